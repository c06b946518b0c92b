"""Chunks of any sharding are joined to the tensor they were cut of; those that are not the whole of it are refused."""

from __future__ import annotations

import io
import itertools
import operator
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dist_checkpoint
from cells import looking, naming_attacks
from checkpoints import bits, ckptconv_here, done
from effort import TIMES, every, examples
from features.dcp.writer import Box, Checkpoint, cut, entry_of, grid, one, shards, whole
from hypothesis import given
from hypothesis import strategies as st
from reading import state_of
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

import ckptconv
from ckptconv.engine.execute import carry_out
from ckptconv.features.dcp import archive_templates
from ckptconv.formats.detect import open_source
from ckptconv.plan import Data, FilePlan
from ckptconv.storage.files import Readers
from ckptconv.storage.writing import Writer
from ckptconv.tensors.lazy import LazyTensor

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.complex64, torch.float64]


class _Collecting(Writer):
    """What is written, in memory, and how many calls it took."""

    positioned = True

    def __init__(self, size: int) -> None:
        self.data, self.calls = bytearray(size), 0

    def write_at(self, offset: int, data: memoryview) -> None:
        self.data[offset : offset + len(data)] = data
        self.calls += 1


def content(tensor: LazyTensor, memory: int = 1 << 20) -> bytes:
    writer = _Collecting(tensor.nbytes)
    with Readers() as readers:
        carry_out(FilePlan("", tensor.nbytes, (Data(0, tensor, ""),)), writer, readers, jobs=1, memory=memory)
    return bytes(writer.data)


def opened(checkpoint: Checkpoint, directory: Path) -> Any:
    return open_source(checkpoint.write(directory)).weights


def assert_holds(found: LazyTensor, tensor: torch.Tensor, memory: int = 1 << 20) -> None:
    assert (found.dtype.name, found.shape) == (str(tensor.dtype)[6:], tuple(tensor.shape))
    assert content(found, memory) == (bits(tensor).numpy().tobytes() if tensor.numel() else b"")


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = max(torch.Size(shape).numel(), 1) * dtype.itemsize
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    return data.view(dtype)[: torch.Size(shape).numel()].reshape(shape)


# ------------------------------------------------------------------------------------------------------------ tilings


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, and boxes that it is cut into: those of a grid, some of them cut again, each into a grid of its own."""
    shape = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=4)))

    def cut_up(extents: tuple[int, ...]) -> list[Box]:
        planes = [draw(st.sets(st.integers(1, 11), max_size=2)) for _ in extents]
        return grid(extents, {dim: sorted(at for at in each if at < extents[dim]) for dim, each in enumerate(planes)})

    boxes: list[Box] = []
    for offsets, sizes in cut_up(shape):
        again = cut_up(sizes) if len(boxes) < 20 and draw(st.booleans()) else whole(sizes)
        boxes += [(tuple(map(operator.add, offsets, inner)), size) for inner, size in again]
    return shape, draw(st.permutations(boxes))


@examples(60)
@given(
    tiling=tilings(),
    dtype=st.sampled_from(DTYPES),
    transposed=st.booleans(),
    memory=st.sampled_from([256, 4096, 1 << 20]),
    seed=st.integers(0, 99),
)
def test_grids_of_grids_in_any_order(
    tiling: tuple[tuple[int, ...], list[Box]],
    dtype: torch.dtype,
    transposed: bool,
    memory: int,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    shape, boxes = tiling
    tensor = random_tensor(shape, dtype, seed)
    checkpoint = Checkpoint()
    # Shards of a permuted tensor are saved as they lie in memory.
    save: Callable[[torch.Tensor], Any] = (
        (lambda part: part.mT.contiguous().mT if part.dim() > 1 else part) if (transposed) else (lambda part: part)
    )
    checkpoint.add(("model", "w"), tensor, boxes, ranks=3, save=save)
    assert_holds(opened(checkpoint, tmp_path_factory.mktemp("tiling"))["w"], tensor, memory)


GRIDS = {
    "rows": ((7, 5), {0: [2, 4, 6]}),
    "columns": ((5, 8), {1: [2, 4, 6]}),
    "tiles": ((6, 8), {0: [3], 1: [4]}),
    "planes": ((3, 6, 5), {1: [2, 4]}),
    "two dimensions of three": ((3, 6, 5), {1: [2, 4], 2: [1]}),
    "three of three": ((4, 6, 5), {0: [1], 1: [2, 4], 2: [1, 3]}),
    "many rows": ((300, 3), {0: range(1, 300)}),
}


@every("shape, cuts", GRIDS.values(), ids=GRIDS)
def test_a_grid(shape: tuple[int, ...], cuts: dict[int, list[int]], tmp_path: Path) -> None:
    tensor = random_tensor(shape, torch.float32)
    boxes = grid(shape, cuts)
    order = sorted(range(len(boxes)), key=lambda index: index * 7 % len(boxes))
    assert_holds(opened(one(tensor, boxes, order=order), tmp_path / "c")["w"], tensor, 2048)


@every("dim", [0, 1])
@every("ranks", [1, 3, 8])
def test_shards_some_of_which_are_empty(dim: int, ranks: int, tmp_path: Path) -> None:
    tensor = random_tensor((7, 5), torch.float32)
    boxes = shards((7, 5), dim, ranks)
    # Ranks beyond the last row say the same of their empty shards, and one copy is kept.
    assert_holds(opened(one(tensor, list(dict.fromkeys(boxes)), ranks=ranks), tmp_path / "c")["w"], tensor)


def test_interleaved_blocks(tmp_path: Path) -> None:
    tensor = random_tensor((10, 3), torch.float32)
    boxes = [((start, 0), (size, 3)) for start, size in ((0, 3), (5, 3), (3, 2), (8, 2))]
    assert_holds(opened(one(tensor, boxes), tmp_path / "c")["w"], tensor)


@every("shape", [(), (0,), (3, 0, 2), (1, 1, 1)])
def test_scalars_and_empty_tensors(shape: tuple[int, ...], tmp_path: Path) -> None:
    tensor = random_tensor(shape, torch.float32)
    assert_holds(opened(one(tensor), tmp_path / "c")["w"], tensor)


def test_columns_are_written_in_bands_and_not_row_by_row(tmp_path: Path) -> None:
    tensor = random_tensor((2048, 256), torch.float32)
    found = opened(one(tensor, shards((2048, 256), 1, 4), ranks=4), tmp_path / "c")["w"]
    writer = _Collecting(found.nbytes)
    plan = FilePlan("", found.nbytes, (Data(0, found, ""),))
    reads = []
    with Readers() as readers:
        carry_out(
            plan, writer, readers, jobs=1, memory=1 << 20, seen=lambda file, source, data: reads.append(len(data))
        )
    windows = found.nbytes // (1 << 18)
    assert writer.calls <= windows + 1
    assert len(reads) <= 4 * windows + 8
    assert bytes(writer.data) == bits(tensor).numpy().tobytes()


# ------------------------------------------------------------------------------------------------- torch as the writer


def _state() -> dict[str, Any]:
    return {
        "model": {
            "a.weight": torch.randn(5, 3),
            "a.bias": torch.randn(3).bfloat16(),
            "n": torch.tensor(7),
            "turned": torch.randn(4, 6).t(),
            "empty": torch.empty(0, 3),
        },
        "optimizer": {
            "state": {"a.weight": {"exp_avg": torch.randn(5, 3), "step": torch.tensor(3.0)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": ["a.weight", "a.bias"]}],
        },
        "epoch": 3,
    }


def save(state: dict[str, Any], directory: Path, **options: Any) -> None:
    writer = dist_checkpoint.FileSystemWriter(directory, **options)
    dist_checkpoint.save(state, storage_writer=writer, no_dist=True)


@every(
    "options",
    [
        {},
        {"single_file_per_rank": False},
        {"thread_count": 3},
        {"serialization_format": SerializationFormat.SAFETENSORS},
    ],
    ids=["plain", "a file per item", "threads", "safetensors"],
)
def test_what_torch_saves_here(options: dict[str, Any], tmp_path: Path) -> None:
    state = _state()
    if "serialization_format" in options:
        state["model"]["turned"] = state["model"]["turned"].contiguous()
    save(state, tmp_path / "c", **options)
    done(ckptconv_here("dcp2safetensors", tmp_path / "c", tmp_path / "m", "--optimizer", tmp_path / "o", "--checksum"))
    found = load_file(tmp_path / "m" / "model.safetensors")
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        name: tensor.tolist() for name, tensor in state["model"].items()
    }
    states = load_file(tmp_path / "o" / "model.safetensors")
    assert torch.equal(states["a.weight.exp_avg"], state["optimizer"]["state"]["a.weight"]["exp_avg"])
    loaded = state_of(tmp_path / "c", key=".")
    assert loaded["epoch"] == 3
    assert loaded["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]


# -------------------------------------------------------------------------------------------------- not whole, not true


def refused(directory: Path, code: int = 4, *options: object) -> str:
    output = directory.parent / "out.safetensors"
    said: str = ckptconv_here("dcp2safetensors", directory, output, *options).refused(code)
    assert not output.exists()
    return said


ROWS = shards((6, 4), 0, 3)


def rows() -> Checkpoint:
    return one(random_tensor((6, 4), torch.float32), ROWS, ranks=3)


def chunks(checkpoint: Checkpoint) -> list[ChunkStorageMetadata]:
    return checkpoint.tensors["model.w"].chunks  # type: ignore[union-attr]


def test_a_chunk_that_is_not_listed(tmp_path: Path) -> None:
    checkpoint = rows()
    del chunks(checkpoint)[1], checkpoint.places[1]
    assert "its chunks have 8 fewer: chunks are missing" in refused(checkpoint.write(tmp_path / "c"))


def test_a_chunk_whose_place_is_not_told(tmp_path: Path) -> None:
    checkpoint = rows()
    del checkpoint.places[1]
    assert "records no location for the chunk of 'model.w' at [2, 0]," in refused(checkpoint.write(tmp_path / "c"))


def test_data_without_a_chunk(tmp_path: Path) -> None:
    checkpoint = rows()
    del chunks(checkpoint)[1]
    assert "but describes no chunk there." in refused(checkpoint.write(tmp_path / "c"))


def test_a_size_larger_than_the_chunks(tmp_path: Path) -> None:
    checkpoint = rows()
    checkpoint.tensors["model.w"].size = torch.Size((7, 4))  # type: ignore[union-attr]
    assert "4 fewer: chunks are missing" in refused(checkpoint.write(tmp_path / "c"))


def test_a_chunk_beyond_the_tensor(tmp_path: Path) -> None:
    checkpoint = rows()
    checkpoint.tensors["model.w"].size = torch.Size((5, 4))  # type: ignore[union-attr]
    assert "extends beyond it" in refused(checkpoint.write(tmp_path / "c"))


OVERLAPS: dict[str, list[Box]] = {
    "and a hole": [((0, 0), (3, 4)), ((2, 0), (3, 4))],
    "and no hole": [((0, 0), (4, 4)), ((2, 0), (4, 4))],
    "one inside another": [((0, 0), (6, 4)), ((1, 1), (1, 1))],
    "across": [((0, 0), (6, 2)), ((0, 0), (3, 4))],
}


@every("boxes", OVERLAPS.values(), ids=OVERLAPS)
def test_chunks_that_overlap(boxes: list[Box], tmp_path: Path) -> None:
    refused(one(random_tensor((6, 4), torch.float32), boxes).write(tmp_path / "c"))


def spiral(size: int, turns: int) -> list[Box]:
    """A square from which rows and columns are cut off in turn: a box fewer with each."""
    low, high, boxes = [0, 0], [size, size], []
    for step in range(turns):
        dim, other = step % 2, 1 - step % 2
        sizes, corner = [0, 0], list(low)
        sizes[dim], sizes[other] = 1, high[other] - low[other]
        if step % 4 < 2:
            low[dim] += 1
        else:
            corner[dim] = high[dim] = high[dim] - 1
        boxes.append((tuple(corner), tuple(sizes)))
    return [*boxes, (tuple(low), (high[0] - low[0], high[1] - low[1]))]


ODD: dict[str, list[Box]] = {
    "a pinwheel": [((0, 0), (1, 199)), ((0, 199), (199, 1)), ((199, 1), (1, 199)), ((1, 0), (199, 1)),
                   ((1, 1), (198, 198))],
    "a spiral": spiral(200, 398),
}  # fmt: skip


@every("boxes", ODD.values(), ids=ODD)
def test_chunks_that_no_sharding_makes(boxes: list[Box], tmp_path: Path) -> None:
    checkpoint = one(random_tensor((200, 200), torch.uint8), boxes)
    assert "in a way that no sharding produces" in refused(checkpoint.write(tmp_path / "c"), 5)


@examples(40)
@given(tiling=tilings(), which=st.integers(0, 99), dim=st.integers(0, 3), by=st.sampled_from([-1, 1]))
def test_a_chunk_that_was_moved_never_passes(
    tiling: tuple[tuple[int, ...], list[Box]],
    which: int,
    dim: int,
    by: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    shape, boxes = tiling
    boxes = [box for box in boxes if 0 not in box[1]]
    which, dim = which % len(boxes), dim % len(shape)
    offsets, sizes = boxes[which]
    start = offsets[dim] + by
    if not 0 <= start <= shape[dim] - sizes[dim]:
        return
    tensor = random_tensor(shape, torch.float32)
    moved = [*boxes]
    moved[which] = (*offsets[:dim], start, *offsets[dim + 1 :]), sizes
    if len({box[0] for box in moved}) < len(moved):
        return
    refused(one(tensor, moved).write(tmp_path_factory.mktemp("moved") / "c"))


@every("wrong", [torch.zeros(2, 4, dtype=torch.int32), torch.zeros(4, 2), torch.zeros(2, 5), 5])
def test_an_entry_that_is_not_what_the_metadata_says(wrong: Any, tmp_path: Path) -> None:
    made = iter([wrong])
    checkpoint = one(random_tensor((6, 4), torch.float32), ROWS, save=lambda part: next(made, part))
    message = refused(checkpoint.write(tmp_path / "c"))
    assert "the metadata records" in message or "but a tensor was expected" in message


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    directory = rows().write(tmp_path / "c")
    (directory / "__1_0.distcp").unlink()
    assert "lacks 1 of the 3 files" in refused(directory)
    assert "__1_0.distcp" in refused(directory)


def test_all_files_that_are_missing_are_counted(tmp_path: Path) -> None:
    """Also those that are not needed first, or at all: values are read before tensors, and all is to be copied."""
    checkpoint = Checkpoint()
    checkpoint.add_value(("step",), 5)
    checkpoint.add(("model", "w"), random_tensor((6, 4), torch.float32), shards((6, 4), 0, 3), ranks=3)
    checkpoint.add(("model", "v"), random_tensor((8, 4), torch.float32), shards((8, 4), 0, 8), ranks=8)
    directory = checkpoint.write(tmp_path / "c")
    for rank in (0, 2, 7):
        (directory / f"__{rank}_0.distcp").unlink()
    message = refused(directory)
    assert "lacks 3 of the 8 files with its tensors: '__0_0.distcp', '__2_0.distcp', '__7_0.distcp'." in message


def test_a_file_that_was_cut_short(tmp_path: Path) -> None:
    directory = rows().write(tmp_path / "c")
    os.truncate(directory / "__1_0.distcp", 700)
    assert "cut short" in refused(directory)


def test_an_entry_that_is_another_file_s(tmp_path: Path) -> None:
    checkpoint = rows()
    other = one(random_tensor((6, 5), torch.float32), shards((6, 5), 0, 3), ranks=3)
    directory = checkpoint.write(tmp_path / "c")
    (directory / "__1_0.distcp").write_bytes(bytes(other.files["__1_0.distcp"]))
    refused(directory)


class Twice(MetadataIndex):
    """An index that is no other's equal."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def test_the_same_index_twice(tmp_path: Path) -> None:
    checkpoint = rows()
    directory = checkpoint.write(tmp_path / "c")
    index, info = checkpoint.places[0]
    made = Twice(index.fqn, index.offset, index.index)
    checkpoint.places.append((made, info))
    data = pickle.dumps(checkpoint.metadata())
    # The class is known by its name: let it have that of an honest one.
    data = data.replace(_text(Twice.__module__), _text(MetadataIndex.__module__))
    data = data.replace(_text(Twice.__qualname__), _text("MetadataIndex"))
    (directory / ".metadata").write_bytes(_without_frames(data))
    assert "records two locations for the data of 'model.w'" in refused(directory)


def _text(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def _without_frames(data: bytes) -> bytes:
    """A pickle whose parts have other lengths than its frame says."""
    assert data[2:3] == b"\x95"
    return data[:2] + data[11:]


def test_a_checksum_that_is_wrong_is_found_where_it_is_asked_for(tmp_path: Path) -> None:
    tensor = random_tensor((64, 8), torch.float32)
    checkpoint = one(tensor, shards((64, 8), 1, 4), ranks=4)
    data = checkpoint.files["__2_0.distcp"]
    at = data.find(bits(cut(tensor, ((0, 4), (64, 2)))).numpy().tobytes())
    data[at + 9] ^= 1
    directory = checkpoint.write(tmp_path / "c")
    assert "CRC-32" in refused(directory, 4, "--checksum")
    assert ckptconv_here("dcp2safetensors", directory, tmp_path / "unchecked.safetensors").code == 0


# ------------------------------------------------------------------------------------------------------------ hostile


@every("name", ["/etc/passwd", "../secret.distcp", "a/../../b", "C:\\x", "..\\x", "", "s3://b/x", "\0"])
def test_names_that_lead_elsewhere(name: str, tmp_path: Path) -> None:
    checkpoint = rows()
    checkpoint.places[0][1].relative_path = name
    directory = checkpoint.write(tmp_path / "c")
    assert "is outside its directory" in refused(directory, 3)


def test_a_range_past_the_end(tmp_path: Path) -> None:
    for offset, length in ((1 << 40, 10), (0, 1 << 40), (-5, 10), (1 << 70, 1), (0, 0)):
        checkpoint = rows()
        checkpoint.places[0][1].offset, checkpoint.places[0][1].length = offset, length
        refused(checkpoint.write(tmp_path / "c"))


class Attack:
    """Leaves a trace when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@naming_attacks
def test_code_in_the_metadata_does_not_run(tmp_path: Path) -> None:
    checkpoint = rows()
    metadata = checkpoint.metadata()
    metadata.storage_meta = Attack(tmp_path / "ran")  # type: ignore[assignment]
    directory = checkpoint.write(tmp_path / "c")
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "this file is an attack" in refused(directory, 3)
    assert ckptconv_here("dcp2safetensors", directory, tmp_path / "m.safetensors", "--inert").code == 0
    assert not (tmp_path / "ran").exists()


@naming_attacks
def test_code_in_a_value_does_not_run(tmp_path: Path) -> None:
    checkpoint = rows()
    checkpoint.add_value(("epoch",), Attack(tmp_path / "ran"))
    directory = checkpoint.write(tmp_path / "c")
    assert "this file is an attack" in refused(directory, 3)
    assert ckptconv_here("dcp2safetensors", directory, tmp_path / "m.safetensors", "--inert").code == 0
    assert not (tmp_path / "ran").exists()


@naming_attacks
def test_code_in_a_chunk_does_not_run(tmp_path: Path) -> None:
    checkpoint = one(random_tensor((6, 4), torch.float32), ROWS, save=lambda part: Attack(tmp_path / "ran"))
    assert "this file is an attack" in refused(checkpoint.write(tmp_path / "c"), 3)
    refused(checkpoint.write(tmp_path / "c"), 4, "--inert")
    assert not (tmp_path / "ran").exists()


@examples(60)
@given(at=st.integers(0, 10_000), to=st.integers(0, 255), cut_off=st.booleans())
def test_damaged_metadata_is_refused_or_harmless(
    at: int, to: int, cut_off: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tensor = random_tensor((6, 4), torch.float32)
    directory = one(tensor, ROWS).write(tmp_path_factory.mktemp("damaged") / "c")
    data = bytearray((directory / ".metadata").read_bytes())
    at %= len(data)
    if cut_off:
        del data[at:]
    else:
        data[at] = to
    (directory / ".metadata").write_bytes(data)
    for command in (
        ("convert", directory, directory.parent / "o.safetensors", "--dry-run"),
        *([each, directory] for each in looking()),
    ):
        assert ckptconv_here(*command).code in (0, 2, 3, 4, 5), command


# ---------------------------------------------------------------------------------------------- archives that are alike


@every("size", [1, 5000])
def test_archives_that_are_alike_are_found_where_a_full_reading_finds_them(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint()
    tensors = {}
    for number, dtype in itertools.product(range(6), (torch.float32, torch.int32, torch.float8_e4m3fn)):
        name = f"{dtype}.{number}"
        tensors[name] = random_tensor((size, 3), dtype, number)
        checkpoint.add(
            (name,), tensors[name], save=(lambda part: part.t().contiguous().t()) if number % 2 else lambda p: p
        )
    directory = checkpoint.write(tmp_path / "c")
    quick = open_source(directory)
    monkeypatch.setattr(archive_templates.ArchivePatterns, "find", lambda *_: None)
    slow = open_source(directory)
    assert quick.weights == slow.weights
    assert {path: list(records) for path, records in quick.files.records.items()} == {
        path: list(records) for path, records in slow.files.records.items()
    }
    for name, tensor in tensors.items():
        assert_holds(quick.weights[name], tensor)


def test_an_archive_that_differs_anywhere_else_is_read_in_full(tmp_path: Path) -> None:
    tensor = random_tensor((4, 3), torch.float32)
    data = entry_of(tensor)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        info = next(info for info in archive.infolist() if info.filename.endswith("/data/0"))
    payload = data.find(bits(tensor).numpy().tobytes())
    crc = info.CRC.to_bytes(4, "little")
    free = {at for at in range(len(data)) if payload <= at < payload + tensor.nbytes}
    for at in [
        at for at in range(0, len(data), 17 if TIMES == 1 else 3) if at not in free and data[at : at + 4] != crc
    ]:
        checkpoint = one(random_tensor((12, 3), torch.float32), shards((12, 3), 0, 3), ranks=1)
        entry = checkpoint.places[1][1]
        checkpoint.files["__0_0.distcp"][entry.offset + at] ^= 0x10
        directory = checkpoint.write(tmp_path / "c")
        quick = _outcome(directory)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(archive_templates.ArchivePatterns, "find", lambda *_: None)
            assert _outcome(directory) == quick


def _outcome(directory: Path) -> Any:
    try:
        return open_source(directory).weights
    except ckptconv.CkptconvError as error:
        return str(error)
