"""The files next to Meta's weights that a conversion leaves are named."""

from __future__ import annotations

from pathlib import Path

import torch
from cells import verifying

import ckptconv


@verifying
def test_what_is_left_beside_a_single_file_of_meta_is_told(tmp_path: Path) -> None:
    place = tmp_path / "llama"
    place.mkdir()
    names = ("tok_embeddings.weight", "layers.0.attention.wq.weight", "norm.weight", "output.weight")
    torch.save({name: torch.ones(2, 2) for name in names}, place / "consolidated.00.pth")
    for name in ("params.json", "checklist.chk"):
        (place / name).write_text("{}")
    report = ckptconv.convert(place, tmp_path / "out", fsync=False)
    assert {Path(path).name for path in report.left} == {"params.json", "checklist.chk"}
    assert ckptconv.verify(place, tmp_path / "out").tensors == report.tensors
