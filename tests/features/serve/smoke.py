"""serve, for scripts/smoke.py: its help, as it does not end by itself."""

from __future__ import annotations

from typing import Any


def run(smoke: Any) -> None:
    if "Usage" not in smoke.run("serve", "--help"):
        raise SystemExit("The help of serve says nothing of its usage.")
