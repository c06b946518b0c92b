"""torch and numpy, as frameworks of arrays. Each is imported when the first array is made."""

from __future__ import annotations

import functools
import importlib
import mmap
import weakref
from typing import Any, Protocol

from ckptconv.errors import UnsupportedError, UsageError
from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.lazy import LazyTensor, Stored
from ckptconv.text import brief, install


class Framework(Protocol):
    """Makes arrays."""

    def check(self, name: str, dtype: DType) -> None:
        """Raise UnsupportedError if there are no arrays of `dtype`; `name` is the tensor's."""

    def blank(self, tensor: LazyTensor) -> tuple[Any, memoryview]:
        """Return a new array like `tensor`, in C order, and its bytes, to be filled."""

    def over(self, memory: mmap.mmap, stored: Stored, start: int, nbytes: int) -> Any:
        """Return an array over the map of the file of `stored`.

        Its storage is the `nbytes` bytes from byte `start` of the file, which `stored` lies in.
        """

    def flipped(self, array: Any, dims: tuple[int, ...]) -> Any:
        """Return `array` with the order of the indices of `dims` reversed."""

    def placed(self, array: Any, device: Any) -> Any:
        """Return `array` on `device`."""


class Torch:
    """Tensors of torch. Those over a map can be written: the changes are private to this process."""

    def __init__(self) -> None:
        self._torch = _imported("torch")
        # The storages that are still in use, by address of the map, first byte and size.
        self._storages: weakref.WeakValueDictionary[tuple[int, int, int], Any] = weakref.WeakValueDictionary()

    def check(self, name: str, dtype: DType) -> None:
        if not hasattr(self._torch, dtype.name):
            raise UnsupportedError(
                f"{name!r} has the dtype {dtype}, which this version of torch does not support.",
                "Install a newer torch.",
            )

    def blank(self, tensor: LazyTensor) -> tuple[Any, memoryview]:
        flat = self._torch.empty(tensor.nbytes, dtype=self._torch.uint8)
        return flat.view(self._dtype(tensor)).reshape(tensor.shape), memoryview(flat.numpy())

    def over(self, memory: mmap.mmap, stored: Stored, start: int, nbytes: int) -> Any:
        place = (id(memory), start, nbytes)
        storage = self._storages.get(place)
        if storage is None:
            flat = self._torch.frombuffer(memory, dtype=self._torch.uint8, count=nbytes, offset=start)
            storage = self._storages.setdefault(place, flat.untyped_storage())
        empty = self._torch.empty(0, dtype=self._dtype(stored))
        offset = (stored.offset - start) // stored.dtype.itemsize
        return empty.set_(storage, offset, stored.shape, stored.strides)

    def flipped(self, array: Any, dims: tuple[int, ...]) -> Any:
        # Not every dtype can be flipped; integers of each size can.
        bits = getattr(self._torch, f"int{8 * array.dtype.itemsize}")
        return array.view(bits).flip(dims).view(array.dtype)

    def placed(self, array: Any, device: Any) -> Any:
        if device is None:
            return array
        try:
            self._torch.empty(0, device=device)
        except (RuntimeError, TypeError, AssertionError) as error:
            raise UsageError(
                f"{brief(device)} is not a device that this torch supports: {str(error).partition(chr(10))[0]}"
            ) from error
        return array.to(device)

    def _dtype(self, tensor: LazyTensor) -> Any:
        return getattr(self._torch, tensor.dtype.name)


class Numpy:
    """Arrays of numpy, as `Torch` makes tensors. `raw`: elements are their bits, as unsigned integers."""

    def __init__(self, raw: bool = False) -> None:
        self._numpy = _imported("numpy")
        self._raw = raw

    def check(self, name: str, dtype: DType) -> None:
        if self._dtype(dtype) is None:
            raise UnsupportedError(
                f"{name!r} has the dtype {dtype}, which numpy does not support.",
                'Install ml_dtypes, read the tensor with framework="pt", cast it with .to("float32"), or read '
                "its bits with .numpy(raw=True).",
            )

    def blank(self, tensor: LazyTensor) -> tuple[Any, memoryview]:
        array = self._numpy.empty(tensor.shape, self._dtype(tensor.dtype))
        return array, memoryview(array.reshape(-1).view("u1"))

    def over(self, memory: mmap.mmap, stored: Stored, start: int, nbytes: int) -> Any:
        dtype = self._dtype(stored.dtype)
        strides = [stride * stored.dtype.itemsize for stride in stored.strides]
        return self._numpy.ndarray(stored.shape, dtype, memory, stored.offset, strides)

    def flipped(self, array: Any, dims: tuple[int, ...]) -> Any:
        return self._numpy.flip(array, dims)

    def placed(self, array: Any, device: Any) -> Any:
        if device not in (None, "cpu"):
            raise UsageError(f"numpy does not support the device {device!r}.", 'Use framework="pt".')
        return array

    def _dtype(self, dtype: DType) -> Any:
        """Return the dtype of arrays of `dtype`; None if there is none."""
        if self._raw and dtype.itemsize <= _WIDEST:
            return self._numpy.dtype(f"u{dtype.itemsize}")
        return dtype_of_numpy(dtype.name)


_WIDEST = 8


@functools.cache
def dtype_of_numpy(name: str) -> Any:
    """Return numpy's dtype of that name; floats of 16 and 8 bits need the package ml_dtypes. None if there is none."""
    import numpy

    try:
        return numpy.dtype(name)
    except TypeError:
        pass
    try:
        ml_dtypes = importlib.import_module("ml_dtypes")
    except ImportError:
        return None
    scalar = getattr(ml_dtypes, name, None)
    return scalar and numpy.dtype(scalar)


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            f"Tensors of {name} require the package {name}, which cannot be imported: {error}.",
            f'{install("torch")} Or open with framework="np".' if name == "torch" else f"Install {name}.",
        ) from error


# Names of the frameworks, as safetensors has them.
_NAMES = {"pt": "pt", "torch": "pt", "pytorch": "pt", "np": "np", "numpy": "np"}


def named(name: str) -> str:
    """Return "pt" or "np" for the name of a framework. Raise UsageError for any other."""
    if name not in tuple(_NAMES):  # it may be any object, also one without a hash
        raise UsageError(f"The framework {name!r} is not known.", 'Use "pt" for torch or "np" for numpy.')
    return _NAMES[name]


@functools.cache
def framework(name: str, raw: bool = False) -> Framework:
    """Return the framework "pt" or "np". Raise UsageError if it is not installed."""
    return Torch() if name == "pt" else Numpy(raw)
