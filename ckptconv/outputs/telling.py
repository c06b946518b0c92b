"""The notes and warnings on planned outputs, and on what they are made of. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs.planning import Output
from ckptconv.outputs.told import idle_sentences
from ckptconv.text import some


def notes_of(sources: Sequence[Source], outputs: Sequence[Output], chosen: Options) -> Iterator[str]:
    """Yield the notes on `sources` and on the `outputs` that are planned of them."""
    has_chosen_names = chosen.key or chosen.strip_prefix or chosen.rename
    for one in sources:
        yield from one.told()
        yield from () if has_chosen_names else one.hints
    for each in outputs:
        yield from each.told.notes


def warnings_of(sources: Sequence[Source], outputs: Sequence[Output], chosen: Options) -> Iterator[str]:
    """Yield the warnings on `sources`, their references, and the `outputs` that are planned of them."""
    references = (one.reference for one in sources if one.reference)
    yield from dict.fromkeys(warning for one in (*sources, *references) for warning in one.warnings)
    for each in outputs:
        yield from each.told.warnings
        yield from each.restored.warnings() if each.restored else ()
    # An option that affects none of the outputs is probably a mistake.
    first, *others = (each.told.idle for each in outputs)
    yield from idle_sentences({option: first[option] for option in first if all(option in each for each in others)})
    for each in outputs:
        if each.told.bits:
            yield (
                f"{some(each.told.bits)} cannot be restored without the structure record, because safetensors lack "
                "their dtype."
            )
    if is_inert(outputs):
        yield _no_model(sources[0], outputs, chosen)
    elif not any(each.tensors for each in outputs):
        kept = "none of its contents are kept" if not chosen.structure else "only its structure is kept"
        yield f"{sources[0].path} holds no tensors: {kept}."


def is_inert(outputs: Sequence[Output]) -> bool:
    """Whether the outputs hold no tensor outside objects of opaque classes (known by name only)."""
    return all(each.told.inert for each in outputs)


def _no_model(source: Source, outputs: Sequence[Output], chosen: Options) -> str:
    """Return the warning for an input whose tensors, if any, are all inside objects of opaque classes."""
    count = sum(each.tensors for each in outputs)
    classes = f"objects of classes that are known by name only ({some(source.files.opaque, 3)})"
    what = (
        f"has all its tensors ({count}) inside {classes}: their names are not those of a model"
        if count
        else f"holds no tensor, and {classes}, which may have some, are kept as inert data"
    )
    advice = (
        "Without --raw, whole modules among them become state dicts."
        if chosen.raw
        else (
            "On a machine with these classes, save the state_dict() of the object with torch.save, and convert "
            "that file."
        )
    )
    return f"{source.path} {what}. The output is not a usable model. {advice}"
