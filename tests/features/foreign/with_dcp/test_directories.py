"""Directories that other programs wrote, in the place of those of torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path

from effort import every
from features.dcp.cases import refused
from features.foreign.cells import FLUTTER


@every("name", ["0.metadata", ".metadata"])
def test_a_directory_of_another_program_is_called_what_it_is(name: str, tmp_path: Path) -> None:
    content = {"0.metadata": b"{}", ".metadata": FLUTTER}[name]
    words = {"0.metadata": "Paddle", ".metadata": "is a description of a Flutter project"}
    (tmp_path / name).write_bytes(content)
    (tmp_path / "0_0.distcp").write_bytes(b"{}" if name == "0.metadata" else b"")
    assert words[name] in refused(tmp_path, tmp_path / "out.safetensors", 5)
