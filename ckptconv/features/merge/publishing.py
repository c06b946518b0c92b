"""Tell whether the directory of a model would have the factors of an adapter among its tensors. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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
    UsageError if they would be published.
    """
    # In the files that PEFT loads, names lack that of the adapter.
    every = _factors(weights.tensors)
    factors = {name: adapter for name, adapter in every.items() if adapter}
    if not factors:
        if weights.stem == ADAPTER or not every or len(every) < len(weights.tensors):
            return
        fact = (
            f"The output is {count_of(len(every), 'factor')} of LoRA under the name of a model. No program loads these."
        )
        advice = (
            f"Put the input into a directory with {ADAPTER_CONFIG}, which PEFT needs, and no config.json, and give "
            "--for-hub or --copy-config: the output is then adapter_model.safetensors, which PEFT loads."
        )
        if weights.publishing:
            raise UsageError(fact, advice)
        yield f"{fact} {advice}"
        return
    first, adapter = next(iter(factors.items()))
    others = [name for name in weights.tensors if name not in factors]
    fact = (
        f"The output has {count_of(len(factors), 'factor')} of LoRA, such as {quoted(first)}, and "
        f"{count_of(len(others), 'other tensor') if others else 'nothing else'}. No program loads these as a model."
    )
    advice = (
        f"Merge them: ckptconv merge BASE INPUT OUTPUT. BASE is the model before the training; INPUT needs {_NEEDED}. "
        f"For the adapter alone: --include '*lora_*' --rename '\\.{adapter}(?=\\.|$)=', with adapter_model.safetensors "
        "as OUTPUT."
        if others
        else "PEFT loads adapter_model.safetensors, in which names lack that of the adapter: give OUTPUT that name, "
        f"and --rename '\\.{adapter}(?=\\.|$)='. PEFT needs {_NEEDED}."
    )
    if weights.publishing:
        raise UsageError(fact, advice)
    yield f"{fact} {advice}"


def _factors(names: Iterable[str]) -> dict[str, str | None]:
    """Return the names that are factors, each with the name of its adapter, which those that PEFT loads lack."""
    matches = (FACTOR.fullmatch(name) for name in names if ".lora_" in name)
    return {match[0]: match["adapter"] for match in matches if match}
