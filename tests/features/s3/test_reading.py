"""Checkpoints on a store are read by few requests for what is asked for, and no more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from features.s3.server import S3
from remote import Proxy, fresh
from safetensors.torch import save_file

import ckptconv
from ckptconv.options.table import OPTIONS

KIB = 1 << 10
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
MATRIX = torch.arange(2000 * 700, dtype=torch.float32).reshape(2000, 700)


@pytest.mark.skipif("dequantize" not in OPTIONS, reason="there are no quantized weights")
def test_the_scales_of_all_tiles_are_fetched_from_a_store_at_once(s3: S3, proxy: Proxy, tmp_path: Path) -> None:
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
    reaching = s3.through(proxy.endpoint)
    report = ckptconv.convert(url, tmp_path / "out", dequantize=True, storage_options=reaching, memory=1 << 22)
    ranges = [asked.range for asked in proxy.asked if asked.range]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        tmp_path / "local" / "model.safetensors"
    ).read_bytes()
    assert report.bytes_read < report.input_bytes * 1.05 + (1 << 18)
    # The header, and the codes in long requests; scales lie together, and are asked for no more than once a batch.
    assert sum(last - first < 1 << 16 for first, last in ranges) <= 3
    assert len(ranges) <= 12
