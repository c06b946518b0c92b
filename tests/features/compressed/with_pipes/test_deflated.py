"""A deflated archive may come through a pipe."""

from __future__ import annotations

import os
from pathlib import Path

from checkpoints import ckptconv_forked
from features.compressed.test_compressed import deflated
from spooling import saved


def test_it_is_converted_like_the_plain_file(tmp_path: Path) -> None:
    plain, expected = saved(tmp_path)
    content = deflated(plain, tmp_path / "deflated.pt").read_bytes()
    (tmp_path / "out").mkdir()
    run = ckptconv_forked("pt2safetensors", "-", tmp_path / "out/model.safetensors", "--json", content=content)
    assert run.code == 0, run.err
    assert run.json["input"] == "<stdin>"
    assert (tmp_path / "out/model.safetensors").read_bytes() == expected
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]
