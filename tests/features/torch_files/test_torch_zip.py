"""Archives that are written: what torch, zipfile and our own reader make of them."""

from __future__ import annotations

import io
import itertools
import random
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch
from checkpoints import assert_same
from effort import every

from ckptconv.engine.execute import carry_out
from ckptconv.engine.tasks import Window, tasks
from ckptconv.features.torch_files import torch_zip
from ckptconv.formats.torch.file import read_torch
from ckptconv.plan import FilePlan, Literal, Trailer
from ckptconv.storage.files import Readers
from ckptconv.storage.writing import LocalWriter, Writer
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


@every("jobs", [1, 3])
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


class _Kept(Writer):
    """Keeps what is written, and where."""

    def __init__(self, size: int, positioned: bool) -> None:
        self.positioned, self.data = positioned, bytearray(size)
        self.written: list[tuple[int, int]] = []

    def write_at(self, offset: int, data: memoryview) -> None:
        self.data[offset : offset + len(data)] = data
        self.written.append((offset, offset + len(data)))

    def read_at(self, offset: int, length: int) -> bytes:
        return bytes(self.data[offset : offset + length])


def kept(tmp_path: Path, sizes: Sequence[int], memory: int, positioned: bool) -> _Kept:
    """The archive of storages of these sizes, written by a worker whose windows have a quarter of `memory`."""
    content = random.Random(7).randbytes(max(sizes, default=0))
    (tmp_path / "content").write_bytes(content)
    file = File(str(tmp_path / "content"), len(content))
    plan = torch_zip.file_plan("x", b"pickle", [Stored(file, 0, DTYPES["uint8"], (size,), (1,)) for size in sizes])
    writer = _Kept(plan.size, positioned)
    with Readers() as readers:
        tally = carry_out(plan, writer, readers, jobs=1, memory=memory)
    assert tally.bytes_written == plan.size
    with zipfile.ZipFile(io.BytesIO(writer.data)) as archive:
        assert archive.testzip() is None
        for number, size in enumerate(sizes):
            assert archive.read(f"archive/data/{number}") == content[:size]
    return writer


@every("positioned", [True, False], ids=["file", "stream"])
def test_small_members_are_written_together_with_what_follows_them(tmp_path: Path, positioned: bool) -> None:
    writer = kept(tmp_path, [100] * 1000, 1 << 20, positioned)
    assert len(writer.written) < 12


@every("positioned", [True, False], ids=["file", "stream"])
@every("size", [*range(4060, 4100), 8170, 9000])
def test_a_member_that_ends_near_the_end_of_a_window_is_followed_by_its_checksum(
    size: int, positioned: bool, tmp_path: Path
) -> None:
    """Windows have 4 KiB: the trailers of large members lie before their ends, across them, or after."""
    writer = kept(tmp_path, [size, 3900, size, 7], 1 << 14, positioned)
    # Every byte once; in a stream, one after the other.
    assert [0, *(stop for _, stop in sorted(writer.written))][:-1] == [start for start, _ in sorted(writer.written)]
    assert positioned or writer.written == sorted(writer.written)


@every("positioned", [True, False], ids=["file", "stream"])
def test_the_checksum_of_a_member_of_several_windows_is_not_for_any_of_them_to_tell(positioned: bool) -> None:
    """Each may be made by another worker."""
    file = File("nowhere", 1 << 20)
    plan = torch_zip.file_plan("x", b"", [Stored(file, 0, DTYPES["uint8"], (size,), (1,)) for size in (9000, 100)])
    windows = [task for task in tasks(plan, 4096, positioned) if isinstance(task, Window)]
    pairs = [pair for window in windows for pair in itertools.pairwise(window.pieces)]
    assert [before[1:] for before, piece in pairs if isinstance(piece.part, Trailer)] == [(0, 100)]
