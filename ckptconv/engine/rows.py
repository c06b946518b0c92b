"""Tensors that are columns of the same rows, and the choice of those to read together, a few rows at a time. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

from ckptconv.plan import Checked, Data
from ckptconv.tensors.lazy import Concat, Convert, LazyTensor, Stored, Tagged, View
from ckptconv.tensors.moves import File

Shared: TypeAlias = "tuple[Data | Checked, StridedRows]"


def sharing_rows(parts: Iterable[Data | Checked], unit: int) -> list[list[Shared]]:
    """Return groups of `parts` that are next to each other in the same rows and take most of each row."""
    strided = [(part, strided_part) for part in parts if (strided_part := strided_rows(part.tensor)) is not None]
    groups: dict[object, list[list[Shared]]] = {}
    for part, strided_part in sorted(strided, key=lambda pair: pair[1].offsets):
        known = groups.setdefault(strided_part.rows, [])
        if known and strided_part.shares_rows_of(known[-1][0][1]):
            known[-1].append((part, strided_part))
        else:
            known.append([(part, strided_part)])
    return [group for known in groups.values() for group in known if _worth_sharing(group, unit)]


def _worth_sharing(group: list[Shared], unit: int) -> bool:
    """Return whether one read of `group` costs less than a read of each tensor, which only crosses small gaps."""
    _, (rows, _) = group[0]
    widest = max(distance for _, _, distance in rows)
    taken = sum(part.tensor.nbytes for part, _ in group)
    return len(group) > 1 and widest <= unit and 2 * taken >= sum(count * distance for _, count, distance in rows)


def row_blocks(group: list[Shared], unit: int) -> Iterator[list[tuple[Data | Checked, int, int]]]:
    """Yield `group` as blocks of as many rows as fit into `unit` bytes: of each part, the bytes from start to stop."""
    _, (rows, _) = group[0]
    count = sum(count for _, count, _ in rows)
    step = unit // max(distance for _, _, distance in rows)
    widths = [(part, part.tensor.nbytes // count) for part, _ in group]
    for first in range(0, count, step):
        last = min(first + step, count)
        yield [(part, first * width, last * width) for part, width in widths]


class StridedRows(NamedTuple):
    """The place of a tensor that takes the same bytes from each of several consecutive rows of equal length.

    `rows` are (file, number of rows, bytes from one to the next), one for each part of a joined tensor. `offsets` are
    the first byte of each part. Tensors with the same `rows` may share them.
    """

    rows: tuple[tuple[File, int, int], ...]
    offsets: tuple[int, ...]

    def shares_rows_of(self, first: StridedRows) -> bool:
        """Return whether both tensors are in the same rows, and this one is not before `first`."""
        return self.rows == first.rows and all(
            0 <= mine - theirs < distance
            for mine, theirs, (_, _, distance) in zip(self.offsets, first.offsets, self.rows, strict=True)
        )


def strided_rows(tensor: LazyTensor) -> StridedRows | None:
    """Return the strided rows of `tensor`, one index of its first dimension to a row.

    Return None for a tensor that is dense or in another order.
    """
    if isinstance(tensor, Tagged):
        return strided_rows(tensor.tensor)
    if isinstance(tensor, (View, Convert)):
        return strided_rows(tensor.tensor) if tensor.shape[:1] == tensor.tensor.shape[:1] else None
    if isinstance(tensor, Concat):
        parts = [rows_of_part for part in tensor.parts if (rows_of_part := strided_rows(part)) is not None]
        if not parts or len(parts) < len(tensor.parts):
            return None
        if tensor.dim:
            first = min(parts, key=lambda part: part.offsets)
            return first if all(part.shares_rows_of(first) for part in parts) else None
        rows, offsets = ([*itertools.chain(*column)] for column in zip(*parts, strict=True))
        return StridedRows(tuple(rows), tuple(offsets))
    if not isinstance(tensor, Stored) or not tensor.shape or not tensor.numel:
        return None
    item = tensor.dtype.itemsize
    distance = tensor.strides[0] * item
    width = item + sum((n - 1) * step for n, step in zip(tensor.shape[1:], tensor.strides[1:], strict=True)) * item
    if width >= distance:
        return None
    return StridedRows(((tensor.file, tensor.shape[0], distance),), (tensor.offset,))
