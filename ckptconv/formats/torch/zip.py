"""Read torch's zip archives (.pt, .pth, .bin, .ckpt since torch 1.6) by ranges: directory and pickle, no data.

Source: `torch/serialization.py` and `caffe2/serialize/inline_container.cc`; the zip format is PKWARE's APPNOTE.TXT. An
archive P.pt has the members P/data.pkl (the description), P/data/KEY (one for each storage), and in newer files
P/byteorder. P is any name; the file may have been renamed since. TorchScript archives before torch 1.3 have
P/model.json and P/tensors/KEY instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from ckptconv.errors import CkptconvError, CorruptError, UnsupportedError
from ckptconv.formats.format import HEAD
from ckptconv.formats.registered import FOREIGN
from ckptconv.formats.torch.container import (
    SCANNED,
    SCRIPT_ATTRIBUTES,
    SCRIPT_DESCRIPTION,
    SCRIPT_RECORDS,
    TorchFile,
    first_identity,
    is_pickle,
    plain_pickle,
)
from ckptconv.formats.torch.objects import vocabulary
from ckptconv.formats.torch.storages import FirstDtypes, Storage, StorageId, storage_id
from ckptconv.pickles.machine import load
from ckptconv.pickles.vocabulary import DEFAULT_LIMITS, Limits, MalformedError, RefusedError
from ckptconv.storage import LOCAL_SIGNATURE
from ckptconv.storage.archive import DEFLATED, METHODS, STORED, Archive
from ckptconv.storage.reading import Reader
from ckptconv.storage.zip_directory import normal
from ckptconv.tensors.moves import File
from ckptconv.text import brief, some

PICKLE = "data.pkl"
_STORAGES = "data/"
# Members of TorchScript: the constants of its program, and the folder of their tensors.
CONSTANTS, OF_CONSTANTS = "constants.pkl", "constants/"
# Modules that read archives with programs: `read` returns the weights.
PROGRAMS: tuple[str, ...] = (
    "ckptconv.features.script.archives",
)  # fmt: skip
# The names that torch looks up besides those of storages, in upper or lower case.
_LOOKED_FOR = frozenset(
    (
        PICKLE, "byteorder", CONSTANTS, "version", ".data/version", ".format_version", ".storage_alignment",
        SCRIPT_DESCRIPTION, SCRIPT_ATTRIBUTES,
    )
)  # fmt: skip


def read_zip(reader: Reader, start: int = 0, size: int | None = None, *, limits: Limits = DEFAULT_LIMITS) -> TorchFile:
    """Open a zip archive that torch.save wrote: the whole file, or `size` bytes of it from byte `start`.

    Of a TorchScript archive, return the weights. Raise CorruptError for an archive that contradicts itself or is
    truncated, UnsupportedError for one that is no checkpoint, or whose tensors use an uncommon compression.
    """
    archive = TorchArchive(reader, start, reader.file.size - start if size is None else size)
    byteorder = archive.read("byteorder", b"little")
    if byteorder not in (b"little", b"big"):
        raise archive.corrupt(f"its byteorder is {byteorder[:20]!r}, not little or big")
    pickle = archive.read(SCRIPT_DESCRIPTION if archive.is_old_script else PICKLE)
    # Check all members: otherwise one with a damaged name passes for an absent storage or byteorder.
    archive.locate_all()
    # Archives without data.pkl are older than the byteorder member.
    storages = Storages(archive, byteorder == b"big" and not archive.is_old_script)
    if archive.is_script:
        return _program(archive, pickle, storages, byteorder.decode(), limits)
    where = f"{reader.file.path} ({archive.prefix}{PICKLE})"
    loaded = load(pickle, vocabulary(storages.resolve), where=where, limits=limits)
    return TorchFile(
        loaded.value,
        reader.file,
        loaded.opaque,
        loaded.globals,
        byteorder.decode(),
        archive.records(archive.rows_below(*(archive.prefix + folder for folder in archive.folders))),
        archive.bytes_read,
        "zip archive",
        stem=archive.prefix.removesuffix("/"),
    )


def _program(archive: TorchArchive, pickle: bytes, storages: Storages, byteorder: str, limits: Limits) -> TorchFile:
    """Return the weights of an archive with a program in it, as its feature reads them."""
    for module in PROGRAMS:
        read: TorchFile = import_module(module).read(archive, pickle, storages, byteorder, limits)
        return read
    raise UnsupportedError(
        f"{archive.name} is a TorchScript archive: a program with its weights.",
        "Load it with torch.jit.load, and save its state_dict() with torch.save.",
    )


class Storages:
    """Resolves persistent ids to the storages of an archive."""

    def __init__(self, archive: TorchArchive, swapped: bool, folder: str = "") -> None:
        self._archive = archive
        self._swapped = swapped
        self._folder = folder or archive.folders[0]
        # The rows of the storages that `resolve` returned.
        self.used: set[int] = set()
        self._first = first_identity()
        # Equal sizes share one int: each tensor holds one.
        self._sizes: dict[int, int] = {}
        # Deflated storages, each as a file of its own, by row.
        self._packed: dict[int, File] = {}
        # None for a script archive with data.pkl, where each tensor's id gives its dtype.
        self._dtypes = None if archive.is_script and not archive.is_old_script else FirstDtypes(len(archive.sizes))

    def within(self, folder: str) -> Storages:
        """Return the storages in another folder of the archive."""
        return Storages(self._archive, self._swapped, folder)

    def _agrees(self, row: int, wanted: StorageId) -> bool:
        """Return whether torch.load gives this storage this dtype. It creates a new empty storage each time."""
        return self._dtypes is None or not wanted.numel or self._dtypes.agrees(row, wanted.dtype)

    def resolve(self, pid: Any) -> Storage:
        wanted = storage_id(pid)
        archive = self._archive
        if wanted.location == "meta":
            return Storage(archive.file, archive.start, 0, wanted.dtype, wanted.key, None, meta=True)
        nbytes = wanted.numel * wanted.dtype.itemsize
        nbytes = self._sizes.setdefault(nbytes, nbytes)
        row = archive.storage(wanted.key, self._folder)
        if row is None:
            raise MalformedError(f"needs storage {wanted.key[:40]!r} of {nbytes} bytes, which the archive lacks")
        self.used.add(row)
        size, method = archive.sizes[row], archive.methods[row]
        if method not in (STORED, DEFLATED):
            raise RefusedError(
                f"needs storage {wanted.key[:40]!r}, which is compressed ({METHODS.get(method, method)}); unpack the "
                "archive, pack it without compression (zip -0), and convert the new archive"
            )
        if size != nbytes:
            raise MalformedError(f"needs {nbytes} bytes of storage {wanted.key[:40]!r}, but its record has {size}")
        if not self._agrees(row, wanted):
            raise MalformedError(
                f"has storage {wanted.key[:40]!r} as {wanted.dtype} and as another dtype; torch.load uses the first "
                "dtype for both"
            )
        file, offset = archive.file, archive.start + archive.payloads[row]
        if method:
            if row not in self._packed:
                self._packed[row] = archive.deflated(row, self._folder + wanted.key)
            file, offset = self._packed[row], 0
        return Storage(file, offset, nbytes, wanted.dtype, wanted.key, self._first + row, swapped=self._swapped)


# ------------------------------------------------------------------------------------------------------ the archive


class TorchArchive(Archive):
    """A zip archive as torch writes it. `folders` hold its storages; the first holds those of the state."""

    def __init__(self, reader: Reader, start: int, size: int) -> None:
        super().__init__(reader, start, size)
        old = self._old_script_prefix()
        self.is_old_script = old is not None
        self.prefix = self._prefix() if old is None else old
        self.folders = (SCRIPT_RECORDS,) if self.is_old_script else (_STORAGES, OF_CONSTANTS)
        self.check_names(_LOOKED_FOR, self.folders)
        # Whether it is a TorchScript archive: a program with its weights.
        self.is_script = self.is_old_script or self._has_code()

    def no_directory(self) -> CkptconvError:
        head = self.read_at(0, min(self.size, HEAD))
        for module in FOREIGN:
            import_module(module).check_file(self.file.path, head, self.size)
        if is_pickle(self.read_at(0, min(self.size, SCANNED)), self.name):
            return plain_pickle(self.file.path)
        if head.startswith(LOCAL_SIGNATURE):
            return super().no_directory()
        if self.file.path.endswith(".json"):
            return UnsupportedError(f"{self.file.path} is not a checkpoint.", "Give the weights, or their directory.")
        return CorruptError(
            f"{self.file.path} is not a torch checkpoint: it is not a zip archive, but begins with {head[:16]!r}.",
            "Check its source: the file may not match its name.",
        )

    def _old_script_prefix(self) -> str | None:
        """Return the names' prefix in a TorchScript archive whose description is no pickle; None for other archives."""
        top, slash, _ = next(iter(self.rows), "").partition("/")
        prefix = top + slash
        is_one = slash and all(prefix + name in self.rows for name in (SCRIPT_DESCRIPTION, "version"))
        return prefix if is_one and prefix + PICKLE not in self.rows else None

    def _prefix(self) -> str:
        """Return the prefix of all members' names, which is the prefix of the pickle.

        torch names the outermost directory after the file that it wrote, which may have been renamed.
        """
        # Compare as readers do that ignore case and kinds of slashes.
        pickles = [name for name in self.rows if name[-len(PICKLE) :].lower() == PICKLE]
        exact = [name for name in pickles if normal(name).rpartition("/")[2] == PICKLE]
        # A storage may have any key: the outermost member called data.pkl is the pickle.
        exact.sort(key=len)
        inside = exact[0][: -len(PICKLE)].lower() + _STORAGES if exact else ""
        outermost = [name for name in exact if not name.lower().startswith(inside)]
        for module in () if outermost else FOREIGN:
            import_module(module).check_archive(self.name, self.rows)
        if len(outermost) != 1:
            members = f"{len(outermost)} members named {PICKLE}" if outermost else f"no member named {PICKLE}"
            from ckptconv.cells import cut, way_into

            raise (CorruptError if outermost else UnsupportedError)(
                f"{self.name} is a zip archive, but not from torch.save: it has {members}. It contains "
                f"{some(self.rows, 5, lambda name: cut(name, 60))}.",
                "" if outermost else f"Unpack it first, or name {way_into('zip', self.rows, self.file.path)}",
            )
        # torch looks in the top directory of the first member.
        top, slash, _ = next(iter(self.rows)).partition("/")
        theirs = f"{top}/{PICKLE}".lower()
        for name in exact:
            if slash and name.lower() == theirs and name != outermost[0]:
                raise self.corrupt(f"torch reads {brief(name)} as its description, others read {brief(outermost[0])}")
        prefix = outermost[0][: -len(PICKLE)]
        if outermost[0] != prefix + PICKLE or prefix[-1:] not in ("", "/"):
            raise self.corrupt(f"its {PICKLE} has the name {brief(outermost[0])}, which some readers do not find")
        return prefix

    def _has_code(self) -> bool:
        return self.prefix + "constants.pkl" in self.rows or self.is_any_below(self.prefix + "code/")

    def storages(self, *folders: str) -> Iterator[tuple[str, int]]:
        """Yield the members that hold storages, in all folders or some, as (name, row)."""
        beginnings = tuple(self.prefix + folder for folder in folders or self.folders)
        return (member for member in self.rows.items() if member[0].startswith(beginnings))

    def storage(self, key: str, folder: str) -> int | None:
        """Return the row of the storage with this key."""
        return self.rows.get(self.prefix + folder + key)
