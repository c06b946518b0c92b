"""dcp2safetensors and safetensors2dcp, for scripts/smoke.py: neither torch nor numpy need be there."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
STEP = DATA / "fsdp2_w2_nested" / "checkpoint"


def run(smoke: Any) -> None:
    smoke.run("dcp2safetensors", STEP, "dcp", "--verify")
    smoke.run("dcp2safetensors", STEP, "--optimizer", "dcp_adam.safetensors")
    smoke.run("dcp2safetensors", STEP, "all.safetensors", "--key", ".")
    compressed = DATA / "zstd_w2" / "checkpoint"
    smoke.run("dcp2safetensors", compressed, "zstd.safetensors", code=0 if find_spec("zstandard") else 5)
    smoke.run("dcp2safetensors", STEP, "dcp-shards", "--max-shard-size", "1KB")
    for command in ("dcp2safetensors", "safetensors2dcp"):
        if "Usage" not in smoke.run(command, "--help"):
            raise SystemExit(f"The help of {command} says nothing of its usage.")
