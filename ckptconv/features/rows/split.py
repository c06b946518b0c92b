"""Splits whole rows into their tensors: ids, header, weight, optimizer state, padding."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptconv.engine.reader import TensorReader
from ckptconv.errors import UNWRITTEN, CorruptError, UsageError, leaving
from ckptconv.features.rows.columns import padding, part
from ckptconv.features.rows.layout import METADATA_KEY, PAD, RowLayout, dump
from ckptconv.features.rows.options import CONVERTING, LAYOUT, ROWS, RowOptions
from ckptconv.features.rows.tables import RowTable, layout_of, open_table
from ckptconv.formats.model_files import SUFFIX
from ckptconv.formats.source import Source
from ckptconv.options.option import checked
from ckptconv.options.table import Options
from ckptconv.outputs import safetensors
from ckptconv.outputs.planning import Output, output_of
from ckptconv.outputs.targets import Target, nearest_directory, resolve_output
from ckptconv.plan import Checked, FilePlan
from ckptconv.process import of_feature
from ckptconv.publish.producing import produce
from ckptconv.result import Report
from ckptconv.storage.files import Readers
from ckptconv.storage.paths import Paths, basename, listed, normalize
from ckptconv.storage.progress import counter, shown
from ckptconv.tensors.kernels import is_zero
from ckptconv.tensors.lazy import Narrow

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckptconv.options.keywords import RowsOptions
    from ckptconv.storage.progress import AnyProgress

# Bytes of rows whose padding is read before deciding whether to keep padding.
_LOOK = 1 << 18


@leaving(UNWRITTEN)
@shown
@checked({**CONVERTING, **LAYOUT, "names": ROWS["names"], "decode": ROWS["decode"]}, called="split_rows")
def split(
    table: Paths,
    output: str | os.PathLike[str],
    *,
    names: Sequence[str] = (),
    decode: bool = False,
    progress: AnyProgress | None = None,
    on_total: Callable[[int], object] | None = None,
    before_commit: Callable[[], object] | None = None,
    **options: Unpack[RowsOptions],
) -> Report:
    """Split a table of whole rows into tensors at `output`: a name that ends in .safetensors, or a directory.

    `table` is a checkpoint, or several that each hold a part of the table. `names` are the tensors in each that make up
    the table, in order; by default the only table. With `decode` the header becomes timestamp, count and used, else one
    number. The padding is kept as `pad` if any byte of it is not zero. `options` are the fields of `RowOptions`, which
    describe the layout of a row (embedding_dim, method and others), and those of `Options`. `progress`, `on_total` and
    `before_commit` are as in `convert`. Raises a `CkptconvError`; then no new file exists at `output`.

    Examples:
        >>> report = ckptconv.split_rows("kv.pt", "parts", embedding_dim=64, method="adagrad")
        >>> report.counts
        {'rows': 10, 'bytes a row': 152}
    """
    started = time.monotonic()
    paths, row_options = listed(table), RowOptions.take(further := dict(options))
    chosen = Options(**further)
    target = resolve_output(normalize(output), chosen)
    if target.kind == "torch":
        raise UsageError(
            f"{target.path} is not a name for safetensors, which rows split writes.",
            "Give a name that ends in .safetensors, or a directory.",
        )
    chosen = chosen.replaced(spool_dir=chosen.spool_dir or nearest_directory(target.path))
    sources, rows = open_table(paths, names, chosen)
    layout = layout_of(rows, row_options, paths[0])
    keep = _has_padding(rows, layout, chosen)
    while True:
        planned = plan_split(sources, rows, layout, target, decode=decode, keep_padding=keep)
        try:
            verify = None
            if chosen.asked("verify"):
                verify = of_feature("rows", "with_verify").verifier_of_split(rows, planned, chosen)
            report = produce(sources, [planned], chosen, started, counter(progress), on_total, before_commit, verify)
        except _NotZeroError:
            # Rare: padding that is not zero is usually so from the first rows on.
            keep = True
        else:
            return replace(report, counts=_counts(rows, layout, kept=keep))


def plan_split(
    sources: Sequence[Source], table: RowTable, layout: RowLayout, target: Target, *, decode: bool, keep_padding: bool
) -> Output:
    """Plan the tensors of `table`. Pure.

    Without `keep_padding`, executing the plan raises _NotZeroError if padding is not zero.
    """
    tensors = {field.name: part(table.tensor, field) for field in layout.fields(decode=decode)}
    pad = padding(table.tensor, layout)
    if pad is not None and keep_padding:
        tensors[PAD] = pad
    name = basename(target.path) if target.is_file else f"model{SUFFIX}"
    file = safetensors.file_plan(name, tensors, {"format": "pt", METADATA_KEY: dump(layout, table.name)})
    if pad is not None and not keep_padding:
        file = FilePlan(file.name, file.size, (*file.parts, Checked(file.size, pad, _check_zero)))
    return output_of("rows", sources, target, Options(), (file,), {})._replace(by="split")


class _NotZeroError(CorruptError):
    """Padding that the plan leaves out is not zero: another plan is needed, which keeps it."""


def _check_zero(data: memoryview) -> None:
    if not is_zero(data):
        raise _NotZeroError(f"{PAD} is not zero, so it cannot be omitted.")


def _has_padding(table: RowTable, layout: RowLayout, options: Options) -> bool:
    """Return whether the padding of the first rows has a byte other than zero."""
    pad = padding(table.tensor, layout)
    rows = min(table.tensor.shape[0], max(_LOOK // layout.row_bytes, 1))
    if pad is None or not rows:
        return False
    first = Narrow(pad, 0, 0, rows)
    with Readers(dict(options.storage_options), options.spool_dir) as readers:
        reader = TensorReader(first, readers, 2 * max(_LOOK, first.nbytes))
        return not is_zero(reader.read(0, first.nbytes))


def _counts(table: RowTable, layout: RowLayout, *, kept: bool) -> dict[str, int]:
    counts = {"rows": table.tensor.shape[0], "bytes a row": layout.row_bytes}
    return counts | ({"bytes of padding a row": layout.pad_bytes} if kept else {})
