"""Objects of torch's C++ code, and the extra state of quantized modules, as plain data.

Sources: `_save_to_state_dict` of the modules in `torch/ao/nn/quantized`; `def_pickle` of the classes in
`aten/src/ATen/native/quantized/cpu/fbgemm_utils.cpp` and `aten/src/ATen/native/RNN.cpp`.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from ckptconv.errors import CorruptError, LimitError
from ckptconv.pickles.children import walk
from ckptconv.pickles.nodes import Global, Opaque
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Inline, LazyTensor, Tagged, same_bytes

MAX_DEPTH = 200
# Characters in all paths together. The paths of a million tensors have some ten million.
_MAX_PATHS = 1 << 27

# Python pickles an object of a C++ class as a call of this, with the state (data, name of the class).
_SCRIPT_OBJECT = Global("torch", "ScriptObject")
_CLASSES = "__torch__.torch.classes.quantized."
_LINEAR, _EMBEDDING = f"{_CLASSES}LinearPackedParamsBase", f"{_CLASSES}EmbeddingPackedParamsBase"
_CONV = tuple(f"{_CLASSES}Conv{dims}dPackedParamsBase" for dims in (2, 3))

# Torch's quantized modules. In TorchScript the name begins with __torch__, and may have a number.
_QUANTIZED = re.compile(r"(?:__torch__\.)?torch(?:\.ao)?\.nn(?:\.intrinsic)?\.quantized\.(?:\w+\.)*(\w+)")
_CONVOLUTION = re.compile(r"Conv(?:Transpose)?[123]d|Conv(?:Add)?ReLU[123]d|ConvAdd2d")
# The state that they save besides parameters and buffers.
_SCALED = ("scale", "zero_point")
_HAVE_SCALES = frozenset(("Linear", "LinearReLU", "LinearLeakyReLU", "LinearTanh", "QFunctional"))
_PACKED = {
    "LinearPackedParams": ("dtype", "_packed_params"),
    "EmbeddingPackedParams": ("dtype", "_packed_weight"),
    "PackedParameter": ("param",),
    **dict.fromkeys(("LSTMCell", "GRUCell", "RNNCell"), ("_packed_weight_ih", "_packed_weight_hh")),
}
# A convolution pickles a tuple of this length. The saved parts are at these indices.
_CONV_STATE = 15
_CONV_SAVED = {"weight": 10, "bias": 11, "scale": 12, "zero_point": 13}


class Paths:
    """Joins names to paths. A few shared names and modules could make more paths than memory can hold."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._room = _MAX_PATHS

    def join(self, prefix: str, name: str) -> str:
        """Return `prefix` + `name`. Raises LimitError if all paths together exceed `_MAX_PATHS` characters."""
        self._room -= len(prefix) + len(name)
        if self._room < 0:
            raise LimitError(
                f"{self._where} contains modules whose paths have more than {_MAX_PATHS} characters in all."
            )
        return prefix + name


def detached(tensor: Any) -> Any:
    """Return a parameter or buffer as a state dict holds it: a plain tensor without gradient."""
    if isinstance(tensor, Tagged):
        return Tagged(tensor.tensor, tensor.facts._replace(kind="tensor", requires_grad=False, attributes=None))
    return tensor


def holding_others(values: Mapping[str, Any], known: Mapping[str, Any]) -> list[str]:
    """Return the names of those `values` that hold tensors that are not among the `known` tensors."""
    taken = {same_bytes(leaf) for value in known.values() for leaf in walk(value) if isinstance(leaf, LazyTensor)}
    taken.discard(None)  # empty tensors are never the same
    # Very many attributes may share a value: search it once, and report its tensors under the first attribute.
    seen: set[int] = set()
    names = []
    for name, value in values.items():
        others = False
        for leaf in walk(value, seen):
            if isinstance(leaf, LazyTensor):
                seen.discard(id(leaf))  # report it under each attribute that is this tensor
                others |= same_bytes(leaf) not in taken
        if others:
            names.append(name)
    return names


# ------------------------------------------------------------------------------------------------ quantized modules


def scales_of(cls: Any, state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the scales and zero points that a quantized module of class `cls` saves, by name, as torch's tensors."""
    if _quantized(cls) in _HAVE_SCALES:
        yield from ((name, _scalar(state[name])) for name in _SCALED if name in state)


def packed_in(cls: Any, state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the packed state that a quantized module of Python saves, by name, with unpacked weights."""
    for name in _PACKED.get(_quantized(cls), ()):
        if name in state:
            yield name, _unpacked_by_python(state[name])


def convolution(cls: Any, state: Any) -> dict[str, Any] | None:
    """Return the saved parts of a quantized convolution, by name; None if `state` is not that of a convolution."""
    if type(state) is not tuple or len(state) != _CONV_STATE or not _CONVOLUTION.fullmatch(_quantized(cls)):
        return None
    return {name: _scalar(state[at]) if name in _SCALED else state[at] for name, at in _CONV_SAVED.items()}


def _quantized(cls: Any) -> str:
    """Return the bare name of a class of quantized modules; "" for any other."""
    named = _QUANTIZED.fullmatch(str(cls)) if type(cls) is Global else None
    return named[1] if named else ""


def _scalar(value: Any) -> Any:
    """Return a number as the tensor that torch.tensor makes; other values unchanged."""
    if type(value) is float:
        try:
            rounded = struct.pack("<f", value)
        except OverflowError:
            rounded = struct.pack("<f", math.copysign(math.inf, value))
        return Inline(rounded, DTYPES["float32"], ())
    if type(value) is int and -1 << 63 <= value < 1 << 63:
        return Inline(struct.pack("<q", value), DTYPES["int64"], ())
    return value


def _unpacked_by_python(value: Any) -> Any:
    cls, data = _native(value)
    if cls == _LINEAR and type(data) is tuple:
        return data
    if cls == _EMBEDDING and type(data) is tuple and len(data) == 4 and type(data[1]) is list and len(data[1]) == 1:
        return data[1][0]
    return value


# ---------------------------------------------------------------------------------------------------------- objects


def _native(value: Any) -> tuple[str, Any]:
    """Return an object's class and state; ("", None) for a value that is no object, or has no single state."""
    if type(value) is not Opaque or type(value.cls) is not Global or len(value.state) != 1:
        return "", None
    state = value.state[0]
    if value.cls == _SCRIPT_OBJECT and type(state) is tuple and len(state) == 2 and type(state[1]) is str:
        return state[1], state[0]
    return str(value.cls), state


class Unpacked:
    """Turns objects of TorchScript into plain data: their state, weights under `weight` and `bias`."""

    def __init__(self, where: str) -> None:
        self._where = where
        # By id: a container or object, kept so that no id is reused, and its plain form; None until that is made.
        self._made: dict[int, tuple[Any, Any]] = {}

    def plain(self, value: Any, path: str, depth: int = 0) -> Any:
        """Return `value` with all objects as plain data. Raises CorruptError if one contains itself."""
        kind = type(value)
        if kind not in (Opaque, dict, list, tuple):
            return value
        if id(value) in self._made:
            plain_value = self._made[id(value)][1]
            if plain_value is None:
                raise CorruptError(f"{self._where} has an attribute, {path[:200]}, that contains itself.")
            return plain_value
        if depth > MAX_DEPTH:
            raise LimitError(f"{self._where}: its {path[:200]} is nested more than {MAX_DEPTH} levels deep.")
        self._made[id(value)] = value, None
        if kind is Opaque:
            cls, state = _native(value)
            plain_value = self.plain(_named(cls, state), path, depth + 1) if cls else value
        elif kind is dict:
            plain_value = {key: self.plain(item, path, depth + 1) for key, item in value.items()}
        else:
            plain_value = kind(self.plain(item, path, depth + 1) for item in value)
        self._made[id(value)] = value, plain_value
        return plain_value


def _named(cls: str, state: Any) -> Any:
    """Return the state of an object of C++, with names for its parts if it is a packed weight."""
    if cls == _LINEAR and type(state) is tuple and len(state) == 2:
        return {"weight": state[0], "bias": state[1]}
    # The state is the version, settings, and weight and bias. Later versions and other classes keep their numbers.
    if cls in _CONV and type(state) is tuple and len(state) == 3 and state[0] == "2":
        required, optional = state[1:]
        if type(required) is list and len(required) == 2 and type(optional) is list and len(optional) == 1:
            return {"weight": required[1], "bias": optional[0], "settings": required[0]}
    if cls == _EMBEDDING and type(state) is tuple and len(state) == 4 and type(state[1]) is list and len(state[1]) == 1:
        return {"weight": state[1][0]}
    return state
