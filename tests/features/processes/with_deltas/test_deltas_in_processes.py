"""Deltas are written and applied in processes: what comes out is what threads make."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from checkpoints import ckptconv_here
from features.processes.with_diff.forked import comparable, run_by, two_models

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return two_models(tmp_path_factory.mktemp("two"))


def test_a_quiet_delta_is_the_one_that_is_told_of(two: list[Path], tmp_path: Path) -> None:
    for name, options in (("quiet", ["--quiet"]), ("json", ["--quiet", "--json"])):
        run = ckptconv_here("diff", *two, "--delta", tmp_path / name, *options)
        assert run.code == 0
    files = [{file.name: file.read_bytes() for file in (tmp_path / name).glob("model*")} for name in ("quiet", "json")]
    assert files[0] == files[1]
    assert len(files[0]) == 2
    assert ckptconv_here("diff", *two, "--quiet").code == 1
    assert ckptconv_here("diff", two[0], two[0], "--quiet").code == 0


def test_the_delta_is_that_of_threads(two: list[Path], tmp_path: Path) -> None:
    for encoding in ("auto", "xor", "overwrite"):
        made = [tmp_path / f"{encoding}-{way}" for way in ("forked", "threads")]
        options = ["--delta-encoding", encoding, "--delta"]
        forked = run_by("diff", *two, *options, made[0], "--jobs", 2, forks=4)["delta"]
        threads = ckptconv_here("diff", *two, *options, made[1], "--json").json["delta"]
        assert {**forked, "path": ""} == {**threads, "path": ""}, encoding
        for name in ("model.safetensors.index.json", "model-00000-of-00001.safetensors"):
            assert (made[0] / name).read_bytes() == (made[1] / name).read_bytes(), (encoding, name)
        output = tmp_path / f"{encoding}.safetensors"
        assert ckptconv_here("patch", two[0], made[0], output).code == 0
        assert output.read_bytes() == two[1].read_bytes(), encoding


def test_a_delta_is_applied_in_processes(two: list[Path], tmp_path: Path) -> None:
    for encoding in ("xor", "overwrite"):
        delta = tmp_path / encoding
        assert ckptconv_here("diff", *two, "--delta-encoding", encoding, "--delta", delta).code == 0
        made = [tmp_path / f"{encoding}-{way}.safetensors" for way in ("forked", "threads")]
        forked = run_by("patch", two[0], delta, made[0], "--jobs", 2, forks=2)
        threads = comparable(ckptconv_here("patch", two[0], delta, made[1], "--jobs", 2, "--json").json)
        for report, path in zip((forked, threads), made, strict=True):
            report.pop("outputs")
            report["notes"] = [note.replace(str(path), "OUTPUT") for note in report["notes"]]
        assert forked == threads, encoding
        assert [path.read_bytes() == two[1].read_bytes() for path in made] == [True, True], encoding
