"""There and back through files: torch.load gives what it gave before the state went to safetensors and came back."""

from __future__ import annotations

import argparse
import base64
import collections
import datetime
import decimal
import fractions
import functools
import itertools
import math
import pathlib
import pickle
import struct
import sys
import tempfile
import types
import uuid
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attacks.corpus import CASES
from checkpoints import DATA, Run, ckptconv, ckptconv_here
from huggingface_hub import save_torch_state_dict
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from strict import assert_same
from trees import containers, keys_with, tie_into_a_cycle

import ckptconv as ckptconv_module
from ckptconv import convert
from ckptconv.errors import UnsafeError
from ckptconv.tensors.dtypes import DTYPES


@contextmanager
def deep() -> Iterator[None]:
    """Let torch.save recurse."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


def loaded(path: Path, *, weights_only: bool = False) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sparse and quantized tensors are in beta, or deprecated
        return torch.load(path, weights_only=weights_only, map_location="cpu")


def saved(tmp_path: Path, state: Any, name: str = "x.pt", **options: Any) -> Path:
    with deep():
        torch.save(state, tmp_path / name, **options)
    return tmp_path / name


def run(*arguments: object) -> Run:
    done = ckptconv_here(*arguments, "--no-fsync")
    assert done.code == 0, done.err
    return done


def back(path: Path, *options: object, output: str = "x.safetensors", name: str = "back.pt") -> Path:
    """A `.pt` file that went to safetensors, and came back."""
    run("pt2safetensors", path, path.parent / output, *options)
    run("safetensors2pt", path.parent / output, path.parent / name)
    return path.parent / name


def tensors(count: int) -> list[torch.Tensor]:
    return [torch.full((2, 3), float(number)) for number in range(count)]


def of(*keys: Any) -> dict[Any, Any]:
    """A tensor under each key, no two the same."""
    return {key: torch.full((2,), float(number)) for number, key in enumerate(keys)}


def with_one(value: Any, make: Callable[[Any], Any]) -> Any:
    """What `make` makes of one object."""
    return make(value)


def views_of_one_storage(base: torch.Tensor) -> Any:
    return {
        "whole": base,
        "part": base[100:200].view(10, 10),
        "overlap": base[150:250].view(10, 10),
        "transposed": base[100:200].view(10, 10).t(),
        "expanded": base[3].expand(5, 5),
        "rows": base.view(10, 100)[:4, :7],
        "every second": base[::2],
        "scalar": base[999],
        "windows": base[:20].unfold(0, 4, 1),
        "same": base.view(1000),
        "other": base.clone(),
    }


def with_attributes(tensor: Any) -> Any:
    tensor.ds_id = 7
    tensor.ds_shape = torch.Size([3])
    tensor.partners = [torch.ones(2), {"t": (1, 2.5)}]
    return tensor


def a_cycle() -> Any:
    tree: dict[str, Any] = {"t": torch.ones(1)}
    tree["self"] = tree
    tree["list"] = [tree]
    return tree


def a_cycle_through_a_tuple() -> Any:
    inner: list[Any] = []
    tree = (inner, torch.ones(1))
    inner.append(tree)
    return tree


def nested(levels: int, wrap: Callable[[Any], Any]) -> Any:
    tree: Any = {"t": torch.ones(1)}
    for _ in range(levels):
        tree = wrap(tree)
    return tree


# ---------------------------------------------------------------------------------------------- what must hold, by name

NAN = struct.unpack(">d", bytes.fromhex("7ff800000000beef"))[0]
NEGATIVE_NAN = struct.unpack(">d", bytes.fromhex("fff8000000000001"))[0]
STATES: dict[str, Callable[[], Any]] = {
    "'a.b' against a→b": lambda: {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}},
    "a→b against 'a.b'": lambda: {"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1)},
    "{0:, '0':}": lambda: of(0, "0"),
    "{True:, 'True':}": lambda: of(True, "True"),
    "{1.5:}": lambda: of(1.5, "1.5"),
    "{('a', 0):}": lambda: of(("a", 0), ("a", "0"), "a.0", ()),
    "{None:, 'None':}": lambda: of(None, "None"),
    "{b'a':, 'a':}": lambda: of(b"a", "a", b"\xff\0"),
    "{'':, 'a': {'':}}": lambda: {"": torch.ones(1), "a": of(""), ".": {"": of("")}},
    "a name that ends like the suffix": lambda: {**of("a~2", "a", "a~3"), "x": of("a~2"), "x.a": of("2"), "x.a~2": 1},
    "a tensor named __metadata__": lambda: {**of("__metadata__", "__metadata__~2"), "a": of("__metadata__")},
    "a tensor named __metadata__ alone": lambda: of("__metadata__"),
    "lone surrogates": lambda: {"\ud800": "\udc00", **of("a\udfffb", "a\udffeb"), "l": ["\ud800" * 99] * 2},
    "lone surrogates in a plain dict": lambda: of("\ud800", "\udfff"),
    "NUL, newline, quote, backslash, slash, emoji": lambda: of(
        *("\0", "\n", '"', "\\", "/", "😀", "a\0b", "\x7f", "\u2028", "\ufeff", "'", "\r", "../x", "%s", "{}")
    ),
    "a 64 KiB key": lambda: {"k" * (64 << 10): torch.ones(1), "d": {"é" * (64 << 10): torch.ones(1), "l": [1]}},
    "keys that look like the record's own": lambda: {
        key: {**of(key), "v": [key, {"name": key}, ["@", 0], ["dict", "a", 1], ["float", "nan"], {"dropped": key}]}
        for key in ("@", "dict", "name", "dropped", "version", "root", "nodes", "float", "int", "tuple", "is")
    },
    "keys of the metadata": lambda: of("format", "ckptconv.structure", "total_size", "pt"),
    "NFC and NFD": lambda: of("é", "e\u0301"),
    "empty containers": lambda: {"d": {}, "l": [], "t": (), "s": set(), "n": {"d": [{}]}, "o": OrderedDict(), **of(1)},
    "root {}": dict,
    "root []": list,
    "root ()": tuple,
    "root OrderedDict()": OrderedDict,
    "root set()": set,
    "root tensor": lambda: torch.arange(6).reshape(2, 3),
    "root parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "root list": lambda: [*tensors(2), 1, tensors(1)],
    "root tuple": lambda: (*tensors(1), tensors(1)),
    "root int": lambda: 7,
    "root float": lambda: -0.0,
    "root str": lambda: "text",
    "root bytes": lambda: b"\0\xff",
    "root None": lambda: None,
    "root bool": lambda: True,
    "root dtype": lambda: torch.bfloat16,
    "root of scalars": lambda: {"epoch": 3, "best": math.inf, "names": ["a", ("b", None)]},
    "insertion order": lambda: {
        "z": torch.tensor(True),
        "b": torch.tensor(1),
        "a": torch.tensor(1.0, dtype=torch.float64),
        "c": {"y": 1, "x": torch.ones(1)},
    },
    "insertion order of a plain dict": lambda: {"b": torch.tensor(1.0), "a": torch.tensor(1), "c": torch.tensor(True)},
    "1, 1.0, True": lambda: [1, 1.0, True, 0, 0.0, -0.0, False, {1: 1.0}, {1.0: True}, {True: 1}],
    "integers of any size": lambda: [
        number * sign
        for number in (2**53 - 1, 2**53, 2**53 + 1, 2**63, 2**63 - 1, 2**64, 2**70, 2**256, 2**3000, 3**9000, 2**31)
        for sign in (1, -1)
    ],
    "floats": lambda: [
        *(NAN, NEGATIVE_NAN, math.nan, -math.nan, math.inf, -math.inf, -0.0, 5e-324, 0.1, 1e22),
        1.7976931348623157e308,
    ],
    "floats as keys": lambda: {NAN: 1, math.inf: 2, 0.0: 3, 5e-324: torch.ones(1)},
    "bytes, bytearray": lambda: [b"", b"\0\xff" * 1000, bytearray(b"x\xff"), bytearray(), bytes(range(256))],
    "complex": lambda: [1j, complex(-0.0, NAN), complex(math.inf, -0.0)],
    "set, frozenset": lambda: [{1, "1", None, (1, 2), b"x", 2.5}, frozenset({1, frozenset({2})}), set(), frozenset()],
    "range, slice, Ellipsis": lambda: [
        *(range(5), range(5, 0, -2), range(2**70), slice(None), slice(1, None, 2**70), slice("a", [1]), ...),
    ],
    "torch.Size, dtype, device": lambda: [
        *(torch.Size((2, 3)), torch.Size(), torch.float32, torch.float8_e5m2, torch.uint16, torch.complex32),
        *(torch.device("cuda:0"), torch.device("cpu"), torch.device("meta"), torch.strided, torch.sparse_csr),
        *(torch.per_channel_affine, {torch.bfloat16: 1, torch.Size([2]): 2}),
    ],
    "Counter": lambda: {"milestones": Counter({30: 1, 80: 2}), "empty": Counter()},
    "OrderedDict with _metadata": lambda: torch.nn.Sequential(
        torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)
    ).state_dict(),
    "defaultdict": lambda: [
        *(defaultdict(list, {1: tensors(1)}), defaultdict(None, a=1), defaultdict(int), defaultdict(OrderedDict)),
        *(defaultdict(dict), defaultdict(tuple), defaultdict(bytearray), defaultdict(Counter), defaultdict(frozenset)),
    ],
    "deque": lambda: [deque([1, torch.ones(1)], maxlen=5), deque(), deque(maxlen=0), deque([tensors(1)])],
    "numpy": lambda: {
        "scalars": [
            np.float64(0.1),
            np.float32("nan"),
            np.int8(-1),
            np.bool_(True),
            np.complex64(1j),
            np.uint64(2**63),
        ],
        "texts": [np.str_("é"), np.bytes_(b"x")],
        "arrays": [
            *(np.arange(6).reshape(2, 3), np.asfortranarray(np.ones((2, 3))), np.array(["ab", "c"]), np.zeros((0, 3))),
            *(np.array(5), np.arange(12.0).reshape(3, 4)[:, ::2], np.array([b"ab", b"c"]), np.float16([1, 2])),
        ],
        "big-endian": np.arange(3, dtype=">f4"),
        "dates": [
            np.datetime64("2024-02-29T12"),
            np.array(["2024-01-01"], dtype="datetime64[D]"),
            np.timedelta64(3, "s"),
        ],
        "rng": np.random.default_rng(1).bit_generator.state,
        "legacy rng": np.random.RandomState(0).get_state(),
        "key": {np.int64(3): 1},
        "t": torch.ones(1),
    },
    "list of tensors against {0: tensor}": lambda: {"l": tensors(2), "d": of(0, 1)},
    "tensor in tuple in list": lambda: [(torch.ones(1), (torch.ones(2), tensors(1))), torch.ones(3)],
    "the same tensor twice": lambda: with_one(torch.ones(3), lambda t: {"a": t, "b": [t], "c": t}),
    "the same parameter twice": lambda: with_one(torch.nn.Parameter(torch.ones(3)), lambda t: {"a": t, "b": [t]}),
    "one storage under different views": lambda: views_of_one_storage(torch.arange(1000.0)),
    "one storage of 16-bit floats": lambda: views_of_one_storage(torch.arange(1000).to(torch.bfloat16)),
    "one storage of complex numbers": lambda: views_of_one_storage(torch.arange(1000) * (1 + 2j)),
    "one storage of 16-byte complex numbers": lambda: views_of_one_storage(torch.arange(1000).to(torch.complex128)),
    "one storage of 8-bit floats": lambda: views_of_one_storage(
        (torch.arange(1000) % 250).byte().view(torch.float8_e5m2)
    ),
    "tied": lambda: with_one(
        torch.randn(3, 2), lambda t: {"a": t.detach(), "b": t.detach(), "c": t.view(6), "t": t.t()}
    ),
    "the same container twice": lambda: with_one(tensors(1), lambda inner: {"a": inner, "b": [inner, inner]}),
    "a cycle": a_cycle,
    "a cycle through a tuple": a_cycle_through_a_tuple,
    "0-d and (0, 5)": lambda: {
        "scalar": torch.tensor(1.5),
        "empty": [torch.empty(0, 5), torch.empty(0, 5), torch.empty(1, 0), torch.empty(0)],
        "integers": torch.empty(2, 0, 3, dtype=torch.int8),
        "of something": torch.ones(3)[1:1],
    },
    "non-zero storage offset": lambda: {
        "a": torch.arange(9)[7:],
        "b": torch.arange(90.0)[3:5],
        "c": torch.arange(9.0)[8],
    },
    "fp8, uint16, complex64 and all others": lambda: (
        {
            name: torch.arange(48, dtype=torch.uint8).repeat(dtype.itemsize).view(getattr(torch, name)).reshape(2, 3, 8)
            for name, dtype in DTYPES.items()
            if not name.startswith(("q", "bits", "bool"))
        }
        | {"bool": torch.arange(12).reshape(3, 4) % 3 == 0}
    ),
    "bits": lambda: {
        name: torch.arange(48, dtype=torch.uint8).view(getattr(torch, name))
        for name in ("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2")
    },
    "special values": lambda: {
        "float32": torch.tensor([math.nan, -0.0, math.inf, -math.inf, 1e-45]),
        "payload": torch.tensor([0x7FC00001, -0x3FFFFF, 0x7F800001], dtype=torch.int32).view(torch.float32),
        "complex": torch.tensor([complex(0.0, -0.0), complex(math.nan, math.inf)]),
    },
    "parameters, gradients, attributes": lambda: {
        "p": torch.nn.Parameter(torch.ones(2)),
        "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "integers": torch.nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False),
        "g": torch.ones(2, requires_grad=True),
        "b": torch.nn.Buffer(torch.ones(2)),
        "transient": torch.nn.Buffer(torch.ones(2), persistent=False),
        "attributes": with_attributes(torch.ones(2)),
        "parameter with attributes": with_attributes(torch.nn.Parameter(torch.ones(2))),
        "empty": torch.nn.Parameter(torch.empty(0)),
        "transposed": torch.nn.Parameter(torch.randn(2, 3).t()),
    },
    "strides": lambda: {
        "transposed": torch.arange(12).reshape(3, 4).t(),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "column": torch.arange(12.0).reshape(3, 4)[:, 1],
        "every second": torch.arange(20.0)[::2],
        "expanded": torch.arange(3).expand(5, 3),
        "expanded scalar": torch.tensor(7.0).expand(2, 3, 4),
        "diagonal": torch.arange(9.0).reshape(3, 3).diagonal(),
        "windows": torch.arange(10).unfold(0, 4, 2),
        "one": torch.ones(1).as_strided((1, 1), (5, 7)),
        "half": torch.arange(12).to(torch.float16).reshape(3, 4).t(),
        "complex": (torch.arange(12) * 1j).reshape(3, 4).t(),
        "complex128": torch.arange(12).to(torch.complex128).reshape(3, 4).t(),
    },
    "1000-deep dicts": lambda: nested(1000, lambda tree: {"k": tree, "l": 1}),
    "1000-deep lists": lambda: nested(1000, lambda tree: [tree]),
    "1000-deep tuples": lambda: nested(1000, lambda tree: (1, tree)),
    "sparse": lambda: {
        "coo": torch.eye(3).to_sparse(),
        "uncoalesced": torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,)),
        "hybrid": torch.sparse_coo_tensor([[0, 2]], torch.ones(2, 4), (3, 4)),
        "empty": torch.sparse_coo_tensor(torch.empty(2, 0, dtype=torch.int64), torch.empty(0), (3, 4)),
        "csr": torch.eye(3).to_sparse_csr(),
        "csc": torch.eye(3).to_sparse_csc(),
        "bsr": torch.eye(4).to_sparse_bsr((2, 2)),
        "bsc": torch.eye(4).to_sparse_bsc((2, 2)),
        "requires grad": torch.eye(3).to_sparse().requires_grad_(),
        "parameter": torch.nn.Parameter(torch.eye(3).to_sparse()),
        "twice": [torch.eye(2).to_sparse()] * 2,
    },
    "quantized": lambda: {
        "per tensor": torch.quantize_per_tensor(torch.randn(3, 2), 0.1, 3, torch.quint8),
        "int8": torch.quantize_per_tensor(torch.randn(3, 2), 0.1, 0, torch.qint8).t(),
        "int32": torch.quantize_per_tensor(torch.randn(3, 2), 0.1, 0, torch.qint32),
        "per channel": torch.quantize_per_channel(torch.randn(3, 2), torch.ones(3), torch.zeros(3), 0, torch.qint8),
        "float parameters": torch.quantize_per_channel(
            torch.randn(3, 2), torch.rand(3), torch.rand(3), 0, torch.quint8
        ),
    },
    "nested": lambda: {"n": torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(3, 3)])},
}


def check(path: Path, again: Path) -> None:
    """What torch loads from two files is the same; and with weights_only too, where that is allowed."""
    assert_same(loaded(path), loaded(again))
    try:
        expected = loaded(path, weights_only=True)
    except Exception:
        return
    assert_same(expected, loaded(again, weights_only=True))


@pytest.mark.parametrize("output", ["x.safetensors", "x"])
@pytest.mark.parametrize("name", STATES)
@pytest.mark.filterwarnings("ignore")  # of tensors that are in beta, or deprecated
def test_what_torch_loads_is_the_same_there_and_back(name: str, output: str, tmp_path: Path) -> None:
    path = saved(tmp_path, STATES[name]())
    check(path, back(path, *(["--max-shard-size", "1kB"] if output == "x" else []), output=output))


def test_300_000_entries(tmp_path: Path) -> None:
    path = saved(tmp_path, {f"e{number}": number for number in range(300_000)})
    check(path, back(path))


# At protocol 0, torch writes tensors that it cannot read.
WITHOUT_TENSORS = ["floats", "bytes, bytearray", "integers of any size", "set, frozenset", "Counter", "complex"]
WITH_TENSORS = ["numpy", "deque", "one storage under different views", "parameters, gradients, attributes", "a cycle"]


@pytest.mark.parametrize(
    ("name", "protocol"),
    [*itertools.product(WITHOUT_TENSORS, range(6)), *itertools.product(WITH_TENSORS, range(1, 6))],
)
def test_every_pickle_protocol(name: str, protocol: int, tmp_path: Path) -> None:
    path = saved(tmp_path, STATES[name](), pickle_protocol=protocol)
    check(path, back(path))


@pytest.mark.parametrize("name", ["one storage under different views", "parameters, gradients, attributes", "a cycle"])
def test_the_stream_format(name: str, tmp_path: Path) -> None:
    path = saved(tmp_path, STATES[name](), _use_new_zipfile_serialization=False)
    check(path, back(path))


# --------------------------------------------------------------------------------------------- states nobody thought of


def _base(dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(64) % 100).to(dtype)


POOL = {dtype: _base(dtype) for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex128, torch.bool)}
POOL[torch.float8_e4m3fn] = _base(torch.float32).to(torch.float8_e4m3fn)


@st.composite
def live_tensors(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of any shape, strides and kind, in a storage of its own or one that others share."""
    dtype = draw(st.sampled_from(list(POOL)))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    strides = [draw(st.integers(0, 7)) for _ in shape]
    base = draw(st.sampled_from([POOL[dtype], POOL[dtype].clone()]))
    tensor = base.as_strided(shape, strides, draw(st.integers(0, 10)))
    kind = draw(st.sampled_from(["plain", "plain", "parameter", "frozen", "buffer", "grad"]))
    # torch does not load 8-bit floats that require gradients.
    differentiable = tensor.dtype.itemsize > 1 and (tensor.is_floating_point() or tensor.is_complex())
    if kind == "parameter" and differentiable:
        return torch.nn.Parameter(tensor)
    if kind == "frozen":
        return torch.nn.Parameter(tensor, requires_grad=False)
    if kind == "buffer":
        return torch.nn.Buffer(tensor)
    return tensor.detach().requires_grad_(kind == "grad" and differentiable)


live_keys = keys_with(st.sampled_from([torch.float32, torch.int8, np.float64(0.5), torch.Size([1, 2])]))
live_leaves = (
    st.builds(slice, live_keys, live_keys, live_keys)
    | st.builds(range, st.integers(-9, 9))
    | st.binary().map(bytearray)
)
live_leaves |= st.sampled_from([torch.device("cuda:1"), torch.strided, np.arange(3), np.datetime64("2024-01-01")])
live_trees = st.recursive(
    live_keys | live_tensors() | live_tensors() | live_leaves, lambda inner: containers(inner, live_keys), max_leaves=25
)


@settings(deadline=None, max_examples=60)
@given(live_trees, st.data())
def test_any_state(tree: Any, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        if data.draw(st.booleans()):
            tie_into_a_cycle(tree, data)
        path = saved(Path(directory), tree)
        check(path, back(path, output=data.draw(st.sampled_from(["x.safetensors", "x"]))))


# ------------------------------------------------------------------------------------------------ training that goes on


def a_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def trained(model: torch.nn.Module, optimizer: Any, scheduler: Any, steps: int) -> None:
    data = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))

    def closure() -> Any:
        optimizer.zero_grad()
        loss = (model(data) - data.sum(1, keepdim=True)).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        loss = optimizer.step(closure)
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            scheduler.step(loss)
        else:
            scheduler.step()


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "Adam, lr a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "AdamW, two groups": lambda p: torch.optim.AdamW([{"params": [next(p)], "lr": 0.1}, {"params": list(p)}], lr=0.01),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=5),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
}
rates = torch.optim.lr_scheduler
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "MultiStepLR": lambda o: rates.MultiStepLR(o, [2, 4, 4, 9]),
    "StepLR": lambda o: rates.StepLR(o, 2),
    "OneCycleLR": lambda o: rates.OneCycleLR(o, 0.1, 20, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda o: rates.CosineAnnealingWarmRestarts(o, 3),
    "ReduceLROnPlateau": lambda o: rates.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: rates.SequentialLR(o, [rates.ConstantLR(o), rates.ExponentialLR(o, 0.9)], [2]),
}
# Each optimizer once, and each scheduler; what saves one as a class of its own needs weights_only=False either way.
TRAININGS = [
    *itertools.product(OPTIMIZERS, ["MultiStepLR"]),
    *itertools.product(["SGD, momentum"], list(SCHEDULERS)[1:]),
]


@pytest.mark.parametrize("output", ["x.safetensors", "x"])
@pytest.mark.parametrize(("optimizer", "scheduler"), TRAININGS)
def test_a_training_goes_on_to_the_same_weights(optimizer: str, scheduler: str, output: str, tmp_path: Path) -> None:
    def parts() -> tuple[Any, Any, Any]:
        model = a_model()
        made = OPTIMIZERS[optimizer](model.parameters())
        return model, made, SCHEDULERS[scheduler](made)

    first = parts()
    trained(*first, steps=5)
    path = saved(tmp_path, [part.state_dict() for part in first])
    again = back(path, *(["--max-shard-size", "300"] if output == "x" else []), output=output)
    check(path, again)
    resumed = parts()
    for part, state in zip(resumed, loaded(again), strict=True):
        part.load_state_dict(state)
    trained(*first, steps=5)
    trained(*resumed, steps=5)
    for before, after in zip(first, resumed, strict=True):
        assert_same(before.state_dict(), after.state_dict())


# ------------------------------------------------------------------------------------------- what is known by name only


class Config:
    def __init__(self) -> None:
        self.lr = 0.1
        self.weight = torch.ones(2)


class Plain(dict[str, Any]):
    pass


def test_objects_of_classes_that_only_hold_data_come_back(tmp_path: Path) -> None:
    """What Python's library, torch and numpy have for values, by a list; with all that is in them."""
    rng = np.random.default_rng(5)
    state = {
        "args": argparse.Namespace(lr=0.1, weight=torch.ones(2), where=pathlib.PurePosixPath("/a/b"), inner=[{}]),
        "space": types.SimpleNamespace(a=(1, 2)),
        "when": [
            datetime.datetime(2020, 1, 2, 3, tzinfo=datetime.timezone(datetime.timedelta(hours=2))),
            datetime.date(2020, 1, 2),
            datetime.time(1, 2, 3),
        ],
        "id": uuid.UUID(int=7),
        "numbers": [decimal.Decimal("1.10"), fractions.Fraction(-1, 3)],
        "chain": collections.ChainMap({"a": 1}, {"b": 2}),
        "user": [collections.UserDict(a=1), collections.UserList([1])],
        "torch": torch.__version__,
        "objects": np.array([1, "a", None], dtype=object),
        "records": np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        "dtype": np.dtype("f4"),
        "types": [int, np.float32, torch.Tensor],
        "spaces": collections.defaultdict(argparse.Namespace, a=argparse.Namespace(b=1)),
    }
    twice = argparse.Namespace(a=1)
    path = saved(tmp_path, {**state, "rng": rng, "twice": [twice, twice]})
    run("pt2safetensors", path)
    run("safetensors2pt", tmp_path / "x.safetensors", tmp_path / "back.pt", "--verify")
    again = loaded(tmp_path / "back.pt")
    for name, value in state.items():
        assert type(again[name]) is type(value), name
        if name not in ("args", "objects", "records"):
            assert again[name] == value, name
    assert_same(vars(state["args"]), vars(again["args"]))
    for name in ("objects", "records"):
        np.testing.assert_array_equal(again[name], state[name], strict=True)
    assert again["twice"][0] is again["twice"][1]
    assert again["rng"].random() == rng.random()


def test_objects_of_other_classes_are_written_or_left_out_only_where_that_was_asked_for(tmp_path: Path) -> None:
    state = {
        "w": torch.ones(3),
        "when": [functools.partial(print, 1), 2],
        "class": Config,
        "config": Config(),
        "plain": Plain(a=torch.ones(1)),
        "counts": collections.defaultdict(Config, a=1, b=torch.ones(2)),
    }
    path = saved(tmp_path, state)
    run("pt2safetensors", path)
    source, output = tmp_path / "x.safetensors", tmp_path / "back.pt"
    refused = ckptconv_here("safetensors2pt", source, output)
    assert refused.code == 3
    for words in ("5 objects", "'config'", "functools.partial", "test_round_trip.Config", "--opaque keep", "--exclude"):
        assert words in refused.err
    assert not output.exists()
    kept = run("safetensors2pt", source, output, "--opaque", "keep", "--verify")
    assert "functools.partial" in kept.err
    again = loaded(output)
    assert again["class"] is Config
    assert_same(vars(state["config"]), vars(again["config"]))
    assert_same(dict(state["plain"]), dict(again["plain"]))
    assert again["counts"].default_factory is Config
    assert again["when"][0].func is print
    expected = {"w": torch.ones(3), "when": [None, 2], "counts": {"a": 1, "b": torch.ones(2)}}
    for spelled in (["--opaque", "drop"], ["--drop-opaque"]):
        done = run("safetensors2pt", source, output, "--verify", *spelled)
        assert "left out" in done.err
        assert_same(expected, loaded(output, weights_only=True))
    report = run("safetensors2pt", source, output, "--opaque", "drop", "--json").json
    assert report["dropped"]["when.0"] == "functools.partial"
    assert set(report["dropped"]) == {"when.0", "class", "config", "plain", "counts"}
    for glob, left in (("when.0", {"when": [None, 2]}), ("when.*", {"when": [None, None]}), ("when*", {})):
        run("safetensors2pt", source, output, *excluding(glob, "c*", "plain*"), "--verify")
        assert_same({"w": torch.ones(3), **left}, loaded(output))
    for opaque in ("keep", "drop"):
        convert(source, output, opaque=opaque)
        assert ("config" in loaded(output)) == (opaque == "keep")
    with pytest.raises(UnsafeError):
        convert(source, output)
    for wrong in (["--opaque", "run"], ["--opaque", "keep", "--drop-opaque"]):
        assert ckptconv_here("safetensors2pt", source, output, *wrong).code == 2


def test_only_objects_that_were_chosen_are_asked_about(tmp_path: Path) -> None:
    counts = collections.defaultdict(Config, a=1, b=torch.ones(2))
    state = {"w": torch.ones(3), "args": argparse.Namespace(lr=0.5), "config": Config(), "counts": counts}
    run("pt2safetensors", saved(tmp_path, state))
    source, output = tmp_path / "x.safetensors", tmp_path / "back.pt"
    args = {"args": state["args"]}
    plain = {"counts": {"b": torch.ones(2)}}
    for options, expected in (
        (["--include", "w"], {}),
        (["--include", "w", "--include", "args"], args),
        (excluding("config", "counts"), args),
        ([*excluding("config", "counts"), "--opaque", "keep"], args),
        (["--include", "w", "--include", "counts.b", "--opaque", "drop"], plain),
    ):
        report = run("safetensors2pt", source, output, "--verify", "--json", *options).json
        assert list(report["dropped"]) == (["counts"] if expected is plain else [])
        assert not any("will run" in warning for warning in report["warnings"])
        again = loaded(output)
        assert set(again) == {"w", *expected}
        assert again.get("args", args["args"]) == args["args"]
        assert_same(again.get("counts", {}), expected.get("counts", {}))
    for options in (["--include", "w", "--include", "counts.b"], excluding("config"), excluding("counts")):
        assert ckptconv_here("safetensors2pt", source, output, *options).code == 3


def test_an_attack_is_not_written_even_where_all_else_is(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(CASES["live_partial.pt"].make(str(tmp_path / "canary")))
    run("pt2safetensors", path, "--inert")
    for opaque in ("keep", "drop"):
        done = ckptconv_here("safetensors2pt", tmp_path / "x.safetensors", tmp_path / "x.pt", "--opaque", opaque)
        assert done.code == (3 if opaque == "keep" else 0)
    assert not (tmp_path / "canary").exists()


def excluding(*globs: str) -> list[str]:
    return [part for glob in globs for part in ("--exclude", glob)]


class Subclass(torch.Tensor):
    pass


def test_a_tensor_of_a_subclass_comes_back_as_a_plain_one_only_where_that_was_asked_for(tmp_path: Path) -> None:
    path = saved(tmp_path, {"s": torch.arange(3.0).as_subclass(Subclass), "w": torch.ones(1)})
    run("pt2safetensors", path)
    refused = ckptconv_here("safetensors2pt", tmp_path / "x.safetensors", tmp_path / "back.pt")
    assert refused.code == 3
    assert "Subclass" in refused.err
    run("safetensors2pt", tmp_path / "x.safetensors", tmp_path / "back.pt", "--opaque", "keep")
    assert type(loaded(tmp_path / "back.pt")["s"]) is Subclass
    done = run("safetensors2pt", tmp_path / "x.safetensors", tmp_path / "back.pt", "--drop-opaque")
    assert "Subclass" in done.err
    assert_same({"s": torch.arange(3.0), "w": torch.ones(1)}, loaded(tmp_path / "back.pt", weights_only=True))


@pytest.fixture
def one_process() -> Iterator[Any]:
    """A world of one process, to make distributed tensors in."""
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield distributed.device_mesh.init_device_mesh("cpu", (1,))
    finally:
        distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("zipped", [True, False])
def test_distributed_tensors_are_refused_with_advice(zipped: bool, one_process: Any, tmp_path: Path) -> None:
    from torch.distributed._shard import sharded_tensor, sharding_spec
    from torch.distributed.tensor import Shard, distribute_tensor

    spread = distribute_tensor(torch.arange(8.0), one_process, [Shard(0)])
    sharded = sharded_tensor.rand(sharding_spec.ChunkShardingSpec(0, ["rank:0/cpu"]), 4, 4)
    for tensor in (spread, torch.nn.Parameter(spread), sharded):
        path = saved(tmp_path, {"w": torch.ones(2), "d": [tensor]}, _use_new_zipfile_serialization=zipped)
        refused = ckptconv_here("pt2safetensors", path)
        assert refused.code == 5
        for words in ("1 tensor", "'d.0'", "dcp2safetensors", "--exclude"):
            assert words in refused.err, refused.err
        assert_same({"w": torch.ones(2), "d": [None]}, loaded(back(path, "--exclude", "d.*")))


def test_a_tensor_without_data_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": torch.ones(1), "m": [torch.empty(3, 4, device="meta")]})
    refused = ckptconv_here("pt2safetensors", path)
    assert refused.code == 5
    assert "'m.0'" in refused.err
    assert "meta" in refused.err
    assert_same({"a": torch.ones(1), "m": [None]}, loaded(back(path, "--exclude", "m.*")))


# ---------------------------------------------------------------------------------------------- safetensors from others


def test_a_plain_file_becomes_a_dict_of_its_tensors(tmp_path: Path) -> None:
    state = {"b": torch.ones(2), "a": torch.zeros(3, dtype=torch.int8), "é.0": torch.tensor(1.5)}
    save_file(state, tmp_path / "x.safetensors", {"format": "pt", "by": "others"})
    run("safetensors2pt", tmp_path / "x.safetensors", tmp_path / "x.bin")
    again = loaded(tmp_path / "x.bin", weights_only=True)
    assert type(again) is dict
    assert_same(load_file(tmp_path / "x.safetensors"), again)


def test_a_sharded_set_of_others_becomes_one_dict(tmp_path: Path) -> None:
    state = {f"layers.{number}.weight": torch.full((50,), float(number)) for number in range(12)}
    (tmp_path / "model").mkdir()
    save_torch_state_dict(state, tmp_path / "model", max_shard_size=900)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    for source in (tmp_path / "model", tmp_path / "model" / "model.safetensors.index.json"):
        run("safetensors2pt", source, tmp_path / "x.pt")
        again = loaded(tmp_path / "x.pt", weights_only=True)
        assert_same(state, {name: again[name] for name in state})
        assert len(again) == len(state)


def test_tied_names_of_others_share_their_memory_again(tmp_path: Path) -> None:
    save_file({"embed": torch.ones(4, 2)}, tmp_path / "x.safetensors", {"format": "pt", "head": "embed"})
    run("safetensors2pt", tmp_path / "x.safetensors", tmp_path / "x.pt")
    again = loaded(tmp_path / "x.pt")
    assert again["head"].untyped_storage().data_ptr() == again["embed"].untyped_storage().data_ptr()


def test_files_in_olmos_map_become_the_nested_dict(tmp_path: Path) -> None:
    tree = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 2)}}, "groups": [{"lr": 0.1}], "n": 3}
    flat = {}
    for path, value in (
        (("state", 0, "step"), tree["state"][0]["step"]),
        (("state", 0, "exp_avg"), tree["state"][0]["exp_avg"]),
        (("groups",), tree["groups"]),
        (("n",), 3),
    ):
        plain = isinstance(value, torch.Tensor)
        name = base64.urlsafe_b64encode(pickle.dumps((path, not plain))).decode()
        flat[name] = value if plain else torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    save_file(flat, tmp_path / "x.safetensors")
    run("safetensors2pt", tmp_path / "x.safetensors", tmp_path / "x.pt")
    again = loaded(tmp_path / "x.pt", weights_only=True)
    assert again["groups"] == [{"lr": 0.1}]
    assert again["n"] == 3
    assert_same({key: tree["state"][0][key] for key in ("exp_avg", "step")}, dict(sorted(again["state"][0].items())))


# ------------------------------------------------------------------------------------------------------- other pt files


@pytest.mark.parametrize("path", sorted((DATA / "torch").glob("*/*.pt")), ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_files_of_old_releases_come_back(path: Path, tmp_path: Path) -> None:
    kind = path.name.split(".")[0]
    run("pt2safetensors", path, tmp_path / "x.safetensors")
    done = ckptconv_here("safetensors2pt", tmp_path / "x.safetensors", tmp_path / "x.pt", "--no-fsync")
    if kind == "module":
        assert done.code == 3
        assert "known by name only" in done.err
        return
    assert done.code == 0, done.err
    if kind in ("scripted", "traced"):
        theirs = torch.jit.load(str(path)).state_dict()
        assert_same(dict(theirs), {name: tensor.detach() for name, tensor in loaded(tmp_path / "x.pt").items()})
        return
    # torch cannot read 8-bit floats from a stream, though it writes them: the archive has the same tensors.
    expected, again = loaded(path.parent / f"{kind}.pt"), loaded(tmp_path / "x.pt")
    for name in ("conjugate", "negative"):
        # Kept as the values they stand for, which are not those of the memory they were views of.
        if name in expected:
            assert torch.equal(expected.pop(name), again.pop(name))
    assert_same(expected, again)


# --------------------------------------------------------------------------------------------------------------- scale


def test_memory_stays_small_in_both_directions(tmp_path: Path) -> None:
    moments = [torch.randn(1000, 8000) for _ in range(4)]
    state = {
        "state": {number: {"step": torch.tensor(3.0), "exp_avg": each} for number, each in enumerate(moments)},
        "shared": [moments[0][:500], moments[1].t()],
        "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "params": list(range(4))}],
    }
    path = saved(tmp_path, state)
    for arguments in (
        ("pt2safetensors", path, tmp_path / "x.safetensors"),
        ("safetensors2pt", tmp_path / "x.safetensors", tmp_path / "y.pt"),
    ):
        done = ckptconv(*arguments, "--json", "--no-fsync")
        assert done.code == 0, done.err
        assert done.json["bytes_written"] > 120e6
        assert done.json["peak_rss_bytes"] < 64 << 20
    assert_same(state, loaded(tmp_path / "y.pt", weights_only=True))


def test_many_tensors_take_little_each(tmp_path: Path) -> None:
    count = 30_000
    path = saved(tmp_path, {f"model.layers.{number}.weight": torch.ones(3) for number in range(count)})
    for arguments in (
        ("pt2safetensors", path, tmp_path / "x.safetensors"),
        ("safetensors2pt", tmp_path / "x.safetensors", tmp_path / "y.pt"),
    ):
        done = ckptconv(*arguments, "--json", "--no-fsync")
        assert done.code == 0, done.err
        assert done.json["peak_rss_bytes"] < (64 << 20) + 2048 * count


# ----------------------------------------------------------------------------------------------- storages by themselves


def of_storage(storage: Any) -> tuple[type, torch.dtype, list[int]]:
    return type(storage), storage.dtype, storage.untyped().tolist()


def memory_of(value: Any) -> int:
    return value.untyped().data_ptr() if isinstance(value, torch.TypedStorage) else value.untyped_storage().data_ptr()


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex128]
)
@pytest.mark.parametrize("zipped", [True, False])
def test_typed_storages_stay_storages_and_share_their_memory(dtype: torch.dtype, zipped: bool, tmp_path: Path) -> None:
    tensor = torch.arange(6).to(dtype)
    state = {
        "s": tensor.storage(),
        "t": tensor[1:3],
        "again": [tensor.storage()],
        "other": tensor.clone().storage(),
        "empty": torch.empty(0, dtype=dtype).storage(),
    }
    path = saved(tmp_path, state, _use_new_zipfile_serialization=zipped)
    original = loaded(path)
    ways = {
        "back": loaded(back(path), weights_only=True),
        "pt": ckptconv_module.load_state_dict(path),
        "safetensors": ckptconv_module.load_state_dict(tmp_path / "x.safetensors"),
        "library": ckptconv_module.unflatten(*ckptconv_module.flatten(state)),
    }
    assert ckptconv_here("verify", path, tmp_path / "x.safetensors").code == 0
    for way, got in ways.items():
        assert list(got) == list(original), way
        for name in ("s", "other", "empty"):
            assert of_storage(got[name]) == of_storage(original[name]), (way, name)
        assert of_storage(got["again"][0]) == of_storage(original["s"]), way
        assert torch.equal(got["t"], original["t"]), way
        assert memory_of(got["s"]) == memory_of(got["again"][0]) != memory_of(got["other"]), way
        assert got["t"].data_ptr() == memory_of(got["s"]) + dtype.itemsize, way


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_untyped_storages_come_back_as_torch_reads_them(tmp_path: Path) -> None:
    eight = torch.arange(4.0).to(torch.float8_e4m3fn)
    path = saved(tmp_path, {"u": torch.ones(3).untyped_storage(), "t": eight, "s": eight.untyped_storage()})
    original, got = loaded(path), loaded(back(path), weights_only=True)
    for name in ("u", "s"):
        assert of_storage(got[name]) == of_storage(original[name]), name
    assert torch.equal(got["t"].view(torch.uint8), original["t"].view(torch.uint8))
    assert memory_of(got["t"]) == memory_of(got["s"]) != memory_of(got["u"])
    ours = ckptconv_module.unflatten(*ckptconv_module.flatten({"u": torch.ones(3).untyped_storage()}))
    assert of_storage(ours["u"]) == of_storage(original["u"])
