"""The output of `diff` with --json, for its schema (`scripts/schemas.py`)."""

from __future__ import annotations

from typing import Any

from ckptconv.features.diff.changes import Change
from ckptconv.features.diff.difference import STATUSES, Difference, TensorDifference

# Title, description, the commands, the class of the fields; then: its name in other schemas, `ok`, the meaning of `ok`,
# and the error.
COMMANDS = {
    "diff": (
        "diff",
        "The output of `diff --json`, also if tensors differ.",
        ("diff",),
        Difference,
        "difference",
        None,
        "True if all tensors are equal or the delta was written; true only with exit code 0.",
        "The error for all differences, with the exit code of the process. Only if `ok` is false.",
    )
}
# Properties that are printed with the fields.
PROPERTIES = {Change: ("relative",)}
_COUNTED = (
    *("Tensors only in A.", "Tensors only in B.", "Tensors with different shapes.", "Tensors with different dtypes."),
    *("Tensors with elements that differ.", "Equal tensors."),
)
_COUNTS = {
    status: {"type": "integer", "minimum": 0, "description": about}
    for status, about in zip(STATUSES, _COUNTED, strict=True)
}
# Constraints that the type of a field does not show.
MORE: dict[tuple[type, str], dict[str, Any]] = {
    (Difference, "counts"): {
        "type": "object",
        "properties": _COUNTS,
        "required": list(_COUNTS),
        "additionalProperties": False,
    },
    (TensorDifference, "status"): {"enum": list(STATUSES)},
}
