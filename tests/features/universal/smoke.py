"""--universal, for scripts/smoke.py."""

from __future__ import annotations

from typing import Any

from smoke import ZERO


def run(smoke: Any) -> None:
    smoke.run("zero-to-fp32", ZERO, "--universal", "universal")
    smoke.run("verify", ZERO, "--universal", "universal")
