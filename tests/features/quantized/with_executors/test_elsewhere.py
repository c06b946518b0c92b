"""Quantized weights that several processes make."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from effort import every
from features.quantized.dialects import QUANTIZED

import ckptconv


@every("case", ["gptq", "ct-pack-int4-g32"])
def test_workers_in_processes_of_their_own_make_the_same(case: str, tmp_path: Path) -> None:
    ckptconv.convert(QUANTIZED / case, tmp_path / "here", dequantize=True, max_shard_size="20KB")
    with ProcessPoolExecutor(2, get_context("spawn")) as workers:
        ckptconv.convert(QUANTIZED / case, tmp_path / "there", dequantize=True, max_shard_size="20KB", executor=workers)
    here, there = (sorted((tmp_path / place).glob("*.safetensors")) for place in ("here", "there"))
    assert [path.read_bytes() for path in here] == [path.read_bytes() for path in there]
