"""Large files are compared in processes: what comes out is what threads make."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints import ckptconv_here
from features.processes.with_diff.forked import comparable, run_by, two_models

import ckptconv
from ckptconv import TensorDifference, UsageError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return two_models(tmp_path_factory.mktemp("two"))


def by_name(tensor: TensorDifference) -> str:
    return tensor.name


@pytest.mark.parametrize("options", [{}, {"rtol": 0.0}, {"dtype": "float32"}], ids=["bits", "values", "a cast"])
def test_without_measuring_the_same_tensors_differ(options: dict[str, Any], two: list[Path]) -> None:
    told, measured = (ckptconv.diff(*two, **options, measure=measure) for measure in (False, True))
    for each, beside in zip(*(sorted(found.tensors, key=by_name) for found in (told, measured)), strict=True):
        assert (each.name, each.status, each.change) == (beside.name, beside.status, None)
    assert told.counts == measured.counts
    assert told.equal is measured.equal is False
    assert (told.elements, told.bytes_compared) == (measured.elements, measured.bytes_compared)
    assert (told.elements_differ, told.max_abs, told.max_rel, told.norm) == (None, None, None, None)
    assert json.loads(told.to_json())["max_rel"] is None


def test_what_is_not_measured_is_read_until_it_differs(two: list[Path], tmp_path: Path) -> None:
    told, measured = (ckptconv.diff(*two, jobs=1, measure=measure) for measure in (False, True))
    assert told.bytes_read < measured.bytes_read - (3 << 20)  # most of both sides of "all"
    with pytest.raises(UsageError, match="requires measure=True"):
        ckptconv.diff(*two, html=tmp_path / "page.html", measure=False)


def test_what_is_found_is_what_threads_find(two: list[Path]) -> None:
    for options in ([], ["--rtol", "0.001"]):
        # Those that were equal until a difference was found are read again, in processes too.
        found = run_by("diff", *two, *options, "--jobs", 3, forks=6)
        threads = comparable(ckptconv_here("diff", *two, *options, "--json").json)
        for report in (found, threads):
            report.pop("bytes_read")  # depends on what was compared first
        by_name = [{each["name"]: each for each in report.pop("tensors")} for report in (found, threads)]
        assert by_name[0].keys() == by_name[1].keys()
        for name, told in by_name[1].items():
            other = by_name[0][name].pop("change") or {}
            for key, value in (told.pop("change") or {}).items():
                near = pytest.approx(value, 1e-14) if "norm" in key else value
                assert key == "relative" or other[key] == near, (name, key)
        assert by_name[0] == by_name[1], options
        assert found.pop("norm") == pytest.approx(threads.pop("norm"), 1e-14)
        assert found == threads, options


def test_one_job_needs_no_process(two: list[Path]) -> None:
    assert run_by("diff", *two, "--jobs", 1, forks=0)["counts"]["changed"] == 5
