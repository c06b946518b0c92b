"""Facts about quantized weights in reports, which the feature fills in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class QuantizedGroup:
    """The weights that are quantized in one way."""

    weights: int = 0
    """How many there are."""

    parameters: int = 0
    """Their elements."""

    bits_per_weight: float = 0.0
    """The bits that are stored for each of these, scales included."""


@dataclass(slots=True)
class QuantizedSummary:
    """The quantized weights of a checkpoint."""

    parameters: int
    """Elements of the whole model: of weights in the place of codes, and of all other tensors."""

    formats: dict[str, QuantizedGroup]
    """The quantized weights, by format."""


@dataclass(frozen=True, slots=True)
class Steps:
    """How far the two sides of a weight are apart, of which one is quantized."""

    side: str
    """Which side is quantized: a or b; a if both are."""

    reproduced: bool
    """Whether quantizing the other side gives the very codes and scales that are stored."""

    scales: int
    """How many scales the weight has."""

    scales_differ: int | None
    """How many of them quantizing gives differently; null if it is not known how that was done."""

    beyond: int
    """How many elements are more than half a step apart."""

    largest: float
    """The largest distance, in steps."""

    mean: float
    """The mean distance, in steps."""

    first: list[int] | None
    """The index of the first element that is more than half a step apart; null if none is."""

    worst: list[int] | None
    """The index of the element that is furthest apart."""

    not_finite: int
    """How many elements are not finite on either side, or have a scale of 0 and differ. These count as beyond."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """The distances between two sides of all weights that are quantized on either of them. Tied names count once."""

    tensors: int
    """How many weights there are."""

    scales: int
    """How many scales they have."""

    equal: int
    """How many weights are equal on both sides, once codes are weights."""

    reproduced: int
    """Of the others, how many codes and scales quantizing the other side gives, without a difference."""

    within_half_step: int
    """Of the others, how many have no element that is more than half a step apart."""

    beyond: int
    """Of the others, how many have such elements."""

    elements_beyond: int
    """How many elements are more than half a step apart."""

    largest: float
    """The largest distance of all elements, in steps."""

    mean: float
    """The mean distance of all elements, in steps."""

    unmeasured: int
    """How many differ and have no steps, as their codes stand for numbers in a table, or have other shapes."""
