"""A checkpoint of a trillion parameters can be planned on a laptop; only its bytes are large."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PARAMETERS, ELEMENTS = 50_000, 20_000_000


@pytest.fixture(scope="module")
def plan() -> dict[str, int]:
    """50,000 parameters of twenty million elements each, cut for 1,024 ranks: planned in a process of its own."""
    sizes = ["--parameters", str(PARAMETERS), "--elements", str(ELEMENTS)]
    command = [sys.executable, str(Path(__file__).with_name("scale.py")), *sizes]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    result: dict[str, int] = json.loads(printed)
    return result


def test_every_parameter_is_planned_once(plan: dict[str, int]) -> None:
    assert plan["tensors"] == PARAMETERS
    assert plan["parameters"] > 0.99e12
    headers = plan["bytes"] - 4 * plan["parameters"]
    assert 0 < headers < 300 * PARAMETERS


def test_shards_are_of_the_usual_size(plan: dict[str, int]) -> None:
    shards = plan["files"] - 1
    assert 4 * plan["parameters"] / 5e9 <= shards <= 1.02 * 4 * plan["parameters"] / 5e9


def test_planning_takes_seconds_and_little_memory(plan: dict[str, int]) -> None:
    assert plan["seconds"] < 30
    assert plan["peak_rss_bytes"] < 160 << 20


def test_what_a_worker_is_sent_is_small(plan: dict[str, int]) -> None:
    assert plan["task_bytes"] < 1 << 20


def test_the_last_element_comes_from_the_last_rank(plan: dict[str, int]) -> None:
    (path,) = plan["last"]  # type: ignore[misc]
    assert "zero_pp_rank_1023_" in str(path)
