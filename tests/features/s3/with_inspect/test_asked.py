"""A file on S3 that was looked into."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from checkpoints import ckptconv_here
from features.s3.server import S3
from remote import Proxy, a_model, fresh


def test_a_file_that_was_read_is_not_asked_for_again(s3: S3, proxy: Proxy, tmp_path: Path) -> None:
    torch.save(a_model(), tmp_path / "model.pt")
    url, through = s3.put(tmp_path / "model.pt", f"{fresh()}/model.pt"), json.dumps(s3.through(proxy.endpoint))
    assert ckptconv_here("inspect", url, "--storage-options", through).code == 0
    assert [asked.method for asked in proxy.asked][-1] == "GET"
