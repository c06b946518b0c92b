"""--universal, for scripts/smoke.py."""

from __future__ import annotations

from typing import Any


def run(smoke: Any) -> None:
    smoke.run("convert", "model.pt", "--universal", "universal", "--fresh-optimizer")
    smoke.verify("model.pt", "--universal", "universal", "--fresh-optimizer")
