"""Standard input that is an empty file."""

from __future__ import annotations

from pathlib import Path

from checkpoints import ckptconv_forked


def test_an_empty_file_as_standard_input_is_called_empty(tmp_path: Path) -> None:
    (tmp_path / "empty.pt").touch()
    with open(tmp_path / "empty.pt", "rb") as file:
        run = ckptconv_forked("pt2safetensors", "-", tmp_path / "out.safetensors", stdin=file)
    assert run.code == 4
    assert "<stdin> is empty (0 bytes)" in run.err
