"""Cut a part of a model from the selected tensors, and change its configuration. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from ckptconv.errors import UsageError
from ckptconv.features.companions.contents import changed
from ckptconv.features.companions.directory import QUANTIZED, ROWS
from ckptconv.features.configs import configs
from ckptconv.features.model_facts.edits import Edited, configured, tensors_alone
from ckptconv.features.model_parts.cutting import Asked, Cut, cut
from ckptconv.features.model_parts.editing import edited
from ckptconv.formats.source import MODEL, Source
from ckptconv.options.table import Options
from ckptconv.outputs.computed import Computing, From
from ckptconv.outputs.notices import Change
from ckptconv.outputs.selected import Selected
from ckptconv.outputs.truths import Weights, untrue
from ckptconv.structure import parted
from ckptconv.structure.record import Flattened
from ckptconv.text import some

# The companions that are for another component, by component: their role, further names, and what they are for.
_OF_OTHERS = {
    "vision": ("tokenizer", ("generation_config.json",), "the language model"),
    "text": ("processor of images and sound", (), "the other components"),
}


class Part(NamedTuple):
    """The part of a source that is asked for, and the `options` {name: value} that ask for it.

    `config` is the content of the source's config.json, or of the file at `path`, and `codes` that of
    hf_quant_config.json; None if there is no such file.
    """

    asked: Asked
    options: Mapping[str, Any]
    config: Mapping[str, Any] | None = None
    codes: Mapping[str, Any] | None = None
    path: str = ""


def _parted(chosen: Selected, source: Source, options: Options, reference: Selected | None = None) -> Selected:
    """Return `chosen` with the tensors of the part alone, under its names, and with the change of its configuration."""
    part: Part = source.computed["part"]
    cut_part = cut(part.asked, chosen.tensors, part.config, source.path)
    uncastable = frozenset(cut_part.names[name] for name in chosen.uncastable if name in cut_part.names)
    notes = [*tensors_alone(chosen, "a part of a model" if part.options else "an output with --config")]
    notes += _size_notes(part, cut_part, len(chosen.tensors))
    warnings: list[str] = []
    is_other = bool(source.quantized and source.quantized.formats)
    if part.asked.component == "mtp":
        # They are no model of their own, so that no configuration is true of them.
        warnings += untrue(source.config or {}, Weights([*chosen.tensors], cut_part.names, {}, False, MODEL))
    if part.path and source.config is None:
        notes.append(f"The output has no config.json: {part.path} (--config) was only read.")
    chosen_part = chosen._replace(
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
        warnings=(*chosen.warnings, *warnings),
        notes=(*chosen.notes, *notes),
    )
    if part.asked.component == "mtp":
        return chosen_part

    def step(config: Mapping[str, Any]) -> Edited:
        # The configuration of codes goes where the weights are others.
        return edited(changed(config, Change(plain=is_other)), cut_part.facts, part.path)

    chosen_part = configured(chosen_part, source, step, is_told=bool(part.options))
    if part.codes is None or is_other or source.config is None or source.reference is not None:
        return chosen_part
    if not any(key in (chosen_part.edit or dict)(source.config) for key in configs.QUANTIZING):
        raise UsageError(
            f"Only {QUANTIZED}, not config.json, specifies how the weights of {source.path} are quantized, but the "
            f"names in {QUANTIZED} cannot be changed to those of a part.",
            "Use --dequantize, or omit config.json with --no-copy-config.",
        )
    return chosen_part


def _quantized(chosen: Selected, cut_part: Cut) -> dict[str, parted.PartedTensor]:
    """Return the tensors that are stored in parts, by new name. Raise UsageError if rows of them are taken."""
    kept = {}
    for name, tensor in chosen.quantized.items():
        parts = [parted.prefix_of(name) + part for part in tensor.parts]
        new = cut_part.facts.renaming.of(name)
        if new is None or not all(part in cut_part.names for part in parts):
            continue
        if any(cut_part.tensors[cut_part.names[part]] is not chosen.tensors[part] for part in parts):
            raise UsageError(
                f"{name} is quantized by torchao; selecting rows of such tensors is not supported.",
                "Use --dequantize.",
            )
        kept[new] = tensor
    return kept


def _size_notes(part: Part, cut_part: Cut, before: int) -> Iterator[str]:
    if not part.options:
        return
    facts = cut_part.facts
    kept = [f"--component {part.asked.component}"] if part.asked.component else []
    kept += [f"{len(facts.kept)} of {facts.total} layers"] if facts.kept is not None else []
    kept += [f"{facts.experts[1]:,} of {facts.experts[0]:,} experts"] if facts.experts else []
    lacking = "" if part.config is not None else " No config.json was found to change."
    yield f"A part of the model: {len(cut_part.tensors):,} of {before:,} tensors ({', '.join(kept)}).{lacking}"


def _states(source: Source, states: Mapping[str, Any], groups: Sequence[Any], ties: Mapping[str, str]) -> NoReturn:
    part: Part = source.computed["part"]
    if not part.options:
        raise UsageError(
            "--config supports only conversions of weights, but optimizer states were requested.",
            "Put the file next to the checkpoint as config.json, and omit --config; or give --size for a map.",
        )
    options = [f"--{name}" for name in part.options]
    raise UsageError(
        f"A part of the weights was selected with {some(options, form=str)}, but the optimizer states belong to all "
        "weights.",
        "Convert the states without selecting a part.",
    )


def _record(source: Source) -> Mapping[str, Any]:
    part: Part = source.computed["part"]
    recorded = {name: list(value) if isinstance(value, tuple) else value for name, value in part.options.items()}
    recorded |= {"config": From(part.path)} if part.path else {}
    return {"part": recorded} if recorded else {}


def _unfit(source: Source) -> Mapping[str, str]:
    """Return the companions that are for another component than that of the part."""
    role, others, what = _OF_OTHERS.get(source.computed["part"].asked.component, ("", (), ""))
    names = [name for row in ROWS if row.role == role for name in row.names.split()]
    return dict.fromkeys((*names, *others), f"for {what}")


def _asked(heading: Mapping[str, Any], seen: Callable[[str], str]) -> Mapping[str, Any]:
    path = heading["part"].get("config", "")
    return {"config": seen(path)} if path else {}


COMPUTING = Computing(
    heading={"part?": dict},
    selected=_parted,
    tree=_parted,
    states=_states,
    record=_record,
    unfit=_unfit,
    asked=_asked,
    retold="codes",
)
