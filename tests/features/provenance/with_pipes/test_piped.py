"""Statements of inputs that come through a pipe."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from digested import sha256
from features.provenance.attested import dependencies

from ckptconv import convert


def test_what_came_through_a_pipe_has_a_digest(tmp_path: Path) -> None:
    small = tmp_path / "small.pt"
    torch.save({"w": torch.arange(9)}, small)
    reading, writing = os.pipe()
    os.write(writing, small.read_bytes())  # less than a pipe holds
    os.close(writing)
    try:
        convert(f"/dev/fd/{reading}", tmp_path / "out", digest="sha256", attest=tmp_path / "out.jsonl")
    finally:
        os.close(reading)
    assert [*dependencies(tmp_path / "out.jsonl").values()] == [sha256(small.read_bytes())]
