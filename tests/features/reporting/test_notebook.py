"""Notebooks show reports as tables."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import ckptconv


def test_a_notebook_shows_what_was_done(tmp_path: Path) -> None:
    torch.save({"<w>": torch.ones(3, 4), "b": torch.ones(2000)}, tmp_path / "x.pt")
    table = ckptconv.convert(tmp_path / "x.pt", tmp_path / "x.safetensors", fsync=False)._repr_html_() or ""
    assert table.startswith("<table><caption>Report</caption><tr>")
    assert "x.safetensors" in table
    assert re.search(r"<th>bytes read</th><td>[\d.]+ kB</td>", table)
    assert "dropped" not in table  # nothing was
