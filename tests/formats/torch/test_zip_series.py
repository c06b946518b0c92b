"""Members that are alike are read together, and give what reading them one by one gives."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptconv.errors import CkptconvError
from ckptconv.formats.torch.file import read_torch
from ckptconv.formats.torch.zip import check_zip
from ckptconv.storage import LOCAL_SIGNATURE
from ckptconv.storage import archive as archives
from ckptconv.storage.files import Buffers, MemoryReader, holding
from ckptconv.storage.zip_directory import ENTRY_SIGNATURE
from ckptconv.tensors.moves import File

TENSORS = 600
# Of the storages in the only series: the first, one in the middle, the last.
FIRST, MIDDLE, LAST = b"252", b"400", b"507"


@pytest.fixture(scope="module")
def archive() -> bytes:
    file = io.BytesIO()
    torch.save({f"layer.{n}": torch.full((3,), float(n)) for n in range(TENSORS)}, file)
    return file.getvalue()


def read_apart(patched: pytest.MonkeyPatch) -> None:
    """Have each member read by itself from here on."""
    patched.setattr(archives, "entries_alike", lambda *_: None)


def found(path: Path) -> Any:
    """What is read: where tensors are, and the checksums; or the error's kind and words."""
    try:
        read = read_torch(str(path))
    except CkptconvError as error:
        return type(error), str(error)
    return {name: each.origin() for name, each in read.value.items()}, read.records.digest()


def of_member(archive: bytes, signature: bytes, name: bytes) -> range:
    """The bytes of the record with `signature` of the member with this name."""
    at = archive.index(name) if signature == LOCAL_SIGNATURE else archive.rindex(name)
    return range(archive.rindex(signature, 0, at), at + len(name))


def changes(archive: bytes) -> Iterator[bytes]:
    """The archive with one bit changed, in records of members within a series and at its ends."""
    for signature in (LOCAL_SIGNATURE, ENTRY_SIGNATURE):
        for key, bits, step in ((MIDDLE, 0x11, 1), (FIRST, 2, 5), (LAST, 0x80, 5)):
            for at in of_member(archive, signature, b"/data/" + key)[::step]:
                yield b"".join((archive[:at], bytes([archive[at] ^ bits]), archive[at + 1 :]))


def test_series_are_found_and_give_what_single_members_give(
    archive: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.pt"
    path.write_bytes(archive)
    located: list[tuple[str, bool]] = []
    alike = archives.headers_alike

    def watched(window: bytes, distance: int, names: list[str], crcs: Any) -> bool:
        located.extend((name, alike(window, distance, names, crcs)) for name in (names[0], names[-1]))
        return located[-1][1]

    monkeypatch.setattr(archives, "headers_alike", watched)
    together = found(path)
    assert [(name[-3:].encode(), is_alike) for name, is_alike in located] == [(FIRST, True), (LAST, True)]
    read_apart(monkeypatch)
    assert found(path) == together


def test_a_changed_record_is_seen_as_if_it_were_read_alone(archive: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(data: bytes) -> str:
        try:
            with holding({"m.pt": Buffers(memoryview(data))}):
                check_zip(MemoryReader(File("m.pt", len(data))))
        except CkptconvError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    together = [refused(changed) for changed in changes(archive)]
    read_apart(monkeypatch)
    assert together == [refused(changed) for changed in changes(archive)]
    assert len({*together}) > len(together) // 4
    assert sum("archive/data/400" in each for each in together) > 10


def test_two_members_of_one_name_are_refused_by_that_name(archive: bytes, tmp_path: Path) -> None:
    path, key = tmp_path / "m.pt", b"/data/" + MIDDLE
    at = archive.rindex(key)
    path.write_bytes(archive[:at] + b"/data/401" + archive[at + len(key) :])
    assert "it has two members named 'archive/data/401'" in str(found(path)[1])
