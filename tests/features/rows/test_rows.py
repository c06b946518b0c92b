"""Embedding tables saved as whole rows: split into tensors, packed again, checked.

The reference here is written from the format alone, with numpy, a row at a time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cells import VERIFY, looking
from checkpoints import Run, ckptconv, ckptconv_here, done, metadata_of
from effort import examples
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from ckptconv.features.rows.options import PACKING, ROWS, RowOptions
from ckptconv.features.rows.tables import notes_of
from ckptconv.formats.detect import open_source

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
            *("--embedding-dim", self.dim, "--method", self.optimizer),
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
        data = table[:, offset : offset + sizes[dtype] * (items or 1)].tobytes()
        made[name] = (dtype, [count] if items is None else [count, items], data)
    if decode:
        words = [int.from_bytes(bytes(row[8:16]), "little") for row in table]
        del made["metadata"]
        made["timestamp"] = ("uint32", [count], b"".join((w & 0xFFFFFFFF).to_bytes(4, "little") for w in words))
        made["count"] = ("uint32", [count], b"".join((w >> 32 & 0x7FFFFFFF).to_bytes(4, "little") for w in words))
        made["used"] = ("bool", [count], bytes(w >> 63 for w in words))
    gap = kind.gap
    if gap and count and table[:, gap].any():
        made["pad"] = ("uint8", [count, len(gap)], table[:, gap].tobytes())
    return made


def split_of(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """The same of a safetensors file."""
    return {
        name: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape), bits_of(tensor))
        for name, tensor in load_file(path).items()
    }


def bits_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def run(*arguments: object, code: int = 0, said: str = "") -> Run:
    """A command on rows, which ends with this code and says this."""
    done = ckptconv_here("rows", *arguments)
    assert done.code == code, done.err
    assert said in done.err, done.err
    return done


def table_file(
    path: Path, kind: Kind, table: NDArray[np.uint8], name: str = "m.embeddings.t.weight", **more: Any
) -> Path:
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


# -------------------------------------------------------------------------------- the worked examples


def test_the_examples_of_the_format(tmp_path: Path) -> None:
    out = tmp_path / "parts.safetensors"
    for kind, row, places in (
        (Kind(64, "exact_row_wise_adagrad", "float16"), 152, {"momentum1": 144}),
        (Kind(64, "adam"), 784, {"momentum1": 272, "momentum2": 528}),
        (Kind(8, "partial_row_wise_adam", "float16"), 72, {"momentum2": 32, "momentum1": 36}),
    ):
        table = rows_of(kind, 5)
        assert table.shape == (5, row)
        run("split", *kind.options, table_file(tmp_path / "t.pt", kind, table), out)
        parts = split_of(out)
        for name, offset in places.items():
            *_, data = parts[name]
            width = len(data) // 5
            assert data == b"".join(bytes(line[offset : offset + width]) for line in table), (kind, name)
        record = json.loads(metadata_of(out)["ckptconv.rows"])
        assert record["row_bytes"] == row
        assert {field["name"]: field["offset"] for field in record["fields"]}.items() >= places.items(), kind


# -------------------------------------------------------------------------------- any layout at all

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


@examples(40, HealthCheck.function_scoped_fixture)
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
    source = table_file(tmp_path / f"t{suffix}", kind, table)
    parts, packed = tmp_path / "parts.safetensors", tmp_path / f"packed{suffix}"
    run("split", *kind.options, *(["--decode"] if decode else []), "--no-fsync", "-q", source, parts)
    assert split_of(parts) == expected(kind, table, decode)
    run("pack", "--no-fsync", "-q", parts, packed)
    is_same_table(packed, "m.embeddings.t.weight", kind, table)


@examples(12, HealthCheck.function_scoped_fixture)
@given(kind=kinds, padding=st.sampled_from(["random", "zero", "last"]), memory=st.sampled_from(["20kB", "100kB"]))
def test_small_buffers_and_threads_make_no_difference(tmp_path: Path, kind: Kind, padding: str, memory: str) -> None:
    table = rows_of(kind, 600, 1, padding)
    source = table_file(tmp_path / "t.safetensors", kind, table)
    parts, packed = tmp_path / "parts.safetensors", tmp_path / "packed.safetensors"
    run("split", *kind.options, "--memory", memory, "--jobs", 2, "--no-fsync", "-q", source, parts)
    assert split_of(parts) == expected(kind, table)
    run("pack", "--memory", memory, "--jobs", 2, "--no-fsync", "-q", parts, packed)
    is_same_table(packed, "m.embeddings.t.weight", kind, table)


def test_padding_that_is_first_seen_late_is_kept_all_the_same(tmp_path: Path) -> None:
    """More rows than are looked at beforehand, of which only the last has something in its padding."""
    kind = Kind(64, "exact_row_wise_adagrad", "float16")
    table = rows_of(kind, 40_000, 2, "last")
    source, parts = table_file(tmp_path / "t.safetensors", kind, table), tmp_path / "parts.safetensors"
    run("split", *kind.options, source, parts)
    assert load_file(parts)["pad"].tolist() == [[0, 0, 0, 0]] * 39_999 + [[0, 0, 0, 1]]
    run("pack", parts, tmp_path / "packed.safetensors")
    is_same_table(tmp_path / "packed.safetensors", "m.embeddings.t.weight", kind, table)
    assert sorted(os.listdir(tmp_path)) == ["packed.safetensors", "parts.safetensors", "t.safetensors"]


def test_the_source_is_read_once_for_all_that_it_is_split_into(tmp_path: Path) -> None:
    kind = Kind(256, "adam")
    table = rows_of(kind, 4000)
    source = table_file(tmp_path / "t.pt", kind, table)
    report = run("split", *kind.options, "--json", source, tmp_path / "parts").json
    assert table.nbytes <= report["bytes_read"] <= table.nbytes + (1 << 18)
    assert split_of(tmp_path / "parts" / "model.safetensors") == expected(kind, table)


# -------------------------------------------------------------------------------- which table


def test_shards_of_a_table_are_joined_in_order(tmp_path: Path) -> None:
    kind = Kind(8, "partial_row_wise_adam", "float16", m2="float16")
    table = rows_of(kind, 1000)
    one, two, three = table[:300], table[300:301], table[301:]
    torch.save(
        {"a": as_tensor(one, kind.weight), "b": as_tensor(two, kind.weight), "x": torch.ones(3)}, tmp_path / "1.pt"
    )
    save_file({"c": as_tensor(three, kind.weight)}, tmp_path / "2.safetensors")
    out = tmp_path / "parts.safetensors"
    run("split", *kind.options, "--tensor", "b", "--tensor", "a", tmp_path / "1.pt", out)
    assert split_of(out) == expected(kind, np.concatenate([two, one]))
    save_file({"c": as_tensor(table[:301], kind.weight)}, tmp_path / "1.safetensors")
    run("split", *kind.options, tmp_path / "1.safetensors", tmp_path / "2.safetensors", out)
    assert split_of(out) == expected(kind, table)


def test_a_table_in_a_sharded_checkpoint_is_found_by_its_name(tmp_path: Path) -> None:
    kind = Kind(16, "adam")
    table = rows_of(kind, 50)
    state = {"dense.weight": torch.ones(40, 40), "emb.embedding_bags.ads.weight": as_tensor(table, kind.weight)}
    torch.save(state, tmp_path / "m.pt")
    assert ckptconv_here("pt2safetensors", "--max-shard-size", "8kB", tmp_path / "m.pt", tmp_path / "m").code == 0
    run("split", *kind.options, tmp_path / "m", tmp_path / "parts.safetensors")
    assert split_of(tmp_path / "parts.safetensors") == expected(kind, table)


def test_rows_of_a_view_that_is_wider_are_split_too(tmp_path: Path) -> None:
    """A tensor that is every other row, and some columns, of what was saved."""
    kind = Kind(8, "exact_row_wise_adagrad", "float16")
    table = rows_of(kind, 100)
    room = torch.zeros(200, kind.row // 2 + 5, dtype=torch.float16)
    room[::2, 2:-3] = as_tensor(table, "float16")
    torch.save({"t": room[::2, 2:-3]}, tmp_path / "t.pt")
    run("split", *kind.options, tmp_path / "t.pt", tmp_path / "parts.safetensors")
    assert split_of(tmp_path / "parts.safetensors") == expected(kind, table)


# -------------------------------------------------------------------------------- packing what came elsewhere


def test_tensors_of_any_names_are_packed(tmp_path: Path) -> None:
    kind = Kind(12, "row_wise_rmsprop_ar", "float16", m1="bfloat16")
    table = rows_of(kind, 77, padding="zero")
    run("split", *kind.options, "--decode", table_file(tmp_path / "t.pt", kind, table), tmp_path / "parts.safetensors")
    parts = load_file(tmp_path / "parts.safetensors")
    renamed = {f"m.embeddings.t.{name}": tensor for name, tensor in parts.items() if name != "prev_iter"}
    torch.save({**renamed, "m.embeddings.other.weight": torch.ones(2, 2)}, tmp_path / "state.pt")
    save_file({"iterations": parts["prev_iter"].view(-1, 1)}, tmp_path / "more.safetensors")
    out = tmp_path / "packed.pt"
    options = ["--method", "rmsprop", "--momentum1-dtype", "bfloat16", "--name", "t.weight"]
    names = ["--column", "weight=m.embeddings.t.weight", "--column", "prev_iter=iterations"]
    run("pack", *options, *names, tmp_path / "state.pt", tmp_path / "more.safetensors", out)
    is_same_table(out, "t.weight", kind, table)


def test_momentum_saved_in_the_weights_dtype_is_packed_as_the_bits_it_is(tmp_path: Path) -> None:
    kind = Kind(8, "adam", "float16")
    table = rows_of(kind, 30)
    run("split", *kind.options, table_file(tmp_path / "t.pt", kind, table), tmp_path / "parts.safetensors")
    parts = load_file(tmp_path / "parts.safetensors")
    parts["momentum1"] = parts["momentum1"].view(torch.float16)
    parts["weight_id"] = parts["weight_id"].view(-1, 1)
    save_file(parts, tmp_path / "bits.safetensors")
    run("pack", "--method", "adam", tmp_path / "bits.safetensors", tmp_path / "packed.safetensors")
    is_same_table(tmp_path / "packed.safetensors", "weight", kind, table)


def test_options_that_say_what_is_recorded_change_nothing_and_others_are_refused(tmp_path: Path) -> None:
    kind = Kind(8, "none", "float16")
    run("split", *kind.options, table_file(tmp_path / "t.pt", kind, rows_of(kind, 9)), tmp_path / "p.safetensors")
    run("pack", *kind.options, tmp_path / "p.safetensors", tmp_path / "q.pt")
    for options in (["--embedding-dim", "12"], ["--method", "adam"], ["--weight-dtype", "float32"]):
        assert "records" in run("pack", *options, tmp_path / "p.safetensors", tmp_path / "q.pt", code=2).err


def test_a_dtype_may_be_called_by_its_short_name(tmp_path: Path) -> None:
    kind = Kind(8, "adam", "float32")
    table = table_file(tmp_path / "t.pt", kind, rows_of(kind, 9))
    short = [{"float32": "fp32"}.get(word, word) for word in kind.options]
    assert "fp32" in short
    run("split", *short, table, tmp_path / "short.safetensors")
    run("split", *kind.options, table, tmp_path / "p.safetensors")
    assert (tmp_path / "short.safetensors").read_bytes() == (tmp_path / "p.safetensors").read_bytes()


# -------------------------------------------------------------------------------- refusals


NOT_FITTING = [
    ("--embedding-dim 6 --method adam", 5, "requires a positive multiple of 4"),
    ("--embedding-dim 32 --method adam", 2, "--embedding-dim 64 --method exact_row_wise_adagrad"),
    ("--embedding-dim 64", 2, "--method is missing"),
    ("--method adagrad", 2, "--embedding-dim 64 --method exact_row_wise_adagrad"),
    ("--embedding-dim 64 --method sgd", 2, "is not one of exact_row_wise_adagrad"),
    (
        "--embedding-dim 64 --method adagrad --weight-dtype float32",
        2,
        "The table and its weights are float16, but --weight-dtype is float32.",
    ),
    ("--embedding-dim 64 --method adagrad --momentum1-dtype float16", 2, "always float32"),
    ("--embedding-dim 64 --method adam --momentum1-dtype int8", 2, "is not one of float32"),
    ("--embedding-dim 64 --method none --momentum2-dtype float32", 2, "has no momentum2"),
    ("--embedding-dim 64 --method adam --max-dim 32", 2, "less than --embedding-dim"),
    ("--embedding-dim 0 --method adam", 2, "not a number"),
    ("--embedding-dim 64 --method adagrad --tensor nothing", 2, "has no tensor 'nothing'"),
]
ADAGRAD = Kind(64, "exact_row_wise_adagrad", "float16")


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    source = table_file(tmp_path / "t.pt", ADAGRAD, rows_of(ADAGRAD, 5))
    for options, code, said in NOT_FITTING:
        run("split", *options.split(), source, tmp_path / "out.safetensors", code=code, said=said)
        assert os.listdir(tmp_path) == ["t.pt"], options


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    one, other = torch.ones(4, 76).half(), torch.ones(4, 80).half()
    names = ("--tensor", "a", "--tensor", "b")
    no_tables: list[tuple[dict[str, torch.Tensor], tuple[str, ...], int, str]] = [
        ({"t": torch.ones(4, 76, dtype=torch.float8_e4m3fn)}, (), 2, "no table"),
        ({"m.embeddings.t.weight": torch.ones(4, 76, dtype=torch.bfloat16)}, (), 5, "float32 or float16"),
        ({"a": one, "b": one}, (), 2, "--tensor"),
        ({"a": torch.ones(4, 76, 1).half()}, (), 2, "no table"),
        ({}, (), 2, "no table"),
        ({"a": one, "b": other}, names, 5, "of the same width"),
        ({"a": one, "b": other}, names, 5, "76 items"),
    ]
    for tensors, options, code, said in no_tables:
        torch.save(tensors, tmp_path / "t.pt")
        run("split", *ADAGRAD.options, *options, tmp_path / "t.pt", tmp_path / "o.safetensors", code=code, said=said)


class PartiallyMaterializedTensor:
    """What FBGEMM's handle of a database looks like in a pickle: an object, and no data."""

    def __init__(self) -> None:
        self.wrapped = "rocksdb"


def test_a_handle_without_data_is_refused_and_not_taken_for_a_table(tmp_path: Path) -> None:
    torch.save({"m.embeddings.t.weight": PartiallyMaterializedTensor(), "other": torch.ones(2, 3)}, tmp_path / "t.pt")
    options = ["--embedding-dim", "64", "--method", "adam", tmp_path / "t.pt"]
    for words in (["split", *options, tmp_path / "out"], ["check", *options]):
        said = run(*words, code=5, said="does not contain the rows").err
        assert "PartiallyMaterializedTensor" in said


NO_PARTS: list[tuple[dict[str, torch.Tensor | None], int, str]] = [
    ({"momentum1": None}, 2, "no tensor called momentum1"),
    ({"weight_id": None}, 2, "no tensor called weight_id"),
    ({"metadata": None}, 2, "no tensor called metadata"),
    ({"metadata": None, "timestamp": torch.ones(9, dtype=torch.uint32)}, 2, "no tensor called count"),
    ({"momentum1": torch.ones(9, dtype=torch.float64)}, 2, "never cast"),
    ({"momentum1": torch.ones(8)}, 4, "9 rows"),
    ({"weight": torch.ones(9, 8)}, 2, "float16"),
    ({"weight": torch.ones(9)}, 2, "float16"),
    ({"pad": torch.ones(9, 3, dtype=torch.uint8)}, 4, "4 bytes of padding"),
    ({"pad": torch.ones(9, 4)}, 4, "4 bytes of padding"),
]


def test_parts_that_make_no_table_are_refused(tmp_path: Path) -> None:
    kind = Kind(8, "exact_row_wise_adagrad", "float16")
    run("split", *kind.options, table_file(tmp_path / "t.pt", kind, rows_of(kind, 9)), tmp_path / "p.safetensors")
    for change, code, said in NO_PARTS:
        parts = {**load_file(tmp_path / "p.safetensors"), **change}
        left = {name: tensor for name, tensor in parts.items() if tensor is not None}
        save_file(left, tmp_path / "q.safetensors", metadata_of(tmp_path / "p.safetensors"))
        run("pack", tmp_path / "q.safetensors", tmp_path / "out.pt", code=code, said=said)
        assert not (tmp_path / "out.pt").exists(), said


def test_a_count_that_does_not_fit_into_its_bits_is_refused_and_not_cut(tmp_path: Path) -> None:
    kind = Kind(8, "none")
    source = table_file(tmp_path / "t.pt", kind, rows_of(kind, 9))
    run("split", *kind.options, "--decode", source, tmp_path / "p.safetensors")
    parts = load_file(tmp_path / "p.safetensors")
    parts["count"] = torch.full((9,), 1 << 31, dtype=torch.uint32)
    save_file(parts, tmp_path / "q.safetensors", metadata_of(tmp_path / "p.safetensors"))
    done = run("pack", tmp_path / "q.safetensors", tmp_path / "out.pt", code=2)
    assert "2147483648" in done.err


RECORD: dict[str, Any] = {"version": 1, "tensor": "t", "embedding_dim": 8, "optimizer": "none", "max_dim": 8}
RECORD |= {f"{part}_dtype": "float32" for part in ("weight", "momentum1", "momentum2")} | {"row_bytes": 48}
ANY = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers(), max_size=2)
)


def test_a_record_of_rows_of_another_size_is_refused(tmp_path: Path) -> None:
    rows = {"weight_id": torch.arange(3), "metadata": torch.arange(3), "weight": torch.ones(3, 8)}
    for size, code, said in ((48, 0, ""), (52, 4, "specifies 52 bytes per row, but its parts require 48")):
        save_file(rows, tmp_path / "p.safetensors", {"ckptconv.rows": json.dumps({**RECORD, "row_bytes": size})})
        run("pack", tmp_path / "p.safetensors", tmp_path / "out.safetensors", code=code, said=said)


@examples(40, HealthCheck.function_scoped_fixture)
@given(
    record=st.text(max_size=20)
    | st.builds(lambda key, value: json.dumps({**RECORD, key: value}), st.sampled_from(sorted(RECORD)), ANY)
    | st.sampled_from(["[" * 100_000, '{"version": 1}', "[]", "1" * 5000])
)
def test_no_record_makes_pack_fail_otherwise_than_with_a_reason(tmp_path: Path, record: str) -> None:
    rows = {"weight_id": torch.arange(3), "metadata": torch.arange(3), "weight": torch.ones(3, 8)}
    save_file(rows, tmp_path / "p.safetensors", {"ckptconv.rows": record.encode("utf-8", "replace").decode()})
    done = ckptconv_here("rows", "pack", tmp_path / "p.safetensors", tmp_path / "out.safetensors")
    assert done.code in (0, 2, 4, 5), done.err


# -------------------------------------------------------------------------------- checks

CHECKED = Kind(8, "partial_row_wise_adam", "float16", m2="float16")
STEP, COUNT = 10, 5000


def whole(local: int = 0) -> dict[str, torch.Tensor]:
    """A table of COUNT rows in buckets of 100 ids of which some are there, and all that is saved beside it. Headers
    have ids that are less by `local`."""
    random = np.random.default_rng(5)
    ids = np.sort(random.choice(COUNT * STEP, COUNT, replace=False)).astype("<i8")
    ids = np.concatenate([random.permutation(ids[ids // 100 == bucket]) for bucket in range(COUNT * STEP // 100)])
    table = rows_of(CHECKED, COUNT)
    table[:, :8] = (ids - local).view(np.uint8).reshape(-1, 8)
    table[:, 15] |= 0x80
    kinds = {name: (offset, SIZES.get(dtype, 8) * (items or 1)) for name, offset, dtype, items in CHECKED.parts}
    bits = {name: table[:, offset : offset + size].copy() for name, (offset, size) in kinds.items()}
    return {
        "m.embeddings.t.weight": as_tensor(table, "float16"),
        "m.embeddings.t.weight_id": torch.from_numpy(ids.copy())[:, None],
        "m.embeddings.t.metadata": torch.from_numpy(bits["metadata"]).view(torch.int64),
        "m.embeddings.t.bucket": torch.from_numpy(np.bincount(ids // 100, minlength=COUNT * STEP // 100))[:, None],
        # As they are saved: the bits, under the weight's dtype.
        "optimizer.state.t.momentum1": torch.from_numpy(bits["momentum1"]).view(torch.float16),
        "optimizer.state.t.momentum2": torch.from_numpy(bits["momentum2"]).view(torch.float16),
    }


def checked(path: Path, tensors: dict[str, torch.Tensor], *options: object, code: int = 0) -> Any:
    """The report of a check, or what is said of it where something is wrong."""
    torch.save(tensors, path)
    report = run("check", *CHECKED.options, "--json", *options, path, code=code).json
    assert report["ok"] == (code == 0)
    return report if code == 0 else report["error"]["difference"]


def test_a_table_that_is_right_is_said_to_be_right(tmp_path: Path) -> None:
    report = checked(tmp_path / "t.pt", whole())
    assert sorted(report["checked"]) == ["bucket", "metadata", "momentum1", "momentum2", "weight_id"]
    assert (report["ids"], report["offset"], report["rows"], report["unused"]) == ("global", 0, COUNT, 0)
    assert report["padding"] == COUNT
    assert report["findings"] == report["warnings"] == []
    least, most = report["bucket_size"]
    assert least <= 100 <= most
    assert checked(tmp_path / "t.pt", whole(), "--bucket-size", 100)["bucket_size"] == [100, 100]


def test_local_ids_in_headers_are_told_from_global_ones(tmp_path: Path) -> None:
    for options in ((), ("--global-id-offset", "3000000")):
        report = checked(tmp_path / "t.pt", whole(3_000_000), *options)
        assert (report["ids"], report["offset"]) == ("local", 3_000_000), options
    run("check", *CHECKED.options, "--global-id-offset", 5, tmp_path / "t.pt", code=1)


Change = Callable[[dict[str, torch.Tensor]], None]


def at(name: str, row: int, value: int) -> Change:
    """The change of one number, or of a byte of the table's row."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        key = next(key for key in tensors if key.endswith(f".{name}"))
        tensors[key].view(-1)[row] += value

    return change


def in_header(row: int, key: int) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["m.embeddings.t.weight"].view(torch.int64)[row, 0] = key

    return change


def move_bucket(tensors: dict[str, torch.Tensor]) -> None:
    tensors["m.embeddings.t.bucket"][7] -= 1
    tensors["m.embeddings.t.bucket"][8] += 1


WRONG: list[tuple[str, Change, int | None]] = [
    ("weight_id", in_header(17, 1 << 60), 17),
    ("metadata", at("metadata", 4998, 1), 4998),
    ("momentum1", at("momentum1", 33 * 16 + 3, 4), 33),
    ("momentum2", at("momentum2", 4999, 4), 4999),
    ("bucket", move_bucket, None),
    ("bucket", at("bucket", 3, 1), None),
    ("bucket", at("bucket", 3, -1000), None),
    ("bucket", at("bucket", 3, (1 << 63) - 1000), None),
]


def test_what_is_wrong_is_found_with_its_first_rows(tmp_path: Path) -> None:
    for number, (check, change, row) in enumerate(WRONG):
        tensors = whole()
        change(tensors)
        (finding,) = checked(tmp_path / "t.pt", tensors, "--bucket-size", 100, code=1)["findings"]
        assert finding["check"] == check, number
        said = run("check", *CHECKED.options, "--bucket-size", 100, tmp_path / "t.pt", code=1).err
        if row is not None:
            assert finding["count"] == 1, number
            assert [example["row"] for example in finding["examples"]] == [row], number
            assert str(row) in said, number


def test_ids_that_come_again_are_found_wherever_they_are(tmp_path: Path) -> None:
    tensors = whole()
    for name, column in (("weight_id", 0), ("weight", None)):
        ids = tensors[f"m.embeddings.t.{name}"]
        ids = ids.view(torch.int64)[:, 0] if column is None else ids[:, 0]
        for one, other in ((4999, 3), (2500, 3), (7, 4000)):
            ids[one] = ids[other]
    del tensors["m.embeddings.t.bucket"]
    (finding,) = checked(tmp_path / "t.pt", tensors, code=1)["findings"]
    assert (finding["check"], finding["count"]) == ("unique", 3)
    assert sorted(example["rows"] for example in finding["examples"]) == [[3, 2500, 4999], [7, 4000]]


def test_rows_that_are_not_used_are_counted_and_warned_of(tmp_path: Path) -> None:
    tensors = whole()
    for row in (5, 6, 4000):
        tensors["m.embeddings.t.weight"].view(torch.uint8)[row, 15] &= 0x7F
        tensors["m.embeddings.t.metadata"].view(torch.uint8)[row, 7] &= 0x7F
    report = checked(tmp_path / "t.pt", tensors)
    assert report["unused"] == 3
    assert "3 of 5,000 rows are marked as unused." in report["warnings"][0]


def test_what_cannot_be_compared_is_a_difference(tmp_path: Path) -> None:
    others = [
        ("m.embeddings.t.weight_id", torch.arange(3), "[3]"),
        ("m.embeddings.t.weight_id", torch.arange(COUNT).int(), "4 bytes per row"),
        ("m.embeddings.t.metadata", torch.zeros(COUNT, 2, dtype=torch.int64), "16 bytes per row"),
        ("optimizer.state.t.momentum1", torch.zeros(COUNT, 8).half(), "16 bytes per row"),
        ("m.embeddings.t.bucket", torch.zeros(5), "float32"),
    ]
    for name, tensor, said in others:
        findings = checked(tmp_path / "t.pt", {**whole(), name: tensor}, code=1)["findings"]
        assert any(said in finding["message"] and name.endswith(finding["check"]) for finding in findings), said


def test_what_a_table_was_split_into_can_be_checked_too(tmp_path: Path) -> None:
    torch.save(whole(), tmp_path / "t.pt")
    run("split", *CHECKED.options, tmp_path / "t.pt", tmp_path / "parts.safetensors")
    report = run("check", "--json", tmp_path / "parts.safetensors").json
    assert (report["rows"], report["padding"]) == (COUNT, COUNT)


@examples(40)
@given(st.lists(st.integers(-30, 30) | st.sampled_from([1, 2]), max_size=120), st.integers(1, 7), st.integers(1, 3))
@example([1] * 30 + [2, 2, 3, 3], 7, 3)
def test_ids_that_repeat_are_counted_in_any_order_with_any_memory(ids: list[int], run_size: int, block: int) -> None:
    from ckptconv.features.rows.ids import Ids
    from ckptconv.features.spool.spool import Spool

    spool = Spool()
    try:
        seen = Ids(spool, run_size, block)
        for start in range(0, len(ids), 5):
            seen.add(np.array(ids[start : start + 5], "<i8"))
        count, values = seen.repeated(3)
    finally:
        spool.close()
    assert count == len(ids) - len(set(ids))
    twice = sorted({value for value in ids if ids.count(value) > 1})
    assert values == twice[:3]


def test_it_is_said_which_tables_may_be_whole_rows_and_how_to_split_them(tmp_path: Path) -> None:
    ordinary = {
        "m.embeddings.plain.weight": torch.ones(4, 64),
        "m.embeddings.plain.weight_id": torch.arange(4),
        "m.embeddings.other.weight": torch.ones(4, 76).half(),
    }
    path = tmp_path / "t.pt"
    torch.save({**ordinary, "m.embeddings.h.weight": PartiallyMaterializedTensor(), **whole()}, path)
    notes = [*notes_of(open_source(path))]
    for command in looking():
        assert ckptconv_here(command, "--json", path).json["tables"] == notes
        assert all(note in ckptconv_here(command, path).out for note in notes)
    assert [note.split()[0] for note in notes] == ["m.embeddings.t.weight", "m.embeddings.h.weight"]
    assert "whole rows of 72 bytes. If it does, split them: ckptconv rows split --embedding-dim" in notes[0]
    assert "PartiallyMaterializedTensor" in notes[1]
    kind = Kind(64, "adam")
    table = {"a.embedding_bags.b.weight": as_tensor(rows_of(kind, 3), "float32")}
    torch.save({**table, "a.embedding_bags.b.weight_id": torch.arange(3)}, path)
    (note,) = notes_of(open_source(path))
    command = note.split("ckptconv rows split ")[1].replace("OUTPUT", str(tmp_path / "p.safetensors"))
    run("split", *command.split())
    (note,) = notes_of(open_source(tmp_path / "p.safetensors"))
    assert "rows pack" in note


# -------------------------------------------------------------------------------- memory


def test_memory_does_not_grow_with_the_table(tmp_path: Path) -> None:
    """480,000 rows, 73 MB, of nothing: a file with holes."""
    kind, count = Kind(64, "exact_row_wise_adagrad", "float16"), 480_000
    entry = {"dtype": "F16", "shape": [count, kind.row // 2], "data_offsets": [0, count * kind.row]}
    header = json.dumps({"t": entry}).encode()
    path, parts = tmp_path / "t.safetensors", tmp_path / "parts.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + count * kind.row)
    for jobs in (1, 2):
        quick = ["--jobs", jobs, "--no-fsync", "--json", "--no-progress"]
        split = ckptconv("rows", "split", *kind.options, *quick, path, parts)
        assert (split.code, split.err) == (0, "")
        packed = ckptconv("rows", "pack", *quick, parts, tmp_path / "packed.safetensors")
        assert packed.code == 0
        os.unlink(tmp_path / "packed.safetensors")
        for report in (split.json, packed.json):
            assert report["peak_rss_bytes"] < 64 << 20, jobs
    checked = ckptconv("rows", "check", "--json", "--no-progress", parts)
    difference = json.loads(checked.out)["error"]["difference"]
    assert difference["findings"][0]["count"] == count - 1  # all ids are 0
    assert difference["peak_rss_bytes"] < 64 << 20


# -------------------------------------------------------------------------------- verification, and hostile tables


def test_what_is_made_is_verified(tmp_path: Path) -> None:
    kind = Kind(8, "partial_row_wise_adam", "float16", m2="bfloat16")
    table = rows_of(kind, 2000)
    source, parts = table_file(tmp_path / "t.pt", kind, table), tmp_path / "parts"
    for decode in ([], ["--decode"]):
        report = run("split", *kind.options, *decode, *VERIFY, "--json", source, parts).json
        assert report["bytes_verified"] == table.nbytes, decode
        for name, made in (("1.pt", "1.pt"), ("1.safetensors", "1.safetensors"), ("1", "1/model.safetensors")):
            report = run("pack", *VERIFY, "--json", parts, tmp_path / name).json
            # A bit is a byte.
            assert report["bytes_verified"] == table.nbytes + (len(table) if decode else 0), (decode, name)
            is_same_table(tmp_path / made, "m.embeddings.t.weight", kind, table)


def test_what_comes_out_wrong_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that flips a bit of what is written."""
    from ckptconv.storage.writing import LocalWriter

    kind = Kind(64, "adam")
    table = rows_of(kind, 3000)
    source, parts = table_file(tmp_path / "t.safetensors", kind, table), tmp_path / "parts.safetensors"
    run("split", *kind.options, source, parts)
    write = LocalWriter.write_at

    def flip(writer: LocalWriter, offset: int, data: memoryview) -> None:
        changed = bytearray(data)
        if offset <= 600_000 < offset + len(data):
            changed[600_000 - offset] ^= 4
        write(writer, offset, memoryview(changed))

    monkeypatch.setattr(LocalWriter, "write_at", flip)
    for words in (["split", *kind.options, source], ["pack", parts]):
        run(*words, *VERIFY, tmp_path / "out.safetensors", code=1, said="differs from the table:")
        assert not (tmp_path / "out.safetensors").exists(), words


def test_a_table_that_repeats_its_rows_without_end_is_refused(tmp_path: Path) -> None:
    torch.save({"t": torch.zeros(1, 76).half().expand(1 << 40, 76)}, tmp_path / "t.pt")
    run("split", *ADAGRAD.options, tmp_path / "t.pt", tmp_path / "out.safetensors", code=4)
    run("check", *ADAGRAD.options, tmp_path / "t.pt", code=4)


def test_tables_of_nothing_are_split_or_refused(tmp_path: Path) -> None:
    for shape, code in (((0, 76), 0), ((3, 0), 2), ((0, 0), 2)):
        torch.save({"t": torch.empty(shape).half()}, tmp_path / "t.pt")
        run("split", *ADAGRAD.options, tmp_path / "t.pt", tmp_path / "out.safetensors", code=code)
        run("check", *ADAGRAD.options, tmp_path / "t.pt", code=code)


def test_rows_of_a_big_endian_machine_are_refused(tmp_path: Path) -> None:
    from ckptconv.errors import UnsupportedError
    from ckptconv.features.rows.columns import column
    from ckptconv.tensors.dtypes import DTYPES
    from ckptconv.tensors.lazy import Convert, Stored
    from ckptconv.tensors.moves import File as SourceFile
    from ckptconv.tensors.moves import Swap

    half = DTYPES["float16"]
    stored = Stored(SourceFile("t", 1 << 20), 0, half, (4, 76), (76, 1))
    with pytest.raises(UnsupportedError, match="big-endian"):
        column(Convert(stored, Swap(2), half), 0, DTYPES["int64"], None)


def test_nothing_is_replaced_or_written_unless_it_is_asked_for(tmp_path: Path) -> None:
    kind = Kind(8, "none", "float16")
    source = table_file(tmp_path / "t.pt", kind, rows_of(kind, 5))
    out = tmp_path / "out.safetensors"
    report = run("split", *kind.options, "--dry-run", "--json", source, out).json
    assert report["dry_run"]
    assert os.listdir(tmp_path) == ["t.pt"]
    out.write_text("mine")
    assert "--no-clobber" in run("split", *kind.options, "--no-clobber", source, out, code=1).err
    assert out.read_text() == "mine"
    assert "input itself" in run("split", *kind.options, table_file(out, kind, rows_of(kind, 5)), out, code=2).err
    assert "safetensors" in run("split", *kind.options, source, tmp_path / "out.pt", code=2).err


def test_the_library_takes_paths_and_options_as_words(tmp_path: Path) -> None:
    import ckptconv as library

    kind = Kind(16, "adam", "float16", m2="bfloat16")
    table = rows_of(kind, 100)
    source, parts, packed = table_file(tmp_path / "t.pt", kind, table), tmp_path / "p.safetensors", tmp_path / "q.pt"
    layout = {"embedding_dim": 16, "method": "adam", "momentum2_dtype": "bfloat16"}
    assert library.split_rows(source, parts, **layout, jobs=1).counts["rows"] == 100
    assert split_of(parts) == expected(kind, table)
    library.pack_rows([parts], packed, name="again")
    is_same_table(packed, "again", kind, table)
    assert library.check_rows(str(source), **layout).rows == 100
    with pytest.raises(library.CkptconvError):
        library.split_rows(source, parts, embedding_dim=16, method="adam")


def test_a_weight_of_a_width_that_no_row_has_is_not_supported(tmp_path: Path) -> None:
    for width, said in ((0, "ckptconv: The weight has the shape [3, 0]"), (2, "ckptconv: The embedding dim")):
        torch.save({"weight": torch.ones(3, width), "weight_id": torch.arange(3)}, tmp_path / "t.pt")
        run("pack", "--method", "adam", tmp_path / "t.pt", tmp_path / "out.pt", code=5, said=said)


def test_its_options_take_words() -> None:
    assert ROWS["embedding_dim"].parse("64") == 64
    assert ROWS["names"].parse("t") == ("t",)
    assert PACKING["names"].parse(["weight=a", "pad=b"]) == {"weight": "a", "pad": "b"}
    assert RowOptions(momentum1_dtype=torch.bfloat16) == RowOptions(momentum1_dtype="bf16")


def test_the_short_help_of_packing_has_what_the_page_uses() -> None:
    said = done(ckptconv_here("rows", "pack", "-h")).out
    assert all(option in said for option in ("--method", "--column", "--name"))


def test_rows_of_any_tensor_are_not_for_these_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    run = ckptconv_here("rows", "base", "w", "10:20")
    run.refused(2, "No such command 'base'.", "get_slice(NAME)[5:10] reads rows of any", "are split, pack, check")
    assert "get_slice" not in ckptconv_here("rows", "other", "w", "10:20").err


def test_an_option_for_rows_of_any_tensor_is_told_what_reads_them() -> None:
    told = ckptconv_here("convert", "a.pt", "o.safetensors", "--rows", "5-10")
    told.refused(
        2, "There is no option --rows.", "get_slice(NAME)[5:10]", "ckptconv rows is for embedding tables of FBGEMM"
    )
