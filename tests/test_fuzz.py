"""A few seconds of what `make fuzz` does for longer: no traceback, only our errors, and no success that is wrong."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fuzz
import pytest
from cells import of_features
from compare import Attack
from differential.cases import KINDS, Case
from differential.hunt import Hunter, told
from effort import TIMES

from ckptconv.formats import safetensors
from ckptconv.formats.torch import objects as torch_objects
from ckptconv.formats.torch import unusual
from ckptconv.pickles import machine, opcodes

# So many of each kind, with a fixed seed: a second or two each, where a hunt takes minutes.
CASES = {"pickle": 500, "zip": 100, "tar": 160, "stream": 100, "safetensors": 150, "tensors": 100}


@pytest.mark.parametrize("reader", fuzz.READERS)
@pytest.mark.filterwarnings("ignore")
def test_changed_checkpoints_are_refused_or_read_as_torch_reads_them(reader: str) -> None:
    ends = fuzz.run(reader, seed=0, rounds=45 * TIMES)
    assert len(ends) > 1, "changes that change nothing"


@pytest.fixture(scope="module")
def hunter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hunter]:
    with Hunter(KINDS, tmp_path_factory.mktemp("cases")) as started:
        yield started


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_what_is_read_is_what_the_common_readers_read(kind: str, hunter: Hunter) -> None:
    hunt = hunter.hunt(kind, seed=0, cases=CASES[kind] * TIMES)
    assert not hunt.findings, "\n".join(told(hunt))
    assert hunt.ends["read, others read it"] > 5, "cases that nobody reads"
    assert any(end.startswith("refused") for end in hunt.ends), "cases that are all sound"


MADE = """
import hashlib, random
from differential.cases import KINDS
made = [
    f"{kind} {number} {hashlib.sha1(KINDS[kind].make(random.Random(number)).data()).hexdigest()}"
    for kind in KINDS
    for number in range(30)
]
"""


@pytest.mark.filterwarnings("ignore")
def test_cases_follow_from_the_seed_in_every_process() -> None:
    hashing = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # this process has another
    environment = {**os.environ, "PYTHONPATH": str(Path(fuzz.__file__).parent), "PYTHONHASHSEED": hashing}
    command = [sys.executable, "-W", "ignore", "-c", f"{MADE}print(*made, sep=chr(10))"]
    there = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    here: dict[str, list[str]] = {}
    exec(MADE, here)
    assert here["made"] == there.splitlines()
    assert len({line.split()[-1] for line in here["made"]}) > 100, "cases that are all the same"


# A kind of cases, a rule taken out of ours, and what has to be found then.
FAULTS = [
    ("pickle", opcodes, "python2", lambda data: data, "another value"),  # text of Python 2 is bytes
    *(fault for more in of_features("FUZZ_FAULTS") for fault in more),
    ("tensors", unusual, "resolved", lambda tensor, _: tensor, "another value"),  # nothing is conjugate
    ("zip", torch_objects, "in_order", lambda tensor, _: tensor, "another value"),  # nothing is big-endian
    ("safetensors", safetensors, "contiguous_strides", lambda shape: (0,) * len(shape), "another value"),
]


@pytest.mark.parametrize(("kind", "module", "name", "fault", "category"), FAULTS, ids=[fault[2] for fault in FAULTS])
@pytest.mark.filterwarnings("ignore")
def test_a_rule_that_is_taken_out_is_missed(
    kind: str,
    module: Any,
    name: str,
    fault: Callable[..., Any],
    category: str,
    hunter: Hunter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, name, fault)
    hunt = hunter.hunt(kind, seed=0, cases=3 * CASES[kind], until=category)
    assert category in {finding.category for finding in hunt.findings}


@pytest.mark.parametrize("fault", [RecursionError, MemoryError])
def test_errors_that_are_none_of_ours_are_found(
    fault: type[Exception], hunter: Hunter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: object) -> None:
        raise fault

    monkeypatch.setattr(machine, "run", breaks)
    findings, _ = hunter.read("pickle", b"N.")
    assert [finding.category for finding in findings] == ["memory" if fault is MemoryError else "crash"]


def test_the_smallest_case_shows_the_same_fault(hunter: Hunter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opcodes, "python2", lambda data: data)
    case = Case([b"]", b"(", b"K\1", b"U\1a", b"N", b"e", b"."])
    (finding,), _ = hunter.read("pickle", case.data())
    small, _ = hunter.smaller("pickle", case, finding)
    assert b"U\1a" in small.steps
    assert len(small.steps) < len(case.steps)


def test_nothing_that_a_pickle_calls_runs_in_the_readers(hunter: Hunter, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    data = pickle.dumps(Attack(canary), 2)
    path = tmp_path / "case.pkl"
    path.write_bytes(data)
    answers = hunter.workers.ask(KINDS["pickle"].readers[:2], path)
    assert all(answer["calls"] == [["posix", "system"]] for answer in answers.values())
    assert not canary.exists()
