"""Cut a part of a model from the selected tensors, and change its configuration. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from ckptconv.errors import UsageError
from ckptconv.features.model_parts.cutting import Asked, Cut, cut
from ckptconv.features.model_parts.editing import Edited, edited
from ckptconv.features.model_parts.facts import Facts
from ckptconv.formats import configs
from ckptconv.formats.change import Change
from ckptconv.formats.model_directory import QUANTIZED
from ckptconv.formats.source import MODEL, Source
from ckptconv.options.table import Options
from ckptconv.outputs.computed import Computing, From, ways_of
from ckptconv.outputs.selected import Selected
from ckptconv.outputs.truths import untrue
from ckptconv.structure import parted
from ckptconv.structure.record import Flattened
from ckptconv.text import brief, some


class Part(NamedTuple):
    """The part of a source that is asked for, and the `options` {name: value} that ask for it.

    `config` is the content of the source's config.json, or of the file at `path`, and `codes` that of
    hf_quant_config.json; None if there is no such file. `tokens` are the numbers of tokens of tokenizers, by file, and
    `grafted` the names that are added to the part.
    """

    asked: Asked
    options: Mapping[str, Any]
    config: Mapping[str, Any] | None = None
    codes: Mapping[str, Any] | None = None
    path: str = ""
    tokens: Mapping[str, int] = {}
    grafted: tuple[str, ...] = ()

    @property
    def changes_tensors(self) -> bool:
        """Whether tensors are left out or added; else only a configuration is given."""
        return bool(self.options or self.grafted)


def _parted(chosen: Selected, source: Source, options: Options, reference: Selected | None = None) -> Selected:
    """Return `chosen` with the tensors of the part alone, under its names, and with the change of its configuration."""
    part: Part = source.computed["part"]
    cut_part = cut(part.asked, chosen.tensors, part.config, source.path, part.grafted)
    uncastable = frozenset(cut_part.names[name] for name in chosen.uncastable if name in cut_part.names)
    notes: list[str] = []
    warnings = [*_warnings(part, cut_part, chosen)]
    changes: dict[str, list[str]] = {}
    edit: Edited | None = None
    is_other = bool(source.quantized and source.quantized.formats)
    is_other = is_other or any(way.retold for way in ways_of(source, options) if way is not COMPUTING)

    def of_part(config: Mapping[str, Any]) -> dict[str, Any]:
        return edit.config if edit and config == source.config else _edited(config, cut_part.facts, is_other).config

    if part.asked.component == "mtp":
        # They are no model of their own, so that no configuration is true of them.
        warnings += untrue(source.config or {}, [*chosen.tensors], cut_part.names, {}, False, MODEL)
    elif source.config is not None and part.config is not None and source.reference is None:
        edit = _edited(source.config, cut_part.facts, is_other)
        notes = [*(_told(edit) if part.changes_tensors or edit.rows else ()), *edit.notes]
        warnings += edit.warnings
        changes = {key: [json.dumps(value, ensure_ascii=False) for value in values] for key, *values in edit.rows}
        if part.codes is not None and not is_other and not any(key in edit.config for key in configs.QUANTIZING):
            raise UsageError(
                f"Only {QUANTIZED} says how the weights of {source.path} are quantized, and not config.json: its names "
                "are not changed to those of a part.",
                "Use --dequantize, or write no configuration with --no-copy-config.",
            )
    if part.path and source.config is None:
        notes.append(f"--config has no effect on the output, which has no config.json: {part.path} was only read.")
    return chosen._replace(
        names={name: name for name in cut_part.tensors},
        known=cut_part.tensors,
        tensors=cut_part.tensors,
        described=Flattened(cut_part.tensors, None, uncastable),
        structured=False,
        owners={
            cut_part.names[alias]: cut_part.names[owner]
            for alias, owner in chosen.owners.items()
            if alias in cut_part.names and owner in cut_part.names
        },
        uncastable=uncastable,
        quantized=_quantized(chosen, cut_part),
        unmapped=chosen.first,
        edit=None if part.asked.component == "mtp" else of_part,
        warnings=(*chosen.warnings, *warnings),
        notes=(*chosen.notes, *_size_notes(part, cut_part, len(chosen.tensors)), *notes),
        reporters=(*chosen.reporters, lambda chosen, stored: lambda files: {"configuration": changes}),
    )


def _edited(config: Mapping[str, Any], facts: Facts, is_other: bool) -> Edited:
    """Return a configuration of the part, without that of codes if its weights are others (`is_other`)."""
    return edited(configs.changed(config, Change(plain=is_other)), facts)


def _quantized(chosen: Selected, cut_part: Cut) -> dict[str, parted.PartedTensor]:
    """Return the tensors that are stored in parts, by new name. Raise UsageError if rows of them are taken."""
    kept = {}
    for name, tensor in chosen.quantized.items():
        parts = [parted.prefix_of(name) + part for part in tensor.parts]
        new = cut_part.facts.renaming.of(name)
        if new is None or not all(part in cut_part.names for part in parts):
            continue
        if any(cut_part.tensors[cut_part.names[part]] is not chosen.tensors[part] for part in parts):
            raise UsageError(f"{name} is quantized by torchao, of which no rows are taken.", "Use --dequantize.")
        kept[new] = tensor
    return kept


def _warnings(part: Part, cut_part: Cut, chosen: Selected) -> Iterator[str]:
    if chosen.structured and (chosen.described.values or chosen.described.inert):
        values = some(chosen.described.values, form=str) or "objects of other classes"
        what = "A part of a model" if part.changes_tensors else "An output with --config"
        yield f"{what} is tensors alone; left out: {values}"
    for name, count in part.tokens.items():
        if cut_part.facts.vocabulary and count > cut_part.facts.vocabulary[1]:
            rows = cut_part.facts.vocabulary[1]
            yield (
                f"{name} has {count:,} tokens, {count - rows:,} more than the {rows:,} rows of the vocabulary: the "
                "model fails on text that has one of these."
            )


def _size_notes(part: Part, cut_part: Cut, before: int) -> Iterator[str]:
    if not part.changes_tensors:
        return
    facts = cut_part.facts
    kept = [f"--component {part.asked.component}"] if part.asked.component else []
    kept += [f"{len(facts.kept)} of {facts.total} layers"] if facts.kept is not None else []
    counts = (("experts", facts.experts), ("rows of the vocabulary", facts.vocabulary))
    kept += [f"{pair[1]:,} of {pair[0]:,} {noun}" for noun, pair in counts if pair]
    configured = "" if part.config is not None else " No configuration was found to change."
    if not kept:  # tensors were added alone
        if configured:
            yield configured.strip()
        return
    details = f" ({', '.join(kept)})"
    yield f"A part of the model: {len(cut_part.tensors):,} of {before:,} tensors{details}.{configured}"


def _told(edit: Edited) -> Iterator[str]:
    if edit.rows:
        rows = [f"{row.key}: {_short(row.old)} to {_short(row.new)}" for row in edit.rows]
        yield f"config.json was changed to be true of the part: {some(rows, len(rows), str)}."
    else:
        yield "config.json was not changed."


def _short(value: Any) -> str:
    return f"{len(value):,} entries" if isinstance(value, (list, dict)) and len(value) > 4 else brief(value)


def _states(source: Source, states: Mapping[str, Any], groups: Sequence[Any], ties: Mapping[str, str]) -> NoReturn:
    part: Part = source.computed["part"]
    options = [f"--{name}" for name in (*part.options, *(["graft"] if part.grafted else ["config"] * bool(part.path)))]
    raise UsageError(
        f"{some(options, form=str)} takes a part of the weights, and the optimizer's states are those of all.",
        "Convert the states without it.",
    )


def _record(source: Source) -> Mapping[str, Any]:
    part: Part = source.computed["part"]
    recorded = {name: list(value) if isinstance(value, tuple) else value for name, value in part.options.items()}
    recorded |= {"config": From(part.path)} if part.path else {}
    return {"part": recorded} if recorded else {}


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
