"""A set of files of torch.save in an archive."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
import torch
from checkpoints import ckptconv_here, done
from safetensors.torch import load_file


def test_the_index_of_a_set_in_an_archive_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    index = {"metadata": {}, "weight_map": dict(zip("ab", names, strict=True))}
    Path("pytorch_model.bin.index.json").write_text(json.dumps(index))
    with zipfile.ZipFile("set.zip", "w") as archive:
        archive.write("pytorch_model.bin.index.json", "hf/pytorch_model.bin.index.json")
        for key, name in zip("ab", names, strict=True):
            torch.save({key: torch.ones(2)}, name)
            archive.write(name, f"hf/{name}")
    done(ckptconv_here("convert", "zip://hf/pytorch_model.bin.index.json::set.zip", "x.safetensors"))
    assert load_file("x.safetensors").keys() == {"a", "b"}
