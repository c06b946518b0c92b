"""Lazy tensors as JSON and back. One table names every expression and kernel, and serves both directions.

An expression is a list: its name, then its fields in the order of the table. Files are indices into a list of files.
Long lists of numbers that many tensors share, such as the files of all ranks, are stored once and named by their index.
"""

from __future__ import annotations

import base64
import binascii
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from importlib import import_module
from typing import Any, NamedTuple, get_type_hints

from ckptconv.tensors.casting import Rounded
from ckptconv.tensors.computing import Axis, Joined, Tiled
from ckptconv.tensors.dtypes import DTYPES, DType
from ckptconv.tensors.kernels import CONVERTING, JOINING
from ckptconv.tensors.lazy import (
    Concat,
    Convert,
    Inline,
    LazyTensor,
    Narrow,
    Partitioned,
    Picked,
    Stored,
    Tagged,
    View,
    Zeros,
)
from ckptconv.tensors.moves import DTypeName, File, Kernel
from ckptconv.tensors.registered import HOMES
from ckptconv.tensors.strides import contiguous_strides
from ckptconv.tensors.tile_kernels import TILING, tile_dtype

# Expressions inside one another, dimensions, and elements of a tensor: no more than any real checkpoint has.
MAX_DEPTH, MAX_DIMS, MAX_ELEMENTS = 32, 64, 1 << 63


class Kind(NamedTuple):
    """An expression: its class, and its fields with the form of each."""

    cls: type[LazyTensor]
    fields: tuple[tuple[str, str], ...]


EXPRESSIONS: dict[str, Kind] = {
    "stored": Kind(
        Stored,
        (("file", "file"), ("offset", "count"), ("dtype", "dtype"), ("shape", "shape"), ("strides", "strides")),
    ),
    "partitioned": Kind(
        Partitioned,
        (
            ("files", "files"),
            ("bases", "counts"),
            ("offset", "count"),
            ("piece", "count"),
            ("dtype", "dtype"),
            ("shape", "shape"),
        ),
    ),
    "concat": Kind(Concat, (("parts", "tensors"), ("dim", "count"))),
    "narrow": Kind(Narrow, (("tensor", "tensor"), ("dim", "count"), ("start", "count"), ("length", "count"))),
    "view": Kind(View, (("tensor", "tensor"), ("dtype", "dtype"), ("shape", "shape"))),
    "picked": Kind(Picked, (("tensor", "tensor"), ("start", "count"), ("shape", "shape"), ("strides", "strides"))),
    "convert": Kind(Convert, (("tensor", "tensor"), ("kernel", "kernel"), ("dtype", "dtype"))),
    "joined": Kind(Joined, (("parts", "tensors"), ("kernel", "kernel"), ("dtype", "dtype"))),
    "tiled": Kind(
        Tiled,
        (
            ("parts", "tensors"),
            ("axes", "axes"),
            ("kernel", "kernel"),
            ("dtype", "dtype"),
            ("shape", "shape"),
            ("starts", "strides"),
            ("whole", "strides"),
        ),
    ),
    "inline": Kind(Inline, (("data", "data"), ("dtype", "dtype"), ("shape", "shape"))),
    "zeros": Kind(Zeros, (("dtype", "dtype"), ("shape", "shape"))),
}
_NAMES = {kind.cls: name for name, kind in EXPRESSIONS.items()}
# A kernel is a list too: its name, then its fields. These are the trunk's own.
KERNELS: dict[str, type[Any]] = {
    maker.name: kernel for makers in (CONVERTING, JOINING, TILING) for kernel, maker in makers.items()
}


# ----------------------------------------------------------------------------------------------------------- writing


class Encoder:
    """Encodes expressions as JSON. They refer to `files` and `lists` by index."""

    def __init__(self) -> None:
        self._files: dict[File, int] = {}
        self._lists: dict[tuple[int, ...], int] = {}
        # The list of each tuple of files, which many tensors share; the tuple is kept so that its id stays its own.
        self._known: dict[int, tuple[tuple[File, ...], int]] = {}

    @property
    def files(self) -> list[File]:
        """The files by index; a file that contains another comes before it."""
        return list(self._files)

    @property
    def lists(self) -> list[list[int]]:
        return [list(numbers) for numbers in self._lists]

    def encode(self, tensor: LazyTensor) -> list[Any]:
        """Return `tensor` as JSON, without facts that its bytes do not tell. Raise TypeError for an unknown class."""
        if isinstance(tensor, Tagged):
            return self.encode(tensor.tensor)
        # A file holds the numbers as they are rounded: its readers cast those.
        name = "convert" if isinstance(tensor, Rounded) else _NAMES.get(type(tensor))
        if name is None:
            raise TypeError(f"{type(tensor).__name__} cannot be written as JSON")
        if isinstance(tensor, Stored) and tensor.strides == contiguous_strides(tensor.shape):
            return [name, self.file(tensor.file), tensor.offset, tensor.dtype.name, list(tensor.shape), None]
        fields = EXPRESSIONS[name].fields
        return [name, *(_ENCODE[form](self, getattr(tensor, field)) for field, form in fields)]

    def file(self, file: File) -> int:
        """Return the index of `file`."""
        if file.packed:
            self.file(file.packed.file)
        return self._files.setdefault(file, len(self._files))

    def files_index(self, files: tuple[File, ...]) -> int:
        known = self._known.get(id(files))
        if known is None:
            known = self._known[id(files)] = files, self.list_index(tuple(map(self.file, files)))
        return known[1]

    def list_index(self, numbers: tuple[int, ...]) -> int:
        return self._lists.setdefault(numbers, len(self._lists))


def _name_of(kernel: type[Any]) -> str:
    maker = CONVERTING.get(kernel) or JOINING.find(kernel) or TILING[kernel]
    return maker.name


_ENCODE: dict[str, Callable[[Encoder, Any], Any]] = {
    "file": Encoder.file,
    "files": Encoder.files_index,
    "counts": Encoder.list_index,
    "count": lambda _, number: number,
    "dtype": lambda _, dtype: dtype.name,
    "shape": lambda _, shape: list(shape),
    "strides": lambda _, strides: list(strides),
    "tensor": Encoder.encode,
    "tensors": lambda self, parts: [self.encode(part) for part in parts],
    "kernel": lambda _, kernel: [_name_of(type(kernel)), *kernel],
    "axes": lambda _, axes: [[list(axis) for axis in part] for part in axes],
    "data": lambda _, data: base64.b64encode(data).decode(),
}


# ----------------------------------------------------------------------------------------------------------- reading


class Decoder:
    """Decodes expressions from JSON that is not trusted. Every number is checked against the files it refers to.

    `decode` raises ValueError, with the reason, for any JSON that `Encoder` does not write.
    """

    def __init__(self, files: Sequence[File], lists: Any) -> None:
        self._files = files
        if type(lists) is not list or not all(type(numbers) is list for numbers in lists):
            raise ValueError("its lists are not lists")
        self._lists: list[tuple[int, ...]] = [tuple(map(_count, numbers)) for numbers in lists]
        self._file_lists: dict[int, tuple[File, ...]] = {}
        # Bytes after the base in the rank that has least, by the tuples of files and bases.
        self._least: dict[Hashable, int] = {}

    def decode(self, expression: Any, depth: int = 0) -> LazyTensor:
        """Return the expression that `expression` describes."""
        if depth == MAX_DEPTH:
            raise ValueError(f"expressions are nested more than {MAX_DEPTH} levels deep")
        if (
            type(expression) is not list
            or not expression
            or type(expression[0]) is not str
            or expression[0] not in EXPRESSIONS
        ):
            raise ValueError(f"{_shown(expression)} is not a known expression")
        kind, fields = EXPRESSIONS[expression[0]]
        if len(expression) != len(fields) + 1:
            raise ValueError(
                f"{_shown(expression)} has {len(expression) - 1} fields, but {expression[0]} must have {len(fields)}"
            )
        values: dict[str, Any] = {}
        for (field, form), value in zip(fields, expression[1:], strict=True):
            values[field] = self._field(form, value, values, depth)
        if kind is Narrow:
            _check_dim(values["tensor"], values["dim"])
        elif kind is Concat:
            _check_dim(values["parts"][0], values["dim"])
        tensor = kind(**values)
        _check_elements(tensor.shape)
        check = _CHECKS.get(kind)
        if check:
            check(self, tensor)
        return tensor

    def _field(self, form: str, value: Any, before: dict[str, Any], depth: int) -> Any:
        if form == "tensor":
            return self.decode(value, depth + 1)
        if form == "tensors":
            if type(value) is not list or not value:
                raise ValueError(f"{_shown(value)} is not a list of expressions")
            return tuple(self.decode(item, depth + 1) for item in value)
        if form == "strides" and value is None:
            return contiguous_strides(before["shape"])
        return _DECODE[form](self, value)

    def file(self, value: Any) -> File:
        index = _count(value)
        if index >= len(self._files):
            raise ValueError(f"an expression refers to source {index}, but only {len(self._files)} are listed, from 0")
        return self._files[index]

    def numbers(self, value: Any) -> tuple[int, ...]:
        index = _count(value)
        if index >= len(self._lists):
            raise ValueError(f"an expression refers to list {index}, but only {len(self._lists)} exist, from 0")
        return self._lists[index]

    def files(self, value: Any) -> tuple[File, ...]:
        numbers = self.numbers(value)
        if value not in self._file_lists:
            self._file_lists[value] = tuple(map(self.file, numbers))
        return self._file_lists[value]

    def check_stored(self, tensor: Stored) -> None:
        if len(tensor.strides) != len(tensor.shape):
            raise ValueError(f"strides {_shown(list(tensor.strides))} do not match shape {_shown(list(tensor.shape))}")
        if tensor.numel:
            last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.strides, strict=True))
            _check_within(tensor.file, tensor.offset + (last + 1) * tensor.dtype.itemsize)

    def check_picked(self, tensor: Picked) -> None:
        if len(tensor.strides) != len(tensor.shape):
            raise ValueError(f"strides {_shown(list(tensor.strides))} do not match shape {_shown(list(tensor.shape))}")
        steps = ((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.strides, strict=True))
        if tensor.numel and tensor.start + sum(steps) >= tensor.tensor.numel:
            raise ValueError(f"elements are picked beyond the end of a tensor of {tensor.tensor.numel} elements")

    def check_partitioned(self, tensor: Partitioned) -> None:
        files, bases, item = tensor.files, tensor.bases, tensor.dtype.itemsize
        if not files or len(files) != len(bases) or len(files) * tensor.piece < tensor.numel:
            raise ValueError(
                f"{tensor.numel} elements do not fit in {len(bases)} pieces of {tensor.piece} in {len(files)} files"
            )
        key = id(files), id(bases)
        if key not in self._least:
            self._least[key] = min(file.size - base for file, base in zip(files, bases, strict=True))
        if tensor.offset + tensor.piece * item > self._least[key]:
            left = tensor.numel
            for file, base in zip(files, bases, strict=True):
                taken = min(left, tensor.piece)
                if taken:
                    _check_within(file, base + tensor.offset + taken * item)
                left -= taken

    def check_convert(self, tensor: Convert) -> None:
        kernel, before = tensor.kernel, tensor.tensor.dtype
        maker = CONVERTING.get(type(kernel)) or JOINING.find(type(kernel))
        if maker is None or not maker.fits(kernel, [before], tensor.dtype):
            raise ValueError(f"{kernel} does not yield {tensor.dtype} from {before}")

    def check_joined(self, tensor: Joined) -> None:
        kernel, parts = tensor.kernel, tensor.parts
        maker = JOINING.find(type(kernel))
        alike = maker is not None and all(part.shape == parts[0].shape for part in parts)
        if maker is None or not alike or not maker.fits(kernel, [part.dtype for part in parts], tensor.dtype):
            raise ValueError(f"{kernel} does not yield {tensor.dtype} from its parts")

    def check_tiled(self, tensor: Tiled) -> None:
        dims, parts = len(tensor.shape), tensor.parts
        maker = TILING.find(type(tensor.kernel))
        if (
            maker is None
            or len(tensor.starts) != dims
            or len(tensor.whole) not in (0, dims)
            or not all(tensor.whole)
            or [len(part.shape) for part in parts] != [len(axes) for axes in tensor.axes]
            or any(axis.dim >= dims for axes in tensor.axes for axis in axes)
            or (tensor.numel and not _reaches(tensor))
            or not maker.fits(tensor)
            or tensor.dtype.name != tile_dtype(tensor.kernel)
        ):
            raise ValueError(f"{_shown(list(tensor.kernel))} does not yield {tensor.dtype} from its parts")


def _reaches(tensor: Tiled) -> bool:
    """Return whether the parts have all elements that the expression needs."""
    stops = [start + extent for start, extent in zip(tensor.starts, tensor.shape, strict=True)]
    # The last of a dimension may need fewer elements than the others do.
    return all(
        -(-stops[axis.dim] * axis.num // axis.den) < extent + max(axis.num // axis.den, 1)
        for axes, part in zip(tensor.axes, tensor.parts, strict=True)
        for axis, extent in zip(axes, part.shape, strict=True)
    )


def _check_within(file: File, stop: int) -> None:
    if stop > file.size:
        raise ValueError(f"a tensor ends at byte {stop} of {file.path}, which has only {file.size} bytes")


def _check_dim(tensor: LazyTensor, dim: int) -> None:
    if dim >= len(tensor.shape):
        raise ValueError(f"a tensor of shape {_shown(list(tensor.shape))} has no dimension {dim}")


def _check_elements(shape: tuple[int, ...]) -> None:
    # Empty dimensions do not make the others smaller: strides are products of the others.
    if math.prod(max(extent, 1) for extent in shape) >= MAX_ELEMENTS:
        raise ValueError(f"the shape {_shown(list(shape))} has more elements than can be counted")


_CHECKS: dict[type[LazyTensor], Callable[[Decoder, Any], None]] = {
    Stored: Decoder.check_stored,
    Picked: Decoder.check_picked,
    Partitioned: Decoder.check_partitioned,
    Convert: Decoder.check_convert,
    Joined: Decoder.check_joined,
    Tiled: Decoder.check_tiled,
}


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < MAX_ELEMENTS:
        raise ValueError(f"{_shown(value)} is not a count")
    return value


def _counts(value: Any) -> tuple[int, ...]:
    if type(value) is not list or len(value) > MAX_DIMS:
        raise ValueError(f"{_shown(value)} is not a list of at most {MAX_DIMS} counts")
    return tuple(map(_count, value))


def _shape(value: Any) -> tuple[int, ...]:
    shape = _counts(value)
    _check_elements(shape)
    return shape


def _dtype(value: Any) -> DType:
    if type(value) is not str or value not in DTYPES:
        raise ValueError(f"{_shown(value)} is not a dtype")
    return DTYPES[value]


def _kernel(value: Any) -> Kernel:
    kind = _kernel_called(value[0]) if type(value) is list and value and type(value[0]) is str else None
    if kind is None:
        raise ValueError(f"{_shown(value)} is not a known kernel")
    settings = value[1:]
    if len(settings) != len(kind._fields):
        raise ValueError(f"{_shown(value)} has {len(settings)} fields, but {value[0]} must have {len(kind._fields)}")
    kernel: Kernel = kind(*(_FIELDS[form](setting) for form, setting in zip(_forms(value[0]), settings, strict=True)))
    return kernel


def _kernel_called(name: str) -> type[Any] | None:
    """Return the kernel that is called so, of the trunk or of a feature."""
    if name in KERNELS:
        return KERNELS[name]
    for home in HOMES:
        if name in home.names:
            module = import_module(home.engine)
            makers = {**getattr(module, "JOINING", {}), **getattr(module, "TILING", {})}
            kernel: type[Any] = next(kernel for kernel, maker in makers.items() if maker.name == name)
            return kernel
    return None


@functools.cache
def _forms(name: str) -> tuple[Any, ...]:
    """Return the types of the fields of a kernel."""
    return tuple(get_type_hints(_kernel_called(name), include_extras=True).values())


def _kinds(value: Any) -> tuple[tuple[int, ...], ...]:
    if type(value) is not list or not value or any(type(kind) is not list or len(kind) != 3 for kind in value):
        raise ValueError(f"{_shown(value)} joins no tensors")
    return tuple(tuple(map(_count, kind)) for kind in value)


def _axes(value: Any) -> tuple[tuple[Axis, ...], ...]:
    if type(value) is not list or any(type(axes) is not list or len(axes) > MAX_DIMS for axes in value):
        raise ValueError(f"{_shown(value)} is not a list of axes")
    for axis in itertools.chain.from_iterable(value):
        if type(axis) is not list or len(axis) != 3 or _count(axis[2]) < 1:
            raise ValueError(f"{_shown(axis)} is not an axis")
    return tuple(tuple(Axis(*map(_count, axis)) for axis in axes) for axes in value)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"{_shown(value)} is not a string")
    return value


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{_shown(value)} is neither true nor false")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if type(value) is not list:
        raise ValueError(f"{_shown(value)} is not a list of strings")
    return tuple(map(_text, value))


def _number(value: Any) -> float:
    if type(value) is not float or not math.isfinite(value):
        raise ValueError(f"{_shown(value)} is not a finite number")
    return value


def _numbers(value: Any) -> tuple[float, ...]:
    if type(value) is not list:
        raise ValueError(f"{_shown(value)} is not a list of numbers")
    return tuple(map(_number, value))


# The fields of kernels, by their types.
_FIELDS: dict[Any, Callable[[Any], Any]] = {
    int: _count,
    DTypeName: lambda value: _dtype(value).name,
    tuple[tuple[int, int, int], ...]: _kinds,
    str: _text,
    tuple[str, ...]: _texts,
    bool: _flag,
    float: _number,
    tuple[float, ...]: _numbers,
}


def _data(value: Any) -> bytes:
    if type(value) is not str:
        raise ValueError(f"{_shown(value)} is not text in base64")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"{_shown(value)} is not text in base64") from None


_DECODE: dict[str, Callable[[Decoder, Any], Any]] = {
    "file": Decoder.file,
    "files": Decoder.files,
    "counts": Decoder.numbers,
    "count": lambda _, value: _count(value),
    "dtype": lambda _, value: _dtype(value),
    "shape": lambda _, value: _shape(value),
    "strides": lambda _, value: _counts(value),
    "kernel": lambda _, value: _kernel(value),
    "axes": lambda _, value: _axes(value),
    "data": lambda _, value: _data(value),
}


def _shown(value: Any) -> str:
    """Return the beginning of `value`, which may be large."""
    if type(value) is list:
        value = list(itertools.islice(value, 4)) + (["…"] if len(value) > 4 else [])
        return f"[{', '.join(_shown(item) if type(item) is not list else '[…]' for item in value)}]"
    if type(value) is dict:
        return "an object"
    return repr(value)[:60]
