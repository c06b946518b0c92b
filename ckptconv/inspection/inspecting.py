"""The call `inspect`: open a checkpoint, and say what is in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckptconv.engine.execute import Progress
from ckptconv.formats.detect import complete, open_source
from ckptconv.formats.source import Opened, Source, source_of
from ckptconv.inspection.summary import Summary, forecast, summarize, tensors_of
from ckptconv.options import INSPECTING, Options, checked
from ckptconv.process import no_garbage
from ckptconv.storage.paths import normalize


@checked(INSPECTING)
def inspect(
    source: str | os.PathLike[str] | Source | Opened,
    *,
    key: str = "",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    stats: bool = False,
    as_: str | None = None,
    max_shard_size: int | None = None,
    html: str = "",
    tag: str = "",
    inert: bool = False,
    family: str = "",
    spool_dir: str = "",
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    on_total: Callable[[int], None] | None = None,
) -> Summary:
    """Return what is inside `source`, a path or an opened checkpoint of any format.

    Only descriptions are read, no tensor data, unless `stats` asks for the statistics of all values. `key`, `include`
    and `exclude` choose tensors, as in a conversion. With `as_`, a dtype, or `max_shard_size`, in bytes or as text, the
    summary has what such a conversion would write. `html` is a file for a page that shows all this. `tag`, `inert`,
    `family` and `spool_dir` are those of `open`. `progress` is called with the bytes of tensors read for statistics,
    `on_total` once with their total.

    Raise UsageError for a path that does not exist, or if `key` or a glob of `include` matches nothing, and whatever
    else opening the checkpoint raises.
    """
    from ckptconv.rows import tables

    options = dict(storage_options or {})
    chosen = {"key": key, "include": include, "exclude": exclude}
    which = Options(**chosen)
    opened, path, found, read = source_of(source), "", None, 0
    # A million tensors are a million small objects that live until the end: do not scan them.
    with no_garbage():
        if isinstance(opened, Source):
            opened = complete(opened, key=key, inert=inert)
        else:
            path = os.fspath(opened)
            opened = open_source(
                normalize(path),
                key=key,
                tag=tag,
                inert=inert,
                family=family,
                spool_dir=spool_dir,
                storage_options=options,
            )
        conversion = forecast(opened, as_, max_shard_size, **chosen) if as_ or max_shard_size else None
    if stats:
        from ckptconv.inspection.measure import measured

        tensors, aliases = tensors_of(opened, which)
        kept = {name: tensor for name, tensor in tensors.items() if name not in aliases}
        found, read = measured(kept, options, progress, on_total)
    with no_garbage():
        notes = list(tables.notes(tables.contents(opened)))
        summary = summarize(opened, notes, which, path=path, found=found)
    summary.bytes_read += read
    summary.conversion = conversion
    if html:
        from ckptconv.inspection.page import write_page
        from ckptconv.outputs.targets import files_behind

        write_page(html, summary, files_behind(opened))
    return summary
