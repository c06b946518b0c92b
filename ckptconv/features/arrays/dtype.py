"""The element type of a lazy tensor, as programs for torch and numpy compare it."""

from __future__ import annotations

import sys
from typing import Any

from ckptconv.features.arrays.frameworks import dtype_of_numpy
from ckptconv.tensors.dtypes import DType


class ElementType:
    """An element type. It equals torch's and numpy's dtype, and either's name; `numpy.dtype` takes it.

    `name` is torch's, `code` safetensors' (None if it has none), `itemsize` in bytes; `kind` is one of f float, i
    signed, u unsigned, b bool, c complex, x other bits.
    """

    __slots__ = ("_dtype",)

    def __init__(self, dtype: DType) -> None:
        self._dtype = dtype

    @property
    def name(self) -> str:
        return self._dtype.name

    @property
    def code(self) -> str | None:
        return self._dtype.code

    @property
    def itemsize(self) -> int:
        return self._dtype.itemsize

    @property
    def kind(self) -> str:
        return self._dtype.kind

    @property
    def dtype(self) -> Any:
        """numpy's dtype. Raise AttributeError if it has none."""
        known = dtype_of_numpy(self.name)
        if known is None:
            raise AttributeError(f"numpy has no dtype {self.name}")
        return known

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ElementType):
            return self._dtype == other._dtype
        if isinstance(other, DType):
            return self._dtype == other
        if isinstance(other, str):
            return other.removeprefix("torch.") in (self.name, self.code)
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(other, (numpy.dtype, type)):
            try:
                return bool(numpy.dtype(other) == self.dtype)
            except (TypeError, AttributeError):
                return False
        return type(other).__module__ == "torch" and str(other) == f"torch.{self.name}"

    def __hash__(self) -> int:
        return hash(self._dtype)

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__

    def __reduce__(self) -> tuple[type[ElementType], tuple[DType]]:
        return ElementType, (self._dtype,)
