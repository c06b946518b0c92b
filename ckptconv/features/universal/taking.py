"""The state of a training beside its weights: the optimizer's states, and the number of steps."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from ckptconv.errors import CkptconvError, UnsupportedError
from ckptconv.features.optimizer_states.numbering import ways
from ckptconv.features.optimizer_states.states import check_not_optax, is_numbered
from ckptconv.features.optimizer_states.training import check_key, weights_in, with_states_beside
from ckptconv.features.universal.options import UniversalOptions
from ckptconv.formats.optimizers import optimizers_in, weights_key
from ckptconv.formats.source import Source
from ckptconv.formats.values import number_in
from ckptconv.options.table import Options
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Inline
from ckptconv.text import some

_STEP = "step"
FRESH = "Use --fresh-optimizer to start with zero moments instead."


def needs_states(options: Options, asked: str) -> bool:
    """Return whether to read optimizer states, if any, of the checkpoint that was opened as `asked`."""
    return not UniversalOptions.of(options).fresh_optimizer


def fitted(source: Source, options: Options, asked: str) -> Source:
    """Return `source` with its optimizer's states by parameter name, and its step, if it holds an optimizer and
    `options` do not ask for a fresh one. A ZeRO checkpoint has them already, unless it is for another stage.

    Read the steps. DeepSpeed has one for all parameters of a group: where they differ, as those of experts do that were
    not always chosen, all get the largest, with a warning. Raise UnsupportedError if nothing tells which states are of
    which parameter, UsageError if nothing tells where the weights are.
    """
    given = UniversalOptions.of(options)
    if source.training is not None and not given.zero_stage:
        return source
    key = options.key or weights_key(source.weights)
    for name, _ in optimizers_in(source.weights, key)[:1]:
        check_key(source, name, key)
    if given.fresh_optimizer:
        return source
    source = with_states_beside(source, key)
    try:
        optimizer = source.states()
    except CkptconvError as error:
        error.hint = error.hint if FRESH in error.hint else f"{error.hint} {FRESH}".strip()
        raise
    if optimizer is None:
        return source
    check_not_optax(optimizer, source.path, FRESH)
    if is_numbered(optimizer, weights_in(source, key)):
        raise UnsupportedError(
            f"{source.path} has optimizer states by number, which cannot be matched to parameters.",
            f"{ways()} {FRESH}",
        )
    states = dict(optimizer["state"])
    known = {name: _number(state["step"], options.storage_options) for name, state in states.items() if _STEP in state}
    warnings = []
    for group in optimizer["param_groups"]:
        steps = {name: step for name in group["params"] if (step := known.get(name)) is not None}
        most = max(steps.values(), default=0)
        behind = [name for name, step in steps.items() if step != most]
        for name in behind:
            states[name] = {**states[name], _STEP: Inline(struct.pack("<f", most), DTYPES["float32"], ())}
        if behind:
            warnings.append(
                f"Parameters have fewer steps than others in their group ({most}): {some(behind)}. DeepSpeed stores "
                f"one step count per group, so {most} is written for all."
            )
    step = max((step for step in known.values() if step is not None), default=None)
    return source._replace(
        of_states=source.of_states._replace(step=step),
        optimizer={**optimizer, "state": states},
        warnings=[*source.warnings, *warnings],
    )


def _number(value: Any, storage_options: Mapping[str, Any]) -> int | None:
    """Return a step as a number; None if there is none."""
    value = number_in(value, storage_options)
    return int(value) if type(value) in (int, float) and 0 <= value < 1 << 53 else None
