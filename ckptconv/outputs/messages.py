"""The notes and warnings on planned outputs, and on their sources. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from ckptconv.formats.optimizers import entries, is_optimizer, key_to_add
from ckptconv.formats.source import NOT_CONVERTED, Source
from ckptconv.options.table import Options
from ckptconv.outputs.notices import idle_sentences
from ckptconv.outputs.planning import Output
from ckptconv.text import some


def notes_of(sources: Sequence[Source], outputs: Sequence[Output], chosen: Options) -> Iterator[str]:
    """Yield the notes on `sources` and on the `outputs` that are planned from them."""
    for source in sources:
        yield from source.notes
        given, option = f"--strip-prefix {chosen.strip_prefix}", f"--strip-prefix {chosen.strip_prefix!r}"
        why = next((output.notices.idle[option] for output in outputs if option in output.notices.idle), "")
        is_renamed, hints = chosen.strip_prefix and not why, [] if chosen.rename or ": give " in why else source.hints
        if hints and not chosen.key and not key_to_add(source.weights, chosen):  # the options name tensors with the key
            hints = [re.sub("--key ([^ ]+) --strip-prefix ", r"--strip-prefix \1.", hint) for hint in hints]
        # A part of the prefix leaves the rest.
        hints = [hint for hint in hints if not is_renamed or (given in hint and f"{given} " not in hint)]
        yield from (hint for hint in hints if not chosen.key or f"--key {chosen.key} " in hint)
    if are_weights_left(sources, (output.target.holds for output in outputs)):
        yield f"{NOT_CONVERTED}the weights. To convert them, give OUTPUT after INPUT."
    yield from (note for output in outputs for note in output.notices.notes)


def are_weights_left(sources: Iterable[Source], holds: Iterable[str]) -> bool:
    """Return whether outputs that hold this have only the optimizers' states of `sources`, which have weights too."""
    return {*holds} == {"optimizer"} and not all(is_optimizer(x) for s in sources for x in entries(s.weights).values())


def warnings_of(sources: Sequence[Source], outputs: Sequence[Output], chosen: Options) -> Iterator[str]:
    """Yield the warnings on `sources`, their references, and the `outputs` that are planned from them."""
    references = (source.reference for source in sources if source.reference)
    yield from dict.fromkeys(warning for source in (*sources, *references) for warning in source.warnings)
    yield from (warning for output in outputs for warning in output.notices.warnings)
    # An option that affects none of the outputs is probably a mistake.
    first, *others = (output.notices.idle for output in outputs)
    yield from idle_sentences({option: first[option] for option in first if all(option in idle for idle in others)})
    for bits in (output.notices.bits for output in outputs if output.notices.bits):
        yield f"{some(bits)} cannot be restored without the structure record, because safetensors lack their dtype."
    if is_inert(outputs):
        yield _no_model(sources[0], outputs, chosen)
    elif not any(output.tensors for output in outputs):
        kept = "none of its contents are kept" if not chosen.structure else "only its structure is kept"
        yield f"{sources[0].path} contains no tensors: {kept}."


def is_inert(outputs: Sequence[Output]) -> bool:
    """Return whether all tensors of the outputs are in objects of opaque classes (known by name only)."""
    return all(output.notices.inert for output in outputs)


def _no_model(source: Source, outputs: Sequence[Output], chosen: Options) -> str:
    """Return the warning for an input whose tensors, if any, are all inside objects of opaque classes."""
    count = sum(output.tensors for output in outputs)
    classes = f"objects of classes that are known by name only ({some(source.files.opaque, 3)})"
    problem = f"holds no tensor, and {classes}, which may have some, are kept as inert data"
    if count:
        problem = f"has all its tensors ({count}) inside {classes}: their names are not those of a model"
    advice = "On a machine with these classes, save the state_dict() of the objects, or a dict of their tensors."
    if chosen.raw:
        advice = "Without --raw, whole modules among these objects become state dicts."
    return f"{source.path} {problem}. The output is not a usable model. {advice}"
