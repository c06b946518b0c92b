"""Returns the parts of a table's rows as separate tensors, which are views of its bytes."""

from __future__ import annotations

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.features.rows.layout import Field, RowLayout
from ckptconv.tensors.computing import Bits
from ckptconv.tensors.dtypes import DTYPES, DType
from ckptconv.tensors.lazy import Concat, Convert, LazyTensor, Narrow, Stored, Tagged, View, Zeros

# Parts of a header that are some bits of a field: the first bit, and the number of bits.
_DECODED = {"count": (0, 31), "used": (7, 1)}


def column(table: LazyTensor, offset: int, dtype: DType, items: int | None) -> LazyTensor:
    """Return `items` elements of `dtype` from byte `offset` of each row of `table` [N, …], without a cast.

    The shape is [N, items], or [N] if `items` is None. Raises UnsupportedError for a table whose stored bytes must be
    converted, because they are big-endian or negated.
    """
    shape = (table.shape[0],) if items is None else (table.shape[0], items)
    if isinstance(table, Tagged):
        return column(table.tensor, offset, dtype, items)
    if isinstance(table, Concat) and table.dim == 0:
        return Concat(tuple(column(part, offset, dtype, items) for part in table.parts))
    if isinstance(table, Zeros):
        return Zeros(dtype, shape)
    if isinstance(table, Narrow) and table.dim == 0:
        return Narrow(column(table.tensor, offset, dtype, items), 0, table.start, table.length)
    if isinstance(table, Convert):
        raise UnsupportedError(
            "The bytes of this table must be converted first: the table was saved on a big-endian machine, or is "
            "negated."
        )
    row = table.shape[1] * table.dtype.itemsize
    if isinstance(table, Stored) and (table.strides[1] == 1 or table.shape[1] == 1):
        item = dtype.itemsize
        distance = table.strides[0] * table.dtype.itemsize if table.shape[0] > 1 else row
        if distance % item == 0:
            return Stored(table.file, table.offset + offset, dtype, shape, (distance // item, 1)[: len(shape)])
    size = dtype.itemsize * (items or 1)
    view = View(table, DTYPES["uint8"], (table.shape[0], row))
    return View(Narrow(view, 1, offset, size), dtype, shape)


def check_rows(tensor: LazyTensor, count: int, called: str, where: str) -> None:
    """Raise CorruptError unless `tensor` has a row or an element for each of `count` rows."""
    if not tensor.shape or tensor.shape[0] != count:
        raise CorruptError(f"{where}: {called} has the shape {list(tensor.shape)}, but the table has {count} rows.")


def part(table: LazyTensor, field: Field) -> LazyTensor:
    """Return the tensor of `field` of every row of `table`."""
    values = column(table, field.offset, field.dtype, field.items)
    if field.name not in _DECODED:
        return values
    size = field.dtype.itemsize
    return Convert(values, Bits(size, *_DECODED[field.name], size), field.dtype)


def padding(table: LazyTensor, layout: RowLayout) -> LazyTensor | None:
    """Return the bytes of every row that are in no field, [N, bytes]; None if there are none."""
    gaps = [column(table, gap.offset, gap.dtype, gap.items) for gap in layout.gaps()]
    return Concat(tuple(gaps), 1) if len(gaps) > 1 else gaps[0] if gaps else None
