"""What `verify --json` prints, for the schemas."""

from __future__ import annotations

from typing import Any

from ckptconv.features.verify.report import Verification

COMMANDS: dict[str, tuple[Any, ...]] = {
    "verify": (
        "verify",
        "What `verify --json` prints when the output is exactly that source.",
        ("verify",),
        Verification,
        "verification",
    ),
}
