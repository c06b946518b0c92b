"""The files of a model's directory by their roles."""

from __future__ import annotations

from pathlib import Path

import torch
from checkpoints import ckptconv_here

from ckptconv import inspect

OTHERS = (
    *("config.json", "adapter_config.json", "tokenizer.json", "README.md", ".env", "modeling_tiny.py"),
    *("optimizer.pt", "trainer_state.json", "model.onnx", "vocab.pkl", "notes.odt"),
)


def test_inspect_lists_the_files_of_a_model_by_their_roles(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "onnx").mkdir(parents=True)
    torch.save({"norm.weight": torch.ones(4)}, source / "pytorch_model.bin")
    for name in OTHERS:
        (source / name).write_bytes(b"{}" if name.endswith(".json") else b"\x80\x02N.")
    run = ckptconv_here("inspect", source, "--json")
    assert run.json["roles"] == {
        "configuration": ["adapter_config.json", "config.json"],
        "tokenizer": ["tokenizer.json"],
        "description, license": ["README.md"],
        "hidden file": [".env"],
        "code": ["modeling_tiny.py"],
        "state of the training": ["optimizer.pt", "trainer_state.json"],
        "weights": ["model.onnx", "pytorch_model.bin"],
        "pickle": ["vocab.pkl"],
        "folders are not copied": ["onnx"],
        "not known as a model's": ["notes.odt"],
    }
    shown = ckptconv_here("inspect", source).out
    assert "  configuration           adapter_config.json, config.json" in shown
    assert inspect(source / "pytorch_model.bin").roles is None
