"""A source with others to average it with, and the weights of all."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from ckptconv.errors import UsageError
from ckptconv.features.sums.sources import combined
from ckptconv.formats.source import Source
from ckptconv.outputs.computed import repeated
from ckptconv.plan import Input, content_of
from ckptconv.text import count_of

# The prefix of the names of the other checkpoints' files among those of the source.
OF_OTHERS = "--average"
_MOST_TERMS = 1000
# The most checkpoints that a suggested command names.
_FEW = 6


class Average(NamedTuple):
    """Checkpoints whose tensors are added up in order, each times its weight, and divided by `over`.

    None among the `terms` is the source itself. `minus`: the last one is subtracted from the others.
    """

    terms: tuple[Source | None, ...]
    weights: tuple[float, ...]
    over: float
    minus: bool = False

    def paths(self, own_path: str) -> list[str]:
        """Return the paths of all terms; `own_path` is that of the source."""
        return [own_path if term is None else term.path for term in self.terms]


def weighted(
    steps: int, weights: Sequence[float] | None, decay: float | None, minus: bool
) -> tuple[list[float], float]:
    """Return the weight of each of `steps` checkpoints, with `minus` also that of the subtracted one, and the divisor
    of their sum.

    With `minus`, the result is the first step plus the differences of the others from the subtracted one, by their
    weights; for one step, its difference. Raise UsageError for weights without an average.
    """
    least = 1 if minus else 2
    if steps < least:
        raise UsageError(
            f"An average requires at least {count_of(least, 'checkpoint')}; given: {steps or 'none'}.",
            "Specify the path of each, such as RUN/step-1 RUN/step-2 (in Python a list). `ckptconv steps RUN` lists "
            "the steps of a run.",
        )
    if steps > _MOST_TERMS:
        raise UsageError(f"{steps:,} checkpoints were given; at most {_MOST_TERMS:,} can be averaged in one run.")
    if weights is not None and decay is not None:
        raise UsageError("--weights and --ema cannot be combined: both set the weights. Give one of them.")
    if decay is not None:
        if minus:
            raise UsageError(
                "--ema and --minus cannot be combined: --ema averages, --minus subtracts. Give one of them."
            )
        return [decay ** (steps - 1), *((1 - decay) * decay ** (steps - 1 - n) for n in range(1, steps))], 1.0
    factors = [1.0] * steps if weights is None else [float(weight) for weight in weights]
    if len(factors) != steps:
        raise UsageError(
            f"--weights has {count_of(len(factors), 'weight')} for {count_of(steps, 'checkpoint')}.",
            "Give one weight per checkpoint, in order and without spaces: --weights "
            f"{','.join('1' * steps) if steps <= _FEW else '1,1,2,…'}.",
        )
    if minus:
        return [*factors, -math.fsum(factors[1:] or factors)], 1.0
    over = math.fsum(factors)
    if not over:
        raise UsageError(
            "The weights sum to zero, but an average requires a sum that is not zero.",
            "For A − B: ckptconv average A --minus B OUTPUT",
        )
    return factors, over


def averaged(
    terms: Sequence[Source], own_index: int, weights: Sequence[float], over: float, minus: bool = False
) -> Source:
    """Return `terms[own_index]`, to be averaged with the others; with `minus`, the last one is subtracted. Quantized
    weights of all terms are counted, and a warning names terms that are given twice."""
    inputs = {
        f"{OF_OTHERS}/{number}/{name}": _weighing(identity, (own_index, tuple(weights), over))
        for number, term in enumerate(terms)
        if number != own_index
        for name, identity in term.inputs.items()
    }
    average = Average(
        tuple(None if n == own_index else term for n, term in enumerate(terms)), tuple(weights), over, minus
    )
    combination = combined(terms[own_index], terms, inputs, average=average)
    counted = terms[:-1] if minus else terms
    scaled = _scaled([term.path for term in terms], weights) if minus else ()
    combination = combination._replace(warnings=[*combination.warnings, *repeated(counted), *scaled])
    formats = sum((Counter(term.quantized.formats) for term in terms if term.quantized), Counter[str]())
    return combination.computing(dequantize=combination.quantized and combination.quantized._replace(formats=formats))


def _scaled(paths: Sequence[str], weights: Sequence[float]) -> Iterator[str]:
    """Yield a warning if the first of several checkpoints is scaled, and is not the last of `paths`, from which the
    differences are taken: the weights of differences may be meant."""
    first, *others, base = paths
    if not others or weights[0] == 1 or first == base:
        return
    words = " ".join(map(shlex.quote, (first, *others))) if len(paths) <= _FEW else "STEP..."
    numbers = ",".join(f"{weight:g}" for weight in weights[:-1]) if len(paths) <= _FEW else "W,..."
    quoted = shlex.quote(base)
    yield (
        f"The weight of {first}, the first STEP, scales the model itself: the result is {weights[0]:g} × {first} plus "
        f"differences from {base}. For only {base} plus differences, give {base} first: ckptconv average {quoted} "
        f"{words} OUTPUT --minus {quoted} --weights 1,{numbers}"
    )


def _weighing(identity: Hashable, facts: tuple[Hashable, ...]) -> Hashable:
    """Return the identity of an input, with further `facts` that decide the average."""
    content = content_of(identity)
    more = (*(content if isinstance(content, tuple) else (content,)), *facts)
    return Input(identity.file, more) if isinstance(identity, Input) else more
