"""dcp2safetensors, for scripts/smoke.py: neither torch nor numpy need be there."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
STEP = DATA / "fsdp2_w2_nested" / "checkpoint"


def run(smoke: Any) -> None:
    smoke.run("dcp2safetensors", STEP, "dcp", *smoke.verifying)
    smoke.run("dcp2safetensors", STEP, "--optimizer", "dcp_adam.safetensors")
    smoke.run("dcp2safetensors", STEP, "all.safetensors", "--key", ".")
    for compressed in DATA.parent.glob("with_compressed/data/*/checkpoint"):
        smoke.run("dcp2safetensors", compressed, "zstd.safetensors", code=0 if find_spec("zstandard") else 5)
    smoke.run("dcp2safetensors", STEP, "dcp-shards", "--max-shard-size", "1KB")
    if "Usage" not in smoke.run("dcp2safetensors", "--help"):
        raise SystemExit("The help of dcp2safetensors says nothing of its usage.")
