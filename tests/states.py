"""State dicts of every kind that has to survive a round trip."""

from __future__ import annotations

import array
import math
import numbers
import random
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

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


def tensors(count: int) -> list[torch.Tensor]:
    return [torch.full((2, 3), float(number)) for number in range(count)]


def of(*keys: Any) -> dict[Any, Any]:
    """A tensor under each key, no two the same."""
    return {key: torch.full((2,), float(number)) for number, key in enumerate(keys)}


def with_one(value: Any, make: Callable[[Any], Any]) -> Any:
    """What `make` makes of one object."""
    return make(value)


def with_objects() -> dict[str, Any]:
    """A state of tensors and of four objects of classes that are not known to hold only data."""
    return {
        "w": torch.ones(3),
        "when": [array.array("d", [1.5]), 2],
        "class": numbers.Number,
        "config": random.Random(),
        "counts": defaultdict(random.Random, a=1, b=torch.ones(2)),
    }


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


def _base(dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(64) % 100).to(dtype)


POOL = {dtype: _base(dtype) for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex128, torch.bool)}


POOL[torch.float8_e4m3fn] = _base(torch.float32).to(torch.float8_e4m3fn)
