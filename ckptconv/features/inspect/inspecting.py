"""The call `inspect`: opens a checkpoint, and returns its contents."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from ckptconv.features.inspect.options import INSPECTING, INSTEAD
from ckptconv.features.inspect.summary import Summary, forecast, summarize, tensors_of
from ckptconv.formats.detect import complete, with_layout
from ckptconv.formats.opening import opened_at
from ckptconv.formats.registered import reader_of
from ckptconv.formats.source import Opened, Source, source_of
from ckptconv.options.option import checked, filled
from ckptconv.options.table import CHANGING, Options
from ckptconv.process import no_garbage
from ckptconv.storage.location import Location
from ckptconv.storage.paths import normalize
from ckptconv.storage.progress import counter, shown
from ckptconv.storage.stores import pinned

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckptconv.options.keywords import InspectOptions
    from ckptconv.storage.progress import AnyProgress

# The modules of features whose `notes_of(source)` yields notes for users on a checkpoint, a sentence each.
NOTES: dict[str, str] = {
    "rows": "ckptconv.features.rows.tables",
}
# Fields of a summary that features fill: the module of each. Its `survey(source, tensors, options, storage_options,
# warnings)` returns the value, or None, and adds the reason to the warnings. The tensors are those that the options
# choose.
SURVEYS: dict[str, str] = {
    "quantized": "ckptconv.features.quantized.surveying",
    "roles": "ckptconv.features.model_checks.roles",
}


@shown
@checked(INSPECTING, INSTEAD)
def inspect(
    source: str | os.PathLike[str] | Source | Opened,
    *,
    progress: AnyProgress | None = None,
    on_total: Callable[[int], object] | None = None,
    **options: Unpack[InspectOptions],
) -> Summary:
    """Return the contents of `source`, a path or an opened checkpoint of any format.

    Only descriptions are read, no tensor data, unless `stats` asks for the statistics of all values. `key`, `include`
    and `exclude` choose tensors, as in a conversion, and `map` and `size` give them other names and layouts. With
    `as_`, a dtype, or `max_shard_size`, in bytes or as text, the summary has the files of such a conversion. `html`
    is a file for a page that shows all this; with `overwrite` it replaces other files than earlier pages too. `tag`,
    `inert`, `raw`, `family` and `spool_dir` are those of `open`.
    `progress` and `on_total` are those of `convert`, for the bytes of tensors that are read for statistics.

    Raise UsageError for a path that does not exist, or if `key` or a glob of `include` matches nothing, and the errors
    of opening the checkpoint.

    Examples:
        >>> summary = ckptconv.inspect("model.pt", stats=True)
        >>> summary.format, summary.bytes, summary.not_finite
        ('torch zip archive', 60, [])
        >>> [(tensor.name, tensor.dtype, tensor.shape, tensor.stats.mean) for tensor in summary.tensors]
        [('bias', 'float32', (3,), 0.0), ('weight', 'float32', (3, 4), 1.0)]
    """
    settings = filled(INSPECTING, options)
    stats, as_, max_shard_size = (settings.pop(name) for name in ("stats", "as_", "max_shard_size"))
    html, overwrite = settings.pop("html"), settings.pop("overwrite")
    chosen = {name: settings.pop(name) for name in ("include", "exclude")} | {"key": settings["key"]}
    which = Options(**chosen)
    if html:
        from ckptconv.features.reporting.report_file import PAGE, check_whole

        check_whole(html, PAGE, overwrite)
    opened, path, statistics, read = source_of(source, settings), "", None, 0
    # A million tensors are a million small objects that live until the end: do not scan them.
    with no_garbage():
        if isinstance(opened, Source):
            opened = complete(opened, key=settings["key"], inert=settings.get("inert", False))
            layout = {name: settings[name] for name in ("storage_options", *CHANGING) if name in settings}
            opened = with_layout(opened, **layout)
        else:
            path = os.fspath(opened)
            stores = dict(settings["storage_options"] or {})
            place = Location(pinned(normalize(path), stores), stores)
            sources = opened_at(place.path, settings, copies=False)
            opened = sources[0] if sources[0].component is None else reader_of(place).together(place, sources)
        conversion = forecast(opened, as_, max_shard_size, **chosen) if as_ or max_shard_size else None
        chosen_tensors = tensors_of(opened, which)
    kept = {name: tensor for name, tensor in chosen_tensors.tensors.items() if name not in chosen_tensors.aliases}
    if stats:
        from ckptconv.features.reporting.measure import measured

        statistics, read = measured(kept, settings["storage_options"], counter(progress), on_total)
    with no_garbage():
        notes = [note for module in NOTES.values() for note in import_module(module).notes_of(opened)]
        summary = summarize(opened, notes, which, path=path, statistics=statistics, chosen_tensors=chosen_tensors)
        for field, module in SURVEYS.items():
            survey = import_module(module).survey(opened, kept, which, settings["storage_options"], summary.warnings)
            setattr(summary, field, survey)
    summary.bytes_read += read
    summary.conversion = conversion
    if html:
        from ckptconv.features.inspect.page import page_of
        from ckptconv.features.reporting.report_file import PAGE, write_whole
        from ckptconv.outputs.targets import files_behind

        write_whole(html, page_of(summary).encode(), PAGE, overwrite, [summary.input, *files_behind(opened)])
    return summary
