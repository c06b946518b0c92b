"""Applies a map to selected tensors: to weights by name, or to an optimizer's states by parameter. Pure."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptconv.errors import UsageError
from ckptconv.features.maps.claims import UnknownNamesError
from ckptconv.features.maps.options import MapOptions
from ckptconv.formats.source import NOT_CONVERTED, Source
from ckptconv.options.table import NONE, Options
from ckptconv.outputs import selection
from ckptconv.outputs.computed import Computing, Elsewhere, Restated, Shown
from ckptconv.outputs.selected import Selected
from ckptconv.structure.record import MAP_KEY, Flattened
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.text import count_of, quoted, some

if TYPE_CHECKING:
    from ckptconv.features.maps.chosen import ChosenMap
    from ckptconv.features.maps.compile import Applied


# The side of maps that has the names of transformers.
_TRANSFORMERS = "hf"


def with_owners(tensors: Mapping[str, LazyTensor], owners: Mapping[str, str]) -> dict[str, LazyTensor]:
    """Return `tensors`, with the owner's tensor for each alias of {alias: owner}: then a map's results are tied too."""
    return {name: tensors[owners.get(name, name)] for name in tensors}


def mapped(chosen: Selected, map_: ChosenMap | None, options: Options, reference: Selected | None = None) -> Selected:
    """Return `chosen` with the names and layouts of `map_`; unchanged without one. No structure record is kept.

    Sizes may follow from the shapes of tensors in `reference`.
    """
    if map_ is None:
        return chosen
    if chosen.edit and map_.config:
        map_ = dataclasses.replace(map_, config=chosen.edit(map_.config))
    shapes = {name: tensor.shape for name, tensor in reference.tensors.items()} if reference else {}

    def cast(tensor: LazyTensor, sources: Sequence[str]) -> LazyTensor:
        if not chosen.uncastable.isdisjoint(sources):
            return tensor
        return selection.converted(sources[-1], tensor, chosen.dtype, chosen.widen_only)

    try:
        applied = map_.apply(with_owners(chosen.tensors, chosen.owners), shapes, cast)
    except UnknownNamesError as error:
        if chosen.unmapped is None and (options.strip_prefix or options.rename):
            first = (
                "--strip-prefix and --rename change names before the map is applied, so the new names must match the "
                "map."
            )
            raise UnknownNamesError(error.message, f"{first} {error.hint}") from None
        if chosen.unmapped is None:
            raise
        hint = (
            "The map is applied after the part is selected. Convert with the map first, and select the part of that "
            "output."
        )
        raise UnknownNamesError(error.message, hint) from None
    mapped_tensors = applied.tensors
    uncastable = frozenset(
        name for name, sources in applied.sources.items() if not chosen.uncastable.isdisjoint(sources)
    )
    before, chosen = chosen, told_of(chosen, applied, options)
    return chosen._replace(
        names={name: name for name in mapped_tensors},
        known=mapped_tensors,
        tensors=mapped_tensors,
        described=Flattened(mapped_tensors, None, uncastable),
        structured=False,
        owners={},
        uncastable=uncastable,
        warnings=(*chosen.warnings, *_left_out(map_, applied)),
        notes=(*chosen.notes, *_values(before)),
        quantized={},
        unmapped=chosen.first,
        equal=(*chosen.equal, *applied.equal),
        tied=applied.copied,
    )


def told_of(chosen: Selected, applied: Applied | None, options: Options) -> Selected:
    """Return `chosen` with the record and the notes of the map that was `applied`, if one was."""
    if not applied:
        return chosen
    record = applied.record()
    record["name"] = Elsewhere(record["name"])  # it may be the name of a file
    names = f"map {applied.map.name}: names of {applied.source} → names of {applied.target}"
    if applied.alternative:
        made, other = map(quoted, applied.alternative)
        names += (
            f", such as {made} instead of the map's alternative {other}; for safetensors, --like REF selects the names "
            "of REF"
        )
    reported = {"made_of": {name: list(of) for name, of in applied.sources.items()}} if options.dry_run else {}
    return chosen._replace(
        applied=applied,
        notes=(*chosen.notes, names),
        remarks={**chosen.remarks, MAP_KEY: json.dumps(record, ensure_ascii=False, separators=(",", ":"))},
        record={**chosen.record, "map": record},
        reporters=(*chosen.reporters, lambda chosen, stored: lambda files: reported),
    )


def _left_out(map_: ChosenMap, applied: Applied) -> Iterator[str]:
    """Yield warnings about the tensors that a map left out."""
    if applied.dropped:
        yield f"left out, because the map {map_.map.name} drops them: {some(applied.dropped)}"
    if applied.padding:
        padded = some(applied.padding.items(), form=lambda pair: f"{count_of(pair[1], 'element')} of {pair[0][:100]!r}")
        yield f"left out as padding: {padded}"
    yield from applied.unchecked
    if idle := map_.idle_sizes():
        yield f"--size {idle[0]} has no effect: the map {map_.map.name} has no such axis."


def _values(chosen: Selected) -> Iterator[str]:
    """Yield a note on values that are no tensors: no structure record is kept."""
    if chosen.structured and (chosen.described.values or chosen.described.inert):
        values = some(chosen.described.values, form=str) or "objects of other classes"
        yield f"{NOT_CONVERTED}{values}, because --map writes only tensors."


def _selected(chosen: Selected, source: Source, options: Options, reference: Selected | None) -> Selected:
    chosen = mapped(chosen, source.computed.get("map"), options, reference)
    if options.for_hub and chosen.applied and source.config and source.reference is None:
        _check_published(chosen.applied, source)
    return chosen


def _check_published(applied: Applied, source: Source) -> None:
    """Raise UsageError if a model to publish would have a transformers configuration, and names of another program."""
    if _TRANSFORMERS in applied.map.sides and applied.target != _TRANSFORMERS and "model_type" in (source.config or {}):
        raise UsageError(
            f"The map {applied.map.name} converts {applied.source} names to {applied.target} names, but the output "
            "would get the config.json of transformers, which does not find weights under these names.",
            "Omit --map to keep the names, or add --no-copy-config.",
        )


def _tree(chosen: Selected, source: Source, options: Options) -> Selected:
    map_: ChosenMap = source.computed["map"]
    try:
        return mapped(chosen, map_, options)
    except UsageError as error:
        if not map_.is_back:
            raise
        raise UsageError(
            f"{source.path} was written with a map, but the reverse of that map does not match its names. "
            f"{error.message}",
            "Use --map none to write the tensors unchanged.",
        ) from error


def _states(source: Source, states: Mapping[str, Any], groups: Sequence[Any], ties: Mapping[str, str]) -> Restated:
    from ckptconv.features.maps.states import apply_to_states

    every = {**states, **{alias: states[owner] for alias, owner in ties.items() if owner in states}}
    mapped_states = apply_to_states(source.computed["map"], every, groups)

    def told(chosen: Selected, options: Options) -> Selected:
        return told_of(chosen, mapped_states.applied, options)

    return Restated(mapped_states.states, mapped_states.groups, mapped_states.equal, told)


def _restored(source: Source, options: Options) -> Source:
    """Return `source` with the map that the user chose, or else the reverse of the map that made it."""
    if "map" in source.computed or MapOptions.of(options).map == NONE:
        return source
    from ckptconv.features.maps.chosen import of_record

    return source.computing(map=of_record(source.remarks[MAP_KEY], source.path, back=True))


def _recalled(record: Any, where: str) -> ChosenMap:
    from ckptconv.features.maps.chosen import of_record

    return of_record(record, where)


def _shown(source: Source, tensors: Mapping[str, LazyTensor], ties: Mapping[str, str]) -> Shown:
    applied = source.computed["map"].apply(with_owners(tensors, ties))
    return Shown(applied.tensors, {name: list(of) for name, of in applied.sources.items()})


COMPUTING = Computing(
    heading={"map?": dict},
    selected=_selected,
    states=_states,
    tree=_tree,
    restored=_restored,
    recalled=_recalled,
    shown=_shown,
    facts=lambda source: {"map": source.computed["map"].map.name},
)
