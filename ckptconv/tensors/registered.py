"""The kernels of features: the modules that have them, and tables that find them there.

A kernel of a feature is a named tuple in its folder. The module `kernels` there, which is the engine's, has entries for
it in `JOINING` or `TILING`, as `kernels` and `tile_kernels` here have for the trunk's own. The module `with_verify` has
the same, written independently, in `JOINED` or `TILES`, for the feature `verify`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Home(NamedTuple):
    """The home of a feature's kernels: their names in JSON, and its folder."""

    names: tuple[str, ...]
    folder: str

    @property
    def engine(self) -> str:
        """The module that carries them out."""
        return f"{self.folder}.kernels"


HOMES: tuple[Home, ...] = (
    Home(("sum",), "ckptconv.features.sums"),
    Home(("dequantize", "quantize", "rescale", "largest", "quantize fp4"), "ckptconv.features.quantized"),
    Home(("xor", "overlay"), "ckptconv.features.deltas"),
    Home(("low rank", "magnitude"), "ckptconv.features.factors"),
    Home(("arithmetic",), "ckptconv.features.maps"),
)


class ByKernel(dict[type[Any], T], Generic[T]):
    """A table by kernel. An entry for a feature's kernel is looked up, when it is asked for, in the table of the same
    name that the feature has in its module `within`."""

    def __init__(self, called: str, entries: Mapping[type[Any], T], *, within: str = "kernels") -> None:
        super().__init__(entries)
        self._called, self._within = called, within

    def __missing__(self, kernel: type[Any]) -> T:
        for home in HOMES:
            if home.folder == kernel.__module__.rpartition(".")[0]:
                module = import_module(f"{home.folder}.{self._within}")
                entry: T = getattr(module, self._called, {})[kernel]
                return self.setdefault(kernel, entry)
        raise KeyError(kernel)

    def find(self, kernel: type[Any]) -> T | None:
        """Return the entry of a kernel, None for a kernel of another kind."""
        try:
            return self[kernel]
        except KeyError:
            return None
