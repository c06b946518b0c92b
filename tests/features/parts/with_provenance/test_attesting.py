"""Statements about outputs that are made in parts: `finish` reads the inputs where the parts found them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from checkpoints import ckptconv_here, seven_shards
from digested import sha256
from features.provenance.attested import dependencies, mixed_model

from ckptconv import convert, finish
from ckptconv.errors import CorruptError, FailedError, UsageError

SHARD = 100_000


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seven_shards(tmp_path_factory.mktemp("model") / "model.pt", rows=25)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixed_model(tmp_path_factory.mktemp("mixed") / "mixed.pt")


def test_parts_without_digests_are_not_attested(shards: Path, tmp_path: Path) -> None:
    convert(shards, tmp_path / "out", max_shard_size=SHARD, part=(0, 1))
    with pytest.raises(UsageError, match="without digests"):
        finish(tmp_path / "out", attest=tmp_path / "out.jsonl")
    finish(tmp_path / "out")
    assert not (tmp_path / "out.jsonl").exists()


def test_parts_give_what_a_whole_run_gives(mixed: Path, tmp_path: Path) -> None:
    options: Any = {"max_shard_size": 1_000_000}
    convert(mixed, tmp_path / "out", digest="sha256", attest=tmp_path / "whole.jsonl", **options)
    for first in ("", "sha256"):
        parts, told = tmp_path / f"parts{first}" / "out", tmp_path / f"parts{first}.jsonl"
        for number, digest in enumerate((first, "sha256")):
            convert(mixed, parts, part=(number, 2), digest=digest, **options)
        finish(parts, attest=told)
        assert told.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_what_parts_have_read_stays(mixed: Path, tmp_path: Path) -> None:
    source = tmp_path / "source.pt"
    source.write_bytes(mixed.read_bytes())
    convert(source, tmp_path / "new", digest="sha256", part=(0, 1))
    with pytest.raises(UsageError, match="the input itself"):
        finish(tmp_path / "new", overwrite=True, attest=source)
    assert source.read_bytes() == mixed.read_bytes()


def test_parts_are_attested_where_their_inputs_are(mixed: Path, tmp_path: Path) -> None:
    source, out, told = tmp_path / "source.pt", tmp_path / "out", tmp_path / "out.jsonl"
    source.write_bytes(mixed.read_bytes())
    convert(source, out, digest="sha256", part=(0, 1))
    stamp = source.stat().st_mtime_ns
    os.utime(source, ns=(1, 1))
    with pytest.raises(CorruptError, match="changed while it was read"):
        finish(out, attest=told)
    os.utime(source, ns=(stamp, stamp))
    source.rename(tmp_path / "elsewhere.pt")
    with pytest.raises(FailedError, match=r"source\.pt cannot be read here"):
        finish(out, attest=told)
    assert not told.exists()
    (tmp_path / "elsewhere.pt").rename(source)
    finish(out, attest=told)
    assert dependencies(told) == {"source.pt": sha256(source.read_bytes())}


def test_a_statement_replaces_no_file_of_others(mixed: Path, tmp_path: Path) -> None:
    convert(mixed, tmp_path / "parts", digest="sha256", part=(0, 1))
    (tmp_path / "notes.md").write_text("mine")
    ckptconv_here("finish", tmp_path / "parts", "--attest", tmp_path / "notes.md").refused(2)
    assert (tmp_path / "notes.md").read_text() == "mine"
