"""The output of `verify` with --json, for its schema."""

from __future__ import annotations

from typing import Any

from ckptconv.features.verify.report import Verification

COMMANDS: dict[str, tuple[Any, ...]] = {
    "verify": (
        "verify",
        "The output of `verify --json` for an output that matches its source.",
        ("verify",),
        Verification,
        "verification",
    ),
}
