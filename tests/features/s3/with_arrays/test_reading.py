"""A checkpoint on a store that is open: what is replaced meanwhile is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from features.s3.server import S3
from remote import fresh

import ckptconv
from ckptconv import CorruptError

MATRIX = torch.arange(2000 * 700, dtype=torch.float32).reshape(2000, 700)


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
