"""Chooses the tensors of whole rows among others, and assembles their table. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptconv.errors import CorruptError, UnsupportedError, UsageError
from ckptconv.features.rows.columns import check_rows, column
from ckptconv.features.rows.layout import METADATA_KEY, PAD, Field, RowLayout, make, optimizer_named, parse
from ckptconv.features.rows.options import RowOptions
from ckptconv.features.rows.tables import RowsContents
from ckptconv.options.kinds import MOST_ITEMS
from ckptconv.tensors.computing import Join, Joined
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Concat, LazyTensor, View, Zeros
from ckptconv.text import some

DEFAULT_NAME = "weight"
_SHOWN = 8


@dataclass(frozen=True)
class RowParts:
    """The tensors from which a table is packed, by their part in a row.

    Also the layout of the rows, their number, and the name of the table.
    """

    layout: RowLayout
    rows: int
    tensors: dict[str, LazyTensor]
    name: str
    warnings: tuple[str, ...] = ()

    @classmethod
    def choose(cls, content: RowsContents, names: Mapping[str, str], options: RowOptions) -> RowParts:
        """Choose the parts in `content`. Raises a `CkptconvError` if one is missing or does not fit."""
        layout, table = _layout(content, names, options)
        places = _places(content, layout, names)
        fields = layout.fields(decode="metadata" not in places)
        lacking = [field.name for field in fields if field.name not in places]
        if lacking:
            # If all parts of the metadata are missing, name the metadata.
            whole = set(_HEADER) <= set(lacking)
            raise _missing("metadata" if whole else lacking[0], content)
        weight = content.tensors[places["weight"]]
        rows = weight.shape[0] if weight.shape else 0
        tensors = {f.name: _fitted(content.tensors[places[f.name]], f, layout, rows, content.path) for f in fields}
        if PAD in places:
            tensors[PAD] = _fitted_pad(content.tensors[places[PAD]], layout, rows, content.path)
        if METADATA_KEY not in content.metadata:
            return cls(layout, rows, tensors, table)
        used = {places[name] for name in tensors}
        left = [name for name in content.tensors if name not in used]
        warnings = (f"not packed, because they are not parts of a row: {some(left)}",) if left else ()
        return cls(layout, rows, tensors, table, warnings)

    @property
    def pad(self) -> LazyTensor:
        """The bytes of the padding, [N, bytes]; zeros if no tensor has them."""
        return self.tensors.get(PAD) or Zeros(DTYPES["uint8"], (self.rows, self.layout.pad_bytes))

    def table(self) -> LazyTensor:
        """Return the table [N, items]."""
        tensors = dict(self.tensors)
        if _HEADER[0] in tensors:
            parts = tuple(View(tensors[part], tensors[part].dtype, (self.rows,)) for part in _HEADER)
            tensors["metadata"] = Joined(parts, _METADATA, DTYPES["int64"])
        pieces: dict[int, LazyTensor] = {
            field.offset: View(tensors[field.name], DTYPES["uint8"], (self.rows, field.nbytes))
            for field in self.layout.fields()
        }
        at = 0
        for gap in self.layout.gaps():
            pieces[gap.offset] = column(self.pad, at, gap.dtype, gap.nbytes)
            at += gap.nbytes
        joined = Concat(tuple(piece for _, piece in sorted(pieces.items())), 1)
        return View(joined, DTYPES[self.layout.weight_dtype], (self.rows, self.layout.row_items))


# The parts of the metadata, and how they are joined: bytes, first bit, number of bits.
_HEADER = ("timestamp", "count", "used")
_METADATA = Join(((4, 0, 32), (4, 32, 31), (1, 63, 1)), 8)


def _layout(content: RowsContents, names: Mapping[str, str], options: RowOptions) -> tuple[RowLayout, str]:
    """Return the layout of the rows and the name of their table: as recorded, else by the options."""
    record = content.metadata.get(METADATA_KEY)
    if record is not None:
        layout, table = parse(record, content.path)
        _check_agrees(layout, options, content.path)
        return layout, table
    weight = content.tensors.get(_name_of("weight", content, names))
    if weight is None:
        raise _missing("weight", content)
    return make(_completed(options, weight), weight.dtype.name), DEFAULT_NAME


def _places(content: RowsContents, layout: RowLayout, names: Mapping[str, str]) -> dict[str, str]:
    """Return the names of the tensors that are parts of such rows, by part.

    Raises UsageError if an entry of `names` is not a part, or names no tensor.
    """
    parts = list(dict.fromkeys(f.name for f in (*layout.fields(), *layout.fields(decode=True))))
    for part, name in names.items():
        if part not in (*parts, PAD):
            raise UsageError(f"{part!r} is not a part of these rows.", f"It has {', '.join((*parts, PAD))}.")
        if name not in content.tensors:
            raise UsageError(f"{content.path} has no tensor {name!r}.")
    places = {part: _name_of(part, content, names) for part in (*parts, PAD)}
    return {part: name for part, name in places.items() if name in content.tensors}


def _name_of(part: str, content: RowsContents, names: Mapping[str, str]) -> str:
    """Return the name of the tensor for `part`: the given one, the part's own, or the only name that ends with it."""
    if part in names or part in content.tensors:
        return names.get(part, part)
    ending = [name for name in content.tensors if name.endswith(f".{part}")]
    return ending[0] if len(ending) == 1 else part


def _missing(part: str, content: RowsContents) -> UsageError:
    names = ", ".join(list(content.tensors)[:_SHOWN])
    return UsageError(
        f"{content.path} has no tensor called {part}, which every row requires. It has {names or 'none'}.",
        f"Specify the tensor: --column {part}=NAME.",
    )


def _completed(options: RowOptions, weight: LazyTensor) -> RowOptions:
    """Return `options` with the embedding dimension of the weight."""
    if len(weight.shape) != 2 or not 0 < weight.shape[1] <= MOST_ITEMS:
        raise UnsupportedError(f"The weight has the shape {list(weight.shape)}; expected [rows, D].")
    if options.embedding_dim not in (None, weight.shape[1]):
        raise UsageError(
            f"The weight has rows of {weight.shape[1]} items, but --embedding-dim is {options.embedding_dim}."
        )
    return options.replaced(embedding_dim=weight.shape[1])


def _check_agrees(layout: RowLayout, options: RowOptions, where: str) -> None:
    """Raise UsageError if the record contradicts one of the options."""
    for key, value in vars(options).items():
        is_method = key == "method"
        recorded = layout.optimizer if is_method else getattr(layout, key)
        if value is not None and recorded != (optimizer_named(value) if is_method else value):
            raise UsageError(
                f"{where} records {layout.describe()}, but --{key.replace('_', '-')} is {value}.",
                f"Omit --{key.replace('_', '-')}.",
            )


def _fitted(tensor: LazyTensor, field: Field, layout: RowLayout, rows: int, where: str) -> LazyTensor:
    """Check that `tensor` fits `field` of the rows, and return it.

    Momentum may have the form in which it is saved next to a table, with its bits viewed as the weight's dtype. Raises
    CorruptError for another number of rows, UsageError for another width or dtype.
    """
    check_rows(tensor, rows, field.name, where)
    shape = [rows] if field.items is None else [rows, field.items]
    same_kind = tensor.dtype == field.dtype or (
        field.dtype.kind == "u" and (tensor.dtype.kind, tensor.dtype.itemsize) == ("i", field.dtype.itemsize)
    )
    as_is = same_kind and tensor.numel == rows * (field.items or 1)
    viewed = tensor.dtype.name == layout.weight_dtype and tensor.nbytes == rows * field.nbytes
    if not (as_is or (viewed and field.offset >= layout.weight.stop)):
        raise UsageError(
            f"{where}: {field.name} is {list(tensor.shape)} of {tensor.dtype}, but rows of this layout require {shape} "
            f"of {field.dtype}.",
            "Parts are never cast: specify the dtype, or convert the tensor first.",
        )
    return tensor


def _fitted_pad(pad: LazyTensor, layout: RowLayout, rows: int, where: str) -> LazyTensor:
    check_rows(pad, rows, PAD, where)
    if pad.dtype.name != "uint8" or pad.nbytes != rows * layout.pad_bytes:
        raise CorruptError(
            f"{where}: {PAD} is {list(pad.shape)} of {pad.dtype}, but rows of this layout have {layout.pad_bytes} "
            "bytes of padding."
        )
    return pad if len(pad.shape) == 2 else View(pad, pad.dtype, (rows, layout.pad_bytes))
