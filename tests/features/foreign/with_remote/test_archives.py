"""Compressed archives, of which one file can be named by a URL."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
import torch
from checkpoints import ckptconv_here, done


def test_a_name_like_one_in_the_archive_is_suggested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(2)}, "a_model.pt")
    with tarfile.open("all.tar", "w") as archive:
        archive.add("a_model.pt", "./a_model.pt")
    run = ckptconv_here("convert", "tar://a_model.pt::all.tar", "x.safetensors")
    run.refused(2, "does not exist", "Did you mean tar://./a_model.pt::all.tar?")
    done(ckptconv_here("convert", "tar://./a_model.pt::all.tar", "x.safetensors"))


def test_a_compressed_archive_is_refused_with_an_address_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(2)}, "a.pt")
    for name in ("both.tar.gz", "packed", "packed.bin"):
        with tarfile.open(name, "w:gz") as packed:
            packed.add("a.pt")
        run = ckptconv_here("convert", name, "x")
        if name == "both.tar.gz":  # a pipe would give the archive, not the file in it
            assert "zcat" not in run.refused(5, "one file or directory in it: tar://NAME::both.tar.gz")
            done(ckptconv_here("convert", "tar://a.pt::both.tar.gz", "x.safetensors"))
            continue
        run.refused(5, "compressed with gzip", "called .tar.gz, .tar.bz2 or .tar.xz, specify it: tar://NAME::FILE")
