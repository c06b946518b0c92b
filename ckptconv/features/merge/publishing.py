"""Predict whether the directory of a model would have the factors of an adapter among its tensors. Pure."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from ckptconv.errors import UsageError
from ckptconv.features.merge.files import KEYS
from ckptconv.formats.adapter_names import FACTOR
from ckptconv.formats.source import ADAPTER, ADAPTER_CONFIG
from ckptconv.outputs.truths import Weights
from ckptconv.text import count_of, quoted

_NEEDED = f"an {ADAPTER_CONFIG} with {KEYS} next to it"


def untrue(config: Mapping[str, Any] | None, weights: Weights) -> Iterator[str]:
    """Yield a warning if factors in the form of a training are among the `weights`, which no program loads as a model.
    Also yield one if they are all that there is, under the names that PEFT loads, but in the file of a model. Raise
    UsageError if they would be published. Yield a warning if other tensors of the same adapter are left out.
    """
    yield from _of_left_out(weights)
    # In the files that PEFT loads, names lack that of the adapter.
    every = _factors(weights.tensors)
    factors = {name: adapter for name, adapter in every.items() if adapter}
    if not factors:
        if weights.stem == ADAPTER or not every or len(every) < len(weights.tensors):
            return
        fact = (
            f"The output contains only {count_of(len(every), 'LoRA factor')}, but has the file name of a model. No "
            "program loads such a file."
        )
        advice = f"For PEFT, name OUTPUT adapter_model.safetensors, and copy {ADAPTER_CONFIG} next to it."
        if weights.publishing:
            raise UsageError(fact, advice)
        yield f"{fact} {advice}"
        return
    first, adapter = next(iter(factors.items()))
    others = [name for name in weights.tensors if name not in factors]
    fact = (
        f"The output has {count_of(len(factors), 'LoRA factor')}, such as {quoted(first)}, and "
        f"{count_of(len(others), 'other tensor') if others else 'nothing else'}. No program loads these as a model."
    )
    advice = (
        f"To merge the factors, use ckptconv merge BASE INPUT OUTPUT. BASE is the model before the training run; INPUT "
        f"needs {_NEEDED}. To write the adapter alone, name OUTPUT adapter_model.safetensors, and use "
        f"{_selecting(adapter, weights.before)}."
        if others
        else "For PEFT, name OUTPUT adapter_model.safetensors, and remove the name of the adapter from the names of "
        f"tensors with {_selecting(adapter, weights.before)}. PEFT needs {_NEEDED}."
    )
    if weights.publishing:
        raise UsageError(fact, advice)
    yield f"{fact} {advice}"


def _of_left_out(weights: Weights) -> Iterator[str]:
    """Yield a warning if the `weights` have the factors of an adapter, but not all of its other trained tensors."""
    for adapter in dict.fromkeys(filter(None, _factors(weights.after).values())):
        left = [name for name in _beside_factors(weights.before, adapter) if name not in weights.after]
        if left:
            yield (
                f"The output has the factors of the adapter {quoted(adapter)}, but lacks "
                f"{count_of(len(left), 'other tensor')} of this adapter, such as {quoted(left[0])}. To select all "
                f"tensors that PEFT saves together, use {_selecting(adapter, weights.before)}."
            )


def _selecting(adapter: str, names: Collection[str]) -> str:
    """Return the options that select an adapter of a training, and rename its tensors to the names that PEFT loads."""
    are_factors = len(_factors(names)) == len(names)
    globs = [] if are_factors else ["*lora_*", *(glob for glob in _globs(adapter) if fnmatch.filter(names, glob))]
    copied = r"(\.modules_to_save)?" if len(globs) > 1 else ""
    return f"{''.join(f'--include {glob!r} ' for glob in globs)}--rename '{copied}\\.{adapter}(?=\\.|$)='"


def _beside_factors(names: Iterable[str], adapter: str) -> list[str]:
    """Return the `names` of other tensors that PEFT saves with the factors of an adapter."""
    return [name for glob in _globs(adapter) for name in fnmatch.filter(names, glob)]


def _globs(adapter: str) -> tuple[str, str]:
    """Return globs of the names in a training of an adapter's tensors other than factors: copied modules, and rows of
    tokens."""
    return f"*.modules_to_save.{adapter}.*", f"*.trainable_tokens_delta.{adapter}"


def _factors(names: Iterable[str]) -> dict[str, str | None]:
    """Return the names that are factors, each with the name of its adapter, which those that PEFT loads lack."""
    matches = (FACTOR.fullmatch(name) for name in names if ".lora_" in name)
    return {match[0]: match["adapter"] for match in matches if match}
