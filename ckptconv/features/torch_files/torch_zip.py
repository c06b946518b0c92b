"""Plans zip archives in the layout of torch.save. Source: `caffe2/serialize/inline_container.cc`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptconv.features.torch_files import archive
from ckptconv.features.torch_files.archive import ALIGNMENT, Member
from ckptconv.plan import FilePlan
from ckptconv.tensors.lazy import LazyTensor


def file_plan(name: str, description: bytes, storages: Sequence[LazyTensor], stem: str = "archive") -> FilePlan:
    """Plan an archive of a pickle and the storages it refers to by number, each the bytes of a tensor in C order.

    `stem` is the directory inside the archive; torch uses the file's name for it.
    """
    return archive.file_plan(name, _members(description, storages, stem))


def _members(description: bytes, storages: Sequence[LazyTensor], stem: str) -> Iterator[Member]:
    yield Member(f"{stem}/data.pkl", description)
    yield Member(f"{stem}/.format_version", b"1")
    yield Member(f"{stem}/.storage_alignment", b"%d" % ALIGNMENT)
    yield Member(f"{stem}/byteorder", b"little")
    for number, storage in enumerate(storages):
        yield Member(f"{stem}/data/{number}", tensor=storage)
    yield Member(f"{stem}/version", b"3\n")
