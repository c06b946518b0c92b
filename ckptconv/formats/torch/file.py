"""Files that torch.save wrote, whatever their container."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ckptconv.errors import CkptconvError, CorruptError, UnsafeError
from ckptconv.formats.source import Source
from ckptconv.formats.torch.container import SCANNED, TorchFile, is_pickle, refuse_attack
from ckptconv.formats.torch.stream import is_stream, read_stream
from ckptconv.formats.torch.tar import HEAD, is_tar, read_tar
from ckptconv.formats.torch.zip import read_zip
from ckptconv.formats.torch.zip_directory import LOCAL_SIGNATURE
from ckptconv.formats.torch.zip_elsewhere import ends_as_zip, pickles_for_torch
from ckptconv.pickles import attacks
from ckptconv.pickles.vocabulary import DEFAULT_LIMITS, WHOLE_TREES, Limits
from ckptconv.storage.files import Reader, open_reader
from ckptconv.storage.paths import basename
from ckptconv.tensors.moves import File

FAMILY = "torch"


def read_torch(
    file: File | str, options: dict[str, Any] | None = None, *, limits: Limits = DEFAULT_LIMITS
) -> TorchFile:
    """Open a file that torch.save wrote. Reads its description only; `limits` are those of its pickle.

    torch.load takes for a zip archive what begins like one, for a tar archive what tarfile opens, and all else for
    pickles. Raises CorruptError for a file that is several of them: other readers choose in another way.
    """
    reader = open_reader(file, options)
    try:
        head = reader.read_at(0, min(HEAD, reader.file.size))
        try:
            return _read(reader, head, limits)
        except UnsafeError:
            raise
        except CkptconvError:
            _refuse_attack(reader, head)
            raise
    finally:
        reader.close()


def _read(reader: Reader, head: bytes, limits: Limits) -> TorchFile:
    begins_as_zip, begins_as_tar = head.startswith(LOCAL_SIGNATURE), is_tar(head)
    if begins_as_zip and begins_as_tar:
        raise CorruptError(
            f"{reader.file.path} begins as a zip archive and as a tar archive: readers take it for either."
        )
    if begins_as_tar:
        found = read_tar(reader, limits=limits)
        if is_pickle(reader.read_at(0, min(SCANNED, reader.file.size)), reader.file.path, or_begins=True):
            raise CorruptError(
                f"{reader.file.path} begins as a tar archive and as a pickle: readers take it for either."
            )
    elif is_stream(head):
        found = read_stream(reader, limits=limits)
    else:
        return read_zip(reader, limits=limits)
    if ends_as_zip(reader):
        raise CorruptError(
            f"{reader.file.path} begins as a {found.container}, and ends as a zip archive: readers take it for either."
        )
    return found


def _refuse_attack(reader: Reader, head: bytes) -> None:
    """Raise UnsafeError where torch.load, or Python's pickle, would run an attack in a file that is refused."""
    if not attacks.are_refused():
        return
    if head.startswith(LOCAL_SIGNATURE):
        for pickle in pickles_for_torch(reader):
            refuse_attack(pickle, reader.file.path)
    else:
        refuse_attack(reader.read_at(0, min(SCANNED, reader.file.size)), reader.file.path)


def fingerprint(torch_file: TorchFile) -> Hashable:
    """What tells this content from another: size and CRCs, or where none are recorded the time of the last change."""
    digest = torch_file.records.digest()
    return torch_file.file.size, torch_file.file.stamp if digest is None else digest


def read(path: str, options: dict[str, Any] | None = None) -> Source:
    """Open a .pt, .pth, .bin or .ckpt file: the weights are whatever tree it holds."""
    torch_file = read_torch(path, options, limits=WHOLE_TREES)
    return Source(
        format=f"torch {torch_file.container}",
        family=FAMILY,
        path=path,
        weights=torch_file.value,
        facts={"size": torch_file.file.size},
        opaque=[str(name) for name in torch_file.opaque],
        mentioned=[str(name) for name in torch_file.globals],
        records={torch_file.file.path: torch_file.records},
        warnings=list(torch_file.warnings),
        inputs={basename(path): fingerprint(torch_file)},
        bytes_read=torch_file.bytes_read,
    )
