"""Steps of Orbax on S3: descriptions and chunks are read by few requests, and no more of the step than is asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cells import looking, opened, verifying
from checkpoints import ckptconv_here, done
from features.orbax import writer
from features.s3.server import S3, tried_once
from remote import KIB, Proxy, fresh

import ckptconv

NAMES = ("/_METADATA", "/manifest.ocdbt")
LAYERS, SHAPE = 12, (256, 128)


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A step of 12 arrays of 128 KiB, each in four chunks."""
    numbers = np.arange(LAYERS * SHAPE[0] * SHAPE[1], dtype="f4").reshape(LAYERS, *SHAPE)
    arrays = {f"params.layer{at}.w": array for at, array in enumerate(numbers)}
    return writer.step(tmp_path / "step", arrays, compressed=False)


def test_opening_reads_descriptions_and_a_tensor_its_chunks(s3: S3, proxy: Proxy, step: Path) -> None:
    options = tried_once(s3, proxy)
    url = s3.put(step, f"{fresh()}/step")
    for read in opened(url, storage_options=options):
        assert len(read) == LAYERS
        described, requests = proxy.bytes_asked, len(proxy.asked)
        assert described < 80 * KIB
        # The manifest, the tree and the node are read once each; the others are of names and sizes.
        assert len([asked for asked in proxy.asked if asked.reads_range or asked.path.endswith(NAMES)]) <= 8
        assert requests <= 14
        array = read["layer3.w"].numpy()
        np.testing.assert_array_equal(array.reshape(-1)[:2], np.arange(2, dtype="f4") + 3 * SHAPE[0] * SHAPE[1])
        # Its chunks lie one after the other.
        assert len([asked for asked in proxy.asked[requests:] if asked.reads_range]) == 1
        assert proxy.bytes_asked - described <= 1.01 * array.nbytes


@verifying
def test_a_conversion_reads_each_chunk_once_and_verify_and_diff_find_it_equal(
    s3: S3, proxy: Proxy, step: Path, tmp_path: Path
) -> None:
    options = tried_once(s3, proxy)
    url, out = s3.put(step, f"{fresh()}/step"), tmp_path / "out.safetensors"
    report = ckptconv.convert(url, out, storage_options=options)
    assert report.bytes_written > LAYERS * 128 * KIB
    assert proxy.bytes_asked <= 1.05 * report.bytes_written
    assert len([asked for asked in proxy.asked if "/d/" in asked.path and asked.reads_range]) <= 2
    assert len(proxy.asked) <= 24
    ckptconv.verify(url, out, storage_options=options)
    ckptconv.convert(step, tmp_path / "local.safetensors")
    assert out.read_bytes() == (tmp_path / "local.safetensors").read_bytes()
    done(ckptconv_here("diff", step, out))
    for command in looking():
        assert f"{LAYERS} tensors" in done(ckptconv_here(command, step)).out
