"""Files of many ranks on S3: each is described by one request, and several are read at once."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import torch
from features.s3.server import S3, tried_once
from remote import Asked, Proxy, fresh

from ckptconv.formats.detect import open_source


def test_files_of_many_ranks_are_described_by_a_request_each_and_read_several_at_once(
    s3: S3, proxy: Proxy, tmp_path: Path
) -> None:
    ranks = 12
    (tmp_path / "run").mkdir()
    for rank in range(ranks):
        torch.save({"weight": torch.arange(9.0)}, tmp_path / "run" / f"model_rank{rank}.pt")
    url = s3.put(tmp_path / "run", f"{fresh()}/run")
    before = len(proxy.asked)
    together = threading.Barrier(4)

    def held(asked: Asked) -> str:
        if asked.method == "GET" and ".pt" in asked.path:
            with contextlib.suppress(threading.BrokenBarrierError):
                together.wait(600)
        return ""

    proxy.rule = held
    source = open_source(url, storage_options=tried_once(s3, proxy))
    proxy.rule = lambda asked: ""
    assert not together.broken
    assert list(source.weights) == ["weight"]
    assert len(proxy.asked) - before <= ranks + 4
