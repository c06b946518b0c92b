"""The files that a conversion would write, as a read-only file system: nothing is written anywhere."""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptconv.engine.buffers import Tally
from ckptconv.engine.ranges import FileBytes
from ckptconv.errors import CorruptError, UsageError
from ckptconv.features.companions import reading
from ckptconv.features.companions.contents import content, dtype_notes
from ckptconv.features.companions.deciding import LEAVING
from ckptconv.formats import opening
from ckptconv.formats.model_files import SAFETENSORS
from ckptconv.formats.registered import describing
from ckptconv.formats.source import Source
from ckptconv.options import RUNNING
from ckptconv.options.option import checked
from ckptconv.options.table import OPTIONS, Options
from ckptconv.outputs.kinds import further, is_set
from ckptconv.outputs.messages import notes_of, warnings_of
from ckptconv.outputs.notices import UNCHANGED, Change
from ckptconv.outputs.planning import planned
from ckptconv.outputs.targets import Target
from ckptconv.plan import Data, FilePlan, Literal
from ckptconv.process import no_garbage
from ckptconv.storage.files import Readers, is_held
from ckptconv.storage.location import Location
from ckptconv.storage.paths import normalize
from ckptconv.storage.reading import REQUESTS
from ckptconv.tensors.casting import is_decoded
from ckptconv.tensors.lazy import Convert, LazyTensor, untagged

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckptconv.options.keywords import ConvertOptions

# Bytes made at a time, unless a reader asks for others; of remote inputs, bytes that are prefetched.
UNIT, FAR_MEMORY = 512 << 10, 8 << 20


class VirtualFile(NamedTuple):
    """A file that would be written: its bytes, and a tag (40 hexadecimal digits) that no other version of it has."""

    bytes: FileBytes
    tag: str

    @property
    def size(self) -> int:
        return self.bytes.size


class LostValues:
    """Warns of values that became infinite in a cast to `dtype`, and of those that became zero, once for each file.
    `warn` may be set to say it."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._known: set[tuple[str, str]] = set()
        self.warn: Callable[[str], object] = warnings.warn

    def add(self, name: str, tally: Tally) -> None:
        """Warn of the values in the `tally` of a window of a file."""
        for became, warning in tally.lost(self._dtype).items():
            if (name, became) not in self._known:
                self._known.add((name, became))
                self.warn(f"{name}: at least {warning}")


class VirtualFiles(Mapping[str, VirtualFile]):
    """The files that a conversion of a source would write to a directory, by name, and their companions.

    `source` is a source of `convert`, or a virtual checkpoint, and `options` are those of `convert` that choose, name,
    cast and shard. Only descriptions are read. Bytes are computed when they are read, by any number of threads, and
    equal those that `convert` writes. Pickled, it is opened again. `version` is a hash of everything that decides them.
    `warnings` and `notes` are those that the report of `convert` would have before anything is written; reading values
    that become infinite or zero in a cast warns. Raise a `CkptconvError` as `convert` does; CorruptError from `read`
    for an input that has changed since.
    """

    version: str
    warnings: list[str]
    notes: list[str]

    @checked(OPTIONS)
    def __init__(self, source: str | os.PathLike[str], **options: Unpack[ConvertOptions]) -> None:
        chosen = Options(**options)
        path = normalize(source)
        if chosen.per_rank or chosen.to or further(chosen):
            raise UsageError("A virtual checkpoint can contain only the weights of one rank, or of all ranks joined.")
        self._given = (path, dict(options))
        self._closed = False
        self.lost = LostValues(chosen.dtype or "their dtype")
        known = dict(chosen.storage_options)
        place = Location(path, known)
        change = UNCHANGED
        self.path = path
        self.warnings, self.notes = [], []
        with no_garbage():
            reader = describing(path)
            if reader and place.kind == "file" and _asks_for_no_more(chosen):
                # The very files that it describes, however they would be divided today.
                described = import_module(reader).load(place)
                files, self.format, decided = described.files, described.called, repr(described.identity)
                change = _change(files)
                opened = Source(self.format, SAFETENSORS, path, {})
                opened = reading.with_files(opened, reading.together(opened, known), known)
                self.notes = dtype_notes(opened, change)
            else:
                opened = opening.opened(path, chosen, key=chosen.key, **chosen.fitting())
                opened = reading.with_files(opened, reading.together(opened, known), known)
                target = Target(path, "directory")
                for module in LEAVING:
                    opened, _ = import_module(module).with_left(opened, target._replace(path=""), known)
                output = planned(opened, target, chosen)
                change, plan = output.notices.change, output.plan
                files = [file for file in plan.files if file.name not in opened.companions]
                self.format, decided = opened.format, plan.plan_id
                self.warnings = list(warnings_of([opened], [output], chosen))
                self.notes = list(notes_of([opened], [output], chosen))
        inputs = dict.fromkeys(source_file.stored for file in files for source_file in file.inputs())
        self.version = _hash(decided, *(f"{source_file.size} {source_file.stamp}" for source_file in inputs))
        if opened.config is not None:
            self.notes += reading.code_notes(opened.config)
        names = {file.name for file in files}
        copies = [
            _copy(name, content(opened, name, file, change))
            for name, file in sorted(opened.companions.items())
            if name not in names
        ]
        self._readers = Readers(known, chosen.spool_dir)
        self._files = {file.name: self._file(file, known) for file in (*files, *copies)}

    def _file(self, file: FilePlan, options: dict[str, Any]) -> VirtualFile:
        copied = [original.stamp for original in file.inputs()] if not isinstance(file.parts[0], Literal) else []
        content = FileBytes(file, self._readers, options, partial(self.lost.add, file.name))
        return VirtualFile(content, _hash(self.version, file.name, *copied))

    def read(
        self, name: str, start: int = 0, stop: int | None = None, *, unit: int = UNIT
    ) -> Generator[memoryview, None, None]:
        """Yield bytes `start` to `stop` of a file, at most about `unit` at a time, each piece valid until the next."""
        file = self[name].bytes
        end = file.size if stop is None else min(stop, file.size)
        if not 0 <= start <= end:
            raise UsageError(f"start {start} and stop {stop} are not a range of the {file.size} bytes of {name}.")
        return file.read(start, end, unit=unit, memory=FAR_MEMORY, requests=REQUESTS)

    def read_bytes(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes `start` to `stop` of a file."""
        with contextlib.closing(self.read(name, start, stop)) as pieces:
            return b"".join(map(bytes, pieces))

    def close(self) -> None:
        """Close the inputs: further reads raise UsageError."""
        self._closed = True
        self._readers.close()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"{self.path} is closed.", "Open it again.")

    def __reduce__(self) -> tuple[Callable[..., VirtualFiles], tuple[Any, ...]]:
        self._check_open()
        path, options = self._given
        if is_held(path):
            raise UsageError(f"{path} cannot be opened in another process, because it was read through a pipe.")
        return _reopened, (path, options, self.version)

    def __getitem__(self, name: str) -> VirtualFile:
        self._check_open()
        return self._files[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __enter__(self) -> VirtualFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _reopened(path: str, options: dict[str, Any], version: str) -> VirtualFiles:
    """Open the files again that were pickled. Raise CorruptError if they are others now."""
    files = VirtualFiles(path, **options)
    if files.version != version:
        files.close()
        raise CorruptError(f"{path} has changed since its files were pickled.", "Open it again.")
    return files


def _asks_for_no_more(options: Options) -> bool:
    """Return whether the `options` leave a virtual checkpoint unchanged: all that are set concern the run alone."""
    return all(OPTIONS[name].group == RUNNING for name in OPTIONS if is_set(name, options))


def _change(files: Sequence[FilePlan]) -> Change:
    """Return the change of the weights in `files` that a configuration is to state."""
    tensors = [part.tensor for file in files for part in file.parts if isinstance(part, Data)]
    plain = [tensor for tensor in tensors if is_decoded(tensor)]
    converted = [tensor for tensor in tensors if isinstance(untagged(tensor), Convert)]
    dtypes = {tensor.dtype.name for tensor in (*plain, *converted)}
    return Change(dtypes.pop() if len(dtypes) == 1 else "", bool(plain))


def _copy(name: str, content: LazyTensor) -> FilePlan:
    """Return the plan of a file of this `content`."""
    return FilePlan(name, content.nbytes, (Data(0, content, name),))


def _hash(*texts: str) -> str:
    """Return 40 hexadecimal digits, as a commit has."""
    return hashlib.sha256("\0".join(texts).encode(errors="surrogateescape")).hexdigest()[:40]
