"""Opens a path, or completes an open checkpoint, with everything that its outputs need."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from typing import Any

from ckptconv.errors import UsageError
from ckptconv.formats.detect import complete, open_parts, open_source, with_layout
from ckptconv.formats.registered import MADE_OF, reader_of
from ckptconv.formats.source import Source
from ckptconv.options.registered import opening, placed
from ckptconv.options.table import Options
from ckptconv.storage import stores
from ckptconv.storage.location import Location
from ckptconv.storage.paths import is_pipe, normalize


def opened(
    origin: str | os.PathLike[str] | Source,
    options: Options,
    *,
    key: str = "",
    states: bool = False,
    **feature_options: Any,
) -> Source:
    """Return the checkpoint `origin`, as `options` ask for it. The other arguments are those of `open_source`, such as
    `options.fitting()`."""
    if not isinstance(origin, Source):
        settings = {**options.opening(), **feature_options}
        return open_source(normalize(origin), key=key, states=states, **settings)
    source = complete(origin, key=key, states=states, inert=bool(options.asked("inert")))
    layout: dict[str, Any] = {**options.changing(), **options.reaching(), **feature_options}
    return with_layout(source, **layout)


def all_opened(
    origin: str | os.PathLike[str] | Source, options: Options, holds: Collection[str], *, recorded: Any = None
) -> list[Source]:
    """Open `origin` with all contents (`Kind.holds`) that its outputs need. Return one source, with `per_rank` one for
    each tensor-parallel rank, or those of a pipeline of diffusers.

    Input from a pipe is read now.
    """
    path = origin.path if isinstance(origin, Source) else normalize(origin)
    needs_states = any(module.needs_states(options, path) for module in _needing(holds))
    wanted: dict[str, Any] = {
        "key": options.key,
        "states": "optimizer" in holds or needs_states,
        "recorded": recorded,
        **(options.fitting() if "weights" in holds else {}),
    }
    if isinstance(origin, Source):
        return [opened(origin, options, **wanted)]
    settings = {**options.opening(), **wanted}
    return opened_at(path, settings, copies=options.asked("copy_config"), per_rank=options.per_rank)


def opened_at(path: str, settings: Mapping[str, Any], *, copies: bool | None, per_rank: bool = False) -> list[Source]:
    """Open the checkpoint at `path`, with the `settings` of `open_source`. Return one source, with `per_rank` one for
    each tensor-parallel rank, or those of a pipeline of diffusers. A directory with one model is a pipeline only if
    `copies` asks for its other files too; None: if it is on the hub."""
    if is_pipe(path):
        if per_rank:
            raise UsageError("Input from a pipe has no ranks.")
        return [open_source(path, **settings)]
    path, settings = placed(path, settings, settings)
    reaching = dict(settings["storage_options"] or {})
    place = Location(stores.pinned(path, reaching), reaching)
    copies = stores.is_repository(place.path) if copies is None else copies
    if per_rank or reader_of(place, settings["family"], copies=copies):
        return open_parts(place, per_rank=per_rank, **settings)
    return [open_source(place.path, **settings)]


def fitted(
    sources: Sequence[Source], origin: str | os.PathLike[str] | Source, options: Options, holds: Collection[str]
) -> list[Source]:
    """Return `sources`, opened from `origin`, with the parts that outputs need: the model alone, the state from which a
    training goes on, or the optimizer's states of another checkpoint."""
    path = origin.path if isinstance(origin, Source) else normalize(origin)
    fitting = list(sources)
    if options.for_hub:
        from ckptconv.formats.training import model_alone

        fitting = [model_alone(source, options) for source in fitting]
    for module in _needing(holds):
        fitting = [module.fitted(source, options, path) for source in fitting]
    for warned in opening(options.changing(), "warned"):
        fitting = warned(fitting)
    return fitting


def _needing(holds: Collection[str]) -> list[Any]:
    """Return the modules that fit sources to outputs that hold more than weights."""
    return [import_module(module) for part, module in MADE_OF.items() if part in holds]
