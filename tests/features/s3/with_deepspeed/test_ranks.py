"""Checkpoints of DeepSpeed on S3: the files of many ranks are read by few requests, and no more of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from cells import loaded, opened, verifying
from checkpoints import ckptconv as ckptconv_apart
from features.deepspeed.zero_writer import Model, Save, write
from features.s3.server import S3, tried_once, verified_with_few_requests
from remote import KIB, MIB, Proxy, fresh

from ckptconv import convert
from ckptconv.features.remote import prefetch
from ckptconv.formats.detect import open_source

sys.path.insert(0, str(Path(__file__).parents[4] / "scripts"))
import make_example

ROWS, COLUMNS, RANKS = 2000, 700, 4
MATRIX = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
SMALL = {f"layer{number}.bias": torch.full((50,), float(number)) for number in range(300)}


def test_a_zero_3_checkpoint_is_fetched_in_large_ranges_and_no_more_of_it_than_the_weights(
    s3: S3, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As with 2 GB on many ranks: what a rank holds of a window is a small piece.
    monkeypatch.setattr(prefetch, "REQUEST", 256 * KIB)
    directory = tmp_path / "zero"
    make_example.write(make_example.Example(params=4_000_000, ranks=8, stage=3, sparse=True), directory)
    name = fresh()
    url = s3.put(directory, f"{name}/zero")
    options = tried_once(s3, proxy)
    source = open_source(url, family="deepspeed", storage_options=options)
    described, before = proxy.bytes_asked, len(proxy.asked)
    assert described < 16 * 160 * KIB  # a rank has two files
    report = convert(source, f"s3://models/{name}/out.safetensors", memory=2 * MIB, storage_options=options)
    ranges = [asked for asked in proxy.asked[before:] if asked.reads_range]
    assert proxy.bytes_asked - described <= 1.05 * report.bytes_written
    assert len(ranges) <= report.bytes_written / (256 * KIB)
    assert report.bytes_read <= proxy.bytes_asked
    convert(directory, tmp_path / "local.safetensors", family="deepspeed")
    assert s3.get(f"{name}/out.safetensors") == (tmp_path / "local.safetensors").read_bytes()


def test_a_process_that_reads_and_writes_s3_stays_small(s3: S3, tmp_path: Path) -> None:
    directory = tmp_path / "zero"
    make_example.write(make_example.Example(params=12_000_000, ranks=6, stage=3, sparse=True), directory)
    name = fresh()
    url = s3.put(directory, f"{name}/zero")
    run = ckptconv_apart(
        "zero-to-fp32", url, f"s3://models/{name}/out", "--json", "--storage-options", json.dumps(s3.options)
    )
    assert run.code == 0, run.err
    assert run.json["bytes_written"] > 48_000_000
    assert run.json["peak_rss_bytes"] < 96 * MIB


@verifying
def test_it_is_verified_with_few_requests(s3: S3, proxy: Proxy, tmp_path: Path) -> None:
    make_example.write(make_example.Example(params=4_000_000, ranks=8, stage=3, sparse=True), tmp_path / "run")
    done = verified_with_few_requests(s3.put(tmp_path / "run", fresh()), s3, proxy)
    assert done.bytes_compared > 0.99 * 16_000_000


@pytest.fixture(scope="module")
def step(s3: S3, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A ZeRO-3 step of four ranks."""
    place = tmp_path_factory.mktemp("step")
    write(place / "step", Model([{"w": MATRIX, **SMALL}]), Save(3, RANKS))
    return s3.put(place / "step", fresh())


def test_a_slice_is_fetched_with_a_request_for_each_partition(step: str, s3: S3, proxy: Proxy) -> None:
    for ck in opened(step, storage_options=s3.through(proxy.endpoint)):
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
    for ck in opened(step, storage_options=s3.through(proxy.endpoint)):
        assert len(ck) == 301
        for forward in (False, True):
            before = len(proxy.asked)
            found = dict(ck.forward()) if forward else ck.get_tensors()
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
            assert len(proxy.asked) - before < 40


def test_a_model_loads_from_a_store(step: str, s3: S3) -> None:
    for state in loaded(step, storage_options=s3.options, dtype="bf16"):
        assert torch.equal(state["w"], MATRIX.bfloat16())
        assert state.keys() == {"w", *SMALL}
