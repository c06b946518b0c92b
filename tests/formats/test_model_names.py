"""Models whose programs look for a file of a name of their own keep that name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from effort import every

import ckptconv
from ckptconv import UsageError
from ckptconv.options.table import OPTIONS

STATE = {"conv_in.weight": torch.arange(24.0).reshape(2, 3, 4), "conv_in.bias": torch.ones(2)}


def convert(model: Path, **options: Any) -> Path:
    output = model.parent / "out"
    ckptconv.convert(model, output, fsync=False, for_hub=True, **options)
    return output


def test_models_of_open_clip_keep_their_names(tmp_path: Path) -> None:
    (tmp_path / "clip").mkdir()
    torch.save(STATE, tmp_path / "clip" / "open_clip_pytorch_model.bin")
    (tmp_path / "clip" / "open_clip_config.json").write_text("{}")
    output = convert(tmp_path / "clip")
    copied = {"open_clip_config.json"} if "copy_config" in OPTIONS else set()
    assert {path.name for path in output.iterdir()} == {"open_clip_model.safetensors", *copied}


# timm is told by the configuration.
@every("name", ["open_clip", *(["timm"] if "copy_config" in OPTIONS else [])])
def test_programs_that_read_one_file_get_one(tmp_path: Path, name: str) -> None:
    (tmp_path / "one").mkdir()
    torch.save(STATE, tmp_path / "one" / f"{'open_clip_' if name == 'open_clip' else ''}pytorch_model.bin")
    (tmp_path / "one" / "config.json").write_text('{"architecture": "vit", "pretrained_cfg": {}}')
    with pytest.raises(UsageError, match=f"{name} reads a model from one"):
        convert(tmp_path / "one", max_shard_size=16)
    assert not (tmp_path / "out").exists()
