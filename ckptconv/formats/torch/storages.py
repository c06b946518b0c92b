"""The storages of torch: the memory that tensors are views of, and the persistent ids by which pickles refer to it.

Source: `torch/serialization.py`, from the first releases to torch 2.13.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Hashable
from typing import Any, ClassVar, NamedTuple

from ckptconv.errors import UnsupportedError
from ckptconv.pickles.nodes import Global
from ckptconv.pickles.vocabulary import MalformedError, RefusedError
from ckptconv.tensors.dtypes import DTYPES, DType, itemsize_of_components
from ckptconv.tensors.lazy import Convert, LazyTensor, Stored, Tagged, TensorFacts
from ckptconv.tensors.moves import File, Swap
from ckptconv.tensors.strides import MAX_BYTES
from ckptconv.text import brief


class Storage(Tagged):
    """The memory that tensors are views of: `size` bytes from byte `offset` of `file`.

    A pickle may contain a bare storage. It is then a leaf itself: one-dimensional, with the dtype of its class (uint8
    for an untyped storage). Tensors have the same `identity` if, and only if, they share a storage. `meta`: it has no
    data. `swapped`: the byte order of the file is not little-endian.
    """

    # Most storages are never leaves: `tensor` and `facts` are computed on demand, and not compared.
    __slots__ = ("dtype", "file", "identity", "key", "meta", "offset", "size", "swapped")
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(
        self,
        file: File,
        offset: int,
        size: int,
        dtype: DType,
        key: str,
        identity: Hashable,
        meta: bool = False,
        swapped: bool = False,
    ) -> None:
        self.file = file
        self.offset = offset
        self.size = size
        self.dtype = dtype  # type: ignore[misc]
        self.key = key
        self.identity = identity
        self.meta = meta
        self.swapped = swapped

    @property
    def tensor(self) -> LazyTensor:  # type: ignore[override]
        if self.meta:
            raise UnsupportedError(
                f"{self.file.path} lacks the data of storage {self.key[:100]!r}, because it was saved from the meta "
                "device.",
                "Save the checkpoint again with its weights loaded.",
            )
        count = self.size // self.dtype.itemsize
        return in_order(Stored(self.file, self.offset, self.dtype, (count,), (1,)), self)

    @property
    def facts(self) -> TensorFacts:  # type: ignore[override]
        return TensorFacts("storage", storage=self.identity, storage_nbytes=self.size, strides=(1,))


class StorageId(NamedTuple):
    """The parts of a persistent id. `key` names the storage; `numel` is its size in elements of `dtype`.

    `view` is the sixth part of the id, which only the stream format has.
    """

    dtype: DType
    key: str
    location: str
    numel: int
    view: Any = None


STORAGE_DTYPES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
    "QUInt8": "quint8",
    "QInt8": "qint8",
    "QInt32": "qint32",
    "QUInt4x2": "quint4x2",
    "QUInt2x4": "quint2x4",
    "Untyped": "uint8",
    "_Untyped": "uint8",
    # Only in TorchScript, which also names the storages of new dtypes.
    "ComplexHalf": "complex32",
    **{name[:1].upper() + name[1:]: name for name in DTYPES if name.startswith(("float8_", "float4_", "bits"))},
    **{f"UInt{bits}": f"uint{bits}" for bits in (16, 32, 64)},
}
# The names of their classes that torch.save writes.
STORAGE_CLASSES = frozenset((module, f"{kind}Storage") for module in ("torch", "torch.cuda") for kind in STORAGE_DTYPES)
_STORAGE_CLASS = re.compile(r"(\w+?)Storage(?:Base)?")


def storage_dtype(cls: Any) -> DType | None:
    """Return the dtype of a storage class, such as torch.FloatStorage or torch.cuda.HalfStorage; None for others."""
    return _storage_dtype(cls) if type(cls) is Global else None


@functools.lru_cache(maxsize=256)
def _storage_dtype(cls: Global) -> DType | None:
    named = _STORAGE_CLASS.fullmatch(cls.name) if cls.module.split(".")[0] == "torch" else None
    return DTYPES.get(STORAGE_DTYPES.get(named[1], "")) if named else None


def storage_id(pid: Any) -> StorageId:
    """Parse a persistent id ("storage", class, key, location, numel[, view]).

    Raises MalformedError for any other id, RefusedError for an unknown storage class.
    """
    if type(pid) is not tuple or len(pid) not in (5, 6) or pid[0] != "storage":
        raise MalformedError("has a persistent id that is not that of a storage")
    _, cls, key, location, numel = pid[:5]
    dtype = storage_dtype(cls)
    if dtype is None:
        raise RefusedError(f"has a storage of class {brief(cls, 200)}, which is not known")
    # Keys are text, but integers in the oldest files.
    if type(key) is int and -MAX_BYTES < key < MAX_BYTES:
        key = str(key)
    if type(key) is not str or type(location) is not str or type(numel) is not int:
        raise MalformedError("has a persistent id whose parts have the wrong types")
    if not 0 <= numel < MAX_BYTES // dtype.itemsize:
        raise MalformedError(f"has a storage with the invalid size of {brief(numel)} elements")
    return StorageId(dtype, key, location, numel, pid[5] if len(pid) == 6 else None)


class FirstDtypes:
    """The dtypes with which a pickle first refers to `count` storages, by the storage's number.

    torch.load creates a storage when it first meets its key, and returns it for every later id with that key, whatever
    dtype the later id states.
    """

    # One byte per storage: there may be a million.
    _CODES: ClassVar[dict[str, int]] = {name: code for code, name in enumerate(DTYPES, 1)}

    def __init__(self, count: int) -> None:
        self._codes = bytearray(count)

    def agrees(self, number: int, dtype: DType) -> bool:
        """Return whether `dtype` is that of the first reference to storage `number`, which is remembered."""
        code = self._CODES[dtype.name]
        if not self._codes[number]:
            self._codes[number] = code
        return self._codes[number] == code


def in_order(tensor: LazyTensor, storage: Storage) -> LazyTensor:
    """Return `tensor`, a view of `storage`, in little-endian byte order."""
    if not storage.swapped or itemsize_of_components(tensor.dtype) == 1:
        return tensor
    return Convert(tensor, Swap(itemsize_of_components(tensor.dtype)), tensor.dtype)
