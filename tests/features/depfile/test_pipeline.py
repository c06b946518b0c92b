"""The example of a pipeline, run as it is: cold, warm, after a change, with a broken input, interrupted."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import ZERO
from safetensors.torch import load_file

EXAMPLE = Path(__file__).parents[3] / "examples" / "pipeline"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The example with two models, two runs, and a list of one more."""
    shutil.copy(EXAMPLE / "Makefile", tmp_path)
    (tmp_path / "models").mkdir()
    for number, name in enumerate(["first", "epoch=3"]):
        torch.save({"w": torch.full((4, 5), float(number))}, tmp_path / "models" / f"{name}.pt")
    for name, case in (("seven", "z3_bf16_w2"), ("eight", "z2_bf16_w2")):
        shutil.copytree(ZERO / case / "checkpoint", tmp_path / "runs" / name)
    torch.save({"b": torch.ones(3)}, tmp_path / "listed.bin")
    (tmp_path / "batch.txt").write_text("# one\nexported/listed.safetensors=listed.bin  # and why\n\n")
    return tmp_path


Make = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def make(place: Path, program: Path) -> Make:
    """Runs make where the example is."""

    def run(*arguments: str, shard: str = "200B") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["make", *arguments, f"SHARD={shard}"],
            cwd=place, env=environment(program), capture_output=True, text=True, check=False,
        )  # fmt: skip

    return run


def environment(*programs: Path) -> dict[str, str]:
    cleared = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    places = [*programs, Path(sys.executable).parent, os.environ["PATH"]]
    return {**cleared, "PATH": os.pathsep.join(map(str, places))}


def outputs(place: Path) -> dict[str, int]:
    """Every output, and when it was made."""
    found = [
        *place.glob("models/*.safetensors"),
        *place.glob("exported/*"),
        *place.glob("converted/*/model.safetensors*"),
    ]
    found = [path for path in found if path.name == INDEX or not (path.parent / INDEX).exists()]
    return {str(path.relative_to(place)): path.stat().st_mtime_ns for path in found}


def made(before: dict[str, int], after: dict[str, int]) -> set[str]:
    return {name for name, when in after.items() if before.get(name) != when}


ALL = {
    "models/first.safetensors",
    "models/epoch=3.safetensors",
    "exported/listed.safetensors",
    f"converted/seven/{INDEX}",
    f"converted/eight/{INDEX}",
}


def test_everything_is_converted_at_once_and_then_there_is_nothing_to_do(place: Path, make: Make) -> None:
    done = make("-j4")
    assert done.returncode == 0, done.stderr
    first = outputs(place)
    assert set(first) == ALL
    assert load_file(place / "models/epoch=3.safetensors")["w"][0, 0] == 1
    again = make("-j4")
    assert "Nothing to be done" in again.stdout
    assert outputs(place) == first


@pytest.mark.parametrize(
    ("change", "target"),
    [
        ("models/first.pt", "models/first.safetensors"),
        ("listed.bin", "exported/listed.safetensors"),
        ("runs/seven/global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", f"converted/seven/{INDEX}"),
        ("runs/eight/latest", f"converted/eight/{INDEX}"),
    ],
)
def test_a_change_converts_what_depends_on_it(place: Path, make: Make, change: str, target: str) -> None:
    assert make("-j4").returncode == 0
    before = outputs(place)
    later = time.time() + 5
    os.utime(place / change, (later, later))
    assert make("-j2").returncode == 0
    assert made(before, outputs(place)) == {target}


def test_a_run_that_is_one_file_is_converted_once(place: Path, make: Make) -> None:
    one = {f"converted/{name}/model.safetensors" for name in ("seven", "eight")}
    assert make("-j4", shard="5GB").returncode == 0
    first = outputs(place)
    assert set(first) == {name for name in ALL if not name.startswith("converted")} | one
    assert "Nothing to be done" in make("-j4", shard="5GB").stdout
    later = time.time() + 5
    os.utime(place / "runs/seven/global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", (later, later))
    assert make("-j4", shard="5GB").returncode == 0
    assert made(first, outputs(place)) == {"converted/seven/model.safetensors"}


def test_a_run_may_become_several_files_and_one_again(place: Path, make: Make) -> None:
    for shard, last in (("5GB", "model.safetensors"), ("200B", INDEX), ("5GB", "model.safetensors")):
        later = time.time() + 5
        os.utime(place / "runs/seven/latest", (later, later))
        assert make(shard=shard).returncode == 0
        assert (place / "converted/seven" / last).exists()
        os.utime(place / "runs/seven/latest", (0, 0))
        assert "Nothing to be done" in make(shard=shard).stdout


def test_a_broken_input_stops_make_and_leaves_nothing_of_it(place: Path, make: Make) -> None:
    assert make().returncode == 0
    before = outputs(place)
    broken = place / "models" / "first.pt"
    broken.write_bytes(broken.read_bytes()[:300])
    later = time.time() + 5
    os.utime(broken, (later, later))
    torch.save({"w": torch.zeros(2)}, place / "models" / "new.pt")
    done = make("-k", "-j4")
    assert done.returncode == 2
    assert "models/first.pt" in done.stderr
    assert "Traceback" not in done.stderr
    assert made(before, outputs(place)) == {"models/new.safetensors"}
    assert load_file(place / "models" / "first.safetensors")["w"].shape == (4, 5), "what was there is still right"
    assert not list(place.glob("models/.*"))


# Waits for a signal when a byte of the model `large` is written; "!" in the pipe `begun` says so.
HELD = """
import sys, time
from ckptconv.cli import main
from ckptconv.storage import writing
write_at = writing.LocalWriter.write_at
def held(self, offset, data):
    write_at(self, offset, data)
    with open("begun", "w") as begun:
        begun.write("!")
    time.sleep(600)
writing.LocalWriter.write_at = held
main.main(sys.argv[1:])
"""


def test_a_pipeline_that_is_interrupted_goes_on_where_it_was(place: Path, program: Path, make: Make) -> None:
    torch.save({"w": torch.zeros(30, 30).t()}, place / "models" / "large.pt")
    held = place / "bin" / "ckptconv"
    held.parent.mkdir()
    held.with_name("held.py").write_text(HELD)
    # The terminal's signals reach what it has started, which the other program's children are not.
    kinds = f'*large*) exec "{sys.executable}" "{held.with_name("held.py")}" "$@";; *) exec "{program}/ckptconv" "$@"'
    held.write_text(f'#!/bin/sh\ncase "$*" in {kinds};; esac\n')
    held.chmod(0o755)
    os.mkfifo(place / "begun")
    running = subprocess.Popen(
        ["make", "-j4", "SHARD=200B", "FLAGS=--quiet --jobs 1"],
        cwd=place, env=environment(held.parent), start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    with open(place / "begun") as begun:
        assert begun.read(1) == "!"
    os.killpg(running.pid, signal.SIGINT)
    running.communicate()
    assert running.returncode != 0
    assert "models/large.safetensors" not in outputs(place)
    assert not list(place.glob("models/.large*")), "nothing is left of what was interrupted"
    done = make("-j4")
    assert done.returncode == 0, done.stderr
    assert set(outputs(place)) == ALL | {"models/large.safetensors"}
    assert load_file(place / "models" / "large.safetensors")["w"].shape == (30, 30)
