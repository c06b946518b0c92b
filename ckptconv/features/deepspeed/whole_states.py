"""The optimizer states of ZeRO-0, which are whole, and stored by the numbers of parameters."""

from __future__ import annotations

from ckptconv.errors import UnsupportedError
from ckptconv.features.deepspeed.records import ModelFile
from ckptconv.features.deepspeed.states import own
from ckptconv.features.deepspeed.weights import Weights
from ckptconv.features.optimizer_states.numbering import naming
from ckptconv.features.optimizer_states.states import by_parameter, model_of, renamed
from ckptconv.text import count_of


def read_whole_states(weights: Weights, model: ModelFile) -> None:
    """Read the optimizer of ZeRO-0, which numbers its states."""
    optimizer = model.values.get("optimizer")
    inner = optimizer.get("optimizer_state_dict", optimizer) if isinstance(optimizer, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("state"), dict):
        return
    states = by_parameter([("", inner)], weights.trainable, model.file.path)
    if states is None:
        return
    reasons: list[str] = []
    try:
        numbers = naming(f"{model.file.path}: the optimizer")
    except UnsupportedError as error:
        weights.warnings.append(error.message)
        return
    known = model_of(weights.trainable, model.values.get("module"))
    names = numbers.attempted(numbers.numbers_of(states), known, reasons)
    if names is None:
        weights.warnings.append(
            f"{model.file.path}: the optimizer states of {count_of(len(states['state']), 'parameter')} are numbered, "
            f"and the parameter names are not known{': ' if reasons else ''}{'; '.join(reasons)}."
        )
        return
    named = renamed(states, names.names)
    weights.states = {name: own(state) for name, state in named["state"].items()}
    weights.groups.extend(named["param_groups"])
