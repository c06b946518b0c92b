"""Checkpoints on a store are read by few requests for what is asked for, and no more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from features.s3.server import S3
from remote import Proxy, fresh
from safetensors.torch import save_file
from zero_writer import Model, Save, write

import ckptconv
from ckptconv import CorruptError
from ckptconv.options.table import OPTIONS

KIB = 1 << 10
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
ROWS, COLUMNS, RANKS = 2000, 700, 4
MATRIX = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
SMALL = {f"layer{number}.bias": torch.full((50,), float(number)) for number in range(300)}


@pytest.fixture(scope="module")
def step(s3: S3, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A ZeRO-3 step of four ranks."""
    place = tmp_path_factory.mktemp("step")
    write(place / "step", Model([{"w": MATRIX, **SMALL}]), Save(3, RANKS))
    return s3.put(place / "step", fresh())


def test_a_slice_is_fetched_with_a_request_for_each_partition(step: str, s3: S3, proxy: Proxy) -> None:
    with ckptconv.open(step, storage_options=s3.through(proxy.endpoint)) as ck:
        assert torch.equal(ck["w"][3, 5:8], MATRIX[3, 5:8])  # what is done once
        for key, count in ((slice(10, 20), 1), (slice(480, 520), 2), ((slice(None), slice(None, None, 2)), 4)):
            before = len(proxy.asked)
            part = ck["w"][key]
            asked = [each for each in proxy.asked[before:] if each.range]
            assert torch.equal(part, MATRIX[key])
            wanted = MATRIX.nbytes if count == 4 else part.nbytes
            assert sum(last - first + 1 for first, last in (each.range for each in asked)) <= wanted + 64 * KIB * count
            assert len(asked) <= count + wanted // (1 << 20)


def test_many_small_tensors_take_few_requests(step: str, s3: S3, proxy: Proxy) -> None:
    expected = {"w": MATRIX, **SMALL}
    with ckptconv.open(step, storage_options=s3.through(proxy.endpoint)) as ck:
        assert len(ck) == 301
        for read in (ck.get_tensors, lambda: dict(ck.forward())):
            before = len(proxy.asked)
            found = read()
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
            assert len(proxy.asked) - before < 40


def test_an_object_that_is_replaced_while_it_is_open_is_corrupt(s3: S3, tmp_path: Path) -> None:
    torch.save({"w": MATRIX}, tmp_path / "x.pt")
    name = fresh()
    url = s3.put(tmp_path / "x.pt", f"{name}/x.pt")
    with ckptconv.open(url, storage_options=s3.options) as ck:
        assert torch.equal(ck["w"][7], MATRIX[7])
        torch.save({"w": MATRIX + 1}, tmp_path / "x.pt")
        s3.put(tmp_path / "x.pt", f"{name}/x.pt")
        with pytest.raises(CorruptError, match="changed while it was read"):
            ck["w"][1000:]


def test_a_model_loads_from_a_store(step: str, s3: S3) -> None:
    loaded = ckptconv.load_state_dict(step, storage_options=s3.options, dtype="bf16")
    assert torch.equal(loaded["w"], MATRIX.bfloat16())
    assert loaded.keys() == {"w", *SMALL}


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
