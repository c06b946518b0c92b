"""The output of `verify` with --json, for its schema."""

from __future__ import annotations

from typing import Any

from ckptconv.features.verify.report import Verification

COMMANDS: dict[str, tuple[Any, ...]] = {
    "verify": (
        "verify",
        "The report that `verify --json` prints of an output that is exactly that source.",
        ("verify",),
        Verification,
        "verification",
    ),
}
