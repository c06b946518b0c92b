"""Attacks are refused by name; with --inert they are read, and do nothing."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from attacks import corpus
from attacks.corpus import CASES
from attacks.ending import LARGE, size_of
from attacks.every import ALL, LIVE, W, loaded, written
from cells import looking
from checkpoints import ckptconv_here
from safetensors.torch import load_file

from ckptconv.process import has_feature


def test_with_inert_an_attack_is_converted_and_still_does_nothing(tmp_path: Path) -> None:
    output = tmp_path / "model.safetensors"
    for case in LIVE:
        path = written(case, tmp_path)
        run = ckptconv_here("pt2safetensors", path, output, "--no-fsync", "--inert")
        assert run.code != corpus.UNSAFE or case.exit == corpus.UNSAFE, run.err
        assert not (tmp_path / "canary").exists(), case.file
        if output.exists():
            assert run.code == 0
            assert "kept as inert data, never run" in run.out
            if case.whole:
                assert torch.equal(load_file(output)["w"], W), case.file
            output.unlink()


def test_with_inert_what_readers_read_differently_is_refused_all_the_same(tmp_path: Path) -> None:
    """Its tensors are others for whoever reads it in another way: there is nothing to convert."""
    output = tmp_path / "model.safetensors"
    seen = 0
    for case in [case for case in ALL if case.family == "readers"]:
        if case.live and case.file != "two_tar_v7_live.pt":
            run = ckptconv_here("pt2safetensors", written(case, tmp_path), output, "--no-fsync", "--inert")
            assert run.code == corpus.CORRUPT, f"{case.file}: {run.err}"
            assert not (tmp_path / "canary").exists(), case.file
            seen += 1
    # Half of them are tar archives.
    assert seen > (20 if has_feature("tar") else 9)


@pytest.mark.skipif(corpus.BACK == "convert", reason="no feature writes .pt files")
def test_what_is_left_of_a_safetensors_file_with_calls_in_it_runs_nothing(tmp_path: Path) -> None:
    """With --drop-opaque and --inert, whatever can be written is; whoever loads it runs none of it."""
    output = tmp_path / "model.pt"
    ends: Counter[int] = Counter()
    for case in [case for case in ALL if case.family == "safetensors"]:
        path = written(case, tmp_path)
        if size_of(path) > LARGE:  # as they are refused without these options
            continue
        run = ckptconv_here("safetensors2pt", path, output, "--no-fsync", "--drop-opaque", "--inert")
        ends[run.code] += 1
        if not run.code:
            loaded(output)
            output.unlink()
        assert not (tmp_path / "canary").exists(), case.file
        path.unlink()
    assert ends[corpus.DONE] > 30


MENTIONED = {"os.system", "torch._utils._rebuild_tensor_v2", "torch.FloatStorage", "collections.OrderedDict"}


def test_they_are_not_shown_either_and_with_inert_every_class_is_that_they_mention(tmp_path: Path) -> None:
    path = written(CASES["live_os_system.pt"], tmp_path)
    for command in looking():
        assert ckptconv_here(command, path).code == corpus.UNSAFE
        run = ckptconv_here(command, path, "--inert")
        assert run.code == 0
        assert [name for name in MENTIONED if name not in run.out] == []
        described = ckptconv_here(command, path, "--inert", "--json").json
        assert described["opaque"] == ["os.system"]
        assert set(described["classes"]) == MENTIONED
