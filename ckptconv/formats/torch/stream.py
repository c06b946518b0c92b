"""Reads torch's stream format (before torch 1.6, and since then with `_use_new_zipfile_serialization=False`).

Source: `_legacy_save` and `_legacy_load` in `torch/serialization.py`, and `torch/csrc/generic/serialization.cpp`.
Pickles follow one another: a magic number, the version, facts about the machine, the object, and the keys of the
storages. After them come the storages in the order of the keys, each as a count of elements (int64) and its bytes.

Nothing says where a pickle ends but the pickle itself, and the object comes before the keys that tell where its
storages lie. So the object is read twice: once for its end and the sizes of its storages, from which everything else
follows by arithmetic, and then for what it says. Elements are little-endian whatever the machine that wrote them.
"""

from __future__ import annotations

import array
import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.formats.torch.container import AGAIN, Pickles, TorchFile, first_identity
from ckptconv.formats.torch.objects import Storage, StorageId, storage_id, vocabulary
from ckptconv.pickles.machine import load
from ckptconv.pickles.nodes import Global
from ckptconv.pickles.vocabulary import DEFAULT_LIMITS, Limits, MalformedError, RefusedError, Vocabulary
from ckptconv.storage.coalesce import coalesced
from ckptconv.storage.files import Reader
from ckptconv.storage.records import Records
from ckptconv.structure.soundness import MAX_BYTES
from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.moves import File
from ckptconv.text import brief

MAGIC = 0x1950A86A20F9469CFC6C
VERSION = 1001
# The magic number as protocols 2 and up have it, and as protocol 1 does.
_MAGICS = (b"\x8a\x0a" + MAGIC.to_bytes(10, "little") + b".", b"L%dL\n." % MAGIC)
# Protocol and frame come before it.
HEAD = 40
_COUNT = struct.Struct("<q")


def is_stream(head: bytes) -> bool:
    """Whether a file that begins with `head` (HEAD bytes) is in this format."""
    return any(magic in head[:HEAD] for magic in _MAGICS)


def read_stream(reader: Reader, *, limits: Limits = DEFAULT_LIMITS) -> TorchFile:
    """Open a file in the stream format: its pickles are read, and the counts before its storages; no data.

    What follows the last storage is an error: torch.load would pass over it without a word. Raises CorruptError for a
    file that contradicts itself or is truncated, UnsupportedError for a version that is not known, and for a file of
    several objects.
    """
    pickles = Pickles(reader, 0, reader.file.size, limits)
    if pickles.load("the magic number").value != MAGIC:
        raise pickles.corrupt("it does not begin with the magic number of torch's stream format")
    version = pickles.load("the version").value
    if version != VERSION:
        raise UnsupportedError(
            f"{reader.file.path} is in version {brief(version)} of torch's stream format; only {VERSION} is known."
        )
    machine = pickles.load("the facts about the machine").value
    if type(machine) is not dict:
        raise pickles.corrupt(f"its facts about the machine are of type {type(machine).__name__}, not a dict")
    storages = _Storages(reader.file, swapped=machine.get("little_endian") is False)

    pickles.load("the object", _surveyed(storages), before=b"]")
    pickled = pickles.last
    keys = pickles.load("the keys of its storages").value
    storages.place(_checked_keys(keys, storages, pickles), pickles.position)
    _check_counts(reader, storages, pickles)
    loaded = load(pickled, vocabulary(storages.resolve), where=pickles.where("the object"), limits=limits)
    return TorchFile(
        loaded.value,
        reader.file,
        tuple(dict.fromkeys((*pickles.opaque, *loaded.opaque))),
        tuple(dict.fromkeys((*pickles.globals, *loaded.globals))),
        "little",
        storages.records(),
        pickles.bytes_read,
        "stream",
    )


def _surveyed(storages: _Storages) -> Vocabulary:
    """The vocabulary of a reading that only notes the storages: what tensors are made of is not looked at."""
    words = vocabulary(storages.note)
    rebuilding = {name for name in words.constructors if name[0].startswith("torch._")}
    building = {name for name in words.builders if name[0].startswith("torch")}
    return replace(
        words,
        constructors={**words.constructors, **dict.fromkeys(rebuilding, lambda args: None)},
        builders={**words.builders, **dict.fromkeys(building, lambda value, state: value)},
    )


# --------------------------------------------------------------------------------------------------------- storages


class _Noted(NamedTuple):
    """What the object says of a storage each time: all of it must be the same, or torch takes what is said first."""

    dtype: DType
    numel: int
    meta: bool
    of_number: bool  # whether the key is a number, as in the oldest files


class _View(NamedTuple):
    """A part of a storage, in elements, with an identity of its own."""

    root: str
    offset: int
    numel: int
    identity: int
    of_number: bool


class _Storages:
    """The storages of a file: first noted as the object mentions them, then placed by the keys, then resolved."""

    def __init__(self, file: File, swapped: bool) -> None:
        self.file = file
        # Of each key that was met.
        self.noted: dict[str, _Noted] = {}
        # What recurs among them, once.
        self._kinds: dict[_Noted, _Noted] = {}
        # The place of each key in the file, and there of its bytes, in the order of the keys.
        self.rows: dict[str, int] = {}
        self.offsets = array.array("Q")
        self.sizes = array.array("Q")
        self.end = 0
        # Written by a big-endian machine.
        self.swapped = swapped
        self._first = first_identity()
        self._views: dict[str, _View] = {}

    def note(self, pid: Any) -> Any:
        """Remember the storage that is meant; a persistent id may also stand for a class, beside its source code."""
        if type(pid) is tuple and len(pid) == 4 and pid[0] == "module" and type(pid[1]) is Global:
            return pid[1]
        wanted = storage_id(pid)
        noted = _Noted(wanted.dtype, wanted.numel, wanted.location == "meta", type(pid[2]) is int)
        known = self.noted.setdefault(wanted.key, self._kinds.setdefault(noted, noted))
        if known != noted and (known.numel or noted.numel or known[2:] != noted[2:]):
            raise MalformedError(
                f"has storage {brief(wanted.key)} as {known.numel} elements of {known.dtype} and as {noted.numel} of "
                f"{noted.dtype}, or in two places"
            )
        if self.swapped and wanted.dtype.kind == "c":
            raise RefusedError("has complex numbers from a big-endian machine, whose two parts torch wrote as one")
        return None

    def place(self, keys: list[str], start: int) -> None:
        """Work out where the storages lie, in the order of `keys` from byte `start` on."""
        for key in keys:
            dtype, numel, *_ = self.noted[key]
            self.rows[key] = len(self.rows)
            self.offsets.append(start + _COUNT.size)
            self.sizes.append(numel * dtype.itemsize)
            start += _COUNT.size + self.sizes[-1]
        self.end = start

    def resolve(self, pid: Any) -> Any:
        """The storage that a persistent id means, once all are placed."""
        if pid[0] == "module":
            return pid[1]
        wanted = storage_id(pid)
        row = self.rows[wanted.key]
        offset, size, identity = self.offsets[row], self.sizes[row], self._first + row
        if wanted.view is not None:
            view = self._view(wanted)
            offset += view.offset * wanted.dtype.itemsize
            size = view.numel * wanted.dtype.itemsize
            identity = view.identity
        return Storage(self.file, offset, size, wanted.dtype, wanted.key, identity, meta=wanted.location == "meta")

    def _view(self, wanted: StorageId) -> _View:
        """The part of a storage that is meant: (key of the view, offset, elements)."""
        view = wanted.view
        if type(view) is not tuple or len(view) != 3 or type(view[1]) is not int or type(view[2]) is not int:
            raise MalformedError("has a view of a storage whose parts are of the wrong types")
        key, offset, numel = _name(view[0]), view[1], view[2]
        if key is None:
            raise MalformedError("has a view of a storage whose key is neither text nor an address")
        if key in self.rows:
            # torch has one table for both, and takes what it met first.
            raise MalformedError(f"has a view of a storage with the key of a storage, {brief(key)}")
        if offset < 0 or numel < 0 or offset + numel > wanted.numel:
            raise MalformedError(
                f"has a view of {brief(numel)} elements at element {brief(offset)} of storage "
                f"{brief(wanted.key)}, which has {wanted.numel}"
            )
        identity = self._first + len(self.rows) + len(self._views)
        view = _View(wanted.key, offset, numel, identity, type(view[0]) is int)
        found = self._views.setdefault(key, view)
        if found != view._replace(identity=found.identity):
            raise MalformedError(f"has two views of storages named {brief(key)}, which differ")
        return found

    def records(self) -> Records:
        return Records(self.offsets, self.sizes, array.array("I", bytes(4 * len(self.offsets))))


def _name(key: Any) -> str | None:
    """A key as text; those of the oldest files are addresses. None for what is neither."""
    if type(key) is int and -MAX_BYTES < key < MAX_BYTES:
        return str(key)
    return key if type(key) is str else None


def _checked_keys(keys: Any, storages: _Storages, pickles: Pickles) -> list[str]:
    """The list of keys: those that the object mentions, each once."""
    named = [_name(key) for key in keys] if type(keys) is list else [None]
    names = [name for name in named if name is not None]
    if len(names) < len(named):
        raise pickles.corrupt("what follows the object is not a list of the keys of its storages")
    missing, unknown = storages.noted.keys() - set(names), set(names) - storages.noted.keys()
    if missing:
        raise pickles.corrupt(f"it lacks {len(missing)} storages that its object needs, such as {brief(min(missing))}")
    if unknown:
        raise pickles.corrupt(
            f"it has {len(unknown)} storages that its object does not mention, such as {brief(min(unknown))}"
        )
    if len(set(names)) != len(names):
        raise pickles.corrupt("it names a storage twice")
    # torch tells the number 1 from the text "1".
    odd = next((key for key in keys if storages.noted[str(key)].of_number != (type(key) is int)), None)
    if odd is not None:
        raise pickles.corrupt(f"its object and the list of its storages do not write the key {brief(odd)} alike")
    return names


def _check_counts(reader: Reader, storages: _Storages, pickles: Pickles) -> None:
    """Check the count of elements before every storage, and that the file ends with the last."""
    size = reader.file.size
    noted = iter((*storages.noted[key][:2], key) for key in storages.rows)
    for offset, count in _counts(reader, storages, pickles):
        dtype, numel, key = next(noted)
        # Of a big-endian machine some releases wrote the elements little-endian, but not their number.
        if count != _COUNT.pack(numel) and not (storages.swapped and count == _COUNT.pack(numel)[::-1]):
            (found,) = _COUNT.unpack(count)
            raise pickles.corrupt(
                f"at byte {offset}, storage {brief(key)} should have {numel} elements of {dtype}, and it says {found}"
            )
    if storages.end > size:
        raise pickles.corrupt(
            f"it ends at byte {size}, and its storages at byte {storages.end}: it was cut short", AGAIN
        )
    if storages.end < size:
        another = is_stream(reader.read_at(storages.end, min(HEAD, size - storages.end)))
        what = "another object" if another else "something that is not part of it"
        raise (UnsupportedError if another else CorruptError)(
            f"{reader.file.path}: the object in it ends at byte {storages.end} of {size}, and {what} follows, which "
            "torch.load would not read.",
            f"To convert what is before it: head -c {storages.end}, into another file.",
        )


def _counts(reader: Reader, storages: _Storages, pickles: Pickles) -> Iterator[tuple[int, bytes]]:
    """Where the counts are, and what they are, as far as the file goes; those that are near are read together."""
    width = _COUNT.size
    inside = (offset - width for offset in storages.offsets if offset <= reader.file.size)
    for offsets in coalesced(inside, width, reader.file):
        start, stop = offsets[0], offsets[-1] + width
        window = pickles.read_at(start, stop - start)
        for offset in offsets:
            yield offset, window[offset - start :][:width]
