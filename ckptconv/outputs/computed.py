"""The ways to compute the tensors of an output of more than the bytes of its source, and what an output says of each.

A way is a module with `COMPUTING`; `COMPUTED` names it, and it is imported when its turn comes. A source says with
what it is computed in `Source.computed`. Pure, but for `Again.source`, which opens what a manifest names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptconv.options.table import NONE, Options
from ckptconv.outputs.targets import Target, seen_from

if TYPE_CHECKING:
    from ckptconv.formats.source import Source
    from ckptconv.outputs.naming import Named
    from ckptconv.outputs.selected import Selected
    from ckptconv.plan import FilePlan
    from ckptconv.tensors.lazy import Equal, LazyTensor

_NONE: Mapping[str, Any] = MappingProxyType({})


class Elsewhere(str):
    """A text in the record of an output that says where something lay: it decides nothing."""


class From(Elsewhere):
    """The path of a checkpoint, which a manifest has as it is seen from the output."""


class Again(NamedTuple):
    """How an output is planned again of the source and of what its manifest says.

    `paths` returns those of checkpoints in the heading of a manifest, None for the source; `lost` is what was done, for
    where they are not found, and what to do then. `field` is that of `Verification` with these paths. `source` returns
    the source that is computed, of the source, the heading, the paths as they are seen from here, the options and the
    path of the output.
    """

    paths: Callable[[Mapping[str, Any]], Sequence[str | None]]
    lost: tuple[str, str]
    field: str
    source: Callable[[Source, Mapping[str, Any], Sequence[str | None], Options, str], Source]


class Restated(NamedTuple):
    """States of an optimizer by parameter and groups of parameters, as a way changed them: pairs of values that have to
    be `equal`, and `told`, which returns a selection with what is said of it."""

    states: Mapping[str, Mapping[str, Any]]
    groups: Sequence[Mapping[str, Any]]
    equal: Sequence[Equal]
    told: Callable[[Selected, Options], Selected]


class Shown(NamedTuple):
    """What `inspect` shows of tensors as a way changes them: the tensors, and of which each is made."""

    tensors: dict[str, LazyTensor]
    made_of: dict[str, list[str]]


class Computing(NamedTuple):
    """What a way to compute does at each of its turns; nothing where it is left out.

    - `heading` is what a manifest has of it, as `strict_json.check` takes it; `check` raises ValueError for a heading
      that contradicts itself.
    - `named` changes the tensors of a source as they are stored there; `selected` those that an output is to have,
      given the reference of the source too.
    - `states` changes an optimizer's states by parameter, and groups of these, given ties {alias: owner}; None: it
      leaves them as they are. `tree` does so for what a `.pt` file is to have.
    - `restored` returns the source of a `.pt` file, of which a remark (`Way.remark`) tells how it was made of another.
    - `recalled` returns the entry in `Source.computed` of such a remark, given what has it.
    - `shown` returns what `inspect` shows of tensors, given ties too, and `facts` what it says of the source.
    - `identified` returns the plan id of files, which other choices decide too, of the one that they have without.
    - `record` returns the entries of the heading that follow from the source, and `reported` the fields of a report.
    - `sources` yields the checkpoints that are read beside the source.
    - `asked` returns options with paths that a heading tells of. It gets what returns a path as it is seen from here.
    - `retold`: the configuration of an output says what that of the source does not, so it is written unasked.
    - `again` is how the output is planned again if a command has made it.
    - `lost`: the option of the way's name is the path of a checkpoint, which a manifest has as the member of that name.
      This is what was done, for where the checkpoint is not found, and what to do then.
    """

    heading: Mapping[str, Any] = _NONE
    check: Callable[[Mapping[str, Any]], None] = lambda heading: None
    named: Callable[[Named, Source, Options], Named] = lambda named, source, options: named
    selected: Callable[[Selected, Source, Options, Selected | None], Selected] = lambda chosen, *_: chosen
    states: Callable[[Source, Mapping[str, Any], Sequence[Any], Mapping[str, str]], Restated] | None = None
    tree: Callable[[Selected, Source, Options], Selected] | None = None
    restored: Callable[[Source, Options], Source] = lambda source, options: source
    recalled: Callable[[Any, str], Any] = lambda told, where: None
    shown: Callable[[Source, Mapping[str, LazyTensor], Mapping[str, str]], Shown] | None = None
    facts: Callable[[Source], Mapping[str, Any]] = lambda source: _NONE
    identified: Callable[[Iterable[FilePlan], Source, str], str] = lambda files, source, plan_id: plan_id
    record: Callable[[Source], Mapping[str, Any]] = lambda source: _NONE
    reported: Callable[[Source], Mapping[str, Any]] = lambda source: _NONE
    sources: Callable[[Source], Iterable[Source]] = lambda source: ()
    asked: Callable[[Mapping[str, Any], Callable[[str], str]], Mapping[str, Any]] = lambda heading, seen: _NONE
    retold: bool = False
    again: Again | None = None
    lost: tuple[str, str] | None = None


class Way(NamedTuple):
    """A way to compute: its module, the members of a manifest that tell of it, and the options of a
    conversion that ask for it. If there are none, a command of that name makes such outputs. `remark` is the key under
    which outputs have it in their metadata, "" if they do not."""

    module: str
    members: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    remark: str = ""

    @property
    def computing(self) -> Computing:
        """What it does."""
        computing: Computing = import_module(self.module).COMPUTING
        return computing


# By name, which is that of its entry in `Source.computed`. Those that change the same do so in this order.
COMPUTED: Mapping[str, Way] = {
    "part": Way("ckptconv.features.model_parts.parting", ("part",), ("layers", "experts", "component", "vocab")),
    "map": Way("ckptconv.features.maps.mapped", ("map",), ("map",), "ckptconv.map"),
    "like": Way("ckptconv.features.like.likeness", ("like",), ("like", "partial", "fill")),
    "dequantize": Way("ckptconv.features.quantized.dequantized", ("dequantized",), ("dequantize",)),
    "quantize": Way("ckptconv.features.quantized.quantizing", ("quantized",), ("quantize", "requantize", "keep")),
    "graft": Way("ckptconv.features.model_parts.grafting", ("graft",), ("graft",)),
    "average": Way("ckptconv.features.average.averages", ("average",)),
    "merge": Way("ckptconv.features.merge.computing", ("adapters", "adapter")),
    "patch": Way("ckptconv.features.deltas.changes", ("deltas",)),
}


def ways_of(source: Source, options: Options | None = None) -> list[Computing]:
    """Return the ways in which `source` is computed, and those that `options` ask for."""
    return [
        way.computing
        for name, way in COMPUTED.items()
        if name in source.computed or (options and any(getattr(options, option, None) for option in way.options))
    ]


def restated(
    source: Source, states: Mapping[str, Any], groups: Sequence[Any], ties: Mapping[str, str]
) -> Restated | None:
    """Return an optimizer's states by parameter, and groups of these, as `source` is computed; None: as they are."""
    return next((way.states(source, states, groups, ties) for way in ways_of(source) if way.states), None)


def restored(source: Source, options: Options) -> Source:
    """Return `source` as one that is computed back, where a remark tells how it was computed."""
    for way in COMPUTED.values():
        if way.remark and way.remark in source.remarks:
            source = way.computing.restored(source, options)
    return source


def left_as_made(source: Source, options: Options) -> dict[str, Any]:
    """Return the members of a heading that say that what remarks tell of was not undone."""
    ways = (way for way in COMPUTED.values() if way.remark and way.remark in source.remarks)
    return {way.members[0]: {} for way in ways if _is_none(way, options)}


def _is_none(way: Way, options: Options) -> bool:
    return any(getattr(options, option, None) == NONE for option in way.options)


def recalled(told: Callable[[Way], tuple[Any, str]], options: Options) -> Any:
    """Return the entry in `Source.computed` of the way that the record of an output tells of, and `options` do not;
    None if there is none. `told` returns the record, and what has it."""
    for way in COMPUTED.values():
        if way.remark and not any(getattr(options, option, None) for option in way.options):
            record, where = told(way)
            if record:
                return way.computing.recalled(record, where)
    return None


def ways_in(heading: Mapping[str, Any]) -> dict[str, Computing]:
    """Return the ways that the heading of a manifest tells of, by name."""
    return {name: COMPUTED[name].computing for name in _told_in(heading)}


def _told_in(heading: Mapping[str, Any]) -> list[str]:
    return [name for name, way in COMPUTED.items() if not heading.keys().isdisjoint(way.members)]


def command_of(names: Iterable[str]) -> str:
    """Return the command that makes what is computed in the ways `names`; "" if that is a conversion."""
    return next((name for name in names if not COMPUTED[name].options), "")


def made_as(heading: Mapping[str, Any]) -> str:
    """Return what an output is whose manifest begins with `heading`, and the command that makes it of several inputs,
    as in "weights/average"."""
    command = command_of(_told_in(heading))
    return f"{heading['kind']}/{command}" if command else str(heading["kind"])


def recorded(source: Source, record: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """Return the members of the heading of an output at `target` that say how it was computed; `record` is what its
    selection says."""
    members = {name: value for way in ways_of(source) for name, value in way.record(source).items()} | {**record}
    order = [member for way in COMPUTED.values() for member in way.members]
    return {name: _seen(members[name], target) for name in order if name in members}


def _seen(value: Any, target: Target) -> Any:
    if isinstance(value, From):
        return Elsewhere(seen_from(target, value))
    if isinstance(value, dict):
        return {key: _seen(each, target) for key, each in value.items()}
    return [_seen(each, target) for each in value] if isinstance(value, list) else value


def reported(source: Source, outputs: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields of a report that say how `outputs`, of each the fields that its selection has, were computed of
    `source` and others."""
    fields = {name: value for way in ways_of(source) for name, value in way.reported(source).items()}
    for output in outputs:
        for name, value in output.items():
            before = fields.get(name)
            fields[name] = {**before, **value} if isinstance(before, dict) else before or value
    return fields


def facts_of(source: Source) -> dict[str, Any]:
    """Return what `inspect` says of how `source` is computed."""
    return {name: fact for way in ways_of(source) for name, fact in way.facts(source).items()}


def terms_of(source: Source) -> Iterator[Source]:
    """Yield the checkpoints that `source` is computed of beside itself."""
    for way in ways_of(source):
        yield from way.sources(source)
