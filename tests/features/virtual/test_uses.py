"""What is made of descriptions: what they describe is quantized, computed and served like files."""

from __future__ import annotations

import json
from pathlib import Path

import computed
import pytest
import torch
from checkpoints import DATA, contents
from format_suite import FormatSuite
from safetensors.torch import load_file, save_file

import ckptconv
from ckptconv.features.virtual.description import SUFFIX
from ckptconv.formats.registered import DESCRIBING
from ckptconv.library.virtual import VirtualFiles
from ckptconv.outputs.kinds import KINDS


class TestVirtual(FormatSuite):
    command, family, weights = "pt2safetensors", "safetensors", "*.bin"

    def write(self, place: Path) -> Path:
        names = {}
        for number in (1, 2):
            name = f"pytorch_model-0000{number}-of-00002.bin"
            torch.save({f"layer{number}": torch.full((250, 300), float(number))}, place / name)
            names[f"layer{number}"] = name
        (place / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
        ckptconv.convert(place, place / "x.virtual.json", fsync=False)
        return place / "x.virtual.json"

    def expected(self, checkpoint: Path) -> dict[str, torch.Tensor]:
        return {f"layer{number}": torch.full((250, 300), float(number)) for number in (1, 2)}

    def test_a_remote_checkpoint_is_converted_read_and_loaded_alike(self, checkpoint: Path, tmp_path: Path) -> None:
        pytest.skip("a copy is not what was described: test_virtual.py describes what is on a store")


def test_the_registries_know_its_name() -> None:
    assert [*DESCRIBING] == [SUFFIX]
    assert KINDS["virtual"].suffixes == (SUFFIX,)


def test_it_describes_what_is_computed(tmp_path: Path) -> None:
    here = computed.sources(tmp_path)
    for job in computed.SOME:
        make, source = computed.JOBS[job]
        output, described = tmp_path / f"whole-{job}", tmp_path / f"{job}.virtual.json"
        make(here, source, output, max_shard_size=30_000, fsync=False)
        whole = {name: data for name, data in contents(output).items() if name != ".ckptconv-manifest.json"}
        report = make(here, source, described, max_shard_size=30_000, fsync=False)
        warned = any("quantization_config" in each for each in report.warnings)
        assert warned == ("config.json" in whole), job
        expected = {name: data for name, data in whole.items() if name != "config.json"}
        with VirtualFiles(described) as files:
            assert {name: files.read_bytes(name) for name in files} == expected, job


def test_what_is_dequantized_is_cast_as_its_file_would_be(tmp_path: Path) -> None:
    source = DATA / "quantized" / "bnb-nf4-in-bfloat16"
    ckptconv.convert(source, tmp_path / "m.virtual.json", dequantize=True, fsync=False)
    ckptconv.convert(tmp_path / "m.virtual.json", tmp_path / "wide", dtype="fp32", fsync=False)
    expected = load_file(source / "expected.safetensors")["m.weight"].float()
    assert torch.equal(load_file(tmp_path / "wide" / "model.safetensors")["m.weight"], expected)


def test_the_configuration_beside_it_says_what_was_made_of_the_weights(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    codes = torch.ones(4, 4).to(torch.float8_e4m3fn)
    save_file({name: codes, f"{name}_scale_inv": torch.ones(1, 1)}, tmp_path / "model.safetensors")
    plain = {"model_type": "llama", "dtype": "float16", "layers": [1, 2.5]}
    told = {**plain, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(told))
    ckptconv.convert(tmp_path, tmp_path / "x.virtual.json", dequantize=True, dtype="float32")
    with VirtualFiles(tmp_path / "x.virtual.json") as files:
        assert json.loads(files.read_bytes("config.json")) == {**plain, "dtype": "float32"}
