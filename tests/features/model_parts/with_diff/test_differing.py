"""A part differs from its source in what is not in the part, and in nothing else."""

from __future__ import annotations

from pathlib import Path

from features.model_facts import models

import ckptconv


def test_the_difference_is_what_was_left_out(tmp_path: Path) -> None:
    shapes, config = models.latent()
    tensors = models.save(tmp_path / "m", shapes, config)
    ckptconv.convert(tmp_path / "m", tmp_path / "out", layers="0-4", fsync=False)
    found = ckptconv.diff(tmp_path / "m", tmp_path / "out")
    left = {name for name in tensors if name.startswith(("model.layers.5.", "model.layers.6."))}
    assert {row.name: row.status for row in found.tensors if row.status != "equal"} == dict.fromkeys(left, "only_a")
