"""Steps of Orbax on a server of HTTP that lists its directories: descriptions and chunks are read by ranges."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cells import opened
from features.http.server import http_server
from features.orbax import writer
from remote import KIB

import ckptconv
from ckptconv.errors import CkptconvError

LAYERS, SHAPE = 12, (256, 128)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of one step, which has 12 arrays of 128 KiB, each in four chunks."""
    numbers = np.arange(LAYERS * SHAPE[0] * SHAPE[1], dtype="f4").reshape(LAYERS, *SHAPE)
    arrays = {f"params.layer{at}.w": array for at, array in enumerate(numbers)}
    writer.step(tmp_path / "run" / "100", arrays, compressed=False)
    return tmp_path / "run"


def test_a_step_is_read_by_ranges_and_a_tensor_by_its_chunks(run: Path) -> None:
    with http_server(run, lists=True) as counted:
        for step in opened(f"{counted.endpoint}/100/"):
            assert len(step) == LAYERS
            described = counted.bytes_asked
            assert described < 80 * KIB
            array = step["layer3.w"].numpy()
            assert counted.bytes_asked - described <= 1.01 * array.nbytes
            np.testing.assert_array_equal(array.reshape(-1)[:2], np.arange(2, dtype="f4") + 3 * SHAPE[0] * SHAPE[1])


@pytest.mark.parametrize("path", ["/", "/100/", "/100/_METADATA", "/100/manifest.ocdbt"])
def test_a_run_a_step_and_a_file_of_one_are_converted(path: str, run: Path, tmp_path: Path) -> None:
    ckptconv.convert(run, tmp_path / "local.safetensors")
    with http_server(run, lists=True) as counted:
        report = ckptconv.convert(f"{counted.endpoint}{path}", tmp_path / "out.safetensors")
        assert counted.bytes_asked <= 1.05 * report.bytes_written
        assert sum(asked.reads_range for asked in counted.asked) <= 20
    assert (tmp_path / "out.safetensors").read_bytes() == (tmp_path / "local.safetensors").read_bytes()


def test_a_server_that_lists_nothing_is_said(run: Path, tmp_path: Path) -> None:
    with http_server(run) as counted, pytest.raises(CkptconvError) as refused:
        ckptconv.convert(f"{counted.endpoint}/100/", tmp_path / "out.safetensors")
    assert "list" in str(refused.value)
