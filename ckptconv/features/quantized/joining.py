"""Finds the parts of quantized weights among tensors, and makes each weight of them. Nothing but names, dtypes, shapes
and the few bytes of parts that are shapes themselves is looked at.
"""

from __future__ import annotations

import functools
import math
import re
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.features.quantized import dialects, words
from ckptconv.features.quantized.computing import Dequantize
from ckptconv.features.quantized.configuration import Configuration
from ckptconv.features.quantized.dequantize import GivenPart, fits
from ckptconv.features.quantized.dialects import rotated
from ckptconv.features.quantized.parts import WEIGHT, groups_of, has_parts, is_telling, unread
from ckptconv.features.quantized.table import (
    MARK,
    OF_ACTIVATIONS,
    OF_ADAPTERS,
    OF_MODULES,
    OF_STACKS,
    Format,
    Part,
    Sizes,
)
from ckptconv.features.sums.kernels import WeightedSum
from ckptconv.storage import strict_json
from ckptconv.tensors.computing import Axis, Joined, Tiled
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Convert, Inline, LazyTensor, View, Zeros, untagged
from ckptconv.tensors.moves import Cast
from ckptconv.tensors.slices import as_stored, viewed
from ckptconv.text import count_of, some

# Bytes of small parts by name.
Reading: TypeAlias = "Callable[[Mapping[str, LazyTensor]], Mapping[str, bytes]]"
_DIMENSION = re.compile(r"(\w+)(?:\*(\w+))?(?:/(\w+))?")
# Names of scales and zero points, whatever they are for.
_SCALE = re.compile(r"(^|[._])(scale|scale_inv|zero_point)$")
# Where the name of a module may end in that of a tensor.
_END_OF_MODULE = re.compile(r"[._]")
_F32 = DTYPES["float32"]
# The largest part that is read for what it tells, in bytes.
_LARGEST = 1 << 16


class Weight(NamedTuple):
    """A weight to compute from quantized parts: the name of its format, the parts by role, and the bits that are stored
    for it, scales included."""

    tensor: LazyTensor
    format: str
    parts: Mapping[str, str]
    bits: int


class Recognized(NamedTuple):
    """The quantized weights among tensors by name, all names that go with them, and those of codes without scales where
    nothing says that anything is quantized. `unknown` are single scales that are of no weight, and of nothing else that
    is known."""

    weights: Mapping[str, Weight]
    gone: frozenset[str]
    bare: tuple[str, ...]
    unknown: tuple[str, ...] = ()


def recognized(tensors: Mapping[str, LazyTensor], config: Configuration, read: Reading) -> Recognized:
    """Return the weights that are quantized among `tensors`, as float32 that is to be `rounded`.

    Raise CorruptError for a part without the others, UnsupportedError for parts of no known format, of two, and for
    those that the configuration contradicts.
    """
    for name, (_, what, reader) in unread(tensors).items():
        raise UnsupportedError(
            f"The quantized weight with the part {name!r} {what}, which --dequantize does not support.",
            f"{reader} does.",
        )
    dialects.check(config.stated)
    config = _marked(tensors, config, read)
    groups = groups_of(tensors)
    read = _at_once(groups, tensors, read)
    weights: dict[str, Weight] = {}
    gone: set[str] = set()
    for name, companions in groups.items():
        weight = _weight(name, companions, tensors, config, read)
        if weight is not None:
            weights[name] = weight
            gone.update(weight.parts.values())
    codes = {name: weight.tensor for name, weight in weights.items()}
    turned, matrices = rotated.undone(tensors, codes, config.told)
    gone |= matrices
    bare, unknown = [], []
    modules = {name.removesuffix(WEIGHT): name for name in weights}
    holders = {name.rpartition(".")[0]: name for name in weights if not name.endswith(WEIGHT)}
    for name, tensor in tensors.items():
        if name in gone or name in weights:
            continue
        beside, own = _module(name, modules, holders)
        if own == MARK or own in OF_ACTIVATIONS or _is_of_activations(name, tensor, weights):
            if weights or config.method:
                gone.add(name)
        elif name.endswith(dialects.telling()):
            raise CorruptError(
                f"{name!r} is a part of a quantized weight, but the checkpoint lacks the other parts.",
                "Download or copy all files of the checkpoint again.",
            )
        elif beside and own not in OF_MODULES and not own.startswith(OF_ADAPTERS):
            raise UnsupportedError(
                f"{name!r} belongs to the quantized weight {beside!r}, but the effect of {name!r} is not known.",
                "The program that wrote the checkpoint can write the original weight.",
            )
        elif tensor.dtype.name in ("float8_e4m3fn", "float8_e5m2"):
            if config.method or weights:
                raise _without_scale(name, tensor)
            bare.append(name)
        elif _is_code(name, tensor, config):
            raise _without_scale(name, tensor)
        elif weights and tensor.numel == 1 and _SCALE.search(name):
            unknown.append(name)
    for name, plain in turned.items():
        tensor = tensors.get(name, plain.tensor)
        stored = weights.get(name) or Weight(tensor, str(tensor.dtype), {"codes": name}, 8 * tensor.nbytes)
        weights[name] = stored._replace(
            tensor=plain.tensor, format=f"rotated {stored.format}", parts={**stored.parts, **plain.matrices}
        )
    return Recognized(weights, frozenset(gone), tuple(bare), tuple(unknown))


def _module(name: str, modules: Mapping[str, str], holders: Mapping[str, str]) -> tuple[str, str]:
    """Return the quantized weight whose module a tensor is in, and what the tensor is called there; "" for none.

    A weight that is not called "weight" is the module of what begins with its name, and is beside what `holders`, the
    modules that have such weights, hold themselves, but for parameters of the same kind.
    """
    for at in (mark.start() for mark in _END_OF_MODULE.finditer(name)):
        weight = modules.get(name[:at])
        if weight and (name[at] == "." or not weight.endswith(WEIGHT)):
            return weight, name[at + 1 :]
    holder, _, own = name.rpartition(".")
    return ("", "") if own.removesuffix("_bias") in OF_STACKS else (holders.get(holder, ""), own)


def _marked(tensors: Mapping[str, LazyTensor], config: Configuration, read: Reading) -> Configuration:
    """Return the configuration with the statements of ComfyUI's tensors, which are JSON, about their modules."""
    marks = {name: tensor for name, tensor in tensors.items() if name.endswith(f".{MARK}")}
    if not marks or config.method not in ("", "comfy"):
        return config
    layers = dict(config.layers)
    data = read({name: tensor for name, tensor in marks.items() if tensor.nbytes <= _LARGEST})
    for name in marks:
        try:
            layer = strict_json.check(strict_json.parse(data.get(name, b"").decode()), words.COMFY_LAYER, "it")
        except ValueError as error:
            message = f"{name!r} describes a quantized weight, but {error}."
            raise UnsupportedError(message, "ComfyUI reads it.") from None
        if layers.setdefault(name.removesuffix(f".{MARK}"), layer) != layer:
            raise UnsupportedError(f"{name!r} and {config.path} contradict each other about a quantized weight.")
    return config._replace(method="comfy", layers=layers, path=config.path or MARK)


def _is_of_activations(name: str, tensor: LazyTensor, weights: Collection[str]) -> bool:
    """Return whether a tensor is a scale of activations: of a module, or of stacked experts with one each."""
    own = name.rpartition(".")[2]
    if own in OF_ACTIVATIONS:
        return tensor.numel <= 1
    return any(own.endswith(f"_{word}") and name[: -len(word) - 1] in weights for word in OF_ACTIVATIONS)


def name_of(weight: str, part: Part) -> str:
    """Return the first of the names that a part of `weight` may have."""
    pattern = part.names.split()[0]
    return (weight if pattern[0] == "+" else weight.removesuffix(WEIGHT)) + pattern[1:]


def shape_of(part: Part, shape: Sequence[int], sizes: Sizes) -> tuple[int, ...]:
    """Return the shape that a part has of a weight of `shape`, (…, M, K)."""
    rows, columns = shape[-2:]
    known = {**sizes, "M": rows, "K": columns}
    return (*shape[:-2], *(_extent(text, known) for text in part.shape.split()))


def _without_scale(name: str, tensor: LazyTensor) -> CorruptError:
    return CorruptError(
        f"{name!r} contains codes of a quantized weight ({tensor.dtype} {list(tensor.shape)}), but the checkpoint "
        "lacks its scale.",
        "Give the directory with all files of the checkpoint; if a file is missing there, download or copy it again.",
    )


def _is_code(name: str, tensor: LazyTensor, config: Configuration) -> bool:
    """Return whether a tensor lacks companions that it needs. Where weights are quantized, integers of at most 32 bits
    in two or three dimensions are codes, unless the configuration lists modules without this one."""
    is_named = not config.layers or name.removesuffix(WEIGHT) in config.layers
    is_integer = tensor.dtype.kind in "iu" and tensor.dtype.itemsize <= 4
    return bool(config.method) and is_named and is_integer and len(tensor.shape) in (2, 3)


# ----------------------------------------------------------------------------------------------------------- companions


def _at_once(groups: Mapping[str, Mapping[str, str]], tensors: Mapping[str, LazyTensor], read: Reading) -> Reading:
    """Return `read` for parts that state sizes, which are all read at once when the first is asked for."""
    patterns = {
        pattern
        for format_ in dialects.formats()
        for part in format_.parts.values()
        if part.tells
        for pattern in part.names.split()
    }

    @functools.cache
    def every() -> Mapping[str, bytes]:
        names = {name for companions in groups.values() for pattern, name in companions.items() if pattern in patterns}
        return read({name: tensors[name] for name in tensors if name in names and tensors[name].nbytes <= _LARGEST})

    return lambda wanted: {name: every()[name] for name in wanted if name in every()}


# -------------------------------------------------------------------------------------------------------------- weights


class _RefusedError(Exception):
    """Why parts are not of a format."""


def _weight(
    name: str,
    companions: Mapping[str, str],
    tensors: Mapping[str, LazyTensor],
    config: Configuration,
    read: Reading,
) -> Weight | None:
    """Return the weight of this name from its `companions`, {pattern: name}; None if these are no parts of it."""
    candidates = [format_ for format_ in dialects.formats() if has_parts(format_, companions, tensors)]
    readings: dict[Any, Weight] = {}
    refused: list[str] = []
    for format_ in candidates:
        for called, sizes in format_.sizes(config, name):
            try:
                weight = _made(format_, called, dict(sizes), companions, tensors, read)
            except _RefusedError as error:
                refused.append(f"as {called}, {error}")
                continue
            readings.setdefault(_meaning(weight.tensor), weight)
    if len(readings) == 1:
        (weight,) = readings.values()
        return weight
    if not candidates and not is_telling(companions, tensors):
        return None
    shown = ", ".join(
        f"{part!r} {tensors[part].dtype} {list(tensors[part].shape)}" for part in list(companions.values())[:8]
    )
    if not candidates and "+" not in companions and not _has_codes(companions):
        raise CorruptError(
            f"The quantized weight {name!r} has no codes, only {shown}.",
            "Download or copy all files of the checkpoint again.",
        )
    if len(readings) > 1:
        ways = " or ".join(dict.fromkeys(weight.format for weight in readings.values()))
        raise UnsupportedError(
            f"The quantized weight {name!r} is ambiguous: its parts match {ways} ({shown}).", _says(config)
        )
    if not candidates and "+" in companions and tensors[name].dtype.kind == "f" and tensors[name].dtype.itemsize > 1:
        raise UnsupportedError(f"{name!r} is not a quantized weight, but has parts of one: {shown}.", _says(config))
    why = f": {'; '.join(dict.fromkeys(refused))}" if refused else ""
    raise UnsupportedError(f"The quantized weight {name!r} has an unknown format ({shown}){why}.", _says(config))


def _has_codes(companions: Mapping[str, str]) -> bool:
    return any(
        pattern in companions for format_ in dialects.formats() for pattern in format_.parts["codes"].names.split()
    )


def _says(config: Configuration) -> str:
    if not config.method:
        return "The checkpoint has no configuration that specifies how its weights are quantized."
    return f"{config.path or 'The metadata'} specifies {config.method}."


def _made(
    format_: Format,
    called: str,
    sizes: dict[str, Any],
    companions: Mapping[str, str],
    tensors: Mapping[str, LazyTensor],
    read: Reading,
) -> Weight:
    """Return the weight of parts of one format. Raise _RefusedError if they do not fit it."""
    parts = _parts_of(format_, companions, tensors)
    inner = _parts_of(format_.scale, companions, tensors) if format_.scale else {}
    for role, name in parts.items():
        if tells := format_.parts[role].tells:
            try:
                sizes.update(tells(read({name: tensors[name]}).get(name, b"")))
            except ValueError as error:
                raise _RefusedError(str(error)) from None
    if sizes.get("zero") and "zero" not in parts:
        raise _RefusedError("its zero points are missing")
    if format_.scale:
        scale = _computed(format_.scale, inner, sizes, {role: tensors[part] for role, part in inner.items()}, None)
    given = {role: tensors[part] for role, part in parts.items() if not format_.parts[role].tells}
    weight = _computed(format_, parts, sizes, given, scale if format_.scale else None)
    if format_.completed and weight.numel:
        try:
            weight = format_.completed(weight, given)
        except ValueError as error:
            raise _RefusedError(str(error)) from None
    if "view" in sizes:
        weight = viewed(weight, sizes["view"])
    used = {**{f"scale's {role}": part for role, part in inner.items()}, **parts}
    bits = 8 * sum(tensors[part].nbytes for part in set(used.values()))
    return Weight(weight, called, used, bits)


def _parts_of(format_: Format, companions: Mapping[str, str], tensors: Mapping[str, LazyTensor]) -> dict[str, str]:
    """Return {role: name} of the parts that are there. Raise _RefusedError if one is there twice."""
    names_by_role = {}
    for role, part in format_.parts.items():
        names = [companions[pattern] for pattern in part.names.split() if pattern in companions]
        if len(names) > 1:
            raise _RefusedError(f"several of its parts have the same role: {some(names, form=repr)}")
        if names:
            names_by_role[role] = names[0]
    return names_by_role


def _computed(
    format_: Format,
    names: Mapping[str, str],
    sizes: dict[str, Any],
    given: Mapping[str, LazyTensor],
    scale: LazyTensor | None,
) -> LazyTensor:
    """Return the tensor that a format computes from the parts `given`, by role. Raise _RefusedError if their shapes do
    not fit."""
    given = {role: _shaped(untagged(tensor), format_.parts[role]) for role, tensor in given.items()}
    if scale is not None:
        given["scale"] = scale
    if format_.divided:
        given["scale"] = _divided(given["scale"], format_.divided)
    part = format_.parts["codes"]
    codes = given["codes"]
    if format_.unpacked:
        try:
            codes, others = format_.unpacked(codes, sizes)
        except ValueError as error:
            raise _RefusedError(str(error)) from None
        sizes = {**sizes, **others}
    outer = codes.shape
    dims, wanted = format_.out.split(), part.shape.split()
    if "as" in sizes:
        codes = _seen_as(codes, sizes["as"])
    lead, few = len(outer) - len(wanted), 0
    if lead < 0:
        few = -lead
        if format_.out != "M K" or lead < -2 or format_.codes != "own":
            raise _RefusedError(f"its codes have {count_of(len(outer), 'dimension')}; expected {len(wanted)} or more")
        codes, lead = viewed(codes, (*(1,) * few, *outer)), 0
    ahead = [f"#{number}" for number in range(lead)]
    sizes = {**sizes, **dict(zip(ahead, codes.shape, strict=False))}
    _solve(wanted, codes.shape[lead:], sizes)
    known = [*ahead, *dims]
    shape = tuple(_size(sizes, dim) for dim in known)
    kind = f"int{sizes['b']}" if format_.codes == "int" else format_.codes
    indexed = part_index if (part_index := format_.parts.get("index")) and "index" in given else None
    roles: list[str] = []
    parts, axes = [codes], [_axes([*ahead, *wanted], known, sizes)]
    _check(codes.shape, [*ahead, *wanted], sizes, names.get("codes", ""))
    for role in ("scale", "zero", "index", "table", "times", "shift"):
        if role not in given:
            continue
        about = format_.parts[role]
        own = [] if role in ("index", "table") else ahead
        spec = [*own, *about.shape.split()]
        if role == "table":
            tensor, along = given[role], [Axis(0, 0)]
            _check(tensor.shape, spec, sizes, names[role])
        else:
            tensor = _as(given[role], spec, sizes, names.get(role, "its scale"), math.prod(shape) == 0)
            along = _axes(spec, known, sizes, indexed.shape if indexed and role != "index" else "")
        if tensor.dtype.name == "uint8" and role == "scale":
            tensor = _seen_as(tensor, "float8_e8m0fnu")
        roles.append(role)
        parts.append(tensor)
        axes.append(along)
    for role, number in (("times", format_.times or None), ("shift", sizes.get("shift") if kind == "table8" else None)):
        if number is not None:
            roles.append(role)
            parts.append(Inline(struct.pack("<f", number), _F32, (1,)))
            axes.append([Axis(0, 0)])
    if not math.prod(shape):
        return Zeros(_F32, outer if few else shape)
    stored = parts[1].dtype.name
    between = stored if format_.own and stored in ("float16", "bfloat16") else "float32"
    offset = sizes[format_.offset] if isinstance(format_.offset, str) else format_.offset
    # Zero points that are packed have half of the codes more, as codes have.
    offset = 0 if format_.offset == "half" and "zero" in given and given["zero"].dtype.name == "int32" else offset
    kernel = Dequantize(kind, tuple(roles), offset, format_.over, between, names.get("scale") or names["codes"])
    given_parts = [GivenPart(one.dtype.name, along, one.shape) for one, along in zip(parts, axes, strict=True)]
    if not fits(kernel, given_parts, len(shape)):
        raise _RefusedError("its parts do not fit together")
    weight: LazyTensor = Tiled(tuple(parts), tuple(map(tuple, axes)), kernel, _F32, shape, (0,) * len(shape))
    return viewed(weight, outer) if few else weight


def _seen_as(tensor: LazyTensor, dtype: str) -> LazyTensor:
    """Return bytes as elements of a dtype of one byte."""
    view = View(tensor, DTYPES[dtype], tensor.shape)
    return as_stored(view) or view


def _divided(tensor: LazyTensor, by: float) -> LazyTensor:
    """Return float32 numbers over another, rounded once."""
    if tensor.dtype != _F32:
        raise _RefusedError(f"its scales are {tensor.dtype}")
    quotient = Joined((tensor,), WeightedSum((_F32.name,), (1.0,), by), DTYPES["float64"])
    return Convert(quotient, Cast("float64", _F32.name), _F32)


def _shaped(tensor: LazyTensor, part: Part) -> LazyTensor:
    """Return a part in the dtype and the shape that its entry speaks of."""
    if part.seen and tensor.shape:
        dtype = DTYPES[part.seen]
        last = tensor.shape[-1] * tensor.dtype.itemsize // dtype.itemsize
        elements = View(tensor, dtype, (*tensor.shape[:-1], last))
        return as_stored(elements) or elements
    if part.cast not in ("", tensor.dtype.name):
        return Convert(tensor, Cast(tensor.dtype.name, part.cast), DTYPES[part.cast])
    if part.flat:
        bytes_ = View(tensor, DTYPES["uint8"], (tensor.nbytes,))
        return as_stored(bytes_) or bytes_
    if part.merged and len(tensor.shape) > 1:
        return viewed(tensor, (*tensor.shape[:-2], tensor.shape[-2] * tensor.shape[-1]))
    return tensor


# --------------------------------------------------------------------------------------------------------------- shapes


def _read_dimension(text: str) -> tuple[str, str | None, str | None]:
    match = _DIMENSION.fullmatch(text.lstrip("#"))
    assert match
    name, times, by = match.groups()
    return (f"#{name}" if text.startswith("#") else name), times, by


def _size(sizes: Sizes, name: str | None) -> int:
    """Return the size of this name, or a number as it is."""
    if name is None:
        return 1
    if name.isdecimal():
        return int(name)
    if name not in sizes:
        raise _RefusedError(f"{name} is not known")
    value = sizes[name]
    return _size(sizes, value) if isinstance(value, str) else int(value)


def _solve(wanted: Sequence[str], shape: Sequence[int], sizes: dict[str, Any]) -> None:
    """Add to `sizes` the dimensions that follow from the shape of the codes."""
    for text, extent in zip(wanted, shape, strict=True):
        name, times, by = _read_dimension(text)
        if name not in sizes and not name.isdecimal():
            many, rest = divmod(extent * (_size(sizes, by) if times else 1), _size(sizes, times) if times else 1)
            if rest:
                raise _RefusedError(f"its {extent} words do not contain a whole number of codes")
            sizes[name] = many


def _extent(text: str, sizes: Sizes) -> int:
    name, times, by = _read_dimension(text)
    return -(-_size(sizes, name) * _size(sizes, times) // max(_size(sizes, by), 1))


def _check(shape: Sequence[int], spec: Sequence[str], sizes: Sizes, name: str) -> None:
    expected = [_extent(text, sizes) for text in spec]
    if list(shape) != expected:
        raise _RefusedError(f"{name!r} has the shape {list(shape)}; expected {expected}")


def _as(tensor: LazyTensor, spec: Sequence[str], sizes: Sizes, name: str, empty: bool) -> LazyTensor:
    """Return a part in the shape that `spec` says; trailing dimensions of 1 need not be there, and Model Optimizer has
    one after each dimension of blocks."""
    expected = tuple(_extent(text, sizes) for text in spec)
    if empty and tensor.numel <= 1:
        return tensor

    def bare(shape: Sequence[int]) -> tuple[int, ...]:
        kept = list(shape)
        while kept and kept[-1] == 1:
            kept.pop()
        return tuple(kept)

    of_blocks = tuple(side for extent in expected for side in (extent, 1))
    if bare(tensor.shape) != bare(expected) and tensor.shape != of_blocks:
        raise _RefusedError(f"{name!r} has the shape {list(tensor.shape)}; expected {list(expected)}")
    return viewed(tensor, expected)


def _axes(spec: Sequence[str], known: Sequence[str], sizes: Sizes, looked_up: str = "") -> list[Axis]:
    """Return the dimensions of a part as dimensions of the weight; one that is `looked_up` is needed whole."""
    axes = []
    for text in spec:
        name, times, by = _read_dimension(text)
        if looked_up == name and not times:
            axes.append(Axis(known.index(name), 0))
        else:
            axes.append(Axis(known.index(name), _size(sizes, times), max(_size(sizes, by), 1)))
    return axes


def _meaning(tensor: LazyTensor) -> Any:
    """Return what is equal for two tensors with the same elements: sides that hold one block are all alike."""
    if isinstance(tensor, View):
        return _meaning(tensor.tensor), tensor.shape
    if not isinstance(tensor, Tiled):
        return tensor
    axes = tuple(
        tuple((axis.dim, "one") if extent == 1 else axis for axis, extent in zip(own, part.shape, strict=True))
        for own, part in zip(tensor.axes, tensor.parts, strict=True)
    )
    return axes, tensor.kernel, tensor.shape, tuple(map(_meaning, tensor.parts))
