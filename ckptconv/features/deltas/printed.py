"""The output of `patch`, and of `diff` with a delta, with --json, for its schemas (`scripts/schemas.py`)."""

from __future__ import annotations

from typing import Any

from ckptconv.features.deltas.reading import CHECKSUMS, ENCODINGS

# The commands that print the report of a conversion.
OF_CONVERSIONS = ("patch",)
# Constraints that the type of a field does not show; the class of another feature is known by its name.
MORE: dict[tuple[str, str], dict[str, Any]] = {
    ("DeltaFiles", "encoding"): {"enum": list(ENCODINGS)},
    ("DeltaFiles", "checksum"): {"enum": list(CHECKSUMS)},
    ("DeltaFiles", "version"): {"type": "integer", "minimum": 1},
}
