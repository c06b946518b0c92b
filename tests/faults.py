"""Faults planted into the package for one test: a function, a method or a kernel that does something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ckptconv.tensors import kernels
from ckptconv.tensors.computing import Tile

Plant = Callable[[pytest.MonkeyPatch], None]


def wrapped(owner: Any, name: str, wrong: Callable[..., Any]) -> Plant:
    """`owner.name` is `wrong` instead, which is called with the right one and its arguments."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        right = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **named: wrong(right, *args, **named))

    return plant


def kernel(kind: type[Any], wrong: Callable[..., int]) -> Plant:
    """The kernels of this kind are carried out by `wrong(right, kernel, data, out)`."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        right = kernels.FUNCTIONS[kind]
        patch.setitem(kernels.FUNCTIONS, kind, lambda *args: wrong(right, *args))

    return plant


def spoiled(kind: type[Any], spoil: Callable[[Any, memoryview, memoryview], object]) -> Plant:
    """The kernels of this kind are carried out, and then `spoil(kernel, data, out)`."""

    def wrong(right: Callable[..., int], made_by: Any, data: memoryview, out: memoryview) -> int:
        overflows = right(made_by, data, out)
        spoil(made_by, data, out)
        return overflows

    return kernel(kind, wrong)


def one_bit(kernel: Any, data: memoryview, out: memoryview) -> None:
    out[-1] ^= 1


def other_fields(kind: type[Any], **fields: Callable[[Any], Any]) -> Plant:
    """The kernels of this kind have other fields: what each function gives for the kernel."""

    def wrong(right: Callable[..., int], given: Any, data: memoryview, out: memoryview) -> int:
        return right(given._replace(**{name: made(given) for name, made in fields.items()}), data, out)

    return kernel(kind, wrong)


def tiles(kind: type[Any], spoil: Callable[[Tile, np.ndarray], object] | None = None, **fields: Any) -> Plant:
    """Tiles of a kernel of this kind, which has other fields, or whose results `spoil` then changes, as bytes."""

    def wrong(right: Callable[..., int], tile: Tile, data: memoryview, out: memoryview) -> int:
        if not isinstance(tile.kernel, kind):
            return right(tile, data, out)
        other = tile.kernel._replace(**{name: made(tile.kernel) for name, made in fields.items()})
        overflows = right(tile._replace(kernel=other), data, out)
        if spoil is not None:
            spoil(tile, np.frombuffer(out, "u1"))
        return overflows

    return kernel(Tile, wrong)
