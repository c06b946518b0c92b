"""The output of `scan --json`, for its schema (`scripts/schemas.py`)."""

from __future__ import annotations

from typing import Any

from ckptconv.features.scan.report import RULES, VERDICTS, Finding, ScannedFile, ScanReport

# The object: title, description, the commands, the class of its fields, its name in other schemas, and the meaning of
# `ok`.
COMMANDS = {
    "scan": (
        "Scans",
        "The output of `scan --json`, with any verdict. Wrong usage prints an error object instead.",
        ("scan",),
        ScanReport,
        "scanned",
        None,
        "True if no finding counts (exit code 0).",
        "The error for the worst verdict that counts, with the exit code of the process. Only if `ok` is false.",
    ),
}
_BY_VERDICT = (
    "are safe",
    "refer to names that are not on the reviewed list",
    "cannot be judged",
    "are suspicious",
    "are attacks",
)
_COUNTS = {
    name: {"type": "integer", "minimum": 0, "description": f"How many files {what}."}
    for name, what in zip(VERDICTS, _BY_VERDICT, strict=True)
}
# Constraints that the type of a field does not show.
MORE: dict[tuple[type, str], dict[str, Any]] = {
    (ScanReport, "counts"): {
        "type": "object",
        "properties": _COUNTS,
        "required": list(_COUNTS),
        "additionalProperties": False,
    },
    (ScanReport, "verdict"): {"enum": list(VERDICTS)},
    (ScannedFile, "verdict"): {"enum": list(VERDICTS)},
    (Finding, "rule"): {"enum": list(RULES)},
}
