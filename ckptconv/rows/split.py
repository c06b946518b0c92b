"""Whole rows, split into the tensors that they consist of: ids, header, weight, optimizer state, padding."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ckptconv.conversion import Report, produce
from ckptconv.errors import UsageError
from ckptconv.formats.source import Source
from ckptconv.kernels import is_zero
from ckptconv.move import Progress, TensorReader
from ckptconv.options import Options
from ckptconv.outputs import safetensors
from ckptconv.plan import Blank, FilePlan, NotBlankError
from ckptconv.planning import Output, output_of
from ckptconv.spool import SpoolingReaders
from ckptconv.storage import basename, normalize
from ckptconv.targets import Target, beside, resolve_output
from ckptconv.tensors import Bits, Concat, Convert, LazyTensor, Narrow

from .layout import METADATA_KEY, PAD, Asked, Field, Layout, check_width, could_be, dump, make
from .tables import Paths, Table, as_paths, column, open_table

# Of the padding so many bytes of rows are looked at before it is decided whether it is kept.
_LOOK = 1 << 18
# Parts of a header that are bits of a field: the first of them, and how many.
_DECODED = {"count": (0, 31), "used": (7, 1)}


def split(
    table: Paths,
    output: str | os.PathLike[str],
    *,
    names: Sequence[str] = (),
    decode: bool = False,
    progress: Progress | None = None,
    announce: Callable[[int], None] | None = None,
    publishing: Callable[[], None] | None = None,
    **options: Any,
) -> Report:
    """Split a table of whole rows into tensors at `output`: a name that ends in .safetensors, or a directory.

    `table` is a checkpoint, or several of which each holds a part; `names` are the tensors in each that make up the
    table, in order, by default the only table. With `decode` the header comes as timestamp, count and used, else as one
    number. The padding is kept as `pad` where any byte of it is not zero.
    `options` say what is in a row, by the fields of `Asked`: embedding_dim, optimizer and others; the rest are fields
    of `Options`. `progress`, `announce` and `publishing` are as in `convert`.
    Raises a `CkptconvError`; then nothing new stands at `output`.
    """
    started = time.monotonic()
    paths, asked = as_paths(table), Asked.take(options)
    chosen = Options(**options)
    target = resolve_output(normalize(output), chosen)
    if target.is_torch:
        raise UsageError(
            f"{target.path}: what rows are split into is kept as safetensors.",
            "Give a name that ends in .safetensors, or a directory.",
        )
    chosen = replace(chosen, spool_dir=chosen.spool_dir or beside([target]))
    sources, found = open_table(paths, names, chosen)
    layout = layout_of(found, asked, paths[0])
    keep = _has_padding(found, layout, chosen)
    while True:
        planned = plan_split(sources, found, layout, target, decode=decode, keep_padding=keep)
        try:
            report = produce(
                sources, [planned], chosen, started, progress=progress, announce=announce, publishing=publishing
            )
        except NotBlankError:
            # Rare: where padding is not zero, it is so from the first rows on, as a rule.
            keep = True
        else:
            return replace(report, counts=_counts(found, layout, kept=keep))


def layout_of(table: Table, asked: Asked, where: str) -> Layout:
    """The layout of `table`, which was `asked` for. Raises UsageError where it is not one that the table can have."""
    items, dtype = table.tensor.shape[1], table.tensor.dtype.name
    try:
        layout = make(asked, dtype)
    except UsageError as error:
        if error.hint:
            raise
        raise UsageError(f"{where}: {error.message}", could_be(items, dtype, asked)) from error
    check_width(layout, items, f"{where}: {table.name!r}")
    return layout


def plan_split(
    sources: Sequence[Source], table: Table, layout: Layout, target: Target, *, decode: bool, keep_padding: bool
) -> Output:
    """The plan for the tensors of `table`. Pure. Without `keep_padding`, carrying it out finds padding that is not
    zero."""
    tensors = {field.name: part(table.tensor, field) for field in layout.fields(decode=decode)}
    pad = padding(table.tensor, layout)
    if pad is not None and keep_padding:
        tensors[PAD] = pad
    name = basename(target.path) if target.is_file else f"model{safetensors.SUFFIX}"
    file = safetensors.file_plan(name, tensors, {"format": "pt", METADATA_KEY: dump(layout, table.name)})
    if pad is not None and not keep_padding:
        file = FilePlan(file.name, file.size, (*file.parts, Blank(file.size, pad, PAD)))
    return output_of("rows", sources, target, Options(), (file,), {})


def part(table: LazyTensor, field: Field) -> LazyTensor:
    """The tensor that `field` of every row of `table` is."""
    found = column(table, field.offset, field.dtype, field.items)
    if field.name not in _DECODED:
        return found
    size = field.dtype.itemsize
    return Convert(found, Bits(size, *_DECODED[field.name], size), field.dtype)


def padding(table: LazyTensor, layout: Layout) -> LazyTensor | None:
    """The bytes of every row that are in no field, [N, bytes]; None where there are none."""
    gaps = [column(table, gap.offset, gap.dtype, gap.items) for gap in layout.gaps()]
    return Concat(tuple(gaps), 1) if len(gaps) > 1 else gaps[0] if gaps else None


def _has_padding(table: Table, layout: Layout, options: Options) -> bool:
    """Whether the padding of the first rows has something in it."""
    pad = padding(table.tensor, layout)
    rows = min(table.tensor.shape[0], max(_LOOK // layout.row_bytes, 1))
    if pad is None or not rows:
        return False
    first = Narrow(pad, 0, 0, rows)
    with SpoolingReaders(dict(options.storage_options), options.spool_dir) as readers:
        reader = TensorReader(first, readers, first.nbytes)
        return not is_zero(reader.read(0, first.nbytes))


def _counts(table: Table, layout: Layout, *, kept: bool) -> dict[str, int]:
    counts = {"rows": table.tensor.shape[0], "bytes a row": layout.row_bytes}
    return counts | ({"bytes of padding a row": layout.pad_bytes} if kept else {})
