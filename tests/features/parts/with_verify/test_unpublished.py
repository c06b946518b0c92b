"""Verifying an output whose parts are staged: the error names the command that publishes them."""

from __future__ import annotations

from pathlib import Path

from checkpoints import ckptconv_here, seven_shards


def test_an_output_whose_parts_are_staged_is_to_be_finished_first(tmp_path: Path) -> None:
    model = seven_shards(tmp_path / "model.pt", rows=5)
    for output in (tmp_path / "out", tmp_path / "out.safetensors"):
        assert ckptconv_here("convert", model, output, "--part", "0/2").code == 0
        run = ckptconv_here("verify", model, output)
        run.refused(2, f"Its parts are staged, but not published: ckptconv finish {output}")
