"""Outputs on S3 are verified there, by few requests, over links that break."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import ckptconv
from features.s3.server import S3, tried_once, verified_with_few_requests
from remote import KIB, MIB, Proxy, a_model, fresh

import ckptconv as library
from ckptconv import convert
from ckptconv.errors import DifferenceError, FailedError
from ckptconv.features.spool.spool import Spool
from ckptconv.features.verify import pairs


@pytest.mark.parametrize("memory", [pairs.PREFETCH_MEMORY, 256 * KIB], ids=["in memory", "spooled"])
def test_a_transposed_tensor_is_verified_with_few_requests(
    memory: int, s3: S3, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "PREFETCH_MEMORY", memory)
    torch.save({"a": torch.arange(9.0), "t": torch.randn(2048, 1536).t(), "z": torch.ones(9)}, tmp_path / "model.pt")
    name = fresh()
    convert(tmp_path / "model.pt", tmp_path / "model.safetensors")
    urls = [s3.put(tmp_path / file, f"{name}/{file}") for file in ("model.pt", "model.safetensors")]
    options = tried_once(s3, proxy)
    done = library.verify(*urls, storage_options=options)
    size = 2 * 2048 * 1536 * 4
    asked = [each for each in proxy.asked if each.reads_range]
    assert proxy.bytes_asked < size + MIB
    assert len(asked) < size / (4 * MIB) + 12  # of which some are for descriptions
    assert done.bytes_compared == size / 2 + 72
    assert size < done.bytes_read < size + MIB
    spoiled = bytearray(s3.get(f"{name}/model.safetensors"))
    spoiled[-(1536 * 2048 - (700 * 2048 + 99)) * 4 - 36] ^= 1
    s3.ask("PUT", f"{name}/model.safetensors", bytes(spoiled))
    with pytest.raises(DifferenceError) as caught:
        library.verify(*urls, storage_options=options)
    assert caught.value.difference["tensor"] == "t"
    assert caught.value.difference["index"] == [700, 99]


def test_small_tensors_are_verified_with_few_requests(s3: S3, proxy: Proxy, tmp_path: Path) -> None:
    torch.save({f"w{i:04}": torch.full((50,), float(i)) for i in range(2000)}, tmp_path / "small.pt")
    url = s3.put(tmp_path / "small.pt", f"{fresh()}/small.pt")
    assert verified_with_few_requests(url, s3, proxy).tensors == 2000


def test_what_there_is_no_room_for_is_verified_all_the_same(
    s3: S3, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "PREFETCH_MEMORY", 2 * KIB)
    monkeypatch.setattr(pairs, "BLOCK", 64 * KIB)
    torch.save({"t": torch.randn(40, 1000).t(), "w": torch.randn(500)}, tmp_path / "model.pt")
    name = fresh()
    url = s3.put(tmp_path / "model.pt", f"{name}/model.pt")
    convert(url, f"s3://models/{name}/out.safetensors", storage_options=s3.options)

    def requests() -> int:
        before = len(proxy.asked)
        done = library.verify(url, f"s3://models/{name}/out.safetensors", storage_options=tried_once(s3, proxy))
        assert done.bytes_compared == 4 * (40 * 1000 + 500)
        return len(proxy.asked) - before

    with_room = requests()
    monkeypatch.setattr(Spool, "check_space", lambda spool, size: (_ for _ in ()).throw(FailedError("It is full.")))
    assert requests() > with_room


def test_a_process_that_verifies_from_s3_stays_small(s3: S3, tmp_path: Path) -> None:
    torch.save({"t": torch.randn(4000, 2000).t(), "w": torch.randn(4000, 3000)}, tmp_path / "model.pt")
    name = fresh()
    convert(tmp_path / "model.pt", tmp_path / "out.safetensors")
    url, output = (s3.put(tmp_path / file, f"{name}/{file}") for file in ("model.pt", "out.safetensors"))
    run = ckptconv("verify", url, output, "--json", "--storage-options", json.dumps(s3.options))
    assert run.code == 0, run.err
    assert run.json["bytes_compared"] == 80_000_000
    assert run.json["peak_rss_bytes"] < 128 * MIB


@pytest.mark.parametrize("fault", ["drop", "cut"])
def test_a_link_that_stays_broken_ends_a_verification(fault: str, tmp_path: Path, s3: S3, proxy: Proxy) -> None:
    name = fresh()
    torch.save(a_model(), tmp_path / "model.pt")
    url = s3.put(tmp_path / "model.pt", f"{name}/model.pt")
    convert(url, f"s3://models/{name}/out.safetensors", storage_options=s3.options)
    proxy.rule = lambda asked: fault if asked.reads_range and asked.range[0] > MIB else ""
    with pytest.raises(FailedError, match="cannot be read"):
        library.verify(url, f"s3://models/{name}/out.safetensors", storage_options=tried_once(s3, proxy))
