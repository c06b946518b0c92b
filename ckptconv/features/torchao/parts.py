"""The metadata with which torchao makes its quantized tensors from the parts in safetensors files. Pure.

Source: torchao/prototype/safetensors/{safetensors_support,safetensors_utils}.py of torchao 0.18. The metadata lists all
tensors, as JSON, in `tensor_names`, and has an entry for each: its class, as `_type`, and unless that is "Tensor", its
attributes in `_data`, and the names of its parts. torchao's loader accepts only names with a dot, between a module and
a tensor in it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckptconv.pickles.nodes import Composite, Global, Opaque, Size, TorchConstant
from ckptconv.storage import strict_json
from ckptconv.structure.parted import PartedTensor, Parting, prefix_of
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import LazyTensor

_OF, _NAMES, _PLAIN = "torchao.", "tensor_names", "Tensor"
_ORDINARY = json.dumps({"_type": _PLAIN})
_MX, _NVFP4 = "torchao.prototype.mx_formats.mx_tensor", "torchao.prototype.mx_formats.nvfp4_tensor"
_QUANTIZATION, _WORKFLOWS = "torchao.quantization", "torchao.quantization.quantize_.workflows"
# The classes: their module, and the names of their attributes. `dtype` and `shape` are those of the tensor itself.
_CLASSES: dict[str, tuple[str, tuple[str, ...]]] = {
    "Float8Tensor": (
        _QUANTIZATION,
        ("block_size", "mm_config", "act_quant_kwargs", "kernel_preference", "dtype"),
    ),
    "Int8Tensor": (_QUANTIZATION, ("act_quant_kwargs", "reduce_range", "block_size", "dtype")),
    "Int4Tensor": (_QUANTIZATION, ("activation_dtype", "block_size", "shape")),
    "Int4TilePackedTo4dTensor": (_QUANTIZATION, ("block_size", "shape")),
    "Int4PlainInt32Tensor": (_QUANTIZATION, ("block_size", "shape")),
    "IntxUnpackedToInt8Tensor": (
        _QUANTIZATION,
        ("target_dtype", "block_size", "dtype", "activation_quantization"),
    ),
    "MXTensor": (
        _MX,
        ("elem_dtype", "block_size", "orig_dtype", "kernel_preference", "act_quant_kwargs", "is_swizzled_scales"),
    ),
    "NVFP4Tensor": (
        _NVFP4,
        ("is_swizzled_scales", "use_triton_kernel", "act_quant_kwargs", "block_size", "orig_dtype"),
    ),
}
_OF_THE_TENSOR = frozenset({"dtype", "shape"})
# The names that their parts can have.
_PARTS = frozenset({
    "qdata", "scale", "zero_point", "scale_and_zero", "act_pre_scale", "act_quant_scale", "act_quant_zero_point",
    "per_tensor_scale", "act_per_tensor_scale",
})  # fmt: skip
# Classes of attributes: dataclasses, and those with their values by name or in order.
_DATACLASSES = {
    "QuantizeTensorToFloat8Kwargs": f"{_WORKFLOWS}.float8.float8_tensor",
    "QuantizeTensorToInt8Kwargs": f"{_WORKFLOWS}.int8.int8_tensor",
    "QuantizeTensorToMXKwargs": _MX,
    "QuantizeTensorToNVFP4Kwargs": _NVFP4,
    "PerRow": "torchao.quantization.granularity",
    "PerTensor": "torchao.quantization.granularity",
}
_ENUMS: dict[str, tuple[str, dict[str, Any]]] = {
    "KernelPreference": (
        "torchao.quantization.quantize_.common.kernel_preference",
        {name.upper(): name for name in ("auto", "torch", "mslk", "fbgemm", "emulated", "triton")},
    ),
    "MappingType": (
        "torchao.quantization.quant_primitives",
        {"SYMMETRIC": 1, "SYMMETRIC_NO_CLIPPING_ERR": 2, "ASYMMETRIC": 3},
    ),
    "ScaleCalculationMode": (
        "torchao.prototype.mx_formats.config",
        {name.upper(): name for name in ("floor", "rceil", "ceil", "even")},
    ),
}
_TUPLES = {"Float8MMConfig": ("torchao.float8.inference", ("emulate", "use_fast_accum", "pad_inner_dim"))}
_DTYPE = "torch.dtype"
_WORD = re.compile(r"[a-z][a-z0-9_]{0,60}")
# The deepest attribute, its most values (a few shared lists could multiply them), and the most characters of a text. A
# real attribute has three levels and some twenty values.
_DEEPEST, _MOST, _LONGEST = 16, 256, 100
_INTEGERS = range(-(1 << 63), 1 << 63)


class _UnknownError(Exception):
    """A value has no known class."""


def is_stored_in_parts(cls: str) -> bool:
    """Return whether tensors of the class with this full name are stored under torchao's names.

    >>> is_stored_in_parts("torchao.quantization.Int8Tensor"), is_stored_in_parts("torch.nn.Parameter")
    (True, False)
    """
    return cls.startswith(_OF) and cls.rpartition(".")[2] in _CLASSES


# ---------------------------------------------------------------------------------------------------------- writing


def described(kind: str, of_it: Mapping[str, Any]) -> PartedTensor | None:
    """Return torchao's metadata for a tensor: a `Composite` of this kind, with the parts `of_it`. Return None if it has
    a part that the metadata cannot express."""
    cls, attributes = kind.rpartition(".")[2], of_it.get("attributes")
    if type(attributes) is not dict:
        return None
    parts = tuple(name for name, value in attributes.items() if isinstance(value, LazyTensor))
    if not _PARTS.issuperset(parts) or not parts:
        return None
    known = {**attributes, **{name: of_it.get(name) for name in _OF_THE_TENSOR}}
    try:
        room = iter(range(_MOST))
        data = {name: _encoded(known[name], room) for name in _CLASSES[cls][1] if name in known}
    except _UnknownError:
        return None
    return PartedTensor(json.dumps({"_type": cls, "_data": data, "_tensor_data_names": list(parts)}), parts, _OF)


def metadata_of(known: Mapping[str, PartedTensor], names: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata of a file with the tensors `names` {old: new}. The `known` ones, by old name, are quantized.
    Return {} if none of them is there with all its parts, under names that belong together."""
    entries: dict[str, str] = {}
    parts: set[str] = set()
    for name, parted_tensor in known.items():
        prefix = prefix_of(name)
        stored = {part: names.get(prefix + part, "") for part in parted_tensor.parts}
        begins = {new.removesuffix(part) if new.endswith(part) else "" for part, new in stored.items()}
        new = _name_of(begins.pop()) if len(begins) == 1 else ""
        if new:
            entries[new] = parted_tensor.text
            parts.update(stored.values())
    if not entries:
        return {}
    plain = {new: _ORDINARY for new in names.values() if new not in parts and "." in new and new not in entries}
    every = {**entries, **plain}
    return {**every, _NAMES: json.dumps(list(every), ensure_ascii=False)}


def _name_of(prefix: str) -> str:
    """Return the name whose parts begin with `prefix`; "" if there is none, or torchao cannot load it."""
    module, dot, last = prefix.rpartition(".")
    named = dot and last.startswith("_") and last.endswith("_") and len(last) > 2
    return f"{module}.{last[1:-1]}" if named else ""


def _encoded(value: Any, room: Iterator[int], depth: int = 0) -> Any:
    """Return an attribute in torchao's JSON; take one from `room` for each value in it."""
    if depth > _DEEPEST or next(room, None) is None:
        raise _UnknownError
    kind = type(value)
    if value is None or kind is bool or (kind is float and math.isfinite(value)):
        return value
    if (kind is int and value in _INTEGERS) or (kind is str and len(value) <= _LONGEST):
        return value
    if kind in (list, tuple, Size):
        return [_encoded(item, room, depth + 1) for item in value]
    if kind is TorchConstant and value.kind == "dtype":
        return {"_type": _DTYPE, "_data": value.name}
    if kind is not Opaque or value.kwargs or value.appended or value.items or type(value.args) is not tuple:
        raise _UnknownError
    cls, data = _object(value)
    if isinstance(data, dict):
        data = {name: _encoded(item, room, depth + 1) for name, item in data.items()}
    return {"_type": cls, "_data": data}


def _object(value: Opaque) -> tuple[str, Any]:
    """Return the bare name of an object's class, and the name of an enum's member, or its values by name."""
    cls, args = value.cls, value.args
    if type(cls) is Global and cls.name == "getattr" and len(args) == 2 and type(args[0]) is Global:
        # Some releases of Python pickle a member of an enum by its name.
        if _text(args[1]) in _ENUMS.get(args[0].name, ("", {}))[1] and args[0].module.startswith(_OF):
            return args[0].name, args[1]
        raise _UnknownError
    name = cls.name if type(cls) is Global and cls.module.startswith(_OF) else ""
    if name in _ENUMS and not value.state:
        members = [member for member, value_of_member in _ENUMS[name][1].items() if (value_of_member,) == args]
        if members:
            return name, members[0]
    if name in _TUPLES and len(args) == len(_TUPLES[name][1]) and not value.state:
        return name, dict(zip(_TUPLES[name][1], args, strict=True))
    if name in _DATACLASSES and not args and len(value.state) <= 1:
        state = value.state[0] if value.state else {}
        if type(state) is dict and all(type(key) is str and _WORD.fullmatch(key) for key in state):
            return name, state
    raise _UnknownError


# ---------------------------------------------------------------------------------------------------------- reading


def read(metadata: Mapping[str, str], names: Iterable[str]) -> dict[str, PartedTensor]:
    """Return the quantized tensors, by name, that `metadata` describes in a file with tensors `names`; {} if none."""
    listed, parted_tensors = _listed(metadata), dict[str, PartedTensor]()
    stored_names = set(names if listed else ())
    for name in listed:
        entry = _entry(metadata.get(name, ""))
        parts = entry.get("_tensor_data_names")
        if _text(entry.get("_type")) not in _CLASSES or type(parts) is not list or not parts:
            continue
        if _PARTS.issuperset(map(_text, parts)) and stored_names.issuperset(prefix_of(name) + part for part in parts):
            parted_tensors[name] = PartedTensor(metadata[name], tuple(parts), _OF)
    return parted_tensors


def without(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata without torchao's entries."""
    listed = set(_listed(metadata))
    listed_entries = {name for name in listed if "_type" in _entry(metadata.get(name, ""))}
    return {key: text for key, text in metadata.items() if key not in listed_entries and not (key == _NAMES and listed)}


def assembled(flat: Mapping[str, Any], metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the state dict whose tensors torchao stored as `flat`. Quantized ones are the nodes that a pickle of them
    would have. A tensor with an attribute of an unknown class remains in parts."""
    composites: dict[str, Any] = {}
    taken: set[str] = set()
    for name, parted_tensor in read(metadata, flat).items():
        parts = {part: flat[prefix_of(name) + part] for part in parted_tensor.parts}
        try:
            composites[name] = _composite(_entry(parted_tensor.text), parts)
        except _UnknownError:
            continue
        taken.update(prefix_of(name) + part for part in parts)
    if not composites:
        return dict(flat)
    order = dict.fromkeys([name for name in _listed(metadata) if name in composites or name in flat])
    every = {**composites, **{name: tensor for name, tensor in flat.items() if name not in taken}}
    return {name: every[name] for name in (*order, *(name for name in every if name not in order))}


def _composite(entry: Mapping[str, Any], parts: Mapping[str, LazyTensor]) -> Composite:
    cls, data = entry["_type"], entry.get("_data")
    module, attributes = _CLASSES[cls]
    if not isinstance(data, dict) or not set(data) <= {*attributes, *_PARTS} or "qdata" not in parts:
        raise _UnknownError
    values = {name: _decoded(value) for name, value in data.items()}
    shape, dtype = parts["qdata"].shape, values.get("dtype", values.get("orig_dtype"))
    if "shape" in values:
        shape = _shape(values["shape"])
    elif cls == "NVFP4Tensor" or values.get("elem_dtype") == TorchConstant("dtype", "float4_e2m1fn_x2"):
        shape = (*shape[:-1], 2 * shape[-1]) if shape else shape  # two values in a byte
    if cls == "Int4TilePackedTo4dTensor":
        dtype = TorchConstant("dtype", "bfloat16")
    elif cls.startswith("Int4"):
        dtype = TorchConstant("dtype", parts["scale"].dtype.name) if "scale" in parts else None
    if type(dtype) is not TorchConstant or dtype.name not in DTYPES:
        raise _UnknownError
    strides = tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
    attributes_left = {name: value for name, value in values.items() if name not in _OF_THE_TENSOR}
    return Composite(
        f"{module}.{cls}",
        {
            "dtype": dtype,
            "shape": Size(shape),
            "strides": strides,
            "storage_offset": 0,
            "layout": TorchConstant("layout", "strided"),
            "device": TorchConstant("device", "cpu"),
            "requires_grad": False,
            "attributes": {**parts, **attributes_left},
        },
    )


def _shape(value: Any) -> tuple[int, ...]:
    if type(value) is not list or len(value) > 8 or any(type(n) is not int or not 0 <= n < 1 << 40 for n in value):
        raise _UnknownError
    if math.prod(value) >= 1 << 60:
        raise _UnknownError
    return tuple(value)


def _decoded(value: Any, depth: int = 0) -> Any:
    """Return an attribute in the form of a pickle."""
    if depth > _DEEPEST:
        raise _UnknownError
    if isinstance(value, list):
        return [_decoded(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    cls, data = _text(value.get("_type")), value.get("_data")
    if cls == _DTYPE and type(data) is str and _WORD.fullmatch(data):
        return TorchConstant("dtype", data)
    if cls in _ENUMS and type(data) is str and data in _ENUMS[cls][1]:
        return Opaque(Global(_ENUMS[cls][0], cls), (_ENUMS[cls][1][data],))
    if isinstance(data, dict) and cls in _TUPLES and set(data) == set(_TUPLES[cls][1]):
        module, fields = _TUPLES[cls]
        return Opaque(Global(module, cls), tuple(_decoded(data[name], depth + 1) for name in fields), call="newobj")
    if isinstance(data, dict) and cls in _DATACLASSES and all(map(_WORD.fullmatch, data)):
        state = {name: _decoded(item, depth + 1) for name, item in data.items()}
        return Opaque(Global(_DATACLASSES[cls], cls), (), call="newobj", state=[state] if state else [])
    raise _UnknownError


def _listed(metadata: Mapping[str, str]) -> list[str]:
    """Return the names of all tensors; [] if this is not torchao's metadata."""
    listed = _parsed(metadata.get(_NAMES, ""))
    return listed if type(listed) is list and all(map(_text, listed)) else []


def _entry(text: str) -> dict[str, Any]:
    parsed = _parsed(text)
    return parsed if isinstance(parsed, dict) else {}


def _parsed(text: str) -> Any:
    try:
        return strict_json.parse(text, deepest=_DEEPEST)
    except ValueError:
        return None


def _text(value: Any) -> str:
    return value if type(value) is str else ""


PARTING = Parting("torchao's quantized tensors", is_stored_in_parts, described, read, without, assembled, metadata_of)
