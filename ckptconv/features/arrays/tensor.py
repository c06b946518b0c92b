"""A tensor of an opened checkpoint, which is read when its elements are asked for."""

from __future__ import annotations

import operator
import re
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptconv.errors import OutOfRangeError, UsageError
from ckptconv.features.arrays.dtype import ElementType
from ckptconv.features.arrays.frameworks import framework
from ckptconv.features.arrays.memory import Memory, WantedArray
from ckptconv.options.kinds import FLAG
from ckptconv.options.table import OPTIONS
from ckptconv.outputs import selection
from ckptconv.outputs.safetensors import shape_of
from ckptconv.structure import leaves
from ckptconv.tensors.lazy import Handle, LazyTensor
from ckptconv.tensors.slices import Span, as_stored, sliced
from ckptconv.tensors.strides import contiguous_strides
from ckptconv.text import brief, count_of

_DEVICE = re.compile(r"(cpu|cuda|mps|xpu|hpu|meta)(:\d+)?")
CHANGEABLE = "load_state_dict returns tensors that can be changed, and save_state_dict writes them."


class Tensor(Handle):
    """A tensor that is not loaded: a name, a dtype, a shape, and the places of its bytes.

    `tensor[1:3, ..., 0]` reads only the bytes of that slice, and returns an array of the framework that the checkpoint
    was opened for; `torch()` and `numpy()` return all of it. An array is a view of the file, in memory only where it is
    used, if the bytes lie there as they are needed, and else a copy. A view can be written: that changes neither the
    file nor the memory of other processes, but it does change other views of the same bytes. All of these raise
    CorruptError if a file has changed since the checkpoint was opened.

    Examples:
        >>> weight = ckptconv.open("model.pt")["weight"]
        >>> weight.dtype.name, weight.shape, weight.nbytes
        ('float32', (3, 4), 48)
        >>> weight[1, -2:]
        tensor([1., 1.])
        >>> weight.to("bf16").torch().dtype
        torch.bfloat16
    """

    __slots__ = ("_device", "_framework", "_key", "_memory", "_tensor", "name")
    name: str

    def __init__(
        self,
        name: str,
        tensor: LazyTensor,
        memory: Memory,
        framework: str,
        device: Any = None,
        key: Hashable = None,
    ) -> None:
        self.name = name
        self._tensor = tensor
        self._memory = memory
        self._framework = framework
        self._device = device
        self._key = key

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            read = "" if name.startswith("_") else ": it is not loaded. .torch() or .numpy() returns an array"
            text = f"{type(self).__name__!r} object has no attribute {name!r}{read}"
            raise AttributeError(text, name=name, obj=self)

    # ---- facts

    @property
    def dtype(self) -> ElementType:
        """The element type: its `name` is torch's, its `itemsize` in bytes. It equals torch's and numpy's dtype."""
        return ElementType(self._tensor.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._tensor.shape

    @property
    def ndim(self) -> int:
        return len(self._tensor.shape)

    @property
    def size(self) -> Size:
        """The number of elements, as numpy has it; called, the shape or the extent of a dimension, as torch has it."""
        return Size(self._tensor)

    def numel(self) -> int:
        """Return the number of elements."""
        return self._tensor.numel

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)

    def stride(self, dim: int | None = None) -> Any:
        """Return the number of elements between neighbours, in each dimension or in one: the file's, if torch's tensor
        is a view of the file, else that of C order."""
        stored = as_stored(self._tensor)
        strides = contiguous_strides(self.shape) if stored is None else stored.strides
        return strides if dim is None else strides[dim]

    @property
    def nbytes(self) -> int:
        return self._tensor.nbytes

    def get_shape(self) -> list[int]:
        """Return the shape as safetensors' slices do."""
        return shape_of(self._tensor)

    def get_dtype(self) -> str:
        """Return the dtype as safetensors' slices do, such as "F32"; torch's name for one that safetensors lacks."""
        return self.dtype.code or self.dtype.name

    def __repr__(self) -> str:
        return f"Tensor({self.name!r}, {self.dtype}, {list(self.shape)}, {self.nbytes:,} bytes)"

    def __reduce__(self) -> tuple[type[Tensor], tuple[Any, ...]]:
        return Tensor, (self.name, self._tensor, self._memory, self._framework, self._device, self._key)

    # ---- all of it

    def numpy(self, *, raw: bool = False) -> Any:
        """Return the tensor as a numpy array. `raw`: elements are their bits, as unsigned integers of the same size.

        Raise UnsupportedError for a dtype that numpy lacks, such as bfloat16 without the package ml_dtypes.
        """
        return self._array("np", raw=raw)

    def torch(self, *, device: Any = None) -> Any:
        """Return it as a torch tensor, on `device` if that is given."""
        return self._array("pt", device=device if device is not None else self._device)

    def to(self, dtype: Any) -> Tensor:
        """Return it cast to float32, bfloat16 or float16, as a conversion casts: lazily, with one correct rounding.

        Reading it warns of values that became infinite. Raise UsageError if elements cannot be cast to `dtype`.
        """
        if _DEVICE.fullmatch(str(dtype)):
            hint = f"To read the tensor to a device, use torch(device={str(dtype)!r})."
            raise UsageError(f"{str(dtype)!r} is a device, but to() only casts to a dtype.", hint)
        name = OPTIONS["dtype"].parse(dtype)
        if self.dtype.kind != "f" and name not in (None, "keep", self.dtype.name):
            raise UsageError(
                f"{self.name!r} is a tensor of {self.dtype}; only floating-point tensors can be cast.",
                "Cast the array instead.",
            )
        cast = selection.converted(self.name, self._tensor, name or "keep")
        key = None if self._key is None else (self._key, name)
        return Tensor(self.name, cast, self._memory, self._framework, self._device, key)

    def copy(self) -> Tensor:
        """Return this tensor, not loaded either, with slices of numpy's: `dask.array.from_array` slices a copy."""
        return Tensor(self.name, self._tensor, self._memory, "np", key=self._key)

    def read_into(self, buffer: Any) -> None:
        """Read all elements into `buffer`, in C order: a contiguous array, or any writable buffer of `nbytes` bytes.

        Raise UsageError for another size, or a buffer that cannot be written.
        """
        try:
            view = memoryview(_bytes_of(buffer)).cast("B")
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"{self.name!r} cannot be read into {type(buffer).__name__}: {error}.") from error
        if view.readonly or view.nbytes != self.nbytes:
            fault = "is read-only" if view.readonly else f"has {view.nbytes} bytes"
            raise UsageError(f"{self.name!r} has {self.nbytes} bytes, but the buffer {fault}.")
        self._memory.fill(self._tensor, view)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self.numpy()
        is_cast = dtype is not None and array.dtype != dtype
        if copy is False and array.size and (is_cast or array.base is None):
            raise ValueError(
                f"{self.name!r} cannot be read without a copy: its layout or dtype in the file differs from numpy's."
            )
        return array.astype(dtype) if is_cast else array.copy() if copy else array

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **settings: Any) -> Any:
        # An object with this method is an array to dask, which copies it.
        arrays = [operand.__array__() if isinstance(operand, Tensor) else operand for operand in inputs]
        return getattr(ufunc, method)(*arrays, **settings)

    def __dlpack__(self, **options: Any) -> Any:
        return self.torch().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.torch().__dlpack_device__()

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self.name!r} has no dimensions, so it has no length.")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __bool__(self) -> bool:
        raise TypeError(f"The truth value of {self.name!r} is ambiguous: read its elements.")

    @property
    def lazy(self) -> LazyTensor:
        """The expression that says where its bytes are."""
        return self._tensor

    def wanted(self) -> WantedArray:
        """Return the argument of `Memory.arrays` for this tensor."""
        return WantedArray(self.name, self._tensor, key=self._key)

    def _array(self, name: str, *, raw: bool = False, device: Any = None) -> Any:
        maker = framework(name, FLAG.parse(raw, "raw"))
        (array,) = self._memory.arrays([self.wanted()], maker)
        return maker.placed(array, device)

    # ---- slices

    def __getitem__(self, key: Any) -> Any:
        """Return the elements at `key`: integers, slices with any step, an Ellipsis, None for a new dimension.

        Raise UsageError for anything else, and for an index out of range, which is an IndexError too.
        """
        index = parsed(self.name, key, self.shape)
        maker = framework(self._framework)
        part = sliced(self._tensor, index.spans)
        # A part of a tensor is that tensor's only if it is all of it.
        whole = part is self._tensor
        (array,) = self._memory.arrays([WantedArray(self.name, part, key=self._key if whole else None)], maker)
        if index.flipped:
            array = maker.flipped(array, index.flipped)
        if index.shape != part.shape:
            array = array.reshape(index.shape)
        return maker.placed(array, self._device)

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError(f"{self.name!r} is read-only. {CHANGEABLE}")


class Size(int):
    """The number of elements of a tensor, which can be called for its shape."""

    _shape: tuple[int, ...]

    def __new__(cls, tensor: LazyTensor) -> Size:
        size = super().__new__(cls, tensor.numel)
        size._shape = tensor.shape
        return size

    def __call__(self, dim: int | None = None) -> Any:
        """Return the shape, or the extent of the dimension `dim`."""
        return self._shape if dim is None else self._shape[dim]

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


class Index(NamedTuple):
    """The selection of a key: the span of each dimension, those to reverse afterwards, and the shape of the result."""

    spans: tuple[Span, ...]
    flipped: tuple[int, ...]
    shape: tuple[int, ...]


def parsed(name: str, key: Any, shape: tuple[int, ...]) -> Index:
    """Return the selection of `key` in a tensor of `shape`; `name` is for messages. Raise as `__getitem__` does."""
    keys = key if isinstance(key, tuple) else (key,)
    used = sum(part is not None and part is not Ellipsis for part in keys)
    ellipses = sum(part is Ellipsis for part in keys)
    if used > len(shape) or ellipses > 1:
        problem = "more than one Ellipsis" if ellipses > 1 else f"{used} {'index' if used == 1 else 'indices'}"
        dimensions = count_of(len(shape), "dimension")
        raise OutOfRangeError(f"{name!r} has {dimensions}, but was indexed with {problem}.")
    if not ellipses:
        keys = (*keys, Ellipsis)
    spans: list[Span] = []
    flipped: list[int] = []
    result: list[int] = []
    for part in keys:
        if part is None:
            result.append(1)
        elif part is Ellipsis:
            extents = shape[len(spans) : len(spans) + len(shape) - used]
            spans.extend(Span(0, 1, extent) for extent in extents)
            result.extend(extents)
        elif isinstance(part, slice):
            span, reverse = _of_slice(name, part, shape[len(spans)])
            flipped.extend([len(spans)] if reverse else [])
            spans.append(span)
            result.append(span.length)
        else:
            spans.append(Span(_of_integer(name, part, shape[len(spans)]), 1, 1))
    return Index(tuple(spans), tuple(flipped), tuple(result))


def _of_slice(name: str, part: slice, extent: int) -> tuple[Span, bool]:
    """Return the span of a slice, and whether its indices are to be reversed."""
    try:
        indices = range(extent)[part]
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name!r} cannot be sliced by {part}: {error}.") from error
    if not indices:
        return Span(0, 1, 0), False
    if indices.step > 0:
        return Span(indices[0], indices.step, len(indices)), False
    return Span(indices[-1], -indices.step, len(indices)), True


def _of_integer(name: str, key: Any, extent: int) -> int:
    try:
        index = -1 if isinstance(key, bool) else operator.index(key)
    except TypeError:
        index = None
    if index is None or isinstance(key, bool) or bool(getattr(key, "shape", None)):
        hint = "Read the whole tensor, or a slice of it, and index the array."
        if isinstance(key, list) and key and not any(isinstance(part, (bool, list)) for part in key):
            hint = f"Read each of these: [tensor[index] for index in {brief(key)}]."
        raise UsageError(
            f"{name!r} cannot be indexed by a {type(key).__name__}: only integers, slices, an Ellipsis and None are "
            "supported.",
            hint,
        )
    if not -extent <= index < extent:
        raise OutOfRangeError(f"Index {index} is out of range: {name!r} has size {extent} in that dimension.")
    return index % extent


def _bytes_of(buffer: Any) -> Any:
    """Return an object with the buffer of an array: a torch tensor has no buffer of its own."""
    if leaves.is_tensor(buffer):
        import torch

        return buffer.detach().view(-1).view(torch.uint8).numpy()
    dtype = getattr(buffer, "dtype", None)
    # Python knows no buffers of dtypes from other packages than numpy.
    return buffer.reshape(-1).view("u1") if dtype is not None and buffer.flags.c_contiguous else buffer
