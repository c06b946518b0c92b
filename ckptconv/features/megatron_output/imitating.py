"""Write a step of Megatron-core in the form of another one, which `--like` names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ckptconv.errors import UsageError
from ckptconv.features.dcp.locate import located
from ckptconv.features.megatron_core.alone import COMMON, LARGEST_RUN_CONFIG, RUN_CONFIG
from ckptconv.features.megatron_core.optimizers import optimizers_in
from ckptconv.formats.detect import open_source
from ckptconv.formats.registered import MEGATRON
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs.targets import Target
from ckptconv.storage.location import Location
from ckptconv.storage.paths import join


class Form(NamedTuple):
    """The form of a step: whether it has the file common.pt, the number of optimizers (None if it has none), and the
    text of its run_config.yaml. `behind` are the paths of the step that it was read from."""

    has_common: bool = True
    optimizers: int | None = None
    run_config: str = ""
    where: str = ""
    behind: Sequence[str] = ()


def like(source: Source, targets: Sequence[Target], options: Options) -> tuple[list[Target], Options]:
    """Return the targets with the form of the step that they are to be like."""
    form = form_of(options.fitting()["like"], options.storage_options)
    return [target._replace(layout=form) for target in targets], options


def form_of(path: str, stores: Mapping[str, Any]) -> Form:
    """Return the form of the step at `path`. Raise UsageError if it is no step of Megatron-core."""
    step = open_source(path, storage_options=stores)
    if step.format != MEGATRON:
        raise UsageError(
            f"{path} is a {step.format}, but --like requires a step of Megatron-core here.",
            "Specify a step that the training run saved, or leave out --like. The sizes of a map come from a "
            "config.json next to the checkpoint, or from --size.",
        )
    place = located(Location(step.path, dict(stores))).directory
    optimizers = optimizers_in((step.weights.get("common") or {}).get("optimizer") or {})
    text = place.join(RUN_CONFIG).read_text(LARGEST_RUN_CONFIG) if RUN_CONFIG in place.names else ""
    behind = [join(place.path, name) for name in place.names]
    return Form(COMMON in place.names, len(optimizers) or None, text, place.path, behind)
