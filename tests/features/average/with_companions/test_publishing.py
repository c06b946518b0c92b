"""The configuration of an average."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from cells import VERIFIED
from safetensors.torch import load_file

from ckptconv import average


def test_a_model_to_publish_has_the_configuration_of_the_last(place: Path) -> None:
    for seed in (0, 1):
        (place / f"step{seed}").mkdir()
        torch.save({"model": {"w": torch.full((3, 4), float(seed))}, "step": 3}, f"step{seed}/pytorch_model.bin")
        Path(f"step{seed}/config.json").write_text(json.dumps({"seed": seed}))
    report = average(["step0", "step1"], "out", for_hub=True, **VERIFIED)
    assert {each.name for each in Path("out").iterdir()} == {"config.json", "model.safetensors"}
    assert json.loads(Path("out/config.json").read_text()) == {"seed": 1}
    assert load_file("out/model.safetensors").keys() == {"w"}
    assert report.averaged == ["step0", "step1"]
