"""Detects the format of a checkpoint, and opens it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ckptconv.errors import MissingError, UnsupportedError, UsageError
from ckptconv.formats import model_files
from ckptconv.formats.format import CERTAIN, LIKELY, Format, Found, Probe, surest
from ckptconv.formats.model_files import TORCH
from ckptconv.formats.registered import BY_RANK, FOREIGN, FORMATS, JOINING, LONE, PIPES, PLUGINS, STATES, reader_of
from ckptconv.formats.source import NOT_CONVERTED, Source, Wanted
from ckptconv.options.option import checked
from ckptconv.options.registered import opening, placed
from ckptconv.options.table import CHANGING, FITTING, OPENING
from ckptconv.pickles.nodes import is_distributed_class
from ckptconv.pickles.refusing import refusing_attacks
from ckptconv.process import lacking, needed, of_feature
from ckptconv.storage import stores
from ckptconv.storage.location import Location
from ckptconv.storage.paths import is_pipe, is_remote
from ckptconv.text import UNSET


class OtherFamilyError(UsageError):
    """A path is not of the expected family."""


@checked({**OPENING, **CHANGING, **FITTING})
def open_source(
    path: str | os.PathLike[str],
    *,
    family: str = "",
    tag: str = "",
    exclude_frozen: bool = False,
    model_rank: int | None = None,
    key: str = "",
    states: bool = False,
    structure: bool = True,
    master: bool = False,
    unstack: bool = False,
    inert: bool = False,
    raw: bool = False,
    alone: bool = False,
    spool_dir: str = "",
    storage_options: Mapping[str, Any] | None = None,
    recorded: Any = None,
    known: Location | None = None,
    **feature_options: Any,
) -> Source:
    """Open the checkpoint at `path`, whatever its format. Read descriptions only, no tensor data.

    `family` is the expected family: a path of another one raises UsageError, which names the right command. `tag`,
    `exclude_frozen` and `model_rank` (one tensor-parallel rank) apply to DeepSpeed checkpoints. `key` and `states` ask
    for the value under a key and for the optimizer's states, if these are not read along with the weights. `master`
    (the optimizer's fp32 masters) and `unstack` (a tensor for each layer) apply to Megatron-core's. A structure record
    of safetensors that does not fit the tensors is an error; with `structure` false it is left out. `feature_options`
    are options of features that change a source, or that tell the order in which optimizers number parameters. A file
    that is an attack raises UnsafeError; with `inert` it is opened like any other, and nothing in it runs. `raw` keeps
    whole modules as objects. One file of many, such as a rank's, can be inspected; a caller that takes its weights for
    a model gets an error, unless the file is taken `alone`. "-" is standard input. Input from a pipe is kept in a
    temporary file in `spool_dir`. `recorded` is the record in an output of the changes to its source. `known` is the
    location of `path`, if that was inspected before.
    """
    path = os.fspath(path)
    if not path:
        raise UsageError("The path of the input is empty.", UNSET)
    reached = dict(storage_options or {})
    reaching: dict[str, Any] = {"inert": inert, "spool_dir": spool_dir, "storage_options": storage_options}
    path, feature_options = placed(path, {**feature_options, "recorded": recorded}, reaching)
    path = stores.pinned(path, reached)
    if is_pipe(path):
        pipes = needed(PIPES, "pipes", f"{path} is a pipe, and reading it", "Write it to a file first.")
        path = str(pipes.take_pipe(path, spool_dir))
    elif is_remote(path):
        stores.reached(path).taken(path, reached, spool_dir)
    orders = asked_orders({**feature_options, "states": states}, reaching)
    wanted = Wanted(key, states, tag, exclude_frozen, model_rank, structure, raw, master, unstack, orders=orders)
    for widened in opening(feature_options, "wanted"):
        wanted = widened(wanted, feature_options, reaching)
    with refusing_attacks(not inert):
        place = known or Location(path, reached)
        chosen, guess = choose(Probe(place, family))
        source = _joined(place, chosen.read(guess.place or place, wanted), wanted)
        if alone or (source.family in (TORCH, model_files.SAFETENSORS) and len(source.shards) < 2):
            source = _marked(guess.place or place, source, alone)
        source = _with_optimizer(source, guess.place or place, wanted)
    if stores.is_repository(path):
        source = source._replace(notes=[*source.notes, *stores.reached(path).notes_on(place, source)])
    if tag or exclude_frozen or master or unstack or raw:
        from ckptconv.formats.idle import warned

        source = warned(source, place, guess.called, wanted._replace(unstack=unstack))
    return with_layout(source, **reaching, **feature_options)


def _joined(place: Location, source: Source, wanted: Wanted) -> Source:
    """Return `source`, which is the file of torch.save at `place`. Its distributed tensors are joined if the file holds
    all of their parts, as the file of a single rank does."""
    is_of_a_rank = source.family == TORCH and any(map(is_distributed_class, source.files.mentioned))
    if not is_of_a_rank or place.kind != "file":
        return source
    joined = (import_module(module).read_alone(place, wanted) for module in JOINING)
    return next(filter(None, joined), source)


def _marked(place: Location, source: Source, alone: bool) -> Source:
    """Return `source`, which was read from `place`, with an error if it is one file of many, and not taken `alone`."""
    from ckptconv.formats.lone_file import LoneFile  # a checkpoint of several files is whole

    file = LoneFile.of(place, source)
    groups = [group for group in LONE if group.may_have(file)] if file else []
    if not groups and not alone:
        return source
    from ckptconv.formats.alone import marked  # most files are

    return marked(place, source, file, groups, alone)


def with_layout(
    source: Source,
    *,
    inert: bool = False,
    spool_dir: str = "",
    storage_options: Mapping[str, Any] | None = None,
    **feature_options: Any,
) -> Source:
    """Return `source` with the changes that features make for `feature_options`.

    The arguments are those of `open_source`.
    """
    reaching: dict[str, Any] = {"inert": inert, "spool_dir": spool_dir, "storage_options": storage_options}
    for changed in opening(feature_options, "opened"):
        source = changed(source, feature_options, reaching)
    return source


def complete(source: Source, *, key: str = "", states: bool = False, inert: bool = False) -> Source:
    """Return `source` with the value under `key`, and with `states` the optimizer's states; reopen it if these are
    missing. It keeps its reference, and the other changes of features."""
    wanted = source.wanted._replace(key=key or source.wanted.key, states=states or source.wanted.states)
    if source.reread is not None and wanted != source.wanted:
        with refusing_attacks(not inert):
            again = source.reread(wanted).computing(
                **{name: computation for name, computation in source.computed.items() if name != "dequantize"}
            )
        again = again._replace(companions=source.companions, config=source.config)
        source = source.quantized.again(again) if source.quantized else again
    return _with_states(source, "with_states_beside", wanted.key) if states else source


def _with_states(source: Source, how: str, *asked: Any) -> Source:
    """Return `source` with the changes of the function `how` of the feature that finds optimizer states. Without that
    feature, return it with the reason why they are not read."""
    finding = of_feature(STATES, "training")
    if finding:
        with_states: Source = getattr(finding, how)(source, *asked)
        return with_states
    if source.optimizer is not None:
        return source
    message = f"{NOT_CONVERTED}the optimizer states. Finding them"
    error = lacking(message, STATES, "Convert only the weights.", UnsupportedError)
    of_states = source.of_states._replace(error=error)
    return source._replace(of_states=of_states, notes=[*source.notes, error.message])


def asked_orders(feature_options: Mapping[str, Any], reaching: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the orders of parameters from the first feature that has any by `feature_options`, `states` among them."""
    every = (orders(feature_options, reaching) for orders in opening(feature_options, "orders"))
    return next(filter(None, every), ())


def _with_optimizer(source: Source, place: Location, wanted: Wanted) -> Source:
    """Return `source`, which was read from `place`, with the states of the optimizer in it, or in a file next to it, if
    they are wanted; otherwise as a source that can be reread for those next to it."""
    if wanted.key and source.reread is None:
        source = source._replace(wanted=source.wanted._replace(key=wanted.key))
    lies = place.kind == "directory" and any(name in place.names for name in model_files.OPTIMIZERS)
    is_asked = wanted.states or wanted.orders or lies
    return _with_states(source, "with_optimizer", place, wanted) if is_asked else source


def open_parts(place: Location, *, per_rank: bool, **settings: Any) -> list[Source]:
    """Open the checkpoint at `place` as several sources: with `per_rank`, the tensor-parallel ranks of a DeepSpeed
    checkpoint, else the parts of a pipeline of diffusers. The other arguments are those of `open_source`."""
    place = place.at(stores.pinned(place.path, place.options))
    if not per_rank:
        pipeline = reader_of(place).read(place)
        models = [_component(place.join(name) if name else place, name, settings) for name in pipeline.models]
        return [*pipeline.others, *models]
    reading = needed(BY_RANK, "read", "--per-rank")
    with refusing_attacks(not settings.get("inert", False)):
        ranks = reading.ranks_to_convert(place, settings["tag"])
    return [open_source(place.path, model_rank=rank, **settings) for rank in ranks]


def _component(place: Location, name: str, settings: Mapping[str, Any]) -> Source:
    """Open a model of a pipeline."""
    return open_source(place.path, **{**settings, "family": ""})._replace(part=name)


def choose(probe: Probe) -> Found:
    """Return the format of a path, and its guess. Raise UsageError if there is none of the expected family."""
    place, family = probe.place, probe.expected
    if place.kind == "missing":
        from ckptconv.formats.suggestions import nearby

        raise MissingError(f"{place} does not exist.", nearby(place))
    best = surest(sorted((*_named(family), *FORMATS), key=lambda candidate: family != candidate.FAMILY), probe)
    if best is None or best[1].sure < LIKELY:
        plugins = of_feature(PLUGINS, "entries")
        best = surest(plugins.installed(), probe, best) if plugins else best
    for module in FOREIGN if best is None and probe.is_directory else ():
        import_module(module).check_below(place)
    if best is None:
        from ckptconv.formats.suggestions import within

        raise UsageError(
            f"{place} is {place.entry.described}, but not a known checkpoint.",
            within(place) if probe.is_directory else "",
        )
    chosen, guess = best
    if family not in ("", chosen.FAMILY, *guess.also):
        # Another command would not help with a file that none reads, such as a web page.
        for module in FOREIGN if probe.is_file and guess.sure < CERTAIN else ():
            import_module(module).check_file(place.path, *probe.head)
        meant = (guess.place or place).path
        # The strict spelling for a .pt file may lead back to where the user comes from: safetensors2pt.
        is_torch = chosen.FAMILY == TORCH and family == model_files.SAFETENSORS
        command = "convert {} OUTPUT" if is_torch else guess.command
        raise OtherFamilyError(f"{meant} is {guess.called}.", f"Use: ckptconv {command.format(shlex.quote(meant))}")
    return best


def _named(family: str) -> list[Format]:
    """Return the expected format if another package provides it."""
    if not family or any(family == known.FAMILY for known in FORMATS):
        return []
    return [needed(PLUGINS, "entries", f"The format {family!r} is not known, and asking other packages").named(family)]
