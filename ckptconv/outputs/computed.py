"""Ways to compute the tensors of an output from more than the bytes of its source, and their records in an output.

A way is a module with `COMPUTING`; `COMPUTED` names it, and it is imported when its turn comes. `Source.computed` names
the ways in which a source is computed. Pure, but for `Again.source`, which opens the checkpoints of a manifest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptconv.options.table import Options
from ckptconv.outputs.targets import Target, seen_from
from ckptconv.storage.paths import resolved_name

if TYPE_CHECKING:
    from ckptconv.formats.source import Source
    from ckptconv.outputs.naming import Named
    from ckptconv.outputs.selected import Selected
    from ckptconv.plan import FilePlan
    from ckptconv.tensors.lazy import Equal, LazyTensor

_NONE: Mapping[str, Any] = MappingProxyType({})


class Elsewhere(str):
    """A text in an output's record that states a former place. It has no effect."""


class From(Elsewhere):
    """The path of a checkpoint in a manifest, relative to the output."""


class Again(NamedTuple):
    """The functions that plan an output again from the source and its manifest.

    `paths` returns the paths of checkpoints in the heading of a manifest, None for the source; `lost` is, for an error
    if they are not found, the sentence about the command, and the advice. `field` is the field of `Verification` with
    these paths. `source` returns the computed source, from the source, the heading, the paths as they are seen from
    here, the options and the path of the output.
    """

    paths: Callable[[Mapping[str, Any]], Sequence[str | None]]
    lost: tuple[str, str]
    field: str
    source: Callable[[Source, Mapping[str, Any], Sequence[str | None], Options, str], Source]


class Restated(NamedTuple):
    """States of an optimizer by parameter and groups of parameters, as a way changed them: pairs of values that have to
    be `equal`, and `noted`, which returns a selection with the notes about the change."""

    states: Mapping[str, Mapping[str, Any]]
    groups: Sequence[Mapping[str, Any]]
    equal: Sequence[Equal]
    noted: Callable[[Selected, Options], Selected]


class Shown(NamedTuple):
    """Tensors as `inspect` shows them after a way changed them: the tensors, and the inputs of each."""

    tensors: dict[str, LazyTensor]
    made_of: dict[str, list[str]]


class Computing(NamedTuple):
    """The functions of a way to compute, called in turn; one that is left out does nothing.

    - `heading` is the shape of its members in a manifest, as `strict_json.check` takes it; `check` raises ValueError
      for a heading that contradicts itself.
    - `named` changes the tensors of a source as they are stored there; `selected` those that an output is to have,
      given the reference of the source too.
    - `states` changes an optimizer's states by parameter, and groups of these, given ties {alias: owner}; None: it
      leaves them as they are. `tree` does so for the content of a `.pt` file.
    - `restored` returns the source of a `.pt` file whose remark (`Way.remark`) records how another was converted to it.
    - `recalled` returns the entry in `Source.computed` of such a remark, given the place of the remark.
    - `shown` returns tensors as `inspect` shows them, given ties too, and `facts` its sentences about the source.
    - `identified` returns the plan id of files that its choices decide too, from the plan id without them.
    - `record` returns the entries of the heading that follow from the source, and `reported` the fields of a report.
    - `sources` yields the checkpoints that are read in addition to the source.
    - `unfit` returns the companions of the source that are not for the output: {name: reason}.
    - `asked` returns options with paths from a heading. It gets a function that returns a path as it is seen from here.
    - `retold`: what an output's configuration says otherwise, "counts" or "codes" too: it is written without an option.
    - `again` plans the output again if a command has computed it.
    - `lost`: the option with the name of the way is the path of a checkpoint, which a heading names too. These are what
      was done and what to do, for a message if the checkpoint is not found.
    """

    heading: Mapping[str, Any] = _NONE
    check: Callable[[Mapping[str, Any]], None] = lambda heading: None
    named: Callable[[Named, Source, Options], Named] = lambda named, source, options: named
    selected: Callable[[Selected, Source, Options, Selected | None], Selected] = lambda chosen, *_: chosen
    states: Callable[[Source, Mapping[str, Any], Sequence[Any], Mapping[str, str]], Restated] | None = None
    tree: Callable[[Selected, Source, Options], Selected] | None = None
    restored: Callable[[Source, Options], Source] = lambda source, options: source
    recalled: Callable[[Any, str], Any] = lambda remark, where: None
    shown: Callable[[Source, Mapping[str, LazyTensor], Mapping[str, str]], Shown] | None = None
    facts: Callable[[Source], Mapping[str, Any]] = lambda source: _NONE
    identified: Callable[[Iterable[FilePlan], Source, str], str] = lambda files, source, plan_id: plan_id
    record: Callable[[Source], Mapping[str, Any]] = lambda source: _NONE
    reported: Callable[[Source], Mapping[str, Any]] = lambda source: _NONE
    sources: Callable[[Source], Iterable[Source]] = lambda source: ()
    unfit: Callable[[Source], Mapping[str, str]] = lambda source: _NONE
    asked: Callable[[Mapping[str, Any], Callable[[str], str]], Mapping[str, Any]] = lambda heading, seen: _NONE
    retold: str = ""
    again: Again | None = None
    lost: tuple[str, str] | None = None


class Way(NamedTuple):
    """A way to compute: its module, the members of a manifest that record it, and the options of a conversion that ask
    for it. Without such options, a command of its name makes the outputs. `remark` is its key in the metadata of
    outputs, "" if it has none."""

    module: str
    members: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    remark: str = ""

    @property
    def computing(self) -> Computing:
        """The functions of the way."""
        computing: Computing = import_module(self.module).COMPUTING
        return computing


# Ways by name, which is that of their entry in `Source.computed`. Ways that change the same do so in this order.
COMPUTED: Mapping[str, Way] = {
    "part": Way("ckptconv.features.model_parts.parting", ("part",), ("layers", "experts", "component")),
    "vocab": Way("ckptconv.features.vocab.rows", ("vocab",), ("vocab",)),
    "map": Way("ckptconv.features.maps.mapped", ("map",), ("map",), "ckptconv.map"),
    "like": Way("ckptconv.features.like.likeness", ("like",), ("like", "partial", "fill")),
    "dequantize": Way("ckptconv.features.quantized.dequantized", ("dequantized",), ("dequantize",)),
    "quantize": Way("ckptconv.features.quantized.quantizing", ("quantized",), ("quantize", "requantize", "keep")),
    "graft": Way("ckptconv.features.graft.grafting", ("graft",), ("graft",)),
    "average": Way("ckptconv.features.average.averages", ("average",)),
    "merge": Way("ckptconv.features.merge.computing", ("adapters", "adapter")),
    "patch": Way("ckptconv.features.deltas.changes", ("deltas",)),
}


def ways_of(source: Source, options: Options | None = None) -> list[Computing]:
    """Return the ways in which `source` is computed, and those that `options` ask for."""
    return [
        way.computing
        for name, way in COMPUTED.items()
        if name in source.computed or (options and any(options.asked(option) for option in way.options))
    ]


def restated(
    source: Source, states: Mapping[str, Any], groups: Sequence[Any], ties: Mapping[str, str]
) -> Restated | None:
    """Return an optimizer's states by parameter, and groups of these, as `source` is computed; None: unchanged."""
    return next((way.states(source, states, groups, ties) for way in ways_of(source) if way.states), None)


def ways_in(heading: Mapping[str, Any]) -> dict[str, Computing]:
    """Return the ways that the heading of a manifest names, by name."""
    return {name: COMPUTED[name].computing for name in _names_in(heading)}


def _names_in(heading: Mapping[str, Any]) -> list[str]:
    return [name for name, way in COMPUTED.items() if not heading.keys().isdisjoint(way.members)]


def command_of(names: Iterable[str]) -> str:
    """Return the command that computes in the ways `names`; "" if that is a conversion."""
    return next((name for name in names if not COMPUTED[name].options), "")


def made_as(heading: Mapping[str, Any]) -> str:
    """Return the kind of an output with this `heading`, and the command that computes it: "weights/average"."""
    command = command_of(_names_in(heading))
    return f"{heading['kind']}/{command}" if command else str(heading["kind"])


def recorded(source: Source, record: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """Return the members of the heading of an output at `target` that record its computation; `record` is the record of
    its selection."""
    members = {name: value for way in ways_of(source) for name, value in way.record(source).items()} | {**record}
    order = [member for way in COMPUTED.values() for member in way.members]
    return {name: _seen(members[name], target) for name in order if name in members}


def _seen(value: Any, target: Target) -> Any:
    if isinstance(value, From):
        return Elsewhere(seen_from(target, value))
    if isinstance(value, dict):
        return {key: _seen(item, target) for key, item in value.items()}
    return [_seen(item, target) for item in value] if isinstance(value, list) else value


def reported(source: Source, outputs: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields of a report on the computation of `source`, and those of its `outputs`' selections."""
    fields = {name: value for way in ways_of(source) for name, value in way.reported(source).items()}
    for output in outputs:
        for name, value in output.items():
            before = fields.get(name)
            fields[name] = {**before, **value} if isinstance(before, dict) else before or value
    return fields


def facts_of(source: Source) -> dict[str, Any]:
    """Return the sentences of `inspect` about the computation of `source`."""
    return {name: fact for way in ways_of(source) for name, fact in way.facts(source).items()}


def repeated(terms: Iterable[Source]) -> Iterator[str]:
    """Yield a warning for each checkpoint that is given several times among `terms`."""
    for path, count in Counter(resolved_name(term.path) for term in terms).items():
        if count > 1:
            yield f"{path} is given {count} times, and each time counts as a separate input."


def terms_of(source: Source) -> Iterator[Source]:
    """Yield the further checkpoints that `source` is computed from."""
    for way in ways_of(source):
        yield from way.sources(source)
