"""The output of a command with --json for an input unlike its reference, for its schema (`scripts/schemas.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

from ckptconv.features.like.report import LikeReport
from ckptconv.result import Report

if TYPE_CHECKING:
    from typing_extensions import NotRequired


class DTypeAndShape(TypedDict):
    """The dtype and shape of a tensor."""

    dtype: str
    """The dtype."""

    shape: list[int]
    """The shape."""


class UnlikeTensor(TypedDict):
    """A tensor that an input and its reference do not have in common."""

    tensor: str
    """The tensor."""

    what: Literal["missing", "extra", "shape", "dtype"]
    """The difference."""

    expected: DTypeAndShape | None
    """The dtype and shape in the reference; null if the reference lacks the tensor."""

    found: DTypeAndShape | None
    """The dtype and shape in the input; null if the input lacks the tensor."""


class UnlikeCounts(TypedDict):
    """Numbers of tensors that an input and its reference have in common, and of those that differ."""

    matched: int
    """Tensors that both have."""

    missing: NotRequired[int]
    """Tensors that only the reference has."""

    extra: NotRequired[int]
    """Tensors that only the input has."""

    shape: NotRequired[int]
    """Tensors of another shape."""

    dtype: NotRequired[int]
    """Tensors of a dtype that cannot be cast to the reference's."""


class UnlikeReference(TypedDict):
    """The differences between an input and the reference of --like."""

    what: Literal["reference"]
    """The input does not give the tensors of its reference."""

    file: str
    """The reference."""

    counts: UnlikeCounts
    """Numbers of tensors, by kind of difference. Kinds that the options allow are left out."""

    tensors: list[UnlikeTensor]
    """The tensors that differ, at most 1000 of each kind."""


# Of a failure, what its difference is, and the schema of what else that has.
DIFFERENCES = {UnlikeReference: ""}
# Constraints that the type of a field does not show.
MORE: dict[tuple[type, str], Any] = {
    (LikeReport, "casts"): {"type": "object", "additionalProperties": {"type": "integer", "minimum": 1}},
    (Report, "like"): LikeReport | None,
}
