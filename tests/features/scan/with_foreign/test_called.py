"""Files of other programs are called what they are."""

from __future__ import annotations

from pathlib import Path

from checkpoints import ckptconv_here
from features.scan.test_scan import REASONS


def test_a_pointer_of_git_lfs_is_named_whatever_it_is_called(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(REASONS["a pointer of git-lfs"][1])
    shown = ckptconv_here("scan", path)
    assert shown.code == 4
    assert "is a git-lfs pointer" in shown.out
