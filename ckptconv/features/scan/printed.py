"""What `scan --json` prints, for its schema (`scripts/schemas.py`)."""

from __future__ import annotations

from typing import Any

from ckptconv.features.scan.report import RULES, VERDICTS, Finding, ScannedFile, ScanReport

# The object: title, what prints it, the commands, the class of its fields, what others call these, and what `ok` is.
COMMANDS = {
    "scan": (
        "Scans",
        "What `scan --json` prints, whatever the verdicts are. Wrong usage is an object of failures.",
        ("scan",),
        ScanReport,
        "scanned",
        None,
        "Whether nothing was found that counts: true with exit code 0 only.",
        "What stands for the worst verdict that counts, with the exit code of the process. Only when `ok` is false.",
    ),
}
_BY_VERDICT = ("are safe", "load what nobody has reviewed", "are not to be judged", "are suspicious", "are attacks")
_COUNTS = {
    name: {"type": "integer", "minimum": 0, "description": f"How many files {what}."}
    for name, what in zip(VERDICTS, _BY_VERDICT, strict=True)
}
# What the type of a field does not say.
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
