"""An adapter that is converted is one that PEFT finds: its file has PEFT's name, and its configuration is beside it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from cells import VERIFIED, looking, opened, verified
from checkpoints import DATA, ckptconv_here
from safetensors.torch import load_file, save_file

from ckptconv import UsageError, convert

ADAPTER = DATA / "peft" / "llava" / "adapter"
pytestmark = pytest.mark.usefixtures("place")


def old() -> Path:
    """The adapter as PEFT wrote it before it wrote safetensors."""
    Path("old").mkdir()
    torch.save(load_file(ADAPTER / "adapter_model.safetensors"), "old/adapter_model.bin")
    shutil.copy(ADAPTER / "adapter_config.json", "old")
    return Path("old")


@pytest.mark.parametrize("options", [{}, {"for_hub": True}, {"copy_config": True}, {"dtype": "bf16"}], ids=str)
def test_it_has_the_names_that_peft_looks_for(options: dict[str, object]) -> None:
    convert(ADAPTER, "out", **VERIFIED, **options)
    names = {each.name for each in Path("out").iterdir()} - {".ckptconv-manifest.json"}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}
    assert Path("out/adapter_config.json").read_bytes() == (ADAPTER / "adapter_config.json").read_bytes()
    verified(ADAPTER, "out", **{name: value for name, value in options.items() if name == "for_hub"})


def test_without_a_configuration_it_has_none() -> None:
    convert(ADAPTER, "out", copy_config=False, fsync=False)
    assert not Path("out/adapter_config.json").exists()


def test_old_files_are_known() -> None:
    place = old()
    convert(place, "out", structure=False, **VERIFIED)
    wanted, found = (load_file(f"{each}/adapter_model.safetensors") for each in (ADAPTER, "out"))
    assert {name: t.tolist() for name, t in found.items()} == {name: t.tolist() for name, t in wanted.items()}
    assert Path("out/adapter_config.json").exists()
    for checkpoint in opened(place):
        assert {name: tensor[...].tolist() for name, tensor in checkpoint.items()} == {
            name: tensor.tolist() for name, tensor in wanted.items()
        }
    for command in looking():
        assert ckptconv_here(command, place).code == 0, command


def test_peft_reads_one_file() -> None:
    with pytest.raises(UsageError, match="PEFT reads an adapter from one"):
        convert(ADAPTER, "out", max_shard_size=300)


def test_beside_a_model_its_configuration_is_left_where_it_is() -> None:
    """transformers takes it for a request for the adapter."""
    Path("model").mkdir()
    save_file({"a": torch.ones(2)}, "model/model.safetensors")
    for name in ("config.json", "adapter_config.json"):
        Path("model", name).write_text(json.dumps({}))
    convert("model", "out", copy_config=True)
    assert Path("out/config.json").exists()
    assert not Path("out/adapter_config.json").exists()
