"""Facts about quantized weights in reports, which the feature fills in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class QuantizedGroup:
    """The weights of one kind of quantization."""

    weights: int = 0
    """Number of weights."""

    parameters: int = 0
    """Number of elements of the weights."""

    bits_per_weight: float = 0.0
    """The bits that are stored for each element, scales included."""


@dataclass(slots=True)
class QuantizedSummary:
    """The quantized weights of a checkpoint."""

    parameters: int
    """Elements of the whole model: of the weights that codes stand for, and of all other tensors."""

    formats: dict[str, QuantizedGroup]
    """The quantized weights, by format."""


@dataclass(frozen=True, slots=True)
class Steps:
    """The distance between the two sides of a weight, one of which is quantized."""

    side: str
    """The side that is quantized: a or b; a if both are."""

    reproduced: bool
    """Whether quantizing the other side gives the very codes and scales that are stored."""

    scales: int
    """Number of scales of the weight."""

    scales_differ: int | None
    """Number of scales that quantizing the other side does not reproduce; null if the method of quantization is not
    known."""

    beyond: int
    """Number of elements that differ by more than half a step."""

    largest: float
    """The largest distance, in steps."""

    mean: float
    """The mean distance, in steps."""

    first: list[int] | None
    """The index of the first element that is more than half a step apart; null if none is."""

    worst: list[int] | None
    """The index of the element that is furthest apart."""

    not_finite: int
    """Number of elements that are not finite on either side, or differ and have a scale of 0. They are part of
    `beyond`."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """The distances between two sides of all weights that are quantized on either of them. Tied names count once."""

    tensors: int
    """Number of weights."""

    scales: int
    """Number of scales of these weights."""

    equal: int
    """Number of weights that are equal on both sides once dequantized."""

    reproduced: int
    """Number of other weights whose codes and scales quantizing the other side reproduces exactly."""

    within_half_step: int
    """Number of other weights whose elements all differ by half a step at most."""

    beyond: int
    """Number of other weights with elements that differ by more than half a step."""

    elements_beyond: int
    """Number of elements that differ by more than half a step."""

    largest: float
    """The largest distance of all elements, in steps."""

    mean: float
    """The mean distance of all elements, in steps."""

    unmeasured: int
    """Number of weights that differ and have no steps: their codes index a table, or their shapes differ."""
