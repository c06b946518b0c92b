"""rows split, pack and check, for scripts/smoke.py: neither torch nor numpy need be there."""

from __future__ import annotations

import json
import struct
from typing import Any

ROW = struct.Struct("<qq4f")
LAYOUT = ["--embedding-dim", "4", "--method", "none"]


def run(smoke: Any) -> None:
    table = b"".join(ROW.pack(n, 1 << 32, *(n + i / 4 for i in range(4))) for n in range(5))
    header = json.dumps({"table": {"dtype": "F32", "shape": [5, 8], "data_offsets": [0, len(table)]}}).encode()
    (smoke.place / "kv.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + table)
    smoke.run("rows", "check", *LAYOUT, "kv.safetensors")
    smoke.run("rows", "split", *LAYOUT, "kv.safetensors", "parts.safetensors", *smoke.verifying)
    smoke.run("rows", "pack", "parts.safetensors", "again.safetensors")
    smoke.run("rows", "check", "parts.safetensors", "--json")
    for words in (["rows"], ["rows", "split"], ["rows", "pack"], ["rows", "check"]):
        if "Usage" not in smoke.run(*words, "--help"):
            raise SystemExit(f"The help of {words} says nothing of its usage.")
