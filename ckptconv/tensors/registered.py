"""The kernels of features: the modules that have them, and tables that find them there.

A kernel of a feature is a named tuple in the first of its two modules, which is the engine's: this has entries for it
in `JOINING` or `TILING`, as `kernels` and `tile_kernels` have for the trunk's own. The second has the same arithmetic,
written independently, in `JOINED` or `TILES`, as `verification.arithmetic` has.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Home(NamedTuple):
    """Where kernels of a feature are: their names in JSON, and the two modules."""

    names: tuple[str, ...]
    engine: str
    evaluator: str


HOMES: tuple[Home, ...] = (
    Home(("xor", "overlay"), "ckptconv.features.deltas.kernels", "ckptconv.features.deltas.arithmetic"),
    Home(("low rank", "magnitude"), "ckptconv.features.merge.kernels", "ckptconv.features.merge.arithmetic"),
)


class ByKernel(dict[type[Any], T], Generic[T]):
    """What the trunk has for each of its kernels; and for one of a feature, when it is asked for, what the feature's
    table of the same name has."""

    def __init__(self, called: str, own: Mapping[type[Any], T], *, evaluating: bool = False) -> None:
        super().__init__(own)
        self._called, self._evaluating = called, evaluating

    def __missing__(self, kernel: type[Any]) -> T:
        for home in HOMES:
            if home.engine == kernel.__module__:
                module = import_module(home.evaluator if self._evaluating else home.engine)
                entry: T = getattr(module, self._called, {})[kernel]
                return self.setdefault(kernel, entry)
        raise KeyError(kernel)

    def find(self, kernel: type[Any]) -> T | None:
        """Return what there is for a kernel, None for one that is of another kind."""
        try:
            return self[kernel]
        except KeyError:
            return None


def type_of(name: str) -> type[Any] | None:
    """Return the kernel of a feature that is called so in JSON."""
    for home in HOMES:
        if name in home.names:
            module = import_module(home.engine)
            makers = {**getattr(module, "JOINING", {}), **getattr(module, "TILING", {})}
            kernel: type[Any] = next(kernel for kernel, maker in makers.items() if maker.name == name)
            return kernel
    return None
