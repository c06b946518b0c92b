"""Open what a command was given, a path or a checkpoint that is open, with all that its outputs are made of."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from typing import Any

from ckptconv.errors import UsageError
from ckptconv.formats import pipelines
from ckptconv.formats.detect import complete, open_parts, open_source, with_layout
from ckptconv.formats.registered import MADE_OF
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.storage import stores
from ckptconv.storage.location import Location
from ckptconv.storage.paths import is_pipe, normalize


def opened(
    given: str | os.PathLike[str] | Source,
    options: Options,
    *,
    key: str = "",
    states: bool = False,
    **asked: Any,
) -> Source:
    """Return the checkpoint `given` as `options` ask. The other arguments are those of `open_source`, such as
    `options.fitting()`."""
    if not isinstance(given, Source):
        settings = {**options.opening(), **asked}
        return open_source(normalize(given), key=key, states=states, **settings)
    source = complete(given, key=key, states=states, inert=options.inert)
    layout: dict[str, Any] = {**options.changing(), **options.reaching(), **asked}
    return with_layout(source, **layout)


def all_opened(
    given: str | os.PathLike[str] | Source,
    options: Options,
    holds: Collection[str],
    *,
    recorded: Any = None,
) -> list[Source]:
    """Open `given` with everything that outputs need which hold weights, states and so on (see `Kind.holds`): one
    source, or with `per_rank` one for each tensor-parallel rank, or those of a pipeline of diffusers.

    A pipe is read now.
    """
    path = given.path if isinstance(given, Source) else normalize(given)
    needs_states = any(module.needs_states(options, path) for module in _needing(holds))
    wanted: dict[str, Any] = {
        "key": options.key,
        "states": "optimizer" in holds or needs_states,
        "recorded": recorded,
        **(options.fitting() if "weights" in holds else {}),
    }
    if isinstance(given, Source):
        return [opened(given, options, **wanted)]
    settings = {**options.opening(), **wanted}
    return opened_at(path, settings, copies=options.copy_config, per_rank=options.per_rank)


def opened_at(path: str, settings: Mapping[str, Any], *, copies: bool | None, per_rank: bool = False) -> list[Source]:
    """Open what is at `path`, with the `settings` of `open_source`: one source, with `per_rank` one for each
    tensor-parallel rank, or those of a pipeline of diffusers. A directory with one model is a pipeline only if `copies`
    says that its other files are wanted too; None: if it is on the hub."""
    if is_pipe(path):
        if per_rank:
            raise UsageError("Input from a pipe has no ranks.")
        return [open_source(path, **settings)]
    reaching = dict(settings["storage_options"] or {})
    place = Location(stores.pinned(path, reaching), reaching)
    copies = stores.at(place.path).repository if copies is None else copies
    if per_rank or pipelines.reader_of(place, settings["family"], copies=copies):
        return open_parts(place, per_rank=per_rank, **settings)
    return [open_source(place.path, **settings)]


def fitted(
    sources: Sequence[Source], given: str | os.PathLike[str] | Source, options: Options, holds: Collection[str]
) -> list[Source]:
    """Return `sources`, opened as `given`, with the part of them that is a model, what a training goes on from, or the
    optimizer's states of another checkpoint, where outputs that hold such things need that."""
    asked = given.path if isinstance(given, Source) else normalize(given)
    made = list(sources)
    if options.for_hub:
        from ckptconv.formats.training import model_alone

        made = [model_alone(one, options.key) for one in made]
    for module in _needing(holds):
        made = [module.fitted(one, options, asked) for one in made]
    return _ordered(made) if options.order else made


def _needing(holds: Collection[str]) -> list[Any]:
    """Return the modules that say what outputs need beside weights."""
    return [import_module(module) for what, module in MADE_OF.items() if what in holds]


def _ordered(sources: list[Source]) -> list[Source]:
    """Return `sources`, with a warning if --order changed none of them."""
    from ckptconv.formats.numbers.matching import NAMED

    if any(note.startswith(NAMED) for one in sources for note in one.notes):
        return sources
    idle = "--order has no effect: the input has no numbered optimizer states that it could name."
    return [one._replace(warnings=[*one.warnings, idle]) for one in sources]
