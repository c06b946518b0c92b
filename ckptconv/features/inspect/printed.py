"""The output of `inspect` with --json, for its schema (`scripts/schemas.py`)."""

from __future__ import annotations

from typing import Any

from ckptconv.features.inspect.module_tree import ModuleInfo
from ckptconv.features.inspect.summary import Summary
from ckptconv.features.reporting.statistics import Statistics
from ckptconv.features.reporting.tensor_info import TensorInfo

# Title, description, the commands, the class of the fields, and its name in other schemas.
COMMANDS = {"inspect": ("inspect", "The output of `inspect --json`.", ("inspect",), Summary, "summary")}
# Properties that are printed with the fields.
PROPERTIES = {Summary: ("modules",)}
# Fields that are left out if they are empty, and those that are left out unless they were asked for.
LEFT_OUT = {(Summary, name) for name in ("conversion", "not_finite", "made_of", "quantized", "roles")}
OPTIONAL = {(TensorInfo, "stats")}
# Classes in annotations, which their modules import for type checkers alone.
KNOWN = (Statistics, ModuleInfo)
_ANY_NUMBER = {"type": ["number", "null"]}
_PLAIN = ["string", "integer", "number", "boolean", "object", "array", "null"]
# Constraints that the type of a field does not show.
MORE: dict[tuple[type, str], dict[str, Any]] = {
    (Summary, "values"): {"type": "object", "additionalProperties": {"type": ["string", "boolean", "number", "array"]}},
    (Summary, "facts"): {"type": "object", "additionalProperties": {"type": _PLAIN}},
    (Statistics, "min"): _ANY_NUMBER,
    (Statistics, "max"): _ANY_NUMBER,
    (Statistics, "std"): _ANY_NUMBER,
    (Statistics, "mean"): {"type": ["number", "array", "null"], "items": {"type": "number"}},
}
