"""verify, for scripts/smoke.py."""

from __future__ import annotations

from typing import Any


def run(smoke: Any) -> None:
    import ckptconv

    for options in ({}, {"dtype": "bf16"}):
        output = smoke.place / f"verified-{len(options)}.safetensors"
        ckptconv.convert(smoke.place / "model.pt", output, **options)
        if ckptconv.verify(smoke.place / "model.pt", output, **options).tensors != 2:
            raise SystemExit("The library verified other tensors.")
    smoke.verify("model.pt", "verified-1.safetensors", code=1)
    if "Usage" not in smoke.run("verify", "--help"):
        raise SystemExit("The help of verify says nothing of its usage.")
