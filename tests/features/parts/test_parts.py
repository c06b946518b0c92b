"""A conversion in parts, by processes that know nothing of each other, and what puts the parts together."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from cells import VERIFY
from checkpoints import SHARDS, Run, ckptconv_here, contents, done, seven_shards
from hypothesis import given
from hypothesis import strategies as st
from processes import PROGRAM, prepared

from ckptconv import finish
from ckptconv.cli import progress as report
from ckptconv.errors import UsageError
from ckptconv.features.parts.making import assign
from ckptconv.features.parts.numbers import parse_part

SHARDED = ("--max-shard-size", "100kB")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seven_shards(tmp_path_factory.mktemp("model") / "model.pt", rows=25)


def part(model: Path, output: Path, which: str, *options: object) -> Run:
    return ckptconv_here("pt2safetensors", model, output, *SHARDED, "--part", which, *options)


def whole(model: Path, output: Path) -> dict[str, bytes]:
    run = ckptconv_here("pt2safetensors", model, output, *SHARDED)
    assert run.code == 0, run.err
    return contents(output)


# ------------------------------------------------------------------------------------------------- whose a file is


@given(st.lists(st.integers(0, 1 << 40), max_size=60), st.integers(1, 12), st.integers(0, 5))
def test_every_file_has_one_part_and_no_part_has_much_more_than_another(
    sizes: list[int], count: int, shift: int
) -> None:
    parts = assign(sizes, count, shift)
    assert len(parts) == len(sizes)
    assert all(0 <= each < count for each in parts)
    loads = [sum(size for size, of in zip(sizes, parts, strict=True) if of == number) for number in range(count)]
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_the_largest_files_are_given_out_first() -> None:
    assert assign([1, 1, 4], 2) == [1, 1, 0]


def test_parts_are_named_by_number_and_count() -> None:
    assert parse_part("0/1", "--part") == (0, 1)
    assert parse_part("3/4", "--part") == (3, 4)
    for wrong in ("4/4", "1", "-1/4", "1/0", "a/b", "", "0x1/4", "1/4/5"):
        with pytest.raises(UsageError):
            parse_part(wrong, "--part")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_MIN": "3", "SLURM_ARRAY_TASK_COUNT": "4"}, (2, 4)),
        ({"SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_TASK_COUNT": "1"}, (0, 1)),
        ({"RANK": "1", "WORLD_SIZE": "8"}, (1, 8)),
        ({"JOB_COMPLETION_INDEX": "2", "JOB_COMPLETIONS": "3"}, (2, 3)),
        ({"JOB_COMPLETION_INDEX": "0", "JOB_PARALLELISM": "3"}, (0, 3)),
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}, (3, 4)),
        # In an array, each task of it is a part.
        (
            {
                "SLURM_PROCID": "0",
                "SLURM_STEP_NUM_TASKS": "1",
                "SLURM_ARRAY_TASK_ID": "5",
                "SLURM_ARRAY_TASK_COUNT": "8",
            },
            (5, 8),
        ),
    ],
)
def test_auto_reads_what_batch_systems_set(environment: dict[str, str], expected: tuple[int, int]) -> None:
    assert parse_part("auto", "--part", environment) == expected


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, ["SLURM_ARRAY_TASK_ID", "RANK", "JOB_COMPLETION_INDEX"]),
        # As in a batch script without srun, which runs once.
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
            ["SLURM_PROCID is set", "SLURM_STEP_NUM_TASKS is not. Run it with srun, or"],
        ),
        ({"RANK": "1"}, ["WORLD_SIZE"]),
        ({"RANK": "x", "WORLD_SIZE": "2"}, ["RANK", "'x'"]),
        ({"RANK": "2", "WORLD_SIZE": "2"}, ["part 2 of 2 does not exist."]),
        ({"JOB_COMPLETION_INDEX": "2"}, ["JOB_COMPLETIONS"]),
    ],
)
def test_auto_says_what_is_missing(environment: dict[str, str], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse_part("auto", "--part", environment)
    for word in words:
        assert word in str(caught.value)


# ----------------------------------------------------------------------------------------------------- parts, and all


def test_four_processes_at_once_and_finish_make_what_one_run_makes(model: Path, tmp_path: Path) -> None:
    expected = whole(model, tmp_path / "expected")
    torch.save({"old": torch.ones(2)}, tmp_path / "old.pt")
    ckptconv_here("pt2safetensors", tmp_path / "old.pt", tmp_path / "out")
    old = contents(tmp_path / "out")
    words = ("pt2safetensors", model, tmp_path / "out", *SHARDED, "--json")
    running = [prepared().python(PROGRAM, *words, "--part", f"{n}/4") for n in range(4)]
    reports = []
    for process in running:
        out, err = process.communicate()
        assert process.wait() == 0, err
        reports.append(json.loads(out))
    assert contents(tmp_path / "out").items() >= old.items()
    staged = [output["path"] for report in reports for output in report["outputs"]]
    assert sorted(map(os.path.basename, staged)) == sorted(set(expected) - {".ckptconv-manifest.json"})
    sizes = [report["bytes_written"] for report in reports]
    assert max(sizes) - min(sizes) < 1_100_000
    run = done(ckptconv_here("finish", tmp_path / "out", "--json"))
    assert contents(tmp_path / "out") == expected
    assert {output["path"] for output in run.json["outputs"]} == set(staged)
    assert run.json["tensors"] == SHARDS


def test_one_file_is_made_by_one_part_and_the_others_have_nothing_to_do(model: Path, tmp_path: Path) -> None:
    done(ckptconv_here("pt2safetensors", model, tmp_path / "expected.safetensors"))
    out = tmp_path / "out.safetensors"
    for number in (2, 1, 0):
        run = done(ckptconv_here("pt2safetensors", model, out, "--part", f"{number}/3"))
        assert ("has no files" in run.out) == ("there are fewer files than parts" in run.out) == (number > 0)
        assert not out.exists()
    done(ckptconv_here("finish", out, "--manifest", tmp_path / "manifest.json"))
    assert out.read_bytes() == (tmp_path / "expected.safetensors").read_bytes()
    assert all(json.loads((tmp_path / "manifest.json").read_text())["files"]["out.safetensors"]["tensors"].values())
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("out", ["out", "out/", "out.safetensors", "./out.safetensors"])
def test_what_is_finished_is_called_as_it_was_named(
    out: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    staged = done(ckptconv_here("pt2safetensors", model, out, "--part", "0/1", "--json")).json["outputs"]
    assert done(ckptconv_here("finish", out, "--json")).json["outputs"] == staged
    assert all(output["path"].startswith(out) and Path(output["path"]).is_file() for output in staged)


# -------------------------------------------------------------------------------------------------- what goes wrong


def test_missing_parts_are_named_and_what_is_there_stays(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for number in (0, 2):
        done(part(model, out, f"{number}/4"))
    before = contents(out)
    run = ckptconv_here("finish", out)
    assert run.code == 1
    assert "part 1/4 (" in run.err
    assert "part 3/4 (" in run.err
    assert "part 0/4" not in run.err
    assert contents(out) == before
    for number in (1, 3):
        done(part(model, out, f"{number}/4"))
    done(ckptconv_here("finish", out))
    assert contents(out) == whole(model, tmp_path / "expected")


def test_a_part_that_was_done_is_not_done_again(model: Path, tmp_path: Path) -> None:
    done(part(model, tmp_path / "out", "0/2"))
    report = part(model, tmp_path / "out", "0/2", "--json").json
    assert report["bytes_written"] == 0
    assert report["reused"] == len(report["outputs"])


def test_a_dry_run_of_a_part_says_what_it_would_do(model: Path, tmp_path: Path) -> None:
    report = part(model, tmp_path / "out", "0/2", "--dry-run", "--json").json
    assert not (tmp_path / "out").exists()
    assert report["outputs"] == part(model, tmp_path / "out", "0/2", "--json").json["outputs"]


def test_a_run_of_the_whole_takes_over_what_parts_have_done(model: Path, tmp_path: Path) -> None:
    done(part(model, tmp_path / "out", "0/2"))
    report = ckptconv_here("pt2safetensors", model, tmp_path / "out", *SHARDED, "--json").json
    assert report["reused"] >= 3
    assert contents(tmp_path / "out") == whole(model, tmp_path / "expected")


def test_nothing_to_finish_is_a_usage_error(model: Path, tmp_path: Path) -> None:
    assert ckptconv_here("finish", tmp_path / "nowhere").code == 2
    whole(model, tmp_path / "out")
    assert ckptconv_here("finish", tmp_path / "out").code == 2
    # As a conversion that was killed leaves it.
    (tmp_path / "out" / f".ckptconv-{'0' * 16}").mkdir(0o700)
    ckptconv_here("finish", tmp_path / "out").refused(2, "a conversion without --part", "run the same command again")


def test_parts_of_different_plans_never_come_together(model: Path, tmp_path: Path) -> None:
    done(part(model, tmp_path / "out", "0/2"))
    done(part(model, tmp_path / "out", "1/2", "--dtype", "bfloat16"))
    run = ckptconv_here("finish", tmp_path / "out")
    assert run.code == 2
    assert "2 different conversions" in run.err
    wrong = [path for path in (tmp_path / "out").iterdir() if path.name in run.err]
    assert len(wrong) == 2
    made = [len([*path.glob(".record-*")]) for path in wrong]
    for path, count in zip(wrong, made, strict=True):
        assert f"{path} ({count} of " in run.err
    day = time.strftime("%Y-%m-%d ", time.localtime(wrong[0].stat().st_mtime))
    assert run.err.count(f" complete, last changed {day}") == 2
    assert run.err.count("--dtype 'bfloat16')") == 1


@pytest.mark.parametrize("spoil", ["cut", "flipped", "gone"])
def test_a_staged_file_that_has_changed_is_found(model: Path, tmp_path: Path, spoil: str) -> None:
    out = tmp_path / "out"
    done(part(model, out, "0/1"))
    victim = next(out.glob(".ckptconv-*/model-00003-*"))
    if spoil == "cut":
        os.truncate(victim, 100)
    elif spoil == "gone":
        victim.unlink()
    else:
        with open(victim, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\1")
    run = ckptconv_here("finish", out, "--checksum")
    assert run.code == (4 if spoil == "flipped" else 1)
    assert "part 0/1 (model-00003-of-00007.safetensors)" in run.err
    assert not list(out.glob("*.safetensors"))
    assert part(model, out, "0/1", "--json").json["reused"] == SHARDS
    done(ckptconv_here("finish", out, "--checksum"))
    assert contents(out) == whole(model, tmp_path / "expected")


def test_what_is_read_again_is_shown_unless_that_is_had_off(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "INTERVAL", -1.0)
    for options, shown in (([], True), (["--no-progress"], False), (["--quiet"], False)):
        done(part(model, tmp_path / "out", "0/1"))
        run = done(ckptconv_here("finish", tmp_path / "out", "--checksum", *options))
        assert (", model-00003-of-00007" in run.err) == shown
        assert shown or run.err == ""
    done(part(model, tmp_path / "out", "0/1"))
    announced: list[int] = []
    read: list[int] = []
    finish([tmp_path / "out"], checksum=True, on_total=announced.append, progress=read.append)
    assert announced == [sum(read)] == [sum(path.stat().st_size for path in (tmp_path / "out").glob("[!.]*"))]


# Waits in its first file until its stdin ends.
HELD = """
import os, re, sys, time
from ckptconv.cli import main
from ckptconv.publish.staging import local
create = local.LocalStaging.create
def recorded(self, count):
    # A record has another name until all of it is written.
    while sum(re.fullmatch("[.]record-[0-9a-f]+", name) is not None for name in os.listdir(self.staging)) < count:
        time.sleep(0.01)
def slowly(self, name, size):
    writer = create(self, name, size)
    os.write(1, b"!")
    os.read(0, 1)
    return writer
local.LocalStaging.create = slowly
main.main(sys.argv[1:])
"""


def test_a_living_part_is_never_disturbed(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("pt2safetensors", model, out, *SHARDED, "--part", "0/2", "-q")
    first = prepared().python(HELD, *words, stdin=subprocess.PIPE)
    assert first.stdout is not None
    assert first.stdout.read(1) == "!"
    done(part(model, out, "1/2"))
    for other in (
        ("finish", out),
        ("pt2safetensors", model, out, *SHARDED),
        ("pt2safetensors", model, out, *SHARDED, "--part", "0/2"),
    ):
        run = ckptconv_here(*other)
        assert run.code == 1, other
        assert "another process" in run.err
    other = tmp_path / "other"
    done(ckptconv_here("pt2safetensors", model, other, *SHARDED, "--exclude", "layer0"))
    shutil.copytree(other, out, dirs_exist_ok=True)
    _, err = first.communicate()
    assert first.wait() == 0, err
    done(ckptconv_here("finish", out))
    assert contents(out) == whole(model, tmp_path / "expected")


def test_a_part_that_is_killed_goes_on(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    dying = HELD.replace("os.read(0, 1)", "'00005' in name and (recorded(self, 4), os.kill(os.getpid(), 9))")
    words = ("pt2safetensors", model, out, *SHARDED, "--part", "0/1", "--jobs", 1)
    assert prepared().run(dying, *words).returncode == -signal.SIGKILL
    assert ckptconv_here("finish", out).code == 1
    assert part(model, out, "0/1", "--json").json["reused"] == 4
    done(ckptconv_here("finish", out))
    assert contents(out) == whole(model, tmp_path / "expected")


@pytest.mark.parametrize("options", [[*VERIFY], ["--manifest", "m.json"]])
def test_what_needs_the_whole_is_refused_for_a_part(model: Path, tmp_path: Path, options: list[str]) -> None:
    assert part(model, tmp_path / "out", "0/2", *options).code == 2
    assert not (tmp_path / "out").exists()
