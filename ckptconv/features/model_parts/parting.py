"""Choose a part of a model of what is selected, and say what its configuration has to say. Pure."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from ckptconv.errors import UsageError
from ckptconv.features.model_parts.cutting import Asked, Cut, cut
from ckptconv.features.model_parts.editing import Edited, edited
from ckptconv.features.model_parts.facts import Facts
from ckptconv.formats import configs
from ckptconv.formats.change import Change
from ckptconv.formats.companions import QUANTIZED
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs.computed import Computing, From, ways_of
from ckptconv.outputs.counted import contradicted
from ckptconv.outputs.selected import Selected
from ckptconv.structure import keymap, parted
from ckptconv.text import brief, some


class Part(NamedTuple):
    """The part of a source that is asked for, as `options` {name: value} say it.

    `config` is what config.json says of the source, or the file that `path` names, and `codes` what
    hf_quant_config.json says; None if there is none. `tokens` are the numbers of tokens of tokenizers, by file, and
    `grafted` the names that are added to the part.
    """

    asked: Asked
    options: Mapping[str, Any]
    config: Mapping[str, Any] | None = None
    codes: Mapping[str, Any] | None = None
    path: str = ""
    tokens: Mapping[str, int] = {}
    grafted: tuple[str, ...] = ()


def _parted(chosen: Selected, source: Source, options: Options, reference: Selected | None = None) -> Selected:
    """Return `chosen` with the tensors of the part alone, under its names, and with the change of its configuration."""
    part: Part = source.computed["part"]
    made = cut(part.asked, chosen.tensors, part.config, source.path, part.grafted)
    fixed = frozenset(made.names[name] for name in chosen.fixed if name in made.names)
    notes: list[str] = []
    warnings = [*_warnings(part, made, chosen)]
    changes: dict[str, list[str]] = {}
    if part.asked.component == "mtp":
        # They are no model of their own, so that no configuration is true of them.
        warnings += contradicted(source.config or {}, chosen.tensors, made.names)
    elif source.config is not None and source.reference is None:
        is_other = bool(source.quantized and source.quantized.formats)
        is_other = is_other or any(way.retold for way in ways_of(source, options) if way is not COMPUTING)
        told = edited(configs.changed(source.config, Change(plain=is_other)), made.facts)
        notes = [*_told(told), *told.notes]
        changes = {key: [json.dumps(value, ensure_ascii=False) for value in values] for key, *values in told.rows}
        if part.codes is not None and not is_other and not any(key in told.config for key in configs.QUANTIZING):
            raise UsageError(
                f"Only {QUANTIZED} says how the weights of {source.path} are quantized, and not config.json: its names "
                "are not changed to those of a part.",
                "Use --dequantize, or write no configuration with --no-copy-config.",
            )
    if part.path and source.config is None:
        notes.append(f"--config has no effect on the output, which has no config.json: {part.path} was only read.")
    return chosen._replace(
        names={name: name for name in made.tensors},
        known=made.tensors,
        tensors=made.tensors,
        described=keymap.Flattened(made.tensors, None, fixed),
        structured=False,
        owners={
            made.names[alias]: made.names[owner]
            for alias, owner in chosen.owners.items()
            if alias in made.names and owner in made.names
        },
        fixed=fixed,
        quantized=_quantized(chosen, made),
        unmapped=chosen.first,
        edit=None if part.asked.component == "mtp" else functools.partial(_edited, facts=made.facts),
        warnings=(*chosen.warnings, *warnings),
        notes=(*chosen.notes, _note(part, made, len(chosen.tensors)), *notes),
        tellings=(*chosen.tellings, lambda chosen, stored: lambda files: {"configuration": changes}),
    )


def _edited(config: Mapping[str, Any], facts: Facts) -> dict[str, Any]:
    return edited(config, facts).config


def _quantized(chosen: Selected, made: Cut) -> dict[str, parted.PartedTensor]:
    """Return the tensors that are stored in parts, by new name. Raise UsageError if rows of them are taken."""
    found = {}
    for name, told in chosen.quantized.items():
        parts = [parted.prefix_of(name) + part for part in told.parts]
        new = made.facts.renaming.of(name)
        if new is None or not all(part in made.names for part in parts):
            continue
        if any(made.tensors[made.names[part]] is not chosen.tensors[part] for part in parts):
            raise UsageError(f"{name} is quantized by torchao, of which no rows are taken.", "Use --dequantize.")
        found[new] = told
    return found


def _warnings(part: Part, made: Cut, chosen: Selected) -> Iterator[str]:
    if chosen.structured and (chosen.described.values or chosen.described.inert):
        values = some(chosen.described.values, form=str) or "objects of other classes"
        yield f"A part of a model is tensors alone; left out: {values}"
    for name, count in part.tokens.items():
        if made.facts.vocabulary and count > made.facts.vocabulary[1]:
            rows = made.facts.vocabulary[1]
            yield (
                f"{name} has {count:,} tokens, {count - rows:,} more than the {rows:,} rows of the vocabulary: the "
                "model fails on text that has one of these."
            )


def _note(part: Part, made: Cut, before: int) -> str:
    facts = made.facts
    kept = [f"--component {part.asked.component}"] if part.asked.component else []
    kept += [f"{len(facts.kept)} of {facts.total} layers"] if facts.kept is not None else []
    told = (("experts", facts.experts), ("rows of the vocabulary", facts.vocabulary))
    kept += [f"{pair[1]:,} of {pair[0]:,} {what}" for what, pair in told if pair]
    configured = "" if part.config is not None else " No configuration was found to change."
    what = f" ({', '.join(kept)})" if kept else ""
    return f"A part of the model: {len(made.tensors):,} of {before:,} tensors{what}.{configured}"


def _told(told: Edited) -> Iterator[str]:
    if told.rows:
        rows = [f"{row.key}: {_short(row.old)} to {_short(row.new)}" for row in told.rows]
        yield f"config.json was changed to be true of the part: {some(rows, len(rows), str)}."
    else:
        yield "config.json is true of the part as it is."


def _short(value: Any) -> str:
    return f"{len(value):,} entries" if isinstance(value, (list, dict)) and len(value) > 4 else brief(value)


def _states(source: Source, states: Mapping[str, Any], groups: Sequence[Any], ties: Mapping[str, str]) -> NoReturn:
    part: Part = source.computed["part"]
    given = [f"--{name}" for name in (*part.options, *(["graft"] if part.grafted else ["config"] * bool(part.path)))]
    raise UsageError(
        f"{some(given, form=str)} takes a part of the weights, and the optimizer's states are those of all.",
        "Convert the states without it.",
    )


def _record(source: Source) -> Mapping[str, Any]:
    part: Part = source.computed["part"]
    told = {name: list(value) if isinstance(value, tuple) else value for name, value in part.options.items()}
    told |= {"config": From(part.path)} if part.path else {}
    return {"part": told} if told else {}


def _asked(heading: Mapping[str, Any], seen: Callable[[str], str]) -> Mapping[str, Any]:
    path = heading["part"].get("config", "")
    return {"config": seen(path)} if path else {}


COMPUTING = Computing(
    heading={"part?": dict},
    selected=_parted,
    tree=_parted,
    states=_states,
    record=_record,
    asked=_asked,
    retold=True,
)
