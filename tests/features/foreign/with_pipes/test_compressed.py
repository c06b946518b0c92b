"""A compressed file, which is read from a pipe."""

from __future__ import annotations

import gzip
import shlex
import subprocess
from pathlib import Path

import pytest
import torch
from checkpoints import ckptconv_forked, ckptconv_here, done


def test_a_compressed_file_is_unpacked_on_the_way_as_the_hint_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(2)}, "a.pt")
    Path("a.pt.gz").write_bytes(gzip.compress(Path("a.pt").read_bytes()))
    hint = "zcat FILE | ckptconv convert - OUTPUT"
    ckptconv_here("convert", "a.pt.gz", "x.safetensors").refused(5, "compressed with gzip", hint)
    unpacking, _, converting = hint.replace("FILE", "a.pt.gz").replace("OUTPUT", "x.safetensors").partition(" | ")
    with subprocess.Popen(shlex.split(unpacking), stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        done(ckptconv_forked(*shlex.split(converting)[1:], stdin=program.stdout))
    assert Path("x.safetensors").exists()
