"""Quantized weights from stores and the hub, and made by several processes."""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from checkpoints import DATA
from effort import every
from hub_server import hub_server
from huggingface_hub import constants
from remote import S3, fresh, proxy_to
from safetensors.torch import load_file, save_file

import ckptconv

QUANTIZED = DATA / "quantized"
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


def test_the_scales_of_all_tiles_are_fetched_from_a_store_at_once(s3: S3, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for number in range(3):
        codes = torch.randint(0, 120, (2000, 1500), dtype=torch.uint8, generator=generator)
        tensors[f"{number}.weight"] = codes.view(torch.float8_e4m3fn)
        tensors[f"{number}.weight_scale_inv"] = torch.rand(16, 12, generator=generator) + 0.5
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(FP8))
    ckptconv.convert(source, tmp_path / "local", dequantize=True)
    url = s3.put(source, fresh())
    with proxy_to(s3) as proxy:
        report = ckptconv.convert(
            url, tmp_path / "out", dequantize=True, storage_options=s3.through(proxy.endpoint), memory=1 << 22
        )
        ranges = [asked.range for asked in proxy.asked if asked.range]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        tmp_path / "local" / "model.safetensors"
    ).read_bytes()
    assert report.bytes_read < report.input_bytes * 1.05 + (1 << 18)
    # The header, and the codes in long requests; scales lie together, and are asked for no more than once a batch.
    assert sum(last - first < 1 << 16 for first, last in ranges) <= 3
    assert len(ranges) <= 12


def test_a_repository_of_the_hub_becomes_weights_with_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    case = QUANTIZED / "block-fp8-bf16"
    with hub_server(tmp_path / "hub") as hub:
        hub.commit("org/quantized", {path.name: path.read_bytes() for path in case.iterdir() if path.suffix != ".md"})
        ckptconv.convert("hf://org/quantized", tmp_path / "out", dequantize=True, storage_options=hub.options)
    made, expected = load_file(tmp_path / "out" / "model.safetensors"), load_file(case / "expected.safetensors")
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[name], tensor) for name, tensor in expected.items())
    told = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in told
    assert told["dtype"] == "bfloat16"


@every("case", ["gptq", "ct-pack-int4-g32"])
def test_workers_in_processes_of_their_own_make_the_same(case: str, tmp_path: Path) -> None:
    ckptconv.convert(QUANTIZED / case, tmp_path / "here", dequantize=True, max_shard_size="20KB")
    with ProcessPoolExecutor(2, get_context("spawn")) as workers:
        ckptconv.convert(QUANTIZED / case, tmp_path / "there", dequantize=True, max_shard_size="20KB", executor=workers)
    here, there = (sorted((tmp_path / place).glob("*.safetensors")) for place in ("here", "there"))
    assert [path.read_bytes() for path in here] == [path.read_bytes() for path in there]
