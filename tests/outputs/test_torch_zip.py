"""Archives that are written: what torch, zipfile and our own reader make of them."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from checkpoints import assert_same

from ckptconv.engine.execute import carry_out
from ckptconv.formats.torch.file import read_torch
from ckptconv.outputs import torch_zip
from ckptconv.plan import FilePlan, Literal, Trailer
from ckptconv.storage.files import Readers
from ckptconv.storage.writing import LocalWriter
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Stored
from ckptconv.tensors.moves import File


def rewritten(tmp_path: Path, state: dict[str, torch.Tensor], jobs: int) -> Path:
    """`state` saved by torch, and its pickle and storages written again by us."""
    torch.save(state, tmp_path / "model.pt")
    read = read_torch(str(tmp_path / "model.pt"))
    storages = [Stored(read.file, at, DTYPES["uint8"], (size,), (1,)) for at, size, _ in read.records]
    with zipfile.ZipFile(tmp_path / "model.pt") as archive:
        plan = torch_zip.file_plan("again.pt", archive.read("model/data.pkl"), storages, "again")
    writer = LocalWriter(str(tmp_path / "again.pt"), plan.size)
    with Readers() as readers:
        carry_out(plan, writer, readers, jobs=jobs, memory=1 << 20)
    writer.close()
    return tmp_path / "again.pt"


@pytest.mark.parametrize("jobs", [1, 3])
def test_torch_loads_what_was_saved_and_every_checksum_is_right(tmp_path: Path, jobs: int) -> None:
    state = {
        "large": torch.randn(1000, 700),
        "small": torch.arange(5),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(1.5, dtype=torch.bfloat16),
    }
    path = rewritten(tmp_path, state, jobs)
    for mmap in (False, True):
        assert_same(torch.load(path, weights_only=True, mmap=mmap), state)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert [name.split("/", 1)[0] for name in archive.namelist()] == ["again"] * 9
    assert list(read_torch(str(path)).value) == list(state)


def test_payloads_are_aligned_as_torch_aligns_them(tmp_path: Path) -> None:
    path = rewritten(tmp_path, {str(size): torch.ones(size, dtype=torch.uint8) for size in range(1, 200)}, 1)
    assert all(at % 64 == 0 for at, _, _ in read_torch(str(path)).records)


def test_records_and_places_beyond_four_gigabytes_are_described_in_64_bits(tmp_path: Path) -> None:
    sizes = [5 << 30, 100, 4 << 30, 7]
    file = File("nowhere", 1 << 40)
    storages = [Stored(file, 0, DTYPES["uint8"], (size,), (1,)) for size in sizes]
    plan = torch_zip.file_plan("x", b"pickle", storages)
    path = tmp_path / "sparse.pt"
    write_described_parts(plan, path)
    with zipfile.ZipFile(path) as archive:
        assert [member.file_size for member in archive.infolist() if "/data/" in member.filename] == sizes
        assert archive.read("archive/data.pkl") == b"pickle"
        assert archive.read("archive/version") == b"3\n"


def write_described_parts(plan: FilePlan, path: Path) -> None:
    """All of a plan but its data, which stays a hole."""
    digests = {part.name: 0 for part in plan.parts if not isinstance(part, (Literal, Trailer))}
    with path.open("wb") as out:
        out.truncate(plan.size)
        for part in plan.parts:
            if isinstance(part, (Literal, Trailer)):
                out.seek(part.offset)
                out.write(part.data if isinstance(part, Literal) else part.make(digests))
