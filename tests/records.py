"""A reader of structure records made from docs/internals/structure.md alone: the state of a record and its tensors, as
torch has it. What it does not know fails."""

from __future__ import annotations

import base64
import builtins
import collections
import json
import math
import struct
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ckptconv.pickles.nodes import Composite, Global, Opaque

FACTORIES = {"collections.OrderedDict": collections.OrderedDict, "collections.Counter": collections.Counter}
# Nodes that are made before their contents, so that a circle closes; with the fields before these.
FILLED: dict[str, tuple[Callable[[list[Any]], Any], int]] = {
    "dict": (lambda _: {}, 0),
    "odict": (lambda _: collections.OrderedDict(), 1),
    "counter": (lambda _: collections.Counter(), 1),
    "defaultdict": (lambda fields: collections.defaultdict(factory(fields[0])), 1),
    "list": (lambda _: [], 0),
    "set": (lambda _: set(), 0),
    "deque": (lambda fields: collections.deque(maxlen=fields[0]), 1),
    "opaque": (lambda _: Opaque(None), 0),
}
COMPRESSED = {
    "sparse_csr": ("crow_indices", "col_indices"),
    "sparse_bsr": ("crow_indices", "col_indices"),
    "sparse_csc": ("ccol_indices", "row_indices"),
    "sparse_bsc": ("ccol_indices", "row_indices"),
}


def factory(name: str | None) -> Any:
    return None if name is None else FACTORIES.get(name, getattr(builtins, name, None))


def number(text: str) -> float:
    value: float = struct.unpack(">d", bytes.fromhex(text[4:]))[0] if text.startswith("nan:") else float(text)
    return value


def binary(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def constant(kind: str, name: str) -> Any:
    return torch.device(name) if kind == "device" else getattr(torch, name)


MADE: dict[str, Callable[..., Any]] = {
    "float": number,
    "int": lambda text: int(text, 16),
    "str": lambda text: binary(text).decode("utf-8", "surrogatepass"),
    "bytes": binary,
    "complex": lambda real, imaginary: complex(number(real), number(imaginary)),
    "ellipsis": lambda: ...,
    "bytearray": bytearray,
    "tuple": lambda *values: values,
    "frozenset": lambda *values: frozenset(values),
    "size": lambda *values: torch.Size(values),
    "range": range,
    "slice": slice,
    "torch": constant,
    "global": Global,
    "numpy.scalar": lambda dtype, data: np.frombuffer(data or b"\0", dtype)[0] if data else np.zeros(1, dtype)[0],
    "numpy.array": lambda dtype, shape, order, data: np.ndarray(shape, dtype, bytearray(data), order=order),
    "composite": lambda kind, *parts: composite(kind, dict(zip(parts[::2], parts[1::2], strict=True))),
}


def composite(kind: str, parts: dict[str, Any]) -> Any:
    """The tensor that these parts make up; a node for one of a kind that torch does not have."""
    known = dict(parts)
    grad, attributes, cls = (known.pop(name, None) for name in ("requires_grad", "attributes", "class"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "meta":
            made = torch.empty_strided(known["shape"], known["strides"], dtype=known["dtype"], device="meta")
        elif kind == "sparse_coo":
            made = torch.sparse_coo_tensor(
                known["indices"], known["values"], known["shape"], is_coalesced=known.get("is_coalesced")
            )
        elif kind in COMPRESSED:
            indices = (known[name] for name in COMPRESSED[kind])
            made = torch.sparse_compressed_tensor(
                *indices, known["values"], known["shape"], layout=getattr(torch, kind)
            )
        elif kind == "nested":
            order = ("values", "sizes", "strides", "storage_offsets")
            made = torch._nested_view_from_buffer(*(known[name] for name in order))
        elif kind == "quantized" and "scale" in known:
            make: Any = torch._make_per_tensor_quantized_tensor  # type: ignore[attr-defined]
            made = make(known["values"], known["scale"], known["zero_point"])
        elif kind == "quantized" and "shape" not in known:
            make = torch._make_per_channel_quantized_tensor  # type: ignore[attr-defined]
            made = make(known["values"], known["scales"], known["zero_points"], known["axis"])
        else:
            return Composite(kind, parts)
    if cls == "parameter":
        made = torch.nn.Parameter(made, requires_grad=bool(grad))
    elif grad:
        made.requires_grad_()
    vars(made).update(attributes or {})
    return made


class _Reader:
    def __init__(self, flat: Mapping[str, Any], record: str) -> None:
        self.flat, self.record = flat, json.loads(record)
        self.table: dict[int, Any] = {}
        self.objects: dict[int, Any] = {}
        # Nodes to be filled, objects with their attributes, and views of storages.
        self.empty: list[tuple[Any, list[Any], str | None]] = []
        self.attributed: list[tuple[Any, Any]] = []
        self.views: dict[Any, list[tuple[Any, int, Any]]] = {}

    def tree(self) -> Any:
        tree = self.value(self.record["root"], None, None, top=True)
        while self.empty:
            self.fill(*self.empty.pop())
        for owner, state in self.attributed:
            for part in state if isinstance(state, tuple) else (state,):
                vars(owner).update(part or {})
        for views in self.views.values():
            self.share(views)
        return tree

    def value(self, node: Any, prefix: str | None, key: Any = None, top: bool = False) -> Any:
        if isinstance(node, dict):
            if "dropped" in node:
                return None
            return self.tensor(node, None if prefix is None or key is None else f"{prefix}{key}")
        if not isinstance(node, list):
            return node
        tag, *rest = node
        if tag == "@":
            (index,) = rest
            if index not in self.table:
                made = self.value(self.record["nodes"][index], None, top=True)
                self.table[index] = made
            return self.table[index]
        path = f"{prefix}{key}"
        inner = "" if top else None if prefix is None or key is None or len(path) >= 240 else f"{path}."
        if tag in FILLED:
            make, fields = FILLED[tag]
            made = make(rest[:fields])
            self.empty.append((made, node, inner))
            return made
        # A tuple's elements are named by number; others have no names of their own.
        keys: Any = range(len(rest)) if tag == "tuple" else [None] * len(rest)
        return MADE[tag](*(self.value(child, inner, at) for at, child in zip(keys, rest, strict=True)))

    def fill(self, made: Any, node: list[Any], prefix: str | None) -> None:
        tag, *rest = node
        rest = rest[FILLED[tag][1] :]
        if tag in ("odict", "counter") and node[1] is not None:
            self.attributed.append((made, self.value(node[1], None)))
        if isinstance(made, dict):
            for key, value in zip(rest[::2], rest[1::2], strict=True):
                name = self.value(key, None)
                plain = name if tag in ("dict", "odict") and type(name) in (str, int) else None
                long = isinstance(plain, str) and len(plain) > 240 and bool(prefix)
                made[name] = self.value(value, None if long else prefix, plain)
        elif tag == "opaque":
            for name, child in zip(("cls", "args", "call", "state", "kwargs", "appended", "items"), rest, strict=False):
                setattr(made, name, self.value(child, None))
        elif tag == "set":
            made.update(self.value(child, None) for child in rest)
        else:
            keys: Any = range(len(rest)) if tag == "list" else [None] * len(rest)
            made.extend(self.value(child, prefix, at) for at, child in zip(keys, rest, strict=True))

    def tensor(self, leaf: dict[str, Any], implied: str | None) -> Any:
        if leaf.get("is") in self.objects:
            return self.objects[leaf["is"]]
        data = self.flat[leaf.get("name", implied)]
        if "view" in leaf and leaf["view"].startswith("complex"):
            # Pairs in a file may lie where torch cannot copy them.
            data = torch.view_as_complex(data.clone())
        elif leaf.get("view", "").startswith("bits"):
            data = data.view(getattr(torch, leaf["view"]))
        if "strides" in leaf:
            data = torch.empty_strided(data.shape, leaf["strides"], dtype=data.dtype).copy_(data)
        kind = self.value(leaf.get("kind", "tensor"), None)
        grad = leaf.get("requires_grad", kind == "parameter")
        made = data.detach()
        if kind == "parameter":
            made = torch.nn.Parameter(made, requires_grad=grad)
        elif kind == "buffer":
            made = torch.nn.Buffer(made)
        elif grad:
            made.requires_grad_()
        if "storage" in leaf:
            at, offset, *strides = leaf["storage"]
            before = leaf.get("dtype", self.record["storages"][at][1])
            place = strides[0] if strides else torch.empty(data.shape, device="meta").stride()
            self.views.setdefault((at, before, data.dtype), []).append((made, offset, place))
        if kind == "storage":
            made = made.untyped_storage() if made.dtype == torch.uint8 else made.storage()
        if "is" in leaf:
            self.objects[leaf["is"]] = made
        if "attributes" in leaf:
            self.attributed.append((made, self.value(["@", leaf["attributes"]], None)))
        return made

    @staticmethod
    def share(views: list[tuple[Any, int, Any]]) -> None:
        """Make tensors views of one memory."""
        ends = [
            offset + 1 + sum((extent - 1) * stride for extent, stride in zip(tensor.shape, strides, strict=True))
            for tensor, offset, strides in views
        ]
        line = torch.zeros(max(ends), dtype=views[0][0].dtype)
        places = torch.arange(len(line))
        for tensor, offset, strides in views:
            if math.prod(tensor.shape):
                line[places.as_strided(tensor.shape, strides, offset).reshape(-1)] = tensor.detach().reshape(-1)
        for tensor, offset, strides in views:
            if math.prod(tensor.shape):
                tensor.data = line.as_strided(tensor.shape, strides, offset)


def read_by_the_book(flat: Mapping[str, Any], record: str | None) -> Any:
    """The state that `record` describes, with its tensors."""
    return dict(flat) if record is None else _Reader(flat, record).tree()


def record(root: Any, **more: Any) -> str:
    """The text of a record."""
    return json.dumps({"version": 1, "root": root, **more})


# Nodes with names that torch and numpy do not have: three constants, two scalars, and a composite.
UNKNOWN = [
    ["torch", "dtype", "_dynamo"],
    ["torch", "device", "antigravity"],
    ["torch", "layout", "compile"],
    ["numpy.scalar", "antigravity.x", ["bytes", ""]],
    ["numpy.scalar", "O", ["bytes", "AAAAAAAAAAA="]],
    ["composite", "antigravity", "f", 1],
]
# Texts that are no record, or none that fits a tensor "t" of shape (2, 3).
MALFORMED = [
    "",
    "null",
    "[]",
    "{}",
    '{"version": 1}',
    '{"version": "1", "root": null}',
    '{"version": true, "root": null}',
    '{"version": 1, "root": NaN}',
    '{"version": 1, "root": 1.5}',
    '{"version": 1, "root": null, "nodes": {}}',
    '{"version": 1, "root": null, "storages": [[1]]}',
    '{"version": 1, "root": null',
    '{"version": 1, "root": ' + "9" * 5000 + "}",
    '{"version": 1, "root": ' + "[" * 200_000 + "]" * 200_000 + "}",
    record([]),
    record([1]),
    record([["dict"]]),
    record(["nonsense"]),
    record(["os.system", "echo"]),
    record(["dict", "a"]),
    record(["dict", "a", 1, "a", 2]),
    record(["dict", 1, 1, True, 2]),
    record(["dict", ["list"], 1]),
    record(["set", 1, 1]),
    record(["set", ["dict"]]),
    record(["frozenset", 1, 1]),
    record(["float", 1]),
    record(["float", "1_0"]),
    record(["float", " 1"]),
    record(["float", "nan"]),
    record(["float", "nan:0000000000000000"]),
    record(["float"]),
    record(["float", "1", "2"]),
    record(["int", "12"]),
    record(["int", 12]),
    record(["str", "not base64!"]),
    record(["str", "/w=="]),
    record(["bytes", None]),
    record(["complex", "1"]),
    record(["range", 1, 2, 0]),
    record(["range", 1, 2]),
    record(["slice", 1]),
    record(["size", "a"]),
    record(["deque", -1]),
    record(["deque", 1, 1, 2]),
    record(["deque", "a"]),
    record(["deque", 2**70]),
    record(["defaultdict", "eval"]),
    record(["defaultdict", ["global", "os", "system"]]),
    record(["odict", 5]),
    record(["odict", ["dict", "items", 1]]),
    record(["odict", ["dict", "__of_our_own", 1]]),
    record(["counter", ["dict", "__of_our_own", 1]]),
    record(["odict", ["dict", 1, 1]]),
    record(["counter", ["dict", "update", 1]]),
    record(["global", "os"]),
    record(["global", "os", 1]),
    record(["torch", "dtype"]),
    record(["numpy.scalar", "<f4", "x"]),
    record(["numpy.array", "<f4", ["list"], "C", ["bytes", ""]]),
    record(["numpy.array", "<f4", ["tuple", -1], "C", ["bytes", ""]]),
    record(["opaque"]),
    record(["opaque", ["global", "m", "C"]]),
    record(["opaque", 1, 2]),
    record(["opaque", ["global", "m", "C"], ["tuple"], "call"]),
    record(["opaque", ["global", "m", "C"], ["tuple"], "reduce", 1]),
    record(["opaque", ["global", "m", "C"], ["tuple"], "reduce", ["list"], None, ["list"], ["list", 1]]),
    record(["opaque", ["global", "m", "C"], ["tuple"], "reduce", ["list"], ["dict", 1, 1]]),
    record(["@", 0], nodes=[["opaque", ["@", 0], ["tuple"]]]),
    record(["composite"]),
    record(["composite", 1]),
    record(["composite", "x", 1, 2]),
    record(["composite", "x", "a"]),
    record(["@", 0]),
    record(["@", -1], nodes=[1]),
    record(["@", "0"], nodes=[1]),
    record(["@", True], nodes=[1, 2]),
    record(["@"], nodes=[1]),
    record(["@", 0], nodes=[["@", 0]]),
    record(["@", 0], nodes=[["tuple", ["@", 0]]]),
    record(["@", 0], nodes=[["frozenset", ["tuple", ["@", 0]]]]),
    record({}),
    record({"name": 1}),
    record({"name": ["t"]}),
    record({"name": "missing"}),
    record({"name": "t", "unknown": 1}),
    record({"name": "t", "kind": 1}),
    record({"name": "t", "kind": "storage"}),
    record({"name": "t", "kind": ["list"]}),
    record({"name": "t", "requires_grad": 1}),
    record({"name": "t", "is": "x"}),
    record({"name": "t", "attributes": 0}),
    record({"name": "t", "attributes": ["dict"]}),
    record({"name": "t", "storage": 0}),
    record({"name": "t", "storage": [0, 0]}),
    record({"name": "t", "storage": [0, 0]}, storages=[[4, "float32"]]),
    record({"name": "t", "storage": [0, 1]}, storages=[[24, "float32"]]),
    record({"name": "t", "storage": [0, 0, [3]]}, storages=[[24, "float32"]]),
    record({"name": "t", "storage": [0, 0, [-3, 1]]}, storages=[[24, "float32"]]),
    record({"name": "t", "storage": [0, 0, [2**60, 1]]}, storages=[[24, "float32"]]),
    record({"name": "t", "strides": [1]}),
    record({"name": "t", "strides": [2**40, 1]}),
    record({"name": "t", "strides": [1.5, 1]}),
]
