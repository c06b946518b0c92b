"""Files that torch.save wrote, whatever their container."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ckptconv import attacks, unpickle
from ckptconv.errors import CkptconvError, UnsafeError
from ckptconv.storage import Reader, basename, open_reader
from ckptconv.tensors import File
from ckptconv.vocabulary import DEFAULT_LIMITS, WHOLE_TREES, Limits

from .source import Source
from .torch_container import TorchFile
from .torch_stream import is_stream, read_stream
from .torch_tar import HEAD, is_tar, read_tar
from .torch_zip import read_zip

FAMILY = "torch"
# Attacks that are nothing else are short.
_PICKLE_SCANNED = 1 << 20


def read_torch(
    file: File | str, options: dict[str, Any] | None = None, *, limits: Limits = DEFAULT_LIMITS
) -> TorchFile:
    """Open a file that torch.save wrote. Reads its description only; `limits` are those of its pickle."""
    reader = open_reader(file, options)
    try:
        head = reader.read_at(0, min(HEAD, reader.file.size))
        if is_stream(head):
            return read_stream(reader, limits=limits)
        if is_tar(head):
            return read_tar(reader, limits=limits)
        try:
            return read_zip(reader, limits=limits)
        except CkptconvError:
            _refuse_attack(reader)
            raise
    finally:
        reader.close()


def _refuse_attack(reader: Reader) -> None:
    """Raise UnsafeError for what is no file of torch.save, but a pickle that torch.load would run nevertheless."""
    if attacks.are_refused():
        head = reader.read_at(0, min(_PICKLE_SCANNED, reader.file.size))
        try:
            unpickle.load(head, where=reader.file.path)
        except UnsafeError:
            raise
        except CkptconvError:
            pass


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
