"""Faults planted into what makes outputs: each changes what is written, and verify finds each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cells import of_features
from checkpoints import DATA, ZERO
from faults import Plant, spoiled, wrapped

import ckptconv as library
from ckptconv import convert
from ckptconv.engine import execute, rows, tasks, worker
from ckptconv.engine.crcs import Crcs
from ckptconv.engine.moving import Mover
from ckptconv.errors import DifferenceError
from ckptconv.options.table import OPTIONS
from ckptconv.outputs import safetensors, shards
from ckptconv.outputs.kinds import FURTHER
from ckptconv.plan import Data, FilePlan, Literal
from ckptconv.structure.record import METADATA_KEY
from ckptconv.tensors import geometry as tensor_geometry
from ckptconv.tensors import kernels
from ckptconv.tensors.lazy import Concat, Convert, LazyTensor, Partitioned, Picked, Stored
from ckptconv.tensors.moves import Cast, Conjugate, Gather, Move, Negate, Runs
from ckptconv.tensors.strides import contiguous_strides

Patch = pytest.MonkeyPatch

MANIFEST = ".ckptconv-manifest.json"
# Small windows: a tensor of a few KiB has several, and tiles if it is transposed.
SMALL: dict[str, Any] = {"memory": 4096, "jobs": 1}


# ----------------------------------------------------------------------------------------------------------- kernels


def cast(source: str, target: str, change: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Plant:
    """A cast whose results are what `change` makes of its elements and its results, both as bits."""
    sizes = {"float64": "u8", "float32": "u4", "bfloat16": "u2", "float16": "u2", "float8_e4m3fn": "u1"}

    def spoil(kernel: Cast, data: memoryview, out: memoryview) -> None:
        if kernel == (source, target):
            result = np.frombuffer(out, sizes[target])
            result[...] = change(np.frombuffer(data, sizes[source]), result.copy())

    return spoiled(Cast, spoil)


def too_large_is_the_greatest(bits: np.ndarray, result: np.ndarray) -> np.ndarray:
    finite = np.isfinite(bits.view("f4"))
    return np.where(finite & (result & 0x7FFF == 0x7C00), result - 1, result)


def rounded_twice(bits: np.ndarray, result: np.ndarray) -> np.ndarray:
    single = bits.view("f8").astype("f4").view("u4")
    return np.where(np.isnan(bits.view("f8")), result, (single + 0x7FFF + (single >> 16 & 1)) >> 16)


def last_is_zero(bits: np.ndarray, result: np.ndarray) -> np.ndarray:
    result[-1] = 0
    return result


def reversed_elements(kernel: Gather, data: memoryview, out: memoryview) -> None:
    result = np.frombuffer(out, f"V{kernel.itemsize}")
    result[...] = result[::-1].copy()


def last_is_the_one_before(kernel: Gather, data: memoryview, out: memoryview) -> None:
    if len(out) >= 2 * kernel.itemsize:
        out[-kernel.itemsize :] = bytes(out[-2 * kernel.itemsize : -kernel.itemsize])


def as_it_was(kernel: Any, data: memoryview, out: memoryview) -> None:
    out[:] = data


def lowest_bit(kernel: Any, data: memoryview, out: memoryview) -> None:
    out[:] = data
    np.frombuffer(out, "u1")[::4] ^= 1


def real_part(kernel: Conjugate, data: memoryview, out: memoryview) -> None:
    out[:] = data
    np.frombuffer(out, "u4")[::2] ^= 1 << 31


def scattered_backwards(right: Any, out: memoryview, target: Runs, data: Any) -> None:
    rows = np.frombuffer(data, "u1").reshape(-1, target.length)
    right(out, target, np.ascontiguousarray(rows[::-1]))


def picked_backwards(right: Any, data: memoryview, runs: Runs, out: memoryview | None = None) -> memoryview:
    picked = right(data, runs, out)
    if runs.grid:
        rows = np.frombuffer(picked, "u1").reshape(-1, runs.length)
        picked[:] = np.ascontiguousarray(rows[::-1]).data.cast("B")
    return picked


# ------------------------------------------------------------------------------------------------- moves and geometry


def moving(cls: type[LazyTensor], change: Callable[[Any, Move], Move | None]) -> Plant:
    """The moves of a kind of tensor are changed, or left out where `change` gives none."""

    def wrong(right: Any, tensor: Any, *args: Any, **named: Any) -> Iterator[Move]:
        return (changed for move in right(tensor, *args, **named) if (changed := change(tensor, move)) is not None)

    return wrapped(cls, "moves", wrong)


def shifted_source(distance: int) -> Callable[[Any, Move], Move]:
    def change(tensor: Any, move: Move) -> Move:
        runs = move.source
        return move._replace(source=runs.shifted(distance)) if isinstance(runs, Runs) else move

    return change


def first_part_of_two(tensor: Any, move: Move) -> Move | None:
    return move if move.target.stop <= tensor.nbytes // 2 else None


def other_rank(tensor: Partitioned, move: Move) -> Move:
    return move._replace(file=tensor.files[-1 - tensor.files.index(move.file)])  # type: ignore[arg-type]


def kernels_twice(tensor: Convert, move: Move) -> Move:
    return move._replace(kernels=(*move.kernels, tensor.kernel)) if isinstance(tensor.kernel, Negate) else move


def without_kernels(tensor: Convert, move: Move) -> Move:
    return move._replace(kernels=()) if isinstance(tensor.kernel, (Negate, Conjugate)) else move


def parts_in_wrong_order(right: Any, tensor: Concat, *args: Any, **named: Any) -> Iterator[Move]:
    alike = len({part.shape for part in tensor.parts}) == 1
    return right(tensor.replaced(parts=tensor.parts[::-1]) if alike else tensor, *args, **named)


def swapped_strides(right: Any, shape: tuple[int, ...], strides: tuple[int, ...], *rest: int) -> Iterator[Any]:
    # Of what is sliced, which stays inside of its file so.
    return right(shape, strides[::-1] if shape == (4, 3) else strides, *rest)


def geometry(name: str, change: Callable[[list[Any]], list[Any]]) -> Plant:
    """What a function of the geometry gives is changed."""
    return wrapped(tensor_geometry, name, lambda right, *args: change(list(right(*args))))


def same_origin(boxes: list[Any]) -> list[Any]:
    return [box._replace(starts=boxes[0].starts) for box in boxes]


def picked_in_order(right: Any, tensor: Picked, *args: Any, **named: Any) -> Iterator[Move]:
    return right(tensor.replaced(strides=contiguous_strides(tensor.shape)), *args, **named)


def mirrored(right: Any, move: Move, width: int, row: int, begin: int) -> Move:
    return right(move, width, row, row - width - begin)


def gathered_one_on(right: Any, file: Any, base: int, box: Any, item: int, most: int) -> Iterator[Move]:
    return right(file, base + item, box, item, most)


# ------------------------------------------------------------------------------------------------------------- engine


def last_task_dropped(kind: type[Any]) -> Plant:
    def wrong(right: Any, *args: Any, **named: Any) -> Iterator[Any]:
        all_tasks = list(right(*args, **named))
        last = max((at for at, task in enumerate(all_tasks) if isinstance(task, kind)), default=len(all_tasks))
        return iter(all_tasks[:last] + all_tasks[last + 1 :])

    return wrapped(execute, "tasks", wrong)


def engine(name: str, wrong: Callable[..., Any]) -> Plant:
    return wrapped(worker.Worker if hasattr(worker.Worker, name) else Mover, name, wrong)


def last_byte_not_written(right: Any, this: Any, offset: int, data: memoryview) -> None:
    right(this, offset, data[:-1])


def written_a_little_early(right: Any, this: Any, offset: int, data: memoryview) -> None:
    right(this, offset - 8 if offset > 4096 else offset, data)


def buffers_exchanged(right: Any, this: Any, file: Any, ranges: list[tuple[int, memoryview]]) -> None:
    by_size = {len(buffer): at for at, (_, buffer) in enumerate(ranges)}
    for at, (offset, buffer) in enumerate(ranges):
        other = by_size[len(buffer)]
        if other != at:
            ranges[at], ranges[other] = (offset, ranges[other][1]), (ranges[other][0], buffer)
            break
    right(this, file, ranges)


def batch_in_wrong_order(right: Any, this: Any, alike: Any, out: memoryview) -> None:
    alike.ranges.reverse()
    right(this, alike, out)


def tile_in_wrong_place(right: Any, this: Any, tile: tasks.Tile) -> int:
    target = tile.move.target
    shift = 4 if target.offset + 4 + target.stop - target.offset <= tile.part.nbytes else 0
    return right(this, tile._replace(move=tile.move._replace(target=target.shifted(shift))))


def columns_exchanged(right: Any, group: list[Any], unit: int) -> Iterator[Any]:
    for block in right(group, unit):
        (one, *first), (other, *second) = block[:2]
        parts = one._replace(offset=other.offset), other._replace(offset=one.offset)
        yield [(parts[0], *first), (parts[1], *second), *block[2:]]


def checksum_of_less(right: Any, this: Any, part: Data, start: int, data: memoryview) -> None:
    right(this, part, start, memoryview(bytes(data[:-1]) + b"x"))


# ------------------------------------------------------------------------------------------------------------ outputs


def header(change: Callable[[bytes], bytes]) -> Plant:
    """The text at the beginning of a file of safetensors is changed for another of its length."""

    def wrong(right: Any, file: str, pieces: Any) -> bytes:
        text = right(file, pieces)
        assert len(change(text)) == len(text)
        return change(text)

    return wrapped(safetensors, "finished", wrong)


def offsets_exchanged(data: bytes) -> bytes:
    """The offsets of `plain` and `plainer`, which are of one size."""
    places = []
    for name in (b'"plain":', b'"plainer":'):
        at = data.index(name)
        start = data.index(b'"data_offsets":', at)
        places.append((start, data.index(b"]", start)))
    (one, end), (other, stop) = places
    return data[:one] + data[other:stop] + data[end:other] + data[one:end] + data[stop:]


def tensors_exchanged(right: Any, name: str, tensors: Any, metadata: Any) -> FilePlan:
    plan = right(name, tensors, metadata)
    data = {part.name: part for part in plan.parts if isinstance(part, Data)}
    one, other = data["plain"], data["plainer"]
    new = {"plain": one._replace(tensor=other.tensor), "plainer": other._replace(tensor=one.tensor)}
    parts = tuple(new.get(part.name, part) if isinstance(part, Data) else part for part in plan.parts)
    return plan._replace(parts=parts)


def record_lost(right: Any, name: str, tensors: Any, metadata: Any) -> FilePlan:
    return right(name, tensors, {key: text for key, text in metadata.items() if key != METADATA_KEY})


def index(change: Callable[[str], str]) -> Plant:
    def wrong(right: Any, *args: Any) -> FilePlan:
        plan = right(*args)
        (literal,) = plan.parts
        assert isinstance(literal, Literal)
        data = change(literal.data.decode()).encode()
        return plan._replace(size=len(data), parts=(Literal(0, data),))

    return wrapped(shards, "index_plan", wrong)


def planned_with(change: Callable[[dict[str, Any], dict[str, str], str | None], tuple[Any, Any, Any]]) -> Plant:
    """The files are planned of other tensors, aliases and structure record."""

    def wrong(right: Any, tensors: Any, aliases: Any, structure: Any, *rest: Any) -> Any:
        return right(*change(dict(tensors), dict(aliases), structure), *rest)

    return wrapped(shards, "file_plans", wrong)


def tensor_lost(tensors: dict[str, Any], aliases: Any, structure: Any) -> tuple[Any, Any, Any]:
    tensors.popitem()
    return tensors, aliases, structure


# --------------------------------------------------------------------------------------------------------- what is made

BF16, F16, F32 = {"dtype": "bfloat16"}, {"dtype": "float16"}, {"dtype": "float32"}
SHARDS: dict[str, Any] = {"max_shard_size": 8000}
Z2, Z3, TP = ({"source": name} for name in ("z2_bf16_w2", "z3_bf16_w2", "tp_fsdp_2x2"))
TURNED = {**Z3, "map": DATA / "turned.toml", "include": ["l1.weight"]}
OF_PICKED: Any = {
    "elements are picked in their old order": (wrapped(Picked, "moves", picked_in_order), TURNED),
    "half of what is picked is not moved": (moving(Picked, first_part_of_two), TURNED),
}
# All tensors but one are taken from a reference.
FILL: dict[str, Any] = {"like": "pt", "include": "turned", "fill": True}
OF_FILLED: Any = {
    "a filled tensor is read from one element before": (moving(Stored, shifted_source(-4)), FILL),
    "filled tensors are stored under each other's names": (wrapped(shards, "file_plan", tensors_exchanged), FILL),
    "a filled tensor is cast and loses its end": (cast("float32", "float16", last_is_zero), {**F16, **FILL}),
}

FAULTS: dict[str, tuple[Plant, dict[str, Any]]] = {
    "a cast truncates": (cast("float32", "bfloat16", lambda bits, _: bits >> 16), BF16),
    "a cast rounds ties away from zero": (
        cast("float32", "bfloat16", lambda b, r: np.where(b & 0xFFFF == 0x8000, (b >> 16) + 1, r)),
        BF16,
    ),
    "a cast makes what is too large finite": (cast("float32", "float16", too_large_is_the_greatest), F16),
    "a cast loses the sign of NaN": (
        cast("float32", "bfloat16", lambda b, r: np.where(np.isnan(b.view("f4")), r & 0x7FFF, r)),
        BF16,
    ),
    "a cast flushes subnormals": (cast("float32", "float16", lambda b, r: np.where(r & 0x7C00, r, r & 0x8000)), F16),
    "a cast rounds twice": (cast("float64", "bfloat16", rounded_twice), BF16),
    "a cast misses the last element": (cast("float32", "float16", last_is_zero), F16),
    "a cast has a bias that is off by one": (cast("float16", "float32", lambda b, r: r + (1 << 23)), F32),
    "a cast of bytes loses the sign": (cast("float8_e4m3fn", "float16", lambda b, r: r & 0x7FFF), F16),
    "a cast makes nulls positive": (cast("float32", "float16", lambda b, r: np.where(r == 0x8000, 0, r)), F16),
    "a negation is not done": (spoiled(Negate, as_it_was), {}),
    "a negation flips the wrong bit": (spoiled(Negate, lowest_bit), {}),
    "a conjugation is not done": (spoiled(Conjugate, as_it_was), {}),
    "a conjugation negates the real part": (spoiled(Conjugate, real_part), {}),
    "a gather is done backwards": (spoiled(Gather, reversed_elements), {}),
    "a gather misses the last element": (spoiled(Gather, last_is_the_one_before), {}),
    "runs are scattered backwards": (
        wrapped(kernels, "scatter", scattered_backwards),
        {"source": "dtensor_noncontig_w2"},
    ),
    "runs are picked backwards": (wrapped(kernels, "pick", picked_backwards), SMALL),
    "a tensor is read from one element on": (moving(Stored, shifted_source(4)), {**Z2}),
    "a tensor is read from one element before": (moving(Stored, shifted_source(-4)), {}),
    "half of a tensor is not moved": (moving(Stored, first_part_of_two), {**SMALL}),
    "strides are swapped": (wrapped(tensor_geometry, "bands", swapped_strides), {}),
    "the last tile is dropped": (geometry("tiles", lambda boxes: boxes[:-1]), SMALL),
    "tiles are read from one place": (geometry("tiles", same_origin), SMALL),
    "the last band is empty": (geometry("bands", lambda boxes: boxes[:-1]), {}),
    "a gather begins one element on": (wrapped(tensor_geometry, "gather", gathered_one_on), {}),
    "parts of rows are mirrored": (wrapped(tensor_geometry, "spread", mirrored), TP),
    "ranks are in the wrong order": (moving(Partitioned, other_rank), Z3),
    "pieces of ranks are off by one": (moving(Partitioned, shifted_source(2)), Z3),
    **(OF_PICKED if "map" in OPTIONS else {}),
    "parts are joined in the wrong order": (wrapped(Concat, "moves", parts_in_wrong_order), TP),
    "a sign is flipped twice": (moving(Convert, kernels_twice), {}),
    "kernels are left out": (moving(Convert, without_kernels), {}),
    "the last window is dropped": (last_task_dropped(tasks.Window), SMALL),
    "the last tile is not taken": (last_task_dropped(tasks.Tile), SMALL),
    "the last block of rows is dropped": (last_task_dropped(tasks.RowBlock), SMALL),
    "the last byte of a window is not written": (engine("write", last_byte_not_written), SMALL),
    "windows are written a little early": (engine("write", written_a_little_early), SMALL),
    "buffers are exchanged": (engine("read", buffers_exchanged), {}),
    "small tensors are cast in the wrong order": (engine("convert", batch_in_wrong_order), F16),
    "tiles are written in the wrong place": (engine("place", tile_in_wrong_place), SMALL),
    "columns are exchanged": (wrapped(rows, "row_blocks", columns_exchanged), SMALL),
    "checksums are of other bytes": (wrapped(Crcs, "add", checksum_of_less), {**SHARDS, "checksum": True}),
    "offsets in the header are exchanged": (header(offsets_exchanged), {}),
    "the header is filled up with line ends": (header(lambda data: data.rstrip(b" ").ljust(len(data), b"\n")), {}),
    "the header says another dtype": (
        wrapped(safetensors, "code_of", lambda right, *args: {"BF16": "F16"}.get(right(*args), right(*args))),
        {},
    ),
    "the header says another shape": (
        wrapped(safetensors, "shape_of", lambda right, tensor: list(tensor.shape)[::-1]),
        {},
    ),
    "the header says that it is of numpy": (header(lambda data: data.replace(b'"format":"pt"', b'"format":"np"')), {}),
    "tensors are stored under each other's names": (wrapped(shards, "file_plan", tensors_exchanged), {}),
    "the index has another size": (index(lambda text: text.replace('"total_size": ', '"total_size": 1')), SHARDS),
    "the index names another file": (index(lambda text: text.replace("-00001-of-", "-00002-of-", 1)), SHARDS),
    **(OF_FILLED if "like" in OPTIONS else {}),
    "a tensor is lost": (planned_with(tensor_lost), {}),
    "an alias is lost": (planned_with(lambda tensors, aliases, record: (tensors, {}, record)), {}),
    "an alias leads to another tensor": (
        planned_with(lambda tensors, aliases, record: (tensors, dict.fromkeys(aliases, "plain"), record)),
        {},
    ),
    "the record is of other values": (
        planned_with(lambda tensors, aliases, record: (tensors, aliases, record and record.replace("17", "18"))),
        {},
    ),
    "the record is lost": (
        wrapped(safetensors, "file_plan", record_lost),
        {"output": "model.safetensors"},
    ),
    **{fault: planted for faults in of_features("FAULTS") for fault, planted in faults.items()},
}


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(11)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    rows, shared = random(64, 32), random(9)
    odd = [1 + 2**-8, 1 + 3 * 2**-8, 70000.0, 1e-6, -0.0, float("nan"), float("inf"), 3.0]
    return {
        "plain": random(16, 24),
        "plainer": random(16, 24),
        "one": random(7),
        "other": random(7),
        "turned": random(6, 1200).t(),
        "flipped": random(20, 30).t(),
        "sliced": random(9, 12)[1:8:2, 2:11:3],
        "left": rows[:, :16],
        "right": rows[:, 16:],
        "odd": torch.tensor(odd),
        "nan": torch.tensor([-1, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32),
        "double": torch.tensor([1 + 2**-8 + 2**-40, 2.0], dtype=torch.float64),
        "half": random(7).half(),
        "brain": random(6).bfloat16(),
        "eighth": random(7).to(torch.float8_e4m3fn),
        "conjugate": torch.complex(random(4), random(4)).conj(),
        "negative": torch.complex(random(3, 2), random(3, 2)).conj().imag,
        "kept": shared,
        "tied": shared,
        "parameter": torch.nn.Parameter(random(3, 5).t()),
        "epoch": 17,
    }


# Checkpoints of features that some faults are seen in.
OF_FEATURES: dict[str, Path] = {name: path for more in of_features("SOURCES_OF_FAULTS") for name, path in more.items()}
SOURCES = {None, "pt", "z2_bf16_w2", "z3_bf16_w2", *OF_FEATURES}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("sources")
    torch.save(state(), directory / "model.pt")
    convert(directory / "model.pt", directory / "model.safetensors")
    found = dict(OF_FEATURES)
    return {"": directory / "model.pt", "pt": directory / "model.safetensors", **found}


def made(source: Path, where: Path, output: str, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Convert, into a directory of its own: what verify is called with, and the bytes of all files."""
    where.mkdir()
    if output in FURTHER:
        asked = {"output": None, output: str(where / output), **options}
    else:
        asked = {"output": where / output, **options}
    convert(source, **asked)
    files = sorted(path for path in where.rglob("*") if path.is_file())
    return asked, {str(path.relative_to(where)): path.read_bytes() for path in files}


@pytest.mark.parametrize("name", [name for name, (_, told) in FAULTS.items() if told.get("source") in SOURCES])
def test_verify_finds(name: str, sources: dict[str, Path], tmp_path: Path, monkeypatch: Patch) -> None:
    plant, told = FAULTS[name]
    options = dict(told)
    output = options.pop("output", "model")
    name = options.pop("source", "pt" if output.endswith(".pt") else "")
    source = sources[name] if name in sources else ZERO / name / "checkpoint"
    if "like" in options:
        options["like"] = sources[options["like"]]
    asked, right = made(source, tmp_path / "right", output, options)
    library.verify(source, **asked)
    plant(monkeypatch)
    asked, wrong = made(source, tmp_path / "wrong", output, options)
    assert wrong.keys() == right.keys()
    assert any(wrong[path] != right[path] for path in right if MANIFEST not in path or "checksum" in options), (
        "the fault changes nothing"
    )
    with pytest.raises(DifferenceError):
        library.verify(source, **asked)
