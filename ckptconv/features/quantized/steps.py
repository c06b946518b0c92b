"""The distance of a quantized weight from another weight, in steps of its quantization; and the check whether
quantizing the other weight gives the stored codes and scales.

A step leads from one code to the next, and is divided evenly between them. In units of the weight over its scale, the
step of integers is 1, and that of floats is the unit of their last place there. The nearest code is within half a step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from ckptconv.engine.worker import Worker
from ckptconv.features.pairs.elements import place_of
from ckptconv.features.pairs.runs import Run, runs
from ckptconv.features.quantized.computing import Dequantize, Quantize
from ckptconv.features.quantized.making import tiles_of
from ckptconv.features.quantized.quantize import fits
from ckptconv.features.reporting.quantized import Quantization, Steps
from ckptconv.options.table import Options
from ckptconv.plan import Data
from ckptconv.storage.files import Readers
from ckptconv.storage.packed import packed
from ckptconv.tensors import kernels
from ckptconv.tensors.computing import Axis, Tiled
from ckptconv.tensors.dtypes import DTYPES, SUMMED, DType
from ckptconv.tensors.float_formats import numpy_module
from ckptconv.tensors.lazy import Concat, Convert, Inline, LazyTensor, Narrow, Picked, Tagged, View, Zeros
from ckptconv.tensors.moves import Cast
from ckptconv.tensors.slices import Span, sliced

if TYPE_CHECKING:
    from ckptconv.tensors.float_formats import Array

# Half a step, and what the division by the scale may be off by in float32.
HALF = 0.5 + 2.0**-16
# Elements that are measured at a time.
_BLOCK = 1 << 15
# Of codes that are floats: the bits of their mantissa, and the exponents of their smallest and largest normal numbers.
_FLOATS = {
    "float8_e4m3fn": (3, -6, 8),
    "float8_e5m2": (2, -14, 15),
    "e2m1": (1, 0, 2),
    "e2m3": (3, 0, 2),
    "e3m2": (2, -2, 4),
    "quarters": (2, 0, 0),
}
# The values that the largest number of a block may become, by codes, or the best of these; and whether scales are
# powers of two. llm-compressor's is half a step beyond the largest code of int4. Just less than a power of two: the
# exponent of the scale is that of the largest number less the largest of the codes (OCP Microscaling Formats 1.0,
# section 6.3), and what is beyond the largest code becomes that; just less than 7 is compressed-tensors'.
_RULES: Mapping[str, Sequence[tuple[tuple[float, ...], bool]]] = {
    "float8_e4m3fn": (((448.0,), False), ((448.0,), True), ((512 - 2.0**-15,), True)),
    "e2m1": (((8 - 2.0**-21,), True), ((6.0,), True), ((7 - 2.0**-21,), True)),
    "int4": (((7.0, 7.5, 8.0), False), ((7.0,), False), ((7.5,), False)),
}
_F32 = DTYPES["float32"]


# Two tensors of one shape; and what counts the elements that differ, of each two.
_Both: TypeAlias = "tuple[LazyTensor, LazyTensor]"
Count: TypeAlias = "Callable[[Sequence[_Both]], Sequence[int]]"


class Pair(Protocol):
    """Two tensors of one shape that were compared, and the differences found; None if all bytes are equal."""

    one: LazyTensor
    other: LazyTensor
    found: Any

    @property
    def dtypes(self) -> tuple[DType, DType]: ...


class _Weight(NamedTuple):
    """A quantized side of a pair: its numbers before they are rounded to a dtype, the scale of each of them, the kind
    of its codes, and the number of its scales."""

    numbers: LazyTensor
    factors: LazyTensor
    codes: str
    scales: int


def measured(pairs: Mapping[Any, Pair], options: Options, count: Count) -> dict[Any, Steps]:
    """Return the distance of each of `pairs`, one side of which is quantized, in steps."""
    steps: dict[Any, Steps] = {}
    whole: dict[Any, tuple[Pair, str]] = {}
    with Readers(dict(options.storage_options), options.spool_dir) as readers:
        readers.expect(packed(side for pair in pairs.values() for side in (pair.one, pair.other)))
        worker = Worker(readers, None, 1 << 20)
        for key, pair in pairs.items():
            for side, one, other in (("a", pair.one, pair.other), ("b", pair.other, pair.one)):
                weight = _weight(one)
                if weight is not None and other.dtype.name in SUMMED:
                    steps[key], is_finite = _measured(worker, pair, weight, _exact(other), side)
                    whole.update({key: (pair, side)} if is_finite else {})
                    break
    for key, (scales, is_same) in _remade(whole, count).items():
        steps[key] = replace(steps[key], reproduced=is_same and not scales, scales_differ=scales)
    return steps


def through_codes(
    pairs: Mapping[Any, Pair], options: Options, count: Count, is_tolerant: bool
) -> tuple[dict[Any, Steps], Quantization | None]:
    """Return the distances of the pairs with a quantized side: of those that differ, and of all together. `count`
    counts the differing elements of further tensors. `is_tolerant`: the pairs were compared with a tolerance, so that
    of those that count as equal some may differ in bits."""
    of_codes = {key: pair for key, pair in pairs.items() if is_quantized(pair.one) or is_quantized(pair.other)}
    equal = {key: not (pair.found and pair.found.elements) for key, pair in of_codes.items()}
    unsure = [key for key, is_equal in equal.items() if is_tolerant and is_equal and of_codes[key].found]
    counts = count([(of_codes[key].one, of_codes[key].other) for key in unsure]) if unsure else []
    equal.update((key, not differing) for key, differing in zip(unsure, counts, strict=True))
    steps = measured({key: pair for key, pair in of_codes.items() if not equal[key]}, options, count)
    return steps, summed(of_codes, steps, equal) if of_codes else None


def is_quantized(tensor: LazyTensor) -> bool:
    """Return whether a tensor is computed from codes only."""
    return bool(_of_codes(tensor))


def summed(pairs: Mapping[Any, Pair], steps: Mapping[Any, Steps], equal: Mapping[Any, bool]) -> Quantization:
    """Return the summary of all `pairs`, one side of which is quantized; `equal` says which have equal elements."""
    every = list(steps.values())
    elements = sum(pair.one.numel for pair in pairs.values())
    total = math.fsum(one_steps.mean * pairs[key].one.numel for key, one_steps in steps.items())
    return Quantization(
        tensors=len(pairs),
        scales=sum(_scales_of(pair.one) or _scales_of(pair.other) for pair in pairs.values()),
        equal=sum(equal.values()),
        reproduced=sum(one_steps.reproduced for one_steps in every),
        within_half_step=sum(not one_steps.reproduced and not one_steps.beyond for one_steps in every),
        beyond=sum(not one_steps.reproduced and bool(one_steps.beyond) for one_steps in every),
        elements_beyond=sum(one_steps.beyond for one_steps in every),
        largest=max((one_steps.largest for one_steps in every), default=0.0),
        mean=total / max(elements, 1),
        unmeasured=sum(not is_equal for key, is_equal in equal.items() if key not in steps),
    )


# ------------------------------------------------------------------------------------------------------- expressions


def _rebuilt(tensor: LazyTensor, make: Any) -> LazyTensor | None:
    """Return `tensor` with what `make` makes of each weight of codes in it, without casts of these; None if others are
    among what it consists of."""
    if isinstance(tensor, (Tagged, Convert)):
        is_cast = isinstance(tensor, Tagged) or isinstance(tensor.kernel, Cast)
        return _rebuilt(tensor.tensor, make) if is_cast else None
    if isinstance(tensor, Tiled):
        weight: LazyTensor | None = make(tensor) if isinstance(tensor.kernel, Dequantize) else None
        return weight
    if isinstance(tensor, Concat):
        parts = [_rebuilt(part, make) for part in tensor.parts]
        known = [part for part in parts if part is not None]
        return Concat(tuple(known), tensor.dim) if len(known) == len(parts) else None
    if isinstance(tensor, (View, Narrow, Picked)):
        inner = _rebuilt(tensor.tensor, make)
        if inner is None or tensor.dtype != tensor.tensor.dtype:
            return None
        return View(inner, inner.dtype, tensor.shape) if isinstance(tensor, View) else tensor.replaced(tensor=inner)
    return None


def _of_codes(tensor: LazyTensor) -> list[Tiled]:
    """Return the weights of codes that a tensor consists of; none if there is something else in it."""
    weights: list[Tiled] = []

    def note(tiled: Tiled) -> Tiled:
        weights.append(tiled)
        return tiled

    return weights if _rebuilt(tensor, note) is not None else []


def _scales_of(tensor: LazyTensor) -> int:
    return sum(tiled.parts[1].numel for tiled in _of_codes(tensor))


def _weight(tensor: LazyTensor) -> _Weight | None:
    kinds = set(map(_codes_of, _of_codes(tensor)))
    numbers, factors = (
        (_rebuilt(tensor, make) for make in (_numbers_of, _factors_of)) if len(kinds) == 1 else (None, None)
    )
    if numbers is None or factors is None or "" in kinds:
        return None
    return _Weight(numbers, factors, kinds.pop(), _scales_of(tensor))


def _exact(tensor: LazyTensor) -> LazyTensor:
    """Return a weight before it is rounded to a dtype, if it is computed from codes."""
    return _rebuilt(tensor, _numbers_of) or tensor


def _codes_of(tiled: Tiled) -> str:
    """Return the kind of codes: a dtype of 8 bits, "e2m1", "int"; "" for indices into a table."""
    kernel = tiled.kernel
    assert isinstance(kernel, Dequantize)
    if kernel.codes.startswith("table"):
        return ""
    own = tiled.parts[0].dtype.name if kernel.codes == "own" else kernel.codes
    return own if own in _FLOATS else "int"


def _numbers_of(tiled: Tiled) -> Tiled:
    assert isinstance(tiled.kernel, Dequantize)
    return tiled.replaced(kernel=tiled.kernel._replace(between="float32"))


def _factors_of(tiled: Tiled) -> Tiled:
    """Return the scale of each element: the weights whose codes are all 1."""
    kernel = tiled.kernel
    assert isinstance(kernel, Dequantize)
    codes = tiled.parts[0]
    given = {role: place for place, role in enumerate(kernel.roles, 1) if role not in ("zero", "table", "shift")}
    parts: list[LazyTensor] = [Zeros(codes.dtype, codes.shape), *(tiled.parts[place] for place in given.values())]
    axes = [tiled.axes[0], *(tiled.axes[place] for place in given.values())]
    changed = kernel._replace(roles=tuple(given), offset=-1, between="float32")
    if kernel.codes == "e2m1":
        # The codes of a table stand for what is in it.
        ones = numpy_module().ones(16, "<f4").tobytes()
        parts.append(Inline(ones, _F32, (16,)))
        axes.append((Axis(0, 0),))
        changed = changed._replace(codes="table4", roles=(*given, "table"), offset=0)
    return tiled.replaced(parts=tuple(parts), axes=tuple(axes), kernel=changed)


# ---------------------------------------------------------------------------------------------------------- measuring


def _measured(worker: Worker, pair: Pair, weight: _Weight, other: LazyTensor, side: str) -> tuple[Steps, bool]:
    """Return how far a weight and `other` are apart, and whether all numbers of that are finite."""
    np = numpy_module()
    beyond = not_finite = 0
    total, largest = 0.0, 0.0
    first: int | None = None
    worst: int | None = None
    is_finite = True
    shape = weight.numbers.shape
    for run in runs(pair.one, pair.other, _BLOCK * sum(dtype.itemsize for dtype in pair.dtypes)):
        numbers, factors, theirs = (_read(worker, tensor, run) for tensor in (weight.numbers, weight.factors, other))
        with np.errstate(all="ignore"):
            distance = np.abs(index(weight.codes, theirs / factors) - index(weight.codes, numbers / factors))
        distance[(theirs == numbers) | (np.isnan(theirs) & np.isnan(numbers))] = 0
        is_finite = is_finite and bool(np.isfinite(theirs).all())
        wrong = ~np.isfinite(distance)
        far = wrong | (distance > HALF)
        not_finite += int(np.count_nonzero(wrong))
        beyond += int(np.count_nonzero(far))
        if far.any():
            at = run.number(int(far.argmax()), shape)
            first = at if first is None else min(first, at)
        distance[wrong] = 0
        total += float(distance.sum())
        most = int(distance.argmax())
        if distance[most] > largest:
            largest, worst = float(distance[most]), run.number(most, shape)
    steps = Steps(
        side=side,
        reproduced=False,
        scales=weight.scales,
        scales_differ=None,
        beyond=beyond,
        largest=largest,
        mean=total / max(pair.one.numel, 1),
        first=None if first is None else place_of(first, shape),
        worst=None if worst is None else place_of(worst, shape),
        not_finite=not_finite,
    )
    return steps, is_finite


def _read(worker: Worker, tensor: LazyTensor, run: Run) -> Array:
    """Return part of a tensor as float64."""
    np = numpy_module()
    start, stop = (bound * tensor.dtype.itemsize for bound in (run.start, run.stop))
    data = worker.bytes_of(Data(0, run.of(tensor), ""), start, stop)
    if tensor.dtype.name != "float64":
        data, _ = kernels.apply((Cast(tensor.dtype.name, "float64"),), data)
    numbers: Array = np.frombuffer(data, "<f8").copy()
    return numbers


def index(codes: str, numbers: Array) -> Array:
    """Return the number of steps from 0 to each number; between two codes, steps are divided evenly."""
    if codes not in _FLOATS:
        return numbers
    np = numpy_module()
    mantissa, least, greatest = _FLOATS[codes]
    size = np.abs(numbers)
    _, exponent = np.frexp(size)
    exponent = np.clip(np.where(size > 0, exponent - 1, least), least, greatest)
    steps = np.ldexp(size, mantissa - exponent) + (exponent - least) * 2.0**mantissa
    signed: Array = np.copysign(steps, numbers)
    return signed


# -------------------------------------------------------------------------------------------------- quantizing again


def _remade(pairs: Mapping[Any, tuple[Pair, str]], count: Count) -> dict[Any, tuple[int, bool]]:
    """Return for each pair, of which one side is quantized, how many scales quantizing the other gives differently, at
    least, and whether the codes are the same then; nothing for those of which it is not known how they were
    quantized."""
    results: dict[Any, tuple[int, bool]] = {}
    for attempt in range(max(map(len, _RULES.values()))):
        remade: dict[Any, list[tuple[_Both, _Both]]] = {}
        for key, (pair, side) in pairs.items():
            one, other = (pair.one, pair.other) if side == "a" else (pair.other, pair.one)
            every = _again(one, _exact(other), attempt) if results.get(key) != (0, True) else []
            if every:
                remade[key] = every
        counts = iter(count([tensor for every in remade.values() for both in every for tensor in both]))
        for key, every in remade.items():
            codes, scales = map(sum, zip(*((next(counts), next(counts)) for _ in every), strict=True))
            result = scales, not codes
            if key not in results or (result[0], codes) < (results[key][0], not results[key][1]):
                results[key] = result
    return results


def _again(tensor: LazyTensor, other: LazyTensor, attempt: int) -> list[tuple[_Both, _Both]]:
    """Return the codes and the scales of each quantized weight that `tensor` is joined of, beside those that quantizing
    `other` gives by one of the rules that are known for it; nothing if there is none for one of them."""
    while isinstance(tensor, (Tagged, Convert)):
        tensor = tensor.tensor
    if isinstance(tensor, View) and tensor.dtype == tensor.tensor.dtype:
        return _again(tensor.tensor, View(other, other.dtype, tensor.tensor.shape), attempt)
    if isinstance(tensor, Concat):
        starts = itertools.accumulate((part.shape[tensor.dim] for part in tensor.parts), initial=0)
        spans = [Span(0, 1, extent) for extent in tensor.shape]
        every = []
        for part, start in zip(tensor.parts, starts, strict=False):
            spans[tensor.dim] = Span(start, 1, part.shape[tensor.dim])
            every.append(_again(part, sliced(other, spans), attempt))
        return [both for both_of in every for both in both_of] if all(every) else []
    both = _alone(tensor, other, attempt)
    return [both] if both else []


def _alone(tensor: LazyTensor, other: LazyTensor, attempt: int) -> tuple[_Both, _Both] | None:
    if not isinstance(tensor, Tiled) or not isinstance(tensor.kernel, Dequantize) or len(tensor.shape) < 2:
        return None
    kernel, codes, scale, dims = tensor.kernel, tensor.parts[0], tensor.parts[1], len(tensor.shape)
    kind = codes.dtype.name if kernel.codes == "own" else kernel.codes
    known = _RULES.get(kind, ()) if kernel.roles == ("scale",) and not kernel.over else ()
    of_powers = scale.dtype.name == "float8_e8m0fnu"
    rules = [rule for rule in known if rule[1] or not of_powers] if of_powers or kind != "e2m1" else []
    if attempt >= len(rules) or any(tensor.starts):
        return None
    ahead = tuple(Axis(dim) for dim in range(dims - 2))
    rows, columns = (axis.den for axis in tensor.axes[1][-2:])
    across = {"int4": (4, 32), "e2m1": (4, 8)}.get(kind, (1, 1))
    plain = (*ahead, Axis(dims - 2), Axis(dims - 1, *across))
    sides = (*ahead, Axis(dims - 2, 1, rows), Axis(dims - 1, 1, columns))
    largest, power = rules[attempt]
    again = Quantize("codes", kind, scale.dtype.name, rows, columns, largest, power, False, "")
    is_known = tensor.axes[0] == plain and tensor.axes[1] == sides and (kind != "int4" or kernel.offset == 8)
    if not is_known or not fits(again, other.dtype.name):
        return None
    remade = [
        tiles_of(again._replace(made=what), other, stored.shape)
        for what, stored in (("codes", codes), ("scales", scale))
    ]
    alike = View(codes, remade[0].dtype, codes.shape)
    return (alike, remade[0]), (scale, remade[1])
