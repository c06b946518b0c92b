"""A source that is to be averaged with others, and the weights of each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from ckptconv.errors import UsageError
from ckptconv.formats.source import Source, combined
from ckptconv.plan import Input, content_of
from ckptconv.storage.paths import resolved_name
from ckptconv.text import brief

# Stands before the names of the files of the others among those of the source.
OF_OTHERS = "--average"
_MOST_TERMS = 1000


class Average(NamedTuple):
    """Checkpoints whose tensors are added up in order, each times its weight, and divided by `over`.

    None among the `terms` is the source that has this. `minus`: the last one is taken off the others.
    """

    terms: tuple[Source | None, ...]
    weights: tuple[float, ...]
    over: float
    minus: bool = False

    def paths(self, own: str) -> list[str]:
        """Return the paths of all of them, where that of the source is `own`."""
        return [own if each is None else each.path for each in self.terms]


def weighted(
    steps: int, weights: Sequence[float] | None, decay: float | None, minus: bool
) -> tuple[list[float], float]:
    """Return the weight of each of `steps` checkpoints, and if `minus` of the one that is taken off them, and what
    their sum is divided by.

    With `minus`, it is the first and what the others, or with one step the first, differ by from it, by their weights.
    Raise UsageError for weights that make no average.
    """
    least = 1 if minus else 2
    if steps < least:
        raise UsageError(f"An average needs at least {least} checkpoints, but {steps or 'none'} was given.")
    if steps > _MOST_TERMS:
        raise UsageError(f"{steps:,} checkpoints were given; at most {_MOST_TERMS:,} can be averaged at once.")
    if weights is not None and decay is not None:
        raise UsageError("--weights and --ema exclude each other: both set the weights. Give one of them.")
    if decay is not None:
        if not 0 <= decay <= 1:
            raise UsageError(f"--ema is {brief(decay)}; expected a decay from 0 to 1, such as 0.99.")
        if minus:
            raise UsageError(
                "--ema and --minus exclude each other: --ema averages, --minus subtracts. Give one of them."
            )
        return [decay ** (steps - 1), *((1 - decay) * decay ** (steps - 1 - n) for n in range(1, steps))], 1.0
    found = [1.0] * steps if weights is None else [float(weight) for weight in weights]
    if len(found) != steps:
        raise UsageError(
            f"{len(found)} weights were given for {steps} checkpoints.",
            "Give one weight for each checkpoint, in order.",
        )
    if minus:
        return [*found, -math.fsum(found[1:] or found)], 1.0
    over = math.fsum(found)
    if not over:
        raise UsageError(
            "The weights sum to zero; an average needs another sum.",
            "For the difference of A and B: ckptconv average A --minus B OUT",
        )
    return found, over


def averaged(terms: Sequence[Source], own: int, weights: Sequence[float], over: float, minus: bool = False) -> Source:
    """Return `terms[own]`, which is to be averaged with the others, of which the last is taken off with `minus`;
    quantized weights of all are counted, and those that count twice are told."""
    inputs = {
        f"{OF_OTHERS}/{number}/{name}": _weighing(found, (own, tuple(weights), over))
        for number, each in enumerate(terms)
        if number != own
        for name, found in each.inputs.items()
    }
    average = Average(tuple(None if n == own else each for n, each in enumerate(terms)), tuple(weights), over, minus)
    made = combined(terms[own], terms, inputs, average=average)
    steps = Counter(resolved_name(each.path) for each in (terms[:-1] if minus else terms))
    twice = [name for name, count in steps.items() if count > 1]
    told = [f"{name} is given {steps[name]} times, and is counted as often." for name in twice]
    made = made._replace(warnings=[*made.warnings, *told])
    formats = sum((Counter(each.quantized.formats) for each in terms if each.quantized), Counter[str]())
    return made.computing(dequantize=made.quantized and made.quantized._replace(formats=formats))


def _weighing(found: Hashable, facts: tuple[Hashable, ...]) -> Hashable:
    """Return what identifies an input, with further `facts` that decide what is made of it."""
    content = content_of(found)
    more = (*(content if isinstance(content, tuple) else (content,)), *facts)
    return Input(found.file, more) if isinstance(found, Input) else more
