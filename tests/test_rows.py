"""Embedding tables saved as whole rows: split into tensors, packed again, checked.

The reference here is written from the format alone, with numpy, a row at a time.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import Run, ckptconv_here, metadata_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}
TORCH = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "uint32": torch.uint32,
    "bool": torch.bool,
    "uint8": torch.uint8,
}


def up(count: int, unit: int = 4) -> int:
    return (count + unit - 1) // unit * unit


@dataclass(frozen=True)
class Kind:
    """A layout, as a user says it."""

    dim: int
    optimizer: str
    weight: str = "float32"
    m1: str = "float32"
    m2: str = "float32"
    max_dim: int = 0

    @property
    def options(self) -> list[object]:
        has = {"partial_row_wise_adam": "12", "adam": "12", "row_wise_rmsprop_ar": "1"}.get(self.optimizer, "")
        return [
            *("--embedding-dim", self.dim, "--optimizer", self.optimizer),
            *(("--max-dim", self.max_dim) if self.max_dim else ()),
            *(("--momentum1-dtype", self.m1) if "1" in has else ()),
            *(("--momentum2-dtype", self.m2) if "2" in has else ()),
        ]

    def state(self, dim: int) -> tuple[list[tuple[str, int, str, int | None]], int]:
        """(name, offset, dtype, items) of each part of the state, from its beginning; and the bytes it takes."""
        a, b = SIZES[self.m1], SIZES[self.m2]
        if self.optimizer == "exact_row_wise_adagrad":
            return [("momentum1", 0, "float32", None)], 4
        if self.optimizer == "partial_row_wise_adam":
            return [("momentum2", 0, self.m2, None), ("momentum1", up(b), self.m1, dim)], up(b) + dim * a
        if self.optimizer == "adam":
            return [("momentum1", 0, self.m1, dim), ("momentum2", dim * a, self.m2, dim)], dim * (a + b)
        if self.optimizer == "row_wise_rmsprop_ar":
            return [("momentum1", 0, self.m1, None), ("prev_iter", a, "float32", None)], a + 4
        assert self.optimizer == "none"
        return [], 0

    @property
    def row(self) -> int:
        """Bytes of a row."""
        w = SIZES[self.weight]
        _, size = self.state(self.max_dim or self.dim)
        return (16 // w + up(self.dim) + up(-(-size // w))) * w

    @property
    def parts(self) -> list[tuple[str, int, str, int | None]]:
        start = 16 + up(self.dim) * SIZES[self.weight]
        state, _ = self.state(self.dim)
        return [
            ("weight_id", 0, "int64", None),
            ("metadata", 8, "int64", None),
            ("weight", 16, self.weight, self.dim),
            *((name, start + offset, dtype, items) for name, offset, dtype, items in state),
        ]

    @property
    def gap(self) -> list[int]:
        """The bytes of a row that no part has."""
        sizes = {**SIZES, "int64": 8}
        taken = {
            byte
            for _, offset, dtype, items in self.parts
            for byte in range(offset, offset + sizes[dtype] * (items or 1))
        }
        return [byte for byte in range(self.row) if byte not in taken]


def rows_of(kind: Kind, count: int, seed: int = 0, padding: str = "random") -> NDArray[np.uint8]:
    """A table of random bytes [count, row], with distinct ids."""
    random = np.random.default_rng(seed)
    table = random.integers(0, 256, (count, kind.row), dtype=np.uint8)
    ids = random.permutation(np.arange(count, dtype="<i8")) * 7 + 3
    table[:, :8] = ids.view(np.uint8).reshape(count, 8)
    if kind.gap and padding != "random":
        table[:, kind.gap] = 0
        if padding == "last" and count:
            table[-1, kind.gap[-1]] = 1
    return table


def as_tensor(data: NDArray[np.uint8], dtype: str) -> torch.Tensor:
    """The bytes [N, width] as a tensor of `dtype`."""
    if not data.size:
        return torch.empty(len(data), data.shape[1] // SIZES[dtype], dtype=TORCH[dtype])
    return torch.from_numpy(np.ascontiguousarray(data)).view(TORCH[dtype])


def expected(kind: Kind, table: NDArray[np.uint8], decode: bool = False) -> dict[str, tuple[str, list[int], bytes]]:
    """What the table is split into: dtype, shape and bytes of every part."""
    count = len(table)
    sizes = {**SIZES, "int64": 8}
    made = {}
    for name, offset, dtype, items in kind.parts:
        data = b"".join(bytes(row[offset : offset + sizes[dtype] * (items or 1)]) for row in table)
        made[name] = (dtype, [count] if items is None else [count, items], data)
    if decode:
        words = [int.from_bytes(bytes(row[8:16]), "little") for row in table]
        del made["metadata"]
        made["timestamp"] = ("uint32", [count], b"".join((w & 0xFFFFFFFF).to_bytes(4, "little") for w in words))
        made["count"] = ("uint32", [count], b"".join((w >> 32 & 0x7FFFFFFF).to_bytes(4, "little") for w in words))
        made["used"] = ("bool", [count], bytes(w >> 63 for w in words))
    gap = kind.gap
    if gap and count and table[:, gap].any():
        made["pad"] = ("uint8", [count, len(gap)], b"".join(bytes(row[gap]) for row in table))
    return made


def split_of(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """The same of a safetensors file."""
    return {
        name: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape), bits_of(tensor))
        for name, tensor in load_file(path).items()
    }


def bits_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def run(*arguments: object, code: int = 0) -> Run:
    done = ckptconv_here("rows", *arguments)
    assert done.code == code, done.err
    return done


def saved(path: Path, kind: Kind, table: NDArray[np.uint8], name: str = "m.embeddings.t.weight", **more: Any) -> Path:
    tensors = {name: as_tensor(table, kind.weight), **more}
    if path.suffix == ".pt":
        torch.save(tensors, path)
    else:
        save_file(tensors, path)
    return path


def is_same_table(path: Path, name: str, kind: Kind, table: NDArray[np.uint8]) -> None:
    packed = (torch.load(path) if path.suffix == ".pt" else load_file(path))[name]
    assert packed.dtype == TORCH[kind.weight]
    assert packed.shape == (len(table), kind.row // SIZES[kind.weight])
    assert bits_of(packed) == table.tobytes()


# ------------------------------------------------------------------------------------------------- the worked examples


@pytest.mark.parametrize(
    ("kind", "row", "places"),
    [
        (Kind(64, "exact_row_wise_adagrad", "float16"), 152, {"momentum1": 144}),
        (Kind(64, "adam"), 784, {"momentum1": 272, "momentum2": 528}),
        (Kind(8, "partial_row_wise_adam", "float16"), 72, {"momentum2": 32, "momentum1": 36}),
    ],
    ids=["adagrad", "adam", "partial"],
)
def test_the_examples_of_the_format(tmp_path: Path, kind: Kind, row: int, places: dict[str, int]) -> None:
    table = rows_of(kind, 5)
    assert table.shape == (5, row)
    out = tmp_path / "parts.safetensors"
    run("split", *kind.options, saved(tmp_path / "t.pt", kind, table), out)
    parts = split_of(out)
    for name, offset in places.items():
        *_, data = parts[name]
        width = len(data) // 5
        assert data == b"".join(bytes(line[offset : offset + width]) for line in table), name
    record = json.loads(metadata_of(out)["ckptconv.rows"])
    assert record["row_bytes"] == row
    assert {field["name"]: field["offset"] for field in record["fields"]}.items() >= places.items()


# ---------------------------------------------------------------------------------------------------- any layout at all

dtypes = st.sampled_from(["float32", "float16", "bfloat16"])
kinds = st.builds(
    lambda dim, optimizer, weight, m1, m2, wider: Kind(dim * 4, optimizer, weight, m1, m2, wider and (dim + wider) * 4),
    st.integers(1, 40),
    st.sampled_from(["exact_row_wise_adagrad", "partial_row_wise_adam", "adam", "row_wise_rmsprop_ar", "none"]),
    st.sampled_from(["float32", "float16"]),
    dtypes,
    dtypes,
    st.sampled_from([0, 0, 1, 7]),
)


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=kinds,
    count=st.one_of(st.integers(0, 3), st.integers(4, 700)),
    padding=st.sampled_from(["random", "zero", "last"]),
    decode=st.booleans(),
    suffix=st.sampled_from([".pt", ".safetensors"]),
    seed=st.integers(0, 99),
)
def test_any_layout_is_split_as_the_reference_does_and_packed_again(
    tmp_path: Path, kind: Kind, count: int, padding: str, decode: bool, suffix: str, seed: int
) -> None:
    table = rows_of(kind, count, seed, padding)
    source = saved(tmp_path / f"t{suffix}", kind, table)
    parts, packed = tmp_path / "parts.safetensors", tmp_path / f"packed{suffix}"
    run("split", *kind.options, *(["--decode"] if decode else []), "--no-fsync", "-q", source, parts)
    assert split_of(parts) == expected(kind, table, decode)
    run("pack", "--no-fsync", "-q", parts, packed)
    is_same_table(packed, "m.embeddings.t.weight", kind, table)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=kinds, padding=st.sampled_from(["random", "zero", "last"]), memory=st.sampled_from(["20kB", "100kB"]))
def test_small_buffers_and_threads_make_no_difference(tmp_path: Path, kind: Kind, padding: str, memory: str) -> None:
    table = rows_of(kind, 3000, 1, padding)
    source = saved(tmp_path / "t.safetensors", kind, table)
    parts, packed = tmp_path / "parts.safetensors", tmp_path / "packed.safetensors"
    run("split", *kind.options, "--memory", memory, "--jobs", 2, "--no-fsync", "-q", source, parts)
    assert split_of(parts) == expected(kind, table)
    run("pack", "--memory", memory, "--jobs", 2, "--no-fsync", "-q", parts, packed)
    is_same_table(packed, "m.embeddings.t.weight", kind, table)
