"""Trees written as `.pt` files: what torch loads is what torch had saved, and what Python loads is what was there."""

from __future__ import annotations

import collections
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckptconv.engine.execute import carry_out
from ckptconv.errors import CkptconvError, UnsupportedError
from ckptconv.features.torch_files.tree import plan_tree
from ckptconv.features.torch_files.writer import dumps
from ckptconv.formats.torch.file import read_torch
from ckptconv.pickles.machine import load
from ckptconv.pickles.nodes import Global, NumpyArray, NumpyScalar, Opaque
from ckptconv.storage.files import Readers
from ckptconv.storage.writing import LocalWriter


def rewritten(tmp_path: Path, value: Any) -> Path:
    """What torch saves of `value`, read by us and written by us."""
    torch.save(value, tmp_path / "theirs.pt")
    plan = plan_tree("ours.pt", read_torch(str(tmp_path / "theirs.pt")).value)
    writer = LocalWriter(str(tmp_path / "ours.pt"), plan.size)
    with Readers() as readers:
        carry_out(plan, writer, readers, jobs=2, memory=1 << 20)
    writer.close()
    return tmp_path / "ours.pt"


def again(tmp_path: Path, value: Any, weights_only: bool = True) -> Any:
    return torch.load(rewritten(tmp_path, value), weights_only=weights_only)


PLAIN: dict[str, Any] = {
    "integers": [0, 255, 256, 65535, 65536, -1, 2**31, -(2**31), -(2**63), 2**70, 2**3000],
    "floats": [1.5, -0.0, float("inf"), 5e-324],
    "texts": ["", "a\ud800", "😀", "\0\n"],
    "bytes": [b"", b"a\xff", bytearray(b"\0\xfe"), bytearray()],
    "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
    "sets": [{1, 2}, frozenset({3}), set()],
    "others": [1 + 2j, range(1, 9, 2), slice(1, None, 2), ..., None, True, False],
    "keys": {1: 1, "1": 2, (1, "a"): 3, None: 4, 2.5: 5, b"k": 6},
    "deque": collections.deque([1, 2], maxlen=5),
    "defaultdict": collections.defaultdict(list, {1: [2]}),
    "ordered": collections.OrderedDict(b=1, a=2),
    "counter": collections.Counter({5: 2}),
    "many": list(range(2500)),
    "many keys": {number: number for number in range(2001)},
}


@pytest.mark.parametrize("name", PLAIN)
def test_python_loads_plain_values_as_they_were(name: str) -> None:
    loaded = pickle.loads(dumps(PLAIN[name]))
    assert type(loaded) is type(PLAIN[name])
    assert repr(loaded) == repr(PLAIN[name])
    assert repr(load(dumps(PLAIN[name]), where="pickle").value) == repr(PLAIN[name])


def test_shared_and_cyclic_containers_stay_so() -> None:
    shared: list[Any] = [1]
    cycle: list[Any] = []
    cycle.append((cycle,))
    knot: tuple[Any, ...] = ([],)
    knot[0].append(knot)
    loaded = pickle.loads(dumps([shared, shared, cycle, knot]))
    assert loaded[0] is loaded[1]
    assert loaded[2][0][0] is loaded[2]
    assert loaded[3][0][0] is loaded[3]


def test_a_tree_may_be_as_deep_as_it_likes() -> None:
    deep: list[Any] = []
    for _ in range(20_000):
        deep = [deep]
    assert dumps(deep).count(b"]") >= 20_000


def test_numpy_loads_numpy_values() -> None:
    rows = [
        (NumpyScalar("<f8", np.float64(3.5).tobytes()), np.float64(3.5)),
        (NumpyArray("<i4", (2, 3), "C", np.arange(6, dtype="<i4").tobytes()), np.arange(6, dtype="<i4").reshape(2, 3)),
        (NumpyArray("<U3", (2,), "C", np.array(["ab", "c"], "<U3").tobytes()), np.array(["ab", "c"], "<U3")),
        (NumpyArray(">f4", (2, 2), "F", np.arange(4, dtype=">f4").tobytes()), np.array([[0, 2], [1, 3]], ">f4")),
        (NumpyArray("|S3", (2,), "C", b"abcdef"), np.array([b"abc", b"def"])),
        (NumpyArray("<M8[D]", (1,), "C", bytes(8)), np.array(["1970-01-01"], "M8[D]")),
        (NumpyScalar("<m8[25us]", b"\2" + bytes(7)), np.array([2], "m8[25us]")[0]),
        (NumpyScalar("<m8", b"\2" + bytes(7)), np.timedelta64(2)),
        (NumpyScalar("<m8[2147483647s]", b"\2" + bytes(7)), np.array([2], "m8[2147483647s]")[0]),
    ]
    for node, expected in rows:
        loaded = pickle.loads(dumps(node))
        assert loaded.dtype == expected.dtype
        assert np.array_equal(loaded, expected)


@pytest.mark.parametrize("dtype", ["<f3", "|b7", "<i4[s]", "<m8[7]", "<M8[zz]", "<m8[2147483648s]", "<m4", "f4"])
def test_a_dtype_that_numpy_lacks_is_not_written(dtype: str) -> None:
    with pytest.raises(UnsupportedError, match=r"cannot be written into a pickle"):
        dumps(NumpyScalar(dtype, bytes(8)))


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert type(got) is type(expected)
    assert (got.dtype, got.shape, got.stride()) == (expected.dtype, expected.shape, expected.stride())
    assert got.requires_grad == expected.requires_grad
    assert got.storage_offset() == expected.storage_offset()
    flat = got.detach().contiguous().reshape(-1).view(torch.uint8)
    assert torch.equal(flat, expected.detach().contiguous().reshape(-1).view(torch.uint8))


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_come_back(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 2, (3, 5)).to(dtype)
    same(again(tmp_path, tensor), tensor)


def test_views_share_their_storage_again(tmp_path: Path) -> None:
    base = torch.arange(60.0)
    state = {
        "head": base[:10],
        "tail": base[50:],
        "matrix": base[10:40].reshape(5, 6),
        "transposed": base[10:40].reshape(5, 6).t(),
        "columns": base[10:40].reshape(5, 6)[:, 1:3],
        "every second": base[0:40:2],
        "overlapping": base[5:20],
        "repeated": base[3:4].expand(7),
        "empty": base[:0],
    }
    loaded = again(tmp_path, state)
    for name, tensor in state.items():
        same(loaded[name], tensor)
    assert len({tensor.untyped_storage().data_ptr() for name, tensor in loaded.items() if name != "empty"}) == 1
    assert loaded["head"].untyped_storage().nbytes() == 240


@pytest.mark.parametrize("seed", range(40))
def test_any_views_of_one_storage_come_back_together(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    base = torch.arange(3 * 4 * 5 * 6, dtype=torch.int32).reshape(3, 4, 5, 6)
    views = []
    for _ in range(chance.randint(1, 4)):
        view = base.permute(*chance.sample(range(4), 4))
        for dim in range(4):
            low = chance.randint(0, view.shape[dim] - 1)
            view = view[(slice(None),) * dim + (slice(low, None, chance.choice([1, 1, 2])),)]
        views.append(view)
    loaded = again(tmp_path, views)
    for got, expected in zip(loaded, views, strict=True):
        same(got, expected)
    assert len({tensor.untyped_storage().data_ptr() for tensor in loaded}) == 1


def test_a_whole_training_state_comes_back(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 4))
    model[2].weight = nn.Parameter(model[0].weight.detach().t().contiguous())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "parameter": model[0].weight, "epoch": 3}
    loaded = again(tmp_path, state)
    assert loaded["model"]._metadata == state["model"]._metadata
    assert list(loaded["model"]) == list(state["model"])
    same(loaded["parameter"], model[0].weight)
    assert isinstance(loaded["parameter"], nn.Parameter)
    assert loaded["parameter"].untyped_storage().data_ptr() == loaded["model"]["0.weight"].untyped_storage().data_ptr()
    optimizer.load_state_dict(loaded["optimizer"])
    assert repr(loaded["optimizer"]) == repr(state["optimizer"])


def test_tensors_of_several_parts_come_back(tmp_path: Path) -> None:
    sparse = torch.eye(4).to_sparse()
    loaded = again(tmp_path, {"coo": sparse, "csr": torch.eye(4).to_sparse_csr()})
    assert torch.equal(loaded["coo"].to_dense(), torch.eye(4))
    assert loaded["coo"].is_coalesced() == sparse.is_coalesced()
    assert torch.equal(loaded["csr"].to_dense(), torch.eye(4))
    quantized = torch.quantize_per_tensor(torch.arange(6.0), 0.5, 3, torch.qint8)
    channels = torch.quantize_per_channel(torch.rand(2, 3), torch.rand(2), torch.zeros(2), 0, torch.quint8)
    loaded = again(tmp_path, [quantized, channels])
    assert torch.equal(loaded[0].int_repr(), quantized.int_repr())
    assert loaded[0].q_scale() == 0.5
    assert torch.equal(loaded[1].dequantize(), channels.dequantize())


def test_attributes_and_constants_come_back(tmp_path: Path) -> None:
    tensor = torch.ones(2)
    tensor.note = "kept"
    loaded = again(tmp_path, {"t": tensor, "d": torch.bfloat16, "s": torch.Size((1, 2)), "v": torch.device("cuda:1")})
    assert loaded["t"].note == "kept"
    assert loaded["d"] is torch.bfloat16
    assert loaded["s"] == torch.Size((1, 2))
    assert isinstance(loaded["s"], torch.Size)
    assert loaded["v"] == torch.device("cuda:1")


def test_objects_known_by_name_only_are_never_written() -> None:
    with pytest.raises(CkptconvError, match=r"evil\.Thing"):
        plan_tree("x", {"a": Opaque(Global("evil", "Thing"))})
    with pytest.raises(CkptconvError, match="object"):
        plan_tree("x", object())
