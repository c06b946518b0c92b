"""Merge adapters into a base."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ckptconv.conversion import convert
from ckptconv.errors import UNWRITTEN, leaving
from ckptconv.features.merge.files import merging, read_adapters
from ckptconv.features.merge.options import INSTEAD, MERGING
from ckptconv.formats.opening import opened
from ckptconv.formats.training import model_alone
from ckptconv.options.option import checked
from ckptconv.options.table import Options
from ckptconv.process import no_garbage
from ckptconv.result import Report
from ckptconv.storage.paths import listed

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from typing_extensions import Unpack

    from ckptconv.options.keywords import MergeOptions
    from ckptconv.storage.progress import AnyProgress


@leaving(UNWRITTEN)
@checked(MERGING, INSTEAD)
def merge(
    base: str | os.PathLike[str],
    adapters: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    progress: AnyProgress | None = None,
    on_total: Callable[[int], object] | None = None,
    before_commit: Callable[[], object] | None = None,
    executor: Executor | None = None,
    **options: Unpack[MergeOptions],
) -> Report:
    """Merge `adapters`, one or several that PEFT trained with LoRA, into `base`, and write the result to `output`.

    Both are checkpoints of any format; the `adapter_config.json` of an adapter is next to it. Products are added up in
    float64, in the order of the rank, added to the base, times the scale, and rounded once. Tensors without an adapter
    are copied unchanged. `output` and the other arguments are those of `convert`.

    Raise CorruptError for an adapter that does not fit the base, UnsupportedError for one that is not LoRA's or has an
    unsupported setting, and the errors of `convert`. Then no new file has a final name.

    Examples:
        >>> report = ckptconv.merge("base", "adapter", "merged.safetensors")
        >>> report.notes
        ['merged 1 adapter: 1 tensor changed.']
    """
    further: dict[str, Any] = {**options}
    name = further.pop("adapter", "")
    chosen = Options(**further)
    with no_garbage():
        source = opened(base, chosen, key=chosen.key)
        source = model_alone(source, chosen) if chosen.for_hub else source
        read = read_adapters(listed(adapters, "No adapter was given to merge."), chosen.opening(), name)
        source = merging(source, read, chosen.storage_options)
    return convert(
        source,
        output,
        progress=progress,
        on_total=on_total,
        before_commit=before_commit,
        executor=executor,
        **further,
    )
