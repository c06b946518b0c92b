"""The way back from a record, for scripts/smoke.py."""

from __future__ import annotations

from typing import Any


def run(smoke: Any) -> None:
    import ckptconv
    from ckptconv.formats.detect import open_source

    flat, structure = ckptconv.flatten(open_source(smoke.place / "model.pt").weights)
    if set(ckptconv.unflatten(flat, structure)) != {"a.weight", "b"}:
        raise SystemExit("The library lost a tensor.")
