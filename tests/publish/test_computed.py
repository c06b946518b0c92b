"""Outputs that are computed are conversions like others: killed and gone on with, in parts, from and to stores."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from cells import VERIFIED, verified
from computed import JOBS, SOME, sources
from processes import before_call, contents, failing, in_child
from stores import SOURCES, Place

import ckptconv
from ckptconv.errors import FailedError
from ckptconv.options.table import OPTIONS

SHARDS: dict[str, Any] = {"max_shard_size": 30_000, "fsync": False}
MANIFEST = ".ckptconv-manifest.json"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sources(tmp_path_factory.mktemp("computed"))


@pytest.fixture(scope="module")
def whole(here: Path) -> dict[str, dict[str, bytes]]:
    """What each job makes when nothing disturbs it."""
    for job in SOME:
        make, source = JOBS[job]
        make(here, source, here / f"whole-{job}", **SHARDS)
    return {job: contents(here / f"whole-{job}") for job in SOME}


def weights(found: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in found.items() if name != MANIFEST}


def test_killed_at_any_moment_it_leaves_nothing_bad_and_goes_on(
    here: Path, whole: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    for job in SOME:
        make, source = JOBS[job]
        chance, wanted = random.Random(job), whole[job]
        out = tmp_path / job
        killed = 0
        for at in (25, chance.randint(30, 50), chance.randint(50, 68)):

            def work(at: int = at, make: Any = make, source: str = source, out: Path = out) -> None:
                before_call(at, lambda: os.kill(os.getpid(), signal.SIGKILL))
                make(here, source, out, jobs=1, **SHARDS)

            killed += in_child(work) == -signal.SIGKILL
            found = contents(out) if out.exists() else {}
            assert all(wanted[name] == data for name, data in found.items() if name != MANIFEST), (job, at)
            assert "model.safetensors.index.json" not in found or weights(found) == weights(wanted), (job, at)
        assert killed, job

        def last(make: Any = make, source: str = source, out: Path = out) -> None:
            make(here, source, out, before_commit=lambda: os.kill(os.getpid(), signal.SIGKILL), **SHARDS)

        assert in_child(last) == -signal.SIGKILL, job
        assert make(here, source, out, **SHARDS).reused >= 2, job
        assert weights(contents(out)) == weights(wanted), job
        assert not [path for path in out.iterdir() if path.is_dir()], job


def test_a_full_disk_is_said_and_a_dry_run_tells_the_size(
    here: Path, whole: dict[str, dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(28, "No space left on device")
    for job in SOME:
        make, source = JOBS[job]
        with failing(monkeypatch, "pwrite", 2, full), pytest.raises(FailedError, match="no space left"):
            make(here, source, tmp_path / "out", **SHARDS)
        told = make(here, source, tmp_path / "dry", dry_run=True, **SHARDS)
        stored = {name: len(data) for name, data in whole[job].items() if name.endswith(".safetensors")}
        sizes = {Path(each.path).name: each.bytes for each in told.outputs if each.path.endswith(".safetensors")}
        assert sizes == stored, job
        assert not [path for path in tmp_path.rglob("*") if path.is_file()], job


@pytest.mark.skipif("part" not in OPTIONS, reason="there are no parts")
def test_parts_make_the_whole_and_the_manifest_tells_verify_all(
    here: Path, whole: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    ways = {"fp8-block": "fp8-block", "requantize": "mxfp8", "merge-mxfp8": "mxfp8", "average-int4": "int4-g32"}
    for job in SOME:
        make, source = JOBS[job]
        out = tmp_path / job
        for part in ("0/2", "1/2"):
            make(here, source, out, part=part, **SHARDS)
        ckptconv.finish(out)
        assert weights(contents(out)) == weights(whole[job]), job
        told = json.loads((out / MANIFEST).read_text())
        assert told.get("quantized") == ({ways[job]: 4} if job in ways else None), job
        assert ("average" in told, "adapters" in told) == ("average" in job, job in ("dora", "merge-mxfp8")), job
        assert all(verification.bytes_compared for verification in verified(here / source, out)), job


@pytest.mark.parametrize("kind", SOURCES)
def test_sources_and_output_may_be_on_a_store(
    kind: str, here: Path, whole: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    there = SOURCES[kind]()
    for each in here.iterdir():
        there.put(each, each.name)
    for job in SOME:
        make, source = JOBS[job]
        output = there.at(f"{job}-out") if there.writable else Place(str(tmp_path / job), {})
        make(there.url, source, output.url, storage_options=there.options, **VERIFIED, **SHARDS)
        made = output.contents() if there.writable else contents(tmp_path / job)
        shards = {name: data for name, data in whole[job].items() if name.endswith((".safetensors", ".index.json"))}
        assert {name: made[name] for name in shards} == shards, job
        assert weights(made).keys() >= weights(whole[job]).keys(), job
