"""Recognizes a file by its content, reads every pickle in it, and records problems.

First bytes show the kind of a file, whatever its name. The readers of the formats read the kinds that they know,
strictly, and `watching.watched` sees each pickle. Archives that are no checkpoints are searched for members that are
checkpoints, and pickles for bytes that are pickles. Only descriptions and pickles are read, no tensor data.
"""

from __future__ import annotations

import contextlib
import functools
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ckptconv.errors import CkptconvError, CorruptError, LimitError, TruncatedError, UnsafeError, UnsupportedError
from ckptconv.features.attacks import zip_entries
from ckptconv.features.consecutive.pickles import LongError, Pickles
from ckptconv.features.scan.beginnings import (
    CLOSED,
    HEAD,
    begins_like_pickle,
    header_in,
    is_pickle,
    is_plain,
    may_be_pickle,
    may_call,
    place_of_header,
)
from ckptconv.features.scan.bounds import (
    ENTRIES,
    LIMITS,
    LONGEST,
    MEMBERS,
    STORED,
    SUFFIXES,
    Room,
    has_long,
    is_long,
    is_short,
    listed,
    members_of,
    start_of_last,
)
from ckptconv.features.scan.compressed import decompressed, is_compressed
from ckptconv.features.scan.joblib import Arrays
from ckptconv.features.scan.names import LOADERS, carries_code, is_needed, is_unusual
from ckptconv.features.scan.readers import PartReader
from ckptconv.features.scan.readings import Readings, all_bytes
from ckptconv.features.scan.report import Finding
from ckptconv.features.scan.survey import Passed, survey
from ckptconv.formats.model_files import looks_like_safetensors
from ckptconv.formats.torch.container import SCANNED, is_stream
from ckptconv.formats.torch.file import CONTAINERS, STREAM, read_from
from ckptconv.formats.torch.objects import without_tensors
from ckptconv.formats.torch.zip import TorchArchive
from ckptconv.pickles import watching
from ckptconv.pickles.machine import load
from ckptconv.pickles.nodes import Global
from ckptconv.pickles.refusing import refusing_attacks
from ckptconv.pickles.vocabulary import ExcessiveError, Vocabulary
from ckptconv.storage import LOCAL_SIGNATURE
from ckptconv.storage.buffered import InMemory
from ckptconv.storage.inside import leads_out
from ckptconv.storage.reading import Reader
from ckptconv.storage.tar_header import is_tar
from ckptconv.storage.zip_elsewhere import ends_as_zip
from ckptconv.text import brief, some

# The deepest nesting of files in files, and the most pickles one after the other in a file.
_DEPTH, _PICKLES = 8, 10_000
# The most findings of one rule, and the most classes, that are listed for a file.
_ALIKE = 1_000
# The most bytes of a compressed member or file that are held in memory.
_INFLATED = 1 << 24
# Members of torch's archives with the bytes of tensors.
_STORAGES = re.compile(rb"[^/]+/(?:data|constants|tensors)/[^/.]+", re.DOTALL)
_MACHINE_CODE = (b"\x7fELF", b"MZ\x90", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")
# Readers' names for the pickle on which all others depend.
_MAIN = re.compile(r"\((?:[^()]*data\.pkl|the object|(?:the )?pickle(?: \d+)?)\)$")
_ENCRYPTED, _DEFLATED = 0x41, 8
# The most values in a long pickle that are files themselves.
_LEFT = 1_000
# The most names in a finding.
_NAMED = 10
# Bytes of a possible pickle that are read at first.
_HELD_FIRST = 1 << 16
_MANY = f"{{}} contains a sequence of more than {_PICKLES} pickles."


@dataclass
class ScannedContents:
    """The findings in a file: reasons for a verdict, and the classes that loading it needs.

    `expected`: the file should be a checkpoint, so that it is a finding if it cannot be read. The first `_ALIKE`
    findings of each rule, and the first classes, are kept. `pickles` are the names in messages of the pickles that were
    read to their ends. `room` is that of the outermost file.
    """

    expected: bool = True
    findings: dict[Finding, None] = field(default_factory=dict)
    classes: dict[str, None] = field(default_factory=dict)
    pickles: set[str] = field(default_factory=set)
    room: Room = field(default_factory=Room)

    def _inner(self, expected: bool = True) -> ScannedContents:
        """Return contents for the findings in a part of the file, before it is known whether they count."""
        return ScannedContents(expected, room=self.room)

    def _take(self, inner: ScannedContents) -> None:
        self._keep(inner.findings)
        self._need(inner.classes)

    def add(self, rule: str, message: str) -> None:
        self._keep([Finding(rule, message)])

    def _keep(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            alike = sum(kept.rule == finding.rule for kept in self.findings) if len(self.findings) >= _ALIKE else 0
            if alike < _ALIKE:
                self.findings[finding] = None
            elif alike == _ALIKE:
                self.findings[
                    Finding(finding.rule, f"More than {_ALIKE} findings of this kind; the rest is not listed.")
                ] = None

    def _need(self, classes: Iterable[str]) -> None:
        for name in classes:
            if len(self.classes) < _ALIKE:
                self.classes[name] = None
            else:
                self.classes["…"] = None
                break

    # ---- any file

    def look(self, reader: Reader, depth: int = 0) -> str:
        """Judge a file of any kind, and return its kind in words; "" if nothing in it could run."""
        if depth > _DEPTH:
            self.add("excessive", f"{reader.file.path} is nested in more than {_DEPTH} other archives.")
            return ""
        self.room.open(reader.file.size)
        if not self.room.spend():
            self.add("excessive", "The file contains more nested files than the limit.")
            return ""
        head = reader.read_at(0, min(HEAD, reader.file.size))
        if depth and reader.file.path.endswith(f"{ENTRIES})") and self.archives(reader):
            return "torch.distributed.checkpoint data"
        kinds = [kind for kind in _KINDS if kind.matches(head, reader.file.size)]
        if kinds:
            kind_found = kinds[0].look(self, reader, depth)
            self._otherwise(reader, kinds, depth)
            return kind_found
        closed = next((called for begin, called in CLOSED.items() if head.startswith(begin)), "")
        if closed:
            rule = "unreadable" if self.expected else "not-opened"
            self.add(rule, f"{reader.file.path} is {closed}, which scan does not open. Unpack it first.")
            return "closed archive"
        return self._unknown(reader, depth)

    def _otherwise(self, reader: Reader, kinds: list[_Kind], depth: int) -> None:
        """Judge a file as programs do that take it for another kind than its first: for code that would run."""
        if any(kind in _OF_PICKLES for kind in kinds[:1]):
            return
        inner = self._inner()
        for kind in kinds[1:]:
            if kind not in _OF_PICKLES:
                kind.look(inner, reader, depth)
        if kinds[0] is not _ZIP:
            # To an unpickler, the beginning of an archive is a persistent id, which it does not know.
            inner._from_start(reader, depth)
        if kinds[0] is not _ZIP and ends_as_zip(reader):
            inner._zip(reader, depth)
        inner.findings = {
            finding: None for finding in inner.findings if finding.rule in _RUNNING or finding.rule == "not-opened"
        }
        self._take(inner)

    def _unknown(self, reader: Reader, depth: int) -> str:
        """Judge a file with unknown first bytes: it may be a pickle of an old protocol."""
        as_pickle = self._inner()
        if self.expected or reader.file.size > _HELD_FIRST or may_call(reader.read_at(0, reader.file.size)):
            as_pickle._from_start(reader, depth)
        if as_pickle.findings:
            self._take(as_pickle)
            return "pickle"
        if ends_as_zip(reader):
            return self._zip(reader, depth)
        return "pickle" if self.expected and as_pickle.pickles else ""

    def _from_start(self, reader: Reader, depth: int) -> None:
        """Read a file of any kind as a pickle from its first byte, and judge the bytes after it."""
        readings = Readings()
        end = 0
        with watching.watched(readings.add, readings.judge), self._noting_limits(reader):
            end = self._load(reader, 0, reader.file.path, depth)
        if end:
            self._following(reader, end, depth)
            self.pickles.add(reader.file.path)
        self._judge_calls(readings, depth)

    def _load(self, reader: Reader, at: int, where: str, depth: int) -> int:
        """Read a possible pickle at byte `at`. Return the position after it. Raises the errors of `load`."""
        room = reader.file.size - at
        for length in (_HELD_FIRST, LONGEST):
            try:
                data = reader.read_at(at, min(length, room))
                return at + load(data, without_tensors(), where=where, limits=LIMITS).end
            except TruncatedError:
                if room <= length:
                    raise
        inner = self._inner()
        try:
            return at + self._survey(reader, at, where, without_tensors(), inner, depth)
        finally:
            inner.findings = {finding: None for finding in inner.findings if finding.rule in _RUNNING}
            self._take(inner)

    @contextlib.contextmanager
    def _noting_limits(self, reader: Reader) -> Iterator[None]:
        """Read a possible pickle: its errors are no findings, except that it was not read to its end."""
        try:
            yield
        except LimitError as error:
            self.add("not-opened", f"{reader.file.path} may be a pickle, but exceeds a limit: {error.message}")
        except CkptconvError:
            pass

    def _judge_calls(self, readings: Readings, depth: int) -> None:
        for reading in readings.all():
            # Text may begin with the opcodes of a name. A call is no accident.
            if reading.called or reading.unknown_calls:
                self._judge(reading, depth)
        self._dropped(readings, depth)

    def _dropped(self, readings: Readings, depth: int) -> None:
        """Judge bytes that pickles loaded without keeping the result."""
        for data in readings.dropped():
            self._held(InMemory(data, "bytes that a pickle loads and discards"), depth, True)

    def _following(self, reader: Reader, at: int, depth: int) -> None:
        """Judge the bytes after a pickle: a program that reads one pickle after another takes them for one."""
        readings = Readings()
        with watching.watched(readings.add, readings.judge), self._noting_limits(reader):
            for count in range(2, _PICKLES):
                if at >= reader.file.size:
                    break
                at = self._load(reader, at, f"{reader.file.path} (pickle {count})", depth)
            else:
                self.add("not-opened", _MANY.format(reader.file.path))
        self._judge_calls(readings, depth)

    def read(self, action: Callable[[], object], depth: int = 0) -> bool:
        """Call `action`, which reads pickles; judge them, and any error. Return whether the file was read."""
        readings = Readings()
        error: CkptconvError | None = None
        try:
            with watching.watched(readings.add, readings.judge):
                action()
        except CkptconvError as reason:
            error = reason
        before = len(self.findings)
        all_readings = readings.all()
        for reading in all_readings:
            self._judge(reading, depth)
        self._dropped(readings, depth)
        self.pickles.update(reading.where for reading in all_readings if not reading.broken)
        if error is None:
            return True
        whole = [reading.broken for reading in all_readings if _MAIN.search(reading.where)]
        is_whole = bool(whole) and not any(whole)
        if isinstance(error, UnsafeError):
            if len(self.findings) == before:
                self.add("path-outside", error.message)
        elif isinstance(error, LimitError):
            self.add("excessive", error.message)
        elif isinstance(error, CorruptError) and not isinstance(error, TruncatedError):
            self.add("two-readings", error.message)
        elif not (isinstance(error, UnsupportedError) and is_whole):
            self.add("unreadable", error.message)
        # A file that is read and cannot be converted can be judged.
        return isinstance(error, UnsupportedError) and is_whole

    # ---- pickles

    def _judge(self, reading: watching.PickleReading, depth: int) -> None:
        """Add findings about the names in a pickle."""
        where, called, suspects = reading.where, reading.called, reading.suspects
        if suspects and (called or reading.broken):
            direct = [name for name in suspects if name in called]
            if direct:
                action = f"calls {some(direct, _NAMED, brief)}"
            elif called:
                action = f"refers to {some(suspects, _NAMED, brief)} and calls {some(called, _NAMED, brief)}"
            else:
                action = f"refers to {some(suspects, _NAMED, brief)}, and is broken"
            self.add("dangerous-call", f"{where} {action}.")
        elif suspects:
            self.add("dangerous-name", f"{where} refers to {some(suspects, _NAMED, brief)}, but calls nothing.")
        code = [name for name in called if carries_code(name)]
        if code:
            self.add(
                "carries-code",
                f"{where} builds functions from code that it contains, with {some(code, _NAMED, brief)}.",
            )
        unusual = [name for name in called if is_unusual(name) and name not in suspects]
        if unusual:
            self.add("unusual-call", f"{where} calls {some(unusual, _NAMED, brief)}, which no known checkpoint calls.")
        # With bytes from the pickle, the call is a known one.
        computed = [name for name in reading.unknown_calls if name in LOADERS]
        if computed:
            self.add("unusual-call", f"{where} calls {some(computed, _NAMED, str)} with computed bytes.")
        reported = {*suspects, *unusual, *code}
        shown = {brief(name, 200) for name in reported} | {*computed}
        words = [name for name in reading.unknown_calls if name not in shown]
        if words:
            self.add("unknown-call", f"{where} calls {some(words, _NAMED, str)}, which is not on the reviewed list.")
        names = [name for name in reading.unknown if name not in reported and brief(name, 200) not in words]
        if names and not (reading.broken and not (called or words)):
            self.add(
                "unknown-name", f"{where} refers to {some(names, _NAMED, brief)}, which is not on the reviewed list."
            )
        self._need(brief(name, 200) for name in called if is_needed(name))
        if not reading.broken:
            for data, is_loaded in all_bytes(reading.value):
                # Other bytes are judged if they begin like a file of a known kind.
                if is_loaded or _is_file(data):
                    self._held(InMemory(bytes(data), f"{where}: bytes in it"), depth, is_loaded)

    def _held(self, reader: Reader, depth: int, is_loaded: bool) -> None:
        """Judge bytes in a pickle. `is_loaded`: loading the pickle loads them too."""
        inner = self._inner(expected=is_loaded)
        kind = inner.look(reader, depth + 1)
        if not is_loaded:
            for finding in inner.findings:
                if finding.rule in _RUNNING:
                    self.add("hidden", finding.message)
            return
        self._take(inner)
        if not (kind or inner.findings):
            self.add("not-opened", f"{reader.file.path} is data that a pickle loads, in an unknown format.")

    def _pickles(self, reader: Reader, depth: int) -> str:
        """Read pickles one after another, up to the end or to other bytes."""
        size = reader.file.size
        pickles = Pickles(reader, 0, size, LIMITS, longest=LONGEST)
        count = skipped = 0

        def objects(at: int) -> int:
            within = Pickles(reader, at, size, LIMITS)
            within.load(f"array of objects at byte {at}", without_tensors())
            return within.position

        def action() -> None:
            nonlocal count, skipped
            while pickles.position < size and count < _PICKLES:
                if count and not may_be_pickle(reader, pickles.position):
                    inner._following(reader, pickles.position, depth)
                    break
                arrays = Arrays(reader, pickles.position, objects)
                words = without_tensors()._replace(embedded=arrays)
                part = f"pickle {count + 1}" if count else "the pickle"
                try:
                    pickles.load(part, words)
                except UnsafeError:
                    # More attacks may follow. Its end is that of the same pickle, read as inert data.
                    arrays.begin()
                    with refusing_attacks(False):
                        pickles.load(part, words)
                except LongError:
                    arrays.begin()
                    pickles.position += self._survey(reader, pickles.position, pickles.where(part), words, inner, depth)
                finally:
                    skipped += arrays.skipped
                count += 1
            if count >= _PICKLES and pickles.position < size:
                self.add("not-opened", _MANY.format(reader.file.path))
            if count and ends_as_zip(reader, pickles.position):
                raise CorruptError(f"{reader.file.path} begins as a pickle, but ends as a zip archive.")

        inner = self._inner()
        inner.read(action, depth)
        if skipped:
            # Programs without joblib take the arrays for instructions.
            inner._plainly(reader, depth)
        runs = any(finding.rule in _RUNNING for finding in inner.findings)
        if not (count or runs or self.expected):
            return ""
        if count and not self.expected:
            # Any two bytes may look like a pickle, and Python ignores the bytes after one.
            inner.findings = {finding: None for finding in inner.findings if finding.rule in _RUNNING}
        self._take(inner)
        return "pickle"

    def _survey(
        self, reader: Reader, start: int, where: str, words: Vocabulary, inner: ScannedContents, depth: int
    ) -> int:
        """Read a pickle that is too long to be held, and judge the bytes in it. Return its length."""

        # Bytes that are not loaded with the pickle: by position, or the bytes themselves.
        left: dict[int | bytes, Passed | bytes] = {}

        def look(data: Passed | bytes, *, is_loaded: bool) -> None:
            name = f"{where}: bytes in it"
            if isinstance(data, Passed):
                inner._held(PartReader(reader, name, start + data.position, data.length), depth, is_loaded)
            else:
                inner._held(InMemory(data, name), depth, is_loaded)

        def met(data: Passed | bytes, head: bytes, function: Global | None) -> None:
            key = data.position if isinstance(data, Passed) else data
            if function is None and _is_file(head):
                if len(left) >= _LEFT:
                    raise ExcessiveError(f"contains more than {_LEFT} files")
                left[key] = data
            elif function is not None and str(function) in LOADERS:
                left.pop(key, None)
                look(data, is_loaded=True)

        def read_at(offset: int, length: int) -> bytes:
            return reader.read_at(start + offset, length)

        def placed(name: str | None) -> None:
            why = leads_out(name) if name is not None else ""
            if why:
                inner.add("path-outside", f"{where} refers to {brief(name)}, which is outside its directory: {why}.")
            elif name is None:
                inner.add("reads-elsewhere", f"{where} refers to files by paths that are too long.")

        try:
            return survey(read_at, reader.file.size - start, words, where=where, limits=LIMITS, met=met, placed=placed)
        finally:
            for data in left.values():
                look(data, is_loaded=False)

    def _plainly(self, reader: Reader, depth: int) -> None:
        """Judge a pickle of joblib as Python reads it, for code that would run."""
        readings = Readings()
        with watching.watched(readings.add, readings.judge), self._noting_limits(reader):
            self._load(reader, 0, reader.file.path, depth)
        for reading in readings.all():
            self._judge(reading._replace(where=f"{reader.file.path} (read without joblib)", broken=True), depth)
        self._dropped(readings, depth)

    # ---- torch's files, and archives

    def _torch(self, reader: Reader, depth: int) -> str:
        if has_long(reader) or STREAM not in CONTAINERS:
            return self._pickles(reader, depth) and "torch stream"
        self.read(lambda: read_from(reader, limits=LIMITS), depth)
        return "torch stream"

    def _zip(self, reader: Reader, depth: int) -> str:
        """Read an archive of torch as torch does; in any archive, judge each member that is not a storage."""
        listing = listed(reader)
        # torch.export and numpy also read other members under the names of storages.
        is_other = listing.is_other or reader.file.path.rstrip(")").endswith((".npz", ".pt2"))
        read: set[str] = set()
        if listing.is_torch or not listing.members:
            inner = self._inner()
            # Pickles that are too long to be held are judged like other members.
            check = (
                (lambda: TorchArchive(reader, 0, reader.file.size).locate_all())
                if listing.has_long
                else (lambda: read_from(reader, limits=LIMITS))
            )
            inner.read(check, depth)
            read = inner.pickles
            if is_other and listing.members:
                # It is not torch's, so each member is judged.
                inner.findings = {finding: None for finding in inner.findings if finding.rule != "unreadable"}
            # A file that begins like an archive was cut short, if it has no directory.
            is_cut = not (depth or listing.members) and reader.read_at(0, len(LOCAL_SIGNATURE)) == LOCAL_SIGNATURE
            is_read = listing.is_torch or self.expected or is_cut
            if is_read or any(finding.rule in _RUNNING for finding in inner.findings):
                self._take(inner)
        elif listing.members < zip_entries.count(reader):
            # Other programs may read the members that are not judged here.
            self.add("two-readings", f"{reader.file.path} is an archive whose directory is only partly readable.")
        # A package's members are code and pickles in directories of their own.
        if listing.is_package:
            self.add("carries-code", f"{reader.file.path} is a torch.package archive: importing it runs its code.")
        known = False
        for entry in zip_entries.entries(reader):
            if self.room.stored < 0:
                break
            if is_short(entry) or (listing.is_torch and not is_other and _STORAGES.fullmatch(entry.name)):
                continue
            if _inside(reader, entry) in read:
                continue
            if (listing.is_torch or self.expected) and zip_entries.content(reader, entry, 4).startswith(_MACHINE_CODE):
                self.add("carries-code", f"{_inside(reader, entry)} is machine code.")
            # Only torch's own readers know the right form of the members of its archives.
            known |= bool(self._member(reader, entry, depth, only_what_runs=listing.is_torch and not is_long(entry)))
        if listing.is_torch:
            return "torch archive"
        return "zip archive" if known or (listing.members and self.expected) else ""

    def archives(self, reader: Reader) -> bool:
        """Judge archives that follow each other, from the last to the first. Return whether these are all."""
        self.room.open(reader.file.size)
        end = reader.file.size
        while end > 0:
            start = start_of_last(reader, end)
            if start is None:
                return False
            self._zip(PartReader(reader, f"{reader.file.path} (bytes {start} to {end})", start, end - start), 1)
            end = start
        return True

    def _member(self, reader: Reader, entry: zip_entries.ZipEntry, depth: int, *, only_what_runs: bool) -> str:
        """Judge a member of a zip archive."""
        path = _inside(reader, entry)
        is_expected = path[:-1].endswith(SUFFIXES)
        if entry.flags & _ENCRYPTED or entry.method not in (STORED, _DEFLATED):
            rule = "unreadable" if is_expected else "not-opened"
            self.add(rule, f"{path} is encrypted, or uses an unsupported compression.")
            return ""
        start = zip_entries.payload_of(reader, entry)
        if start is None or not entry.packed:
            return ""
        if entry.name.endswith(b".py") and b"/code/" in entry.name:
            self._code(path, zip_entries.content(reader, entry, _INFLATED + 1))
            return ""
        if entry.name.endswith(b"/bytecode.pkl"):
            self._code(path, zip_entries.content(reader, entry, _INFLATED + 1))
        inner = self._inner(is_expected)
        if entry.method == STORED:
            # Several members may have the same bytes.
            place = reader.file.path, start, entry.packed
            if place in self.room.places:
                return ""
            self.room.places.add(place)
            self.room.stored -= entry.packed
            if self.room.stored < 0:
                self.add("excessive", f"{reader.file.path} has overlapping members above the size limit.")
                return ""
            kind = inner.look(PartReader(reader, path, start, entry.packed), depth + 1)
        else:
            kind = inner.unpacked(path, functools.partial(zip_entries.content, reader, entry), depth)
        if entry.method == _DEFLATED or entry.packed <= _INFLATED:
            self._texts(entry.name, path, lambda: zip_entries.content(reader, entry, _INFLATED + 1), depth)
        if only_what_runs:
            kept = _RUNNING | {"not-opened", "excessive"}
            inner.findings = {finding: None for finding in inner.findings if finding.rule in kept}
        self._take(inner)
        return kind

    def unpacked(self, path: str, content: Callable[[int], bytes], depth: int) -> str:
        """Judge compressed data; `content` returns at most so many bytes from its beginning."""
        head = content(HEAD)
        if not any(kind.matches(head, len(head)) for kind in _KINDS) and not self.expected:
            if len(head) < HEAD:
                return self._unknown(InMemory(head, path), depth + 1)
            if not begins_like_pickle(head, path):
                return ""
        if _NPY.matches(head, len(head)) and is_plain(header_in(head)):
            return "array"
        if self.room.bytes <= 0:
            self.add("excessive", f"{path} is compressed, and exceeds the limit for compressed data.")
            return "compressed file"
        data = content(_INFLATED + 1)
        self.room.spend(len(data))
        if len(data) > _INFLATED:
            self.add("unreadable", f"{path} is compressed, and larger than {_INFLATED >> 20} MiB. Unpack it first.")
            return "compressed file"
        return self.look(InMemory(data, path), depth + 1)

    def _code(self, path: str, code: bytes) -> None:
        """Judge a program of TorchScript."""
        from ckptconv.features.scan.programs import programs_in  # few files have programs

        if len(code) > _INFLATED:
            self.add("not-opened", f"{path} is a program larger than {_INFLATED >> 20} MiB.")
        programs = programs_in(code)
        if programs.files:
            self.add("carries-code", f"{path} is a program that reads or writes files: {some(programs.files, 3, str)}.")
        if programs.unknown:
            self.add("unknown-call", f"{path} calls unknown operators: {some(programs.unknown, 3, str)}.")

    def _texts(self, name: bytes, path: str, content: Callable[[], bytes], depth: int) -> None:
        """Judge the texts that programs evaluate, or load, in a member that is JSON."""
        if not (name.endswith(b".json") or name.rpartition(b"/")[2] in (b"data", b"_stable_baselines3_data")):
            return
        from ckptconv.features.scan.programs import texts_in

        data = content()
        # Readers of JSON also accept UTF-16 and byte order marks.
        if data.lstrip(b" \t\r\n\0\xef\xbb\xbf\xfe\xff")[:1] not in (b"{", b"["):
            return
        if len(data) > _INFLATED:
            self.add("not-opened", f"{path} is a description larger than {_INFLATED >> 20} MiB.")
            return
        texts = texts_in(data)
        if texts is None:
            self.add("not-opened", f"{path} is a description that cannot be read.")
            return
        for text in texts.evaluated:
            self.add("unknown-call", f"{path} evaluates, calls or imports unknown names: {brief(text)}.")
        for pickled in texts.pickled:
            self._held(InMemory(pickled, f"{path}: a pickle in it"), depth, is_loaded=True)

    def _tar(self, reader: Reader, depth: int) -> str:
        """Read torch's tar archives as torch does; in other ones, judge each member."""
        inner = self._inner()
        inner.read(lambda: read_from(reader, limits=LIMITS), depth)
        members: list[tuple[str, int, int]] = []
        try:
            # The members that were listed before an error count.
            members.extend(members_of(reader))
        except LimitError as error:
            self.add("excessive", error.message)
        except UnsafeError as error:
            inner.add("path-outside", error.message)
        except (tarfile.TarError, CkptconvError, ValueError, OSError, EOFError) as error:
            # If torch cannot read it either, only one reason is reported.
            if members or not self.expected or not inner.findings:
                rule = "unreadable" if self.expected else "not-opened"
                self.add(rule, f"{reader.file.path} is a tar archive that cannot be read: {brief(str(error))}.")
        is_torch = any(name in _OF_TAR for name, _, _ in members) or (self.expected and not members)
        if is_torch or any(finding.rule in _RUNNING for finding in inner.findings):
            self._take(inner)
            return "torch tar archive"
        known = False
        if len(members) > MEMBERS:
            self.add("not-opened", f"{reader.file.path} has more than {MEMBERS} members.")
        for name, start, size in members[:MEMBERS]:
            path = f"{reader.file.path} ({brief(name, 200)[1:-1]})"
            member = self._inner(name.endswith(SUFFIXES))
            if size < 0:
                member.add("not-opened", f"{path} is a sparse file.")
            else:
                known |= bool(member.look(PartReader(reader, path, start, size), depth + 1))
            self._take(member)
        return "tar archive" if known or self.expected else ""

    # ---- others

    def _npy(self, reader: Reader, depth: int) -> str:
        """Judge an array of numpy: an array of objects is a pickle after its header."""
        fixed = reader.read_at(0, min(12, reader.file.size))
        begin, length = place_of_header(fixed)
        if len(fixed) < 12 or begin + length > min(reader.file.size, SCANNED):
            self.add(
                "unreadable", f"The header of the numpy array {reader.file.path} is truncated or larger than 1 MiB."
            )
            return "array"
        if not is_plain(reader.read_at(begin, length)):
            start = begin + length
            self._pickles(PartReader(reader, reader.file.path, start, reader.file.size - start), depth)
        return "array"

    def _safetensors(self, reader: Reader, depth: int) -> str:
        # Nothing in it can run. Its names and its record are judged when the file is opened by its path.
        return "safetensors"

    def _compressed(self, reader: Reader, depth: int) -> str:
        """Judge the content of a compressed file, if it can be run."""
        came, errors = False, []

        def content(most: int) -> bytes:
            nonlocal came
            data, error = decompressed(reader, most)
            came |= bool(data)
            errors.extend([error] if error else [])
            return data

        kind = self.unpacked(reader.file.path, content, depth)
        # Only two bytes show that a file is compressed by zlib.
        if errors and (self.expected or came or reader.read_at(0, 1) != b"\x78"):
            rule = "unreadable" if self.expected else "not-opened"
            self.add(rule, f"{reader.file.path} cannot be decompressed: {brief(errors[0])}.")
        elif not kind and self.expected and not self.findings:
            self.add("unreadable", f"{reader.file.path} is compressed, but does not contain a checkpoint.")
        return f"compressed {kind}" if kind else "compressed file" if self.expected else ""


# --------------------------------------------------------------------------------------------------------------- kinds


class _Kind(NamedTuple):
    matches: Callable[[bytes, int], bool]
    look: Callable[[ScannedContents, Reader, int], str]


_NPY = _Kind(lambda head, size: head.startswith(b"\x93NUMPY"), ScannedContents._npy)
_ZIP = _Kind(lambda head, size: head.startswith(LOCAL_SIGNATURE), ScannedContents._zip)
_STREAM = _Kind(lambda head, size: is_stream(head), ScannedContents._torch)
_PICKLE = _Kind(is_pickle, ScannedContents._pickles)
# Kinds that are read as pickles from their first byte.
_OF_PICKLES = (_STREAM, _PICKLE)
# A file is of the first kind that it matches; it is also judged as each of the other kinds.
_KINDS: tuple[_Kind, ...] = (
    _ZIP,
    _Kind(lambda head, size: is_tar(head), ScannedContents._tar),
    _STREAM,
    _NPY,
    _Kind(looks_like_safetensors, ScannedContents._safetensors),
    _PICKLE,
    _Kind(is_compressed, ScannedContents._compressed),
)
# Rules about code that would run, not about the form of a file.
_RUNNING = frozenset(
    {
        "dangerous-call",
        "path-outside",
        "carries-code",
        "unusual-call",
        "dangerous-name",
        "hidden",
        "unknown-call",
        "unknown-name",
    }
)
_OF_TAR = frozenset({"storages", "tensors", "pickle"})


def _inside(reader: Reader, entry: zip_entries.ZipEntry) -> str:
    """Return the name of an archive's member in messages."""
    return f"{reader.file.path} ({brief(entry.name.decode('utf-8', 'replace'), 200)[1:-1]})"


def _is_file(data: bytes | bytearray) -> bool:
    head = bytes(data[:HEAD])
    return len(head) > 3 and any(kind.matches(head, len(data)) for kind in _KINDS)
