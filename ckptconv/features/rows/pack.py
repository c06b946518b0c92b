"""Packs the tensors of whole rows into the table again, bit for bit."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptconv.errors import UNWRITTEN, UsageError, leaving
from ckptconv.features.rows.layout import METADATA_KEY
from ckptconv.features.rows.options import CONVERTING, PACKING, RowOptions
from ckptconv.features.rows.parts import RowParts
from ckptconv.features.rows.tables import RowsContents, contents, open_all
from ckptconv.features.torch_files.tree import plan_tree
from ckptconv.formats.model_files import SUFFIX
from ckptconv.formats.source import Source
from ckptconv.options.option import checked
from ckptconv.options.table import Options
from ckptconv.outputs import safetensors
from ckptconv.outputs.planning import Output, output_of
from ckptconv.outputs.targets import Target, nearest_directory, resolve_output
from ckptconv.plan import FilePlan
from ckptconv.process import of_feature
from ckptconv.publish.producing import produce
from ckptconv.result import Report
from ckptconv.storage.paths import Paths, basename, listed, normalize
from ckptconv.storage.progress import counter, shown
from ckptconv.tensors.lazy import LazyTensor

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckptconv.options.keywords import RowsOptions
    from ckptconv.storage.progress import AnyProgress


@leaving(UNWRITTEN)
@shown
@checked({**CONVERTING, **PACKING}, called="pack_rows")
def pack(
    parts: Paths,
    output: str | os.PathLike[str],
    *,
    names: Mapping[str, str] | None = None,
    name: str = "",
    progress: AnyProgress | None = None,
    on_total: Callable[[int], object] | None = None,
    before_commit: Callable[[], object] | None = None,
    **options: Unpack[RowsOptions],
) -> Report:
    """Pack tensors into a table of whole rows at `output`: safetensors, or a file for torch.load, by its suffix.

    `parts` is a checkpoint with the tensors, or several. `names` are the names of the tensors by part, {"weight": …};
    by default a tensor has the name of its part. `name` is the table's name. The output of `split` records its layout.
    For other inputs `options` describe it, by the fields of `RowOptions`. The other arguments are as for `split`.
    Raises a `CkptconvError`; then no new file exists at `output`.

    Examples:
        >>> report = ckptconv.split_rows("kv.pt", "parts", embedding_dim=64, method="adagrad")
        >>> ckptconv.pack_rows("parts", "again.pt").tensors
        1
    """
    started = time.monotonic()
    row_options = RowOptions.take(further := dict(options))
    chosen = Options(**further)
    target = resolve_output(normalize(output), chosen)
    chosen = chosen.replaced(spool_dir=chosen.spool_dir or nearest_directory(target.path))
    sources = open_all(listed(parts), chosen)
    content = _merged([contents(source) for source in sources])
    chosen_parts = RowParts.choose(content, names or {}, row_options)
    name = name or chosen_parts.name
    planned = _plan(sources, chosen_parts, target, name)
    verify = None
    if chosen.asked("verify"):
        verify = of_feature("rows", "with_verify").verifier_of_pack(chosen_parts, name, planned, chosen)
    report = produce(sources, [planned], chosen, started, counter(progress), on_total, before_commit, verify)
    counts = {"rows": chosen_parts.rows, "bytes a row": chosen_parts.layout.row_bytes}
    return replace(report, counts=counts, warnings=[*report.warnings, *chosen_parts.warnings])


def _merged(contents_of_all: Sequence[RowsContents]) -> RowsContents:
    """Merge the contents of several checkpoints. Raises UsageError for a name that two of them have."""
    tensors: dict[str, LazyTensor] = {}
    for part in contents_of_all:
        twice = [name for name in part.tensors if name in tensors]
        if twice:
            raise UsageError(
                f"{twice[0]!r} is in {part.path} and in another input.", "Give inputs without common tensor names."
            )
        tensors.update(part.tensors)
    records = [part.metadata for part in contents_of_all if METADATA_KEY in part.metadata]
    if len(records) > 1:
        raise UsageError(f"{len(records)} of the inputs are split tables; only one table can be packed per run.")
    return RowsContents(contents_of_all[0].path, tensors, {}, records[0] if records else {})


def _plan(sources: Sequence[Source], parts: RowParts, target: Target, name: str) -> Output:
    table = parts.table()
    if target.kind == "torch":
        file: FilePlan = plan_tree(basename(target.path), {name: table})
    else:
        file_name = basename(target.path) if target.is_file else f"model{SUFFIX}"
        file = safetensors.file_plan(file_name, {name: table}, {"format": "pt"})
    return output_of("rows", sources, target, Options(), (file,), {})._replace(by="pack")
