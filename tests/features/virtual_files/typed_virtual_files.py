"""A user's program, for type checkers: calls that are right, and mistakes that they have to find."""

from __future__ import annotations

import ckptconv


def program(path: str, size: str) -> None:
    with ckptconv.VirtualFiles(path, dtype="bf16", max_shard_size=size) as files:
        print(files.read_bytes("model.safetensors", 0, 8), files["config.json"].size + 1)
    ckptconv.VirtualFiles(path, dtype=16)  # type: ignore[arg-type]
    ckptconv.VirtualFiles(path, max_shard="5GB")  # type: ignore[call-arg]
