"""The policy of `thin`: as its golden file has it, and as a model in plain Python has it of any run."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from effort import TIMES, every
from features.thin.model import stays

from ckptconv.errors import CorruptError, UsageError
from ckptconv.features.thin.metrics import best_of, may_be_highest
from ckptconv.features.thin.policy import PERIODS, Candidate, Policy, reasons_to_stay
from ckptconv.storage.location import Location

GOLDEN: list[dict[str, Any]] = json.loads((Path(__file__).parent / "golden.json").read_text())
RUNS = 10_000


def candidates(steps: list[dict[str, Any]]) -> list[Candidate]:
    return [
        Candidate(
            step["name"], step["number"], step["time"], step.get("good", True), ("held",) if step.get("held") else ()
        )
        for step in steps
    ]


def policy_of(told: dict[str, Any]) -> Policy:
    return Policy(
        told.get("last", 0),
        told.get("every", 0),
        dict.fromkeys(told.get("best", ()), "best"),
        told.get("within"),
        {period: told[period] for period in PERIODS if told.get(period)},
        frozenset(told.get("names", ())),
    )


@every("case", GOLDEN)
def test_what_stays_is_what_the_golden_file_says_and_why(case: dict[str, Any]) -> None:
    steps = [
        {"name": f"step-{number}", "number": number, "time": time, **case.get("facts", {}).get(f"{number}", {})}
        for number, time in case["steps"]
    ]
    reasons = reasons_to_stay(candidates(steps), policy_of(case["policy"]))
    expected = {f"step-{number}": why for number, why in case["stay"].items()}
    assert {name: why for name, why in reasons.items() if why} == expected, case["about"]


def random_run(chance: random.Random) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    number, time = 0, chance.uniform(0, 2e9)
    steps: list[dict[str, Any]] = []
    for _ in range(chance.randrange(12)):
        number += chance.choice((1, 50, 100, 500, 1000))
        time += chance.choice((10, 600, 3600, 86_400, 40 * 86_400))
        steps.append(
            {
                "name": f"step-{number}",
                "number": number if chance.random() < 0.95 else None,
                "time": time if chance.random() < 0.95 else None,
                "good": chance.random() < 0.85,
                "held": chance.random() < 0.05,
            }
        )
    if chance.random() < 0.2:
        chance.shuffle(steps)
    rules: dict[str, Any] = {
        "last": chance.randrange(5),
        "every": chance.choice((1, 100, 500, 1000)),
        "best": {step["name"] for step in steps if chance.random() < 0.2},
        "within": chance.choice((0, 600, 86_400)),
        "names": {str(step["number"]) for step in steps if step["number"] is not None and chance.random() < 0.1},
        **{period: chance.randrange(4) for period in PERIODS},
    }
    return steps, {name: rule for name, rule in rules.items() if chance.random() < 0.3}


def test_the_policy_agrees_with_its_model_on_random_runs() -> None:
    chance = random.Random(TIMES)
    kept = 0
    for _ in range(RUNS):
        steps, policy = random_run(chance)
        found = {name for name, why in reasons_to_stay(candidates(steps), policy_of(policy)).items() if why}
        assert found == stays(steps, policy), (steps, policy)
        kept += len(found)
    assert kept > RUNS


METRICS = {
    "lines.jsonl": '{"step": 1, "eval_loss": 2.0}\n{"step": 2, "eval_loss": 1.0}\n{"step": 3, "eval_loss": 1.5}\n\n',
    "table.csv": "step,eval_loss\n1,2.0\n2,1.0\n3,1.5\n",
    "trainer_state.json": json.dumps(
        {"log_history": [{"step": step, "eval_loss": loss} for step, loss in ((1, 2.0), (2, 1.0), (3, 1.5))]}
    ),
    "list.json": json.dumps([{"global_step": step, "loss": loss} for step, loss in ((1, 2), (2, 1), (3, 1.5))]),
}


@every("name", METRICS)
def test_the_best_steps_are_those_of_the_lowest_metric_or_the_highest(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(METRICS[name])
    place = Location(str(path))

    def best(*options: Any) -> list[int]:
        return [*best_of(place, "", *options)[1]]

    assert best(False, 1, {1, 2, 3}) == [2]
    assert best(False, 2, {1, 2, 3}) == [2, 3]
    assert best(True, 1, {1, 2, 3}) == [1]
    assert best(False, 1, {1, 3}) == [3], "a step that is not there is not the best one"


@every("metric", ["eval_loss", "val_error", "acc_loss", "perplexity", "wer", "maps", "step_time"])
def test_a_metric_that_is_better_when_lower_needs_no_direction(metric: str) -> None:
    assert not may_be_highest(metric)


def test_metrics_that_are_not_there_or_no_numbers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "eval_loss": "nan"}\n{"step": 2, "other": 1}\n')
    with pytest.raises(UsageError, match="has no eval_loss"):
        best_of(Location(str(path)), "", False, 1, {1, 2})
    assert best_of(Location(str(path)), "other", False, 1, {1, 2}) == ("other", {2: 1.0})
    path.write_text('{"step": 1, "eval_loss": 1}\nwhat\n')
    with pytest.raises(CorruptError, match="line 2 is not valid JSON"):
        best_of(Location(str(path)), "", False, 1, {1})
