"""Statements of outputs whose files the workers of an executor write."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from checkpoints import seven_shards
from digested import sha256
from features.provenance.attested import dependencies

from ckptconv import convert


def test_what_other_threads_write_is_attested_too(tmp_path: Path) -> None:
    shards = seven_shards(tmp_path / "model.pt", rows=25)
    asked: Any = {"max_shard_size": 100_000, "digest": "sha256", "attest": tmp_path / "out.jsonl"}
    with ThreadPoolExecutor(2) as executor:
        convert(shards, tmp_path / "out", executor=executor, **asked)
    assert dependencies(tmp_path / "out.jsonl") == {shards.name: sha256(shards.read_bytes())}
