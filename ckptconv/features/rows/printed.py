"""The output of the commands for rows with --json, for its schemas (`scripts/schemas.py`)."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from ckptconv.features.rows.check import CheckReport
from ckptconv.features.rows.layout import RowLayout


class RowsDiffer(TypedDict):
    """The report of `rows check`, if something is wrong."""

    what: Literal["rows"]
    """This is a report of `rows check`."""


# Objects of their own: title, description, the commands, the class of their fields, and its name in other schemas.
COMMANDS = {
    "rows-check": (
        "rows check", "The output of `rows check --json` if nothing is wrong.", ("rows check",), CheckReport, "checked"
    ),
}  # fmt: skip
# The commands that print the report of a conversion.
OF_CONVERSIONS = ("rows split", "rows pack")
# Differences between a table and its parts, and the schema of their other fields.
DIFFERENCES: dict[type, str] = {RowsDiffer: "rows-check#/$defs/checked"}
# Constraints that the type of a field does not show: a schema, or the class that is printed there.
MORE: dict[tuple[type, str], dict[str, Any] | type] = {
    (CheckReport, "layout"): RowLayout,
    (CheckReport, "ids"): {"enum": ["global", "local"]},
    (CheckReport, "offset"): {"type": "integer"},
    (CheckReport, "bucket_size"): {
        "type": ["array", "null"],
        "items": {"type": ["integer", "null"]},
        "minItems": 2,
        "maxItems": 2,
    },
}
