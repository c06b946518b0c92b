"""`ckptconv thin`: what a policy does not keep goes, nothing else, and whatever a run looks like."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Run, ckptconv_here, done
from effort import TIMES, every
from processes import before_call, failing, in_child, moments
from safetensors.torch import load_file, save_file
from saved_steps import SAVERS, optimizer_of, state_of
from stores import FAR, in_memory

import ckptconv
import ckptconv.features.removal.area as area_module
from ckptconv.cli.registered import GROUPS
from ckptconv.errors import CkptconvError, UnsafeError
from ckptconv.features.removal.area import AREA, DONE, JOURNAL, LESSEN, REMOVE, Change, entered
from ckptconv.features.removal.entries import entries_of, mark_of
from ckptconv.features.runs.run import run_at
from ckptconv.features.runs.whole import judged
from ckptconv.features.thin.carrying import carry_out
from ckptconv.features.thin.options import THIN
from ckptconv.features.thin.planning import Thinning, planned
from ckptconv.formats.registered import DESCRIBING
from ckptconv.options.option import filled
from ckptconv.storage.location import Location

SAVER = SAVERS["trainer"]


def thin(run: Path, *options: object, age: str = "0") -> Run:
    return ckptconv_here("thin", run, "--age", age, *options)


def names(run: Path) -> set[str]:
    return {path.name for path in run.iterdir()}


def files(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def plan(run: Path, **options: Any) -> tuple[Thinning, dict[str, Any]]:
    chosen = filled(THIN, {"age": 0, **options})
    return planned(str(run), chosen, {}, inert=False), chosen


def carried_out(planned: tuple[Thinning, dict[str, Any]], on_done: Callable[..., object] = lambda *_: None) -> str:
    """Carry out what was planned at another time, and return the step of an earlier run that was finished."""
    thinning, chosen = planned
    return carry_out(thinning.run.place.path, lambda: thinning, chosen, {}, on_done)[1]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return SAVER.run(tmp_path / "run", 100, 200, 300, 400)


def test_without_yes_it_is_told_what_would_go_and_nothing_changes(run: Path) -> None:
    before = files(run)
    found = done(thin(run, "--keep-last", 2))
    assert found.out.splitlines()[-1] == "nothing was changed: add --yes to make these changes"
    told = json.loads(done(thin(run, "--keep-last", 2, "--json")).out)
    assert {step["name"]: step["action"] for step in told["steps"]} == {
        "checkpoint-100": "remove",
        "checkpoint-200": "remove",
        "checkpoint-300": "keep",
        "checkpoint-400": "keep",
    }
    assert told["carried_out"] is False
    assert told["removed_bytes"] == sum(len(data) for path, data in before.items() if path[11] in "12")
    assert files(run) == before
    assert names(run) == {f"checkpoint-{number}00" for number in range(1, 5)}


def test_one_step_stays_and_two_stay(run: Path) -> None:
    for kept, words in ((1, "1 step kept (… in total), 3 steps"), (2, "2 steps kept (… in total), 2 steps")):
        line = done(thin(run, "--keep-last", kept)).out.splitlines()[-2]
        assert re.sub(r"[\d.]+ [kM]?B(ytes)?", "…", line) == f"{words} would be removed (… in total)"


def test_without_yes_nothing_changes_also_if_no_step_would_go(run: Path) -> None:
    assert done(thin(run, "--keep-last", 9)).out.splitlines()[-1] == "nothing was changed: no step would be removed"
    assert (
        done(thin(run, "--keep-last", 1)).out.splitlines()[-1] == "nothing was changed: add --yes to make these changes"
    )


def test_with_yes_it_is_done_and_what_stays_is_untouched(run: Path) -> None:
    before = files(run)
    done(thin(run, "--keep-last", 1, "--keep-every", 200, "--yes"))
    assert names(run) == {"checkpoint-200", "checkpoint-400"}
    assert files(run) == {path: data for path, data in before.items() if path[11] in "24"}


def test_the_best_step_stays(run: Path, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps({"step": s, "eval_loss": abs(s - 200)}) + "\n" for s in (100, 200, 300)))
    line = done(thin(run, "--keep-best", metrics)).out.splitlines()[1]
    assert line.endswith("best (eval_loss 0, lowest; use --highest for the highest)")
    line = done(thin(run, "--keep-best", metrics, "--highest")).out.splitlines()[2]
    assert line.endswith("best (eval_loss 100, highest)")
    done(thin(run, "--keep-best", metrics, "--yes"))
    assert names(run) == {"checkpoint-200", "checkpoint-400"}


@every("metric", ["val_acc", "eval_accuracy", "eval/f1", "rougeL", "reward", "test-score"])
def test_a_metric_that_may_be_better_when_higher_needs_its_direction(metric: str, run: Path, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.csv"
    metrics.write_text(f"step,{metric}\n100,1\n200,3\n300,2\n")
    options = ("--keep-best", metrics, "--metric", metric)
    before = files(run)
    for more in ((), ("--yes",)):
        thin(run, *options, *more).refused(2, f"--metric {metric}: specify whether", "--highest or --lowest")
    thin(run, *options, "--highest", "--lowest").refused(2, "cannot be combined")
    assert files(run) == before
    assert done(thin(run, *options, "--lowest")).out.splitlines()[0].endswith("lowest; use --highest for the highest)")
    done(thin(run, *options, "--highest", "--yes"))
    assert names(run) == {"checkpoint-200", "checkpoint-400"}


def _name_best(run: Path, state: object) -> None:
    (run / "checkpoint-400" / "trainer_state.json").write_text(json.dumps(state))


@pytest.mark.parametrize("policy", [("--keep-last", 1), ("--keep-last", 1, "--drop", "optimizer")])
def test_the_step_that_the_trainer_calls_the_best_stays_unless_it_is_named(policy: tuple[Any, ...], run: Path) -> None:
    _name_best(run, {"best_model_checkpoint": "elsewhere/run/checkpoint-200/"})
    before = files(run / "checkpoint-200")
    found = done(thin(run, *policy, "--yes"))
    assert re.search(r"checkpoint-200 .* kept +best according to checkpoint-400/trainer_state", found.out, re.MULTILINE)
    assert files(run / "checkpoint-200") == before
    done(thin(run, "--remove", "checkpoint-200", "--yes"))
    assert "checkpoint-200" not in names(run)


def test_what_is_removed_by_name_alone_is_no_other_step_where_the_trainer_names_its_best(run: Path) -> None:
    _name_best(run, {"best_model_checkpoint": "run/checkpoint-200"})
    done(thin(run, "--remove", "checkpoint-100", "--yes"))
    assert names(run) == {f"checkpoint-{number}00" for number in range(2, 5)}


@every(
    "state", [None, [], {"best_model_checkpoint": None}, {"best_model_checkpoint": 3}, {"best_model_checkpoint": ""}]
)
def test_a_state_of_the_trainer_without_a_best_step_keeps_none(state: object, run: Path) -> None:
    _name_best(run, state)
    done(thin(run, "--keep-last", 1, "--yes"))
    assert names(run) == {"checkpoint-400"}


def test_a_metric_in_the_place_of_the_file_is_answered_with_a_file_that_works(run: Path) -> None:
    _name_best(run, {"log_history": [{"step": 200, "eval_loss": 1.0}]})
    found = thin(run, "--keep-best", "eval_loss").refused(2, "eval_loss does not exist.")
    path = re.search(r"such as (\S+); --metric selects", found)
    assert path
    assert " best (eval_loss 1, " in done(thin(run, "--keep-best", path[1], "--metric", "eval_loss")).out


def test_a_step_in_the_place_of_its_run_is_told_to_be_one(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SAVER.run(run / "checkpoint-300", 1, 2)
    warning = "is itself a step: "
    step = run / "checkpoint-300"
    assert f"{step} {warning}{run} has 4 steps." in done(thin(step, "--keep-last", 2)).err
    monkeypatch.chdir(run)
    assert f"{step.name} {warning}" in done(thin(Path(step.name), "--keep-last", 2)).err
    assert warning not in done(thin(run, "--keep-last", 2)).err
    for words in ((), ("--yes",), ("--keep-last", 2)):
        removing = f"To remove only this step, unless it is the last good one: ckptconv thin {run} --remove checkpoint-"
        thin(run / "checkpoint-100", *words).refused(2, "but the directory of a run was expected.", f"{removing}100")
        assert "--remove" not in thin(run / "checkpoint-400", *words).refused(2, "the directory of a run was expected")
    done(thin(run, "--remove", "checkpoint-100", "--yes"))
    assert not (run / "checkpoint-100").exists()


def _torn(run: Path) -> None:
    os.truncate(run / "checkpoint-100" / "optimizer.pt", 900)


def _newest_torn(run: Path) -> None:
    os.truncate(run / "checkpoint-400" / "model.safetensors", 900)


def _unknown(run: Path) -> None:
    shutil.rmtree(run / "checkpoint-100")
    (run / "checkpoint-100").mkdir()
    (run / "checkpoint-100" / "weights.unknown").write_bytes(b"what")


def _named(run: Path) -> None:
    (run / "latest").write_text("checkpoint-100")


def _linked(run: Path) -> None:
    (run / "best").symlink_to("checkpoint-100")


def _link_inside(run: Path) -> None:
    (run / "checkpoint-100" / "data").symlink_to(run.parent)


def _file_link_inside(run: Path) -> None:
    os.rename(run / "checkpoint-100" / "scheduler.pt", run.parent / "scheduler.pt")
    (run / "checkpoint-100" / "scheduler.pt").symlink_to(run.parent / "scheduler.pt")


def _pipe_inside(run: Path) -> None:
    os.mkfifo(run / "checkpoint-100" / "pipe")


def _repository_inside(run: Path) -> None:
    (run / "checkpoint-100" / ".git").mkdir()
    (run / "checkpoint-100" / ".git" / "HEAD").write_text("ref")


def _deep(run: Path) -> None:
    (run / "checkpoint-100" / "/".join("d" * 12)).mkdir(parents=True)


def _run_inside(run: Path) -> None:
    for number in (1, 2):
        SAVER.save(run / "checkpoint-100" / f"checkpoint-{number}", number)


HELD: Mapping[str, tuple[Callable[[Path], None], str, str]] = {
    "torn": (_torn, "checkpoint-100", "not good"),
    "newest torn": (_newest_torn, "checkpoint-300", "the last good step"),
    "not read": (_unknown, "checkpoint-100", "not read"),
    "named": (_named, "checkpoint-100", "latest names it"),
    "linked": (_linked, "checkpoint-100", "best names it"),
    "a link in it": (_link_inside, "checkpoint-100", "contains symbolic links"),
    "a link to a file in it": (_file_link_inside, "checkpoint-100", "contains symbolic links"),
    "a pipe in it": (_pipe_inside, "checkpoint-100", "contains more than regular files and directories"),
    "a repository in it": (_repository_inside, "checkpoint-100", "contains files of several steps"),
    "directories that lie deep": (_deep, "checkpoint-100", "contains directories that are nested too deeply"),
    "a run in it": (_run_inside, "checkpoint-100", "contains files of several steps"),
}


@pytest.mark.parametrize("case", HELD)
def test_what_is_held_stays_whatever_the_policy_says(case: str, run: Path) -> None:
    change, name, why = HELD[case]
    change(run)
    found = json.loads(done(thin(run, "--keep-every", 7000, "--json", "--yes")).out)
    step = next(step for step in found["steps"] if step["name"] == name)
    assert step["action"] == "keep"
    assert why in step["why"]
    assert name in names(run)
    # What comes after the step that `latest` names was not finished: it is not good, and stays.
    assert ("checkpoint-200" in names(run)) is (case == "named")


@pytest.mark.parametrize(
    ("file", "tensor", "option", "why"),
    [
        ("optimizer.pt", optimizer_of(400)["state"][0]["exp_avg"], "--check", "has changed since it was written"),
        ("model.safetensors", state_of(400)["a.weight"], "--stats", "1 of its values are NaN"),
    ],
)
def test_the_last_good_step_is_good_by_its_data_too_if_that_is_asked_for(
    file: str, tensor: torch.Tensor, option: str, why: str, run: Path
) -> None:
    path = run / "checkpoint-400" / file
    at = path.read_bytes().index(tensor.numpy().tobytes())
    with path.open("r+b") as opened:
        opened.seek(at)
        opened.write(b"\0\0\xc0\x7f")
    judging = "steps were judged by sizes and markers, not by data; --check compares digests, --stats searches for NaN"
    assert judging in done(thin(run, "--keep-last", 1)).out
    planned_steps = done(thin(run, "--keep-last", 1, option)).out
    assert "not by data" not in planned_steps
    found = json.loads(done(thin(run, "--keep-last", 1, option, "--json", "--yes")).out)
    *_, last_good, newest = found["steps"]
    assert (last_good["name"], last_good["why"]) == ("checkpoint-300", ["the last good step", "last"])
    (reason,) = newest["why"]
    assert reason.startswith("not good: ")
    assert why in reason
    assert names(run) == {"checkpoint-300", "checkpoint-400"}


def test_what_changed_lately_stays(run: Path) -> None:
    for path in (run / "checkpoint-100").iterdir():
        os.utime(path, (time.time() - 7200,) * 2)
    done(ckptconv_here("thin", run, "--keep-last", 1, "--yes"))
    assert names(run) == {"checkpoint-200", "checkpoint-300", "checkpoint-400"}


def test_a_policy_that_keeps_nothing_and_words_that_make_no_sense_are_refused(run: Path, tmp_path: Path) -> None:
    thin(run).refused(2, "No option selects steps to keep")
    thin(run, "--keep-step", "50").refused(2, "no step has this name or number")
    thin(run, "--keep-last", 1, "--metric", "loss").refused(2, "--keep-best")
    thin(run, "--keep-last", 1, "--lowest").refused(2, "--keep-best")
    thin(run, "--keep-last", 1, age="soon").refused(2, "is not a time")
    thin(run, "--keep-last", 1, age="1").refused(2, "--age 1 has no unit. Use 1s for seconds, 1h for hours,")
    thin(run, "--keep-within", "7").refused(2, "--keep-within 7 has no unit.")
    thin(run, "--drop", "weights").refused(2, "--drop is 'weights'; it may be optimizer.")
    thin(run, "--keep-last", 0).refused(2, "is not a number from 1")
    thin(tmp_path / "none", "--keep-last", 1).refused(2, "does not exist")
    thin(run, "--keep-last", 1, "--delete").refused(2, "Use --remove NAME for a step; thin removes it only with --yes.")
    assert len(names(run)) == 4


def test_steps_of_files_go_with_all_of_their_files_and_nothing_less_of_them_is_kept(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        torch.save(state_of(number), tmp_path / f"model_{number}.pt")
        torch.save({"state": {}, "param_groups": []}, tmp_path / f"optim_{number}.pt")
    for options in (("--drop", "optimizer"), ("--as", "bf16"), ("--as", "delta")):
        before = files(tmp_path)
        found = done(thin(tmp_path, "--keep-last", 1, *options, "--yes"))
        assert "Steps that are files are kept unchanged (2 here)" in found.err
        assert files(tmp_path) == before
    done(thin(tmp_path, "--keep-last", 1, "--yes"))
    assert names(tmp_path) == {"model_3.pt", "optim_3.pt"}


def test_a_step_with_an_optimizer_is_reduced_whoever_wrote_it(run: Path) -> None:
    for name in names(run):
        (run / name / ".ckptconv-manifest.json").write_text("{}")
    first, second = (done(thin(run, "--keep-last", 1, "--drop", "optimizer", "--yes")).out for _ in range(2))
    assert (first.count("already reduced"), second.count("already reduced")) == (0, 3)
    assert [path.parent.name for path in run.rglob("optimizer.pt")] == ["checkpoint-400"]


def test_a_file_whose_number_may_be_a_size_goes_only_if_it_is_named(tmp_path: Path) -> None:
    for size in (224, 384):
        torch.save(state_of(1), tmp_path / f"vit_{size}.pt")
    shown = done(thin(tmp_path, "--keep-last", 1, "--yes"))
    assert f"its number may not be a step number; to select these files as steps: thin '{tmp_path}/vit_*'" in shown.out
    assert names(tmp_path) == {"vit_224.pt", "vit_384.pt"}
    done(thin(tmp_path / "vit_*", "--keep-last", 1, "--yes"))
    assert names(tmp_path) == {"vit_384.pt"}
    # Names of a fixed width are those of a counter.
    for number in ("000999", "001000"):
        torch.save(state_of(1), tmp_path / f"vit_{number}.pt")
    (tmp_path / "vit_384.pt").unlink()
    done(thin(tmp_path, "--keep-last", 1, "--yes"))
    assert names(tmp_path) == {"vit_001000.pt"}


def test_nothing_goes_of_a_directory_with_several_runs_and_what_has_no_steps_number_is_none(tmp_path: Path) -> None:
    runs = {"vit_epoch_": (1, 2, 3), "resnet_epoch_": (11, 12, 13), "llama-": ("7b", "13b")}
    for start, numbers in runs.items():
        for number in numbers:
            torch.save(state_of(1), tmp_path / f"{start}{number}.pt")
    before = files(tmp_path)
    refused = thin(tmp_path, "--keep-last", 2, "--yes")
    refused.refused(2, f"{tmp_path} contains the steps of several runs: resnet_epoch_*, vit_epoch_*.")
    assert files(tmp_path) == before
    done(thin(tmp_path / "vit_epoch_*", "--keep-last", 2, "--yes"))
    assert names(tmp_path) == {*before} - {"vit_epoch_1.pt"}


@FAR
def test_a_run_on_a_store_is_planned_and_not_thinned(run: Path) -> None:
    place = in_memory()
    url = place.put(run, "run")
    before = place.contents()
    found = json.loads(done(ckptconv_here("thin", url, "--keep-last", 1, "--age", 0, "--json")).out)
    assert [step["action"] for step in found["steps"]] == ["remove", "remove", "remove", "keep"]
    refused = ckptconv_here("thin", url, "--keep-last", 1, "--age", 0, "--yes")
    refused.refused(
        5, "is on a store, which cannot remove a step in one operation: thin removes steps of local runs only"
    )
    assert place.contents() == before


@pytest.mark.skipif(not DESCRIBING, reason="there are no virtual checkpoints")
@pytest.mark.parametrize("where", [".", "checkpoint-300"])
def test_nothing_goes_where_it_is_not_known_what_a_virtual_checkpoint_is_made_of(where: str, run: Path) -> None:
    (run / where / f"merged{next(iter(DESCRIBING))}").write_text('{"ckptconv.virtual": 1, ')
    told = json.loads(done(thin(run, "--keep-last", 1, "--yes", "--json")).out)
    assert {step["action"] for step in told["steps"]} == {"keep"}
    assert "a virtual checkpoint that cannot be read may refer to it" in told["steps"][0]["why"]
    assert {"checkpoint-100", "checkpoint-200", "checkpoint-300", "checkpoint-400"} <= names(run)


# ------------------------------------------------------------------------------------------------- less of a step


@every("options", [("--drop", "optimizer"), ("--as", "bf16"), ("--drop", "optimizer", "--as", "bf16")])
def test_less_of_a_step_has_its_weights_and_its_place(options: tuple[str, ...], tmp_path: Path) -> None:
    run = SAVER.run(tmp_path / "run", 100, 200, 300)
    kept = files(run / "checkpoint-300")
    when = max(path.stat().st_mtime for path in (run / "checkpoint-100").iterdir())
    done(thin(run, "--keep-last", 1, *options, "--yes"))
    assert names(run) == {"checkpoint-100", "checkpoint-200", "checkpoint-300"}
    assert files(run / "checkpoint-300") == kept
    for number in (100, 200):
        step = run / f"checkpoint-{number}"
        assert "optimizer.pt" not in names(step)
        dtype = torch.bfloat16 if "bf16" in options else torch.float32
        for name, tensor in load_file(step / "model.safetensors").items():
            assert torch.equal(tensor, state_of(number)[name].to(dtype))
    assert (run / "checkpoint-100" / "model.safetensors").stat().st_mtime == pytest.approx(when, abs=1e-3)
    again = json.loads(done(thin(run, "--keep-last", 1, *options, "--yes", "--json")).out)
    assert [step["action"] for step in again["steps"]] == ["keep"] * 3


# Files of a step beside its weights and its optimizer, as transformers' Trainer saves them, and as users add them.
SMALL = {
    "config.json": '{"model_type": "llama", "dtype": "float32"}',
    "generation_config.json": '{"do_sample": true}',
    "tokenizer.json": "{}",
    "LICENSE": "mine",
    "qwen.tiktoken": "IQ== 0",
    "modeling_mine.py": "x = 1",
    "notes/eval.csv": "step,loss",
}
PICKLES = ["training_args.bin", "scheduler.pt", "rng_state.pth"]
REDUCING = [
    ("--drop", "optimizer"),
    ("--as", "bf16"),
    *([("--as", "delta")] if hasattr(ckptconv, "patch") and DESCRIBING else []),
]


def _with_small_files(run: Path, weights: str) -> Path:
    SAVER.run(run, 100, 200)
    for number in (100, 200):
        step = run / f"checkpoint-{number}"
        for name, text in SMALL.items():
            (step / name).parent.mkdir(exist_ok=True)
            (step / name).write_text(text)
        if weights != "model.safetensors":
            torch.save(load_file(step / "model.safetensors"), step / weights)
            (step / "model.safetensors").unlink()
    return run


@every("options", REDUCING)
def test_a_reduced_step_keeps_the_small_files_and_others_that_go_are_named(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    run = _with_small_files(tmp_path / "run", "model.safetensors")
    before = files(run / "checkpoint-100")
    os.utime(run / "checkpoint-100" / "notes" / "eval.csv", (1e9, 1e9))
    expected, written = (
        json.loads(done(thin(run, "--keep-last", 1, *options, "--json", *yes)).out)["steps"][0]
        for yes in ((), ("--yes",))
    )
    step = files(run / "checkpoint-100")
    kept = [*SMALL, "trainer_state.json"]
    assert set(step).isdisjoint({"optimizer.pt", *PICKLES})
    assert {name: step[name] for name in kept if name != "config.json"} == {
        name: before[name] for name in kept if name != "config.json"
    }
    dtype = "bfloat16" if "bf16" in options else "float32"
    assert json.loads(step["config.json"]) == {"model_type": "llama", "dtype": dtype}
    assert (run / "checkpoint-100" / "notes" / "eval.csv").stat().st_mtime == 1e9
    assert sorted(expected["lost"]) == sorted(written["lost"]) == sorted(PICKLES)
    assert written["left_bytes"] == sum(map(len, step.values()))
    # The manifest has times and paths: its size is not known before.
    if "delta" in options:
        assert expected["left_bytes"] is None
    else:
        assert expected["left_bytes"] == written["left_bytes"] - len(step[".ckptconv-manifest.json"])
    assert set(ckptconv.open(run / "checkpoint-100").keys()) == set(state_of(1))


def test_what_is_said_of_reduced_steps_has_both_sizes_and_the_files_that_go(tmp_path: Path) -> None:
    run = _with_small_files(tmp_path / "run", "pytorch_model.bin")
    size = r"[\d.]+ kB → [\d.]+ kB"
    for yes, words, go in (
        ((), "would be reduced", "would also be removed"),
        (("--yes",), "reduced", "also removed"),
    ):
        lines = done(thin(run, "--keep-last", 1, "--drop", "optimizer", *yes)).out.splitlines()
        assert re.fullmatch(rf"checkpoint-100  {size}  {words}", lines[0])
        assert sorted(lines[2].partition(f" {go}: ")[0].split(", ")) == sorted(PICKLES)
        assert re.search(rf"1 step {words} \({size} in total\)$", lines[-1 if yes else -2])


def test_small_files_that_change_what_a_reduced_step_is_read_as_keep_the_step(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned_before = plan(run, keep_last=3, drop="optimizer")
    before = files(run)

    def writing(_: object, output: str, **options: object) -> None:
        os.mkdir(output)
        torch.save(state_of(100), Path(output) / "pytorch_model.bin")

    # A step that is no set of safetensors until an index is beside it.
    (thinning, chosen) = planned_before
    step = thinning.steps[0]
    index = "checkpoint-100/model.safetensors"
    thinning = thinning._replace(steps=(step._replace(files=[index]), *thinning.steps[1:]))
    monkeypatch.setattr("ckptconv.conversion.convert", writing)
    with pytest.raises(CkptconvError, match="would be read as another format"):
        carried_out((thinning, chosen))
    assert files(run) == before


@pytest.mark.skipif(not (hasattr(ckptconv, "patch") and DESCRIBING), reason="there are no deltas")
def test_a_step_becomes_a_delta_of_one_that_stays_and_that_one_stays_from_then_on(tmp_path: Path) -> None:
    run = SAVERS["torch"].run(tmp_path / "run", 1, 2, 3)
    tree = torch.load(run / "step_3" / "model.pt")
    for number in (1, 2):
        tree["b.weight"][number] += 1
        torch.save(tree, run / f"step_{number}" / "model.pt")
    weights = {number: torch.load(run / f"step_{number}" / "model.pt") for number in (1, 2, 3)}
    when = (run / "step_3" / "model.pt").stat().st_mtime_ns
    done(thin(run, "--keep-last", 1, "--as", "delta", "--yes"))
    assert names(run) == {"step_1", "step_2", "step_3"}
    for number in (1, 2):
        step = run / f"step_{number}"
        assert names(step) == {"delta", "model.virtual.json"}
        done(ckptconv_here("convert", step / "model.virtual.json", tmp_path / f"{number}.safetensors"))
        for name, tensor in load_file(tmp_path / f"{number}.safetensors").items():
            assert torch.equal(tensor, weights[number][name])
    # A run that is moved has all that its deltas are made of.
    run = run.rename(tmp_path / "moved")
    for number in (1, 2):
        done(ckptconv_here("diff", run / f"step_{number}", tmp_path / f"{number}.safetensors"))
        # Its name is that in the run, and not that of where it was made.
        assert AREA not in (run / f"step_{number}" / "model.virtual.json").read_text()
    # What a delta is made of stays even where the delta cannot be read.
    os.utime(run / "step_3" / "model.pt", (1e9, 1e9))
    found = json.loads(done(thin(run, "--keep-last", 1, "--json")).out)
    assert [known.is_good for known in judged(run_at(Location(str(run))))] == [False, False, True]
    assert "a virtual checkpoint refers to it" in found["steps"][2]["why"]
    os.utime(run / "step_3" / "model.pt", ns=(when, when))
    SAVERS["torch"].run(run, 4)
    found = json.loads(done(thin(run, "--keep-last", 1, "--json", "--yes")).out)
    assert found["steps"][2]["why"] == ["a virtual checkpoint refers to it"]
    assert names(run) == {"step_3", "step_4"}
    done(thin(run, "--keep-last", 1, "--yes"))
    assert names(run) == {"step_4"}


def test_a_step_of_which_less_cannot_be_made_stays_as_it_was(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files(run)

    def broken(*_: object, **__: object) -> None:
        raise CkptconvError("It broke.")

    monkeypatch.setattr("ckptconv.conversion.convert", broken)
    thin(run, "--keep-last", 1, "--as", "bf16", "--yes").refused(1, "It broke.")
    assert files(run) == before
    assert AREA not in names(run)


# ------------------------------------------------------------------------------------------------------- killed runs

WAYS: Mapping[str, dict[str, Any]] = {
    "removed": {"keep_last": 2},
    "less": {"keep_last": 2, "as_": "bf16"},
    **({"delta": {"keep_last": 2, "as_": "delta"}} if hasattr(ckptconv, "patch") and DESCRIBING else {}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_killed_run_leaves_each_step_as_it_was_or_as_it_was_to_be_and_the_next_one_finishes_it(
    way: str, tmp_path: Path
) -> None:
    source = SAVER.run(tmp_path / "source", 100, 200, 300, 400)
    was = {path.name: files(path) for path in source.iterdir()}
    count = 0

    def work(run: Path) -> None:
        chosen = filled(THIN, {"age": 0, **WAYS[way]})
        carry_out(str(run), lambda: planned(str(run), chosen, {}, inert=False), chosen, {}, lambda *_: None)

    whole = tmp_path / "whole"
    shutil.copytree(source, whole)
    calls = _calls_of(work, whole, tmp_path / "calls.json")
    to_be = {path.name: files(path) for path in whole.iterdir()}
    for at in moments(calls):
        run = tmp_path / f"run-{at}"
        shutil.copytree(source, run)
        ended = in_child(lambda run=run, at=at: (before_call(at, lambda: os.kill(os.getpid(), 9)), work(run)))
        assert ended == -signal.SIGKILL
        count += 1
        for name, content in was.items():
            found = files(run / name) if (run / name).exists() else None
            assert found is None or _alike(found) in (_alike(content), _alike(to_be.get(name, {}))), (at, name)
            assert (run / name).exists() or name not in to_be, (at, name)
        done(thin(run, "--keep-last", 2, *(("--as", WAYS[way]["as_"]) if "as_" in WAYS[way] else ()), "--yes"))
        assert names(run) == set(to_be), at
        for name, content in to_be.items():
            assert _alike(files(run / name)) == _alike(content), (at, name)
        shutil.rmtree(run)
    assert count >= 5


def _alike(content: dict[str, bytes]) -> dict[str, bytes]:
    """The files without the manifest, which has times and paths."""
    return {name: data for name, data in content.items() if not name.startswith(".ckptconv")}


def _calls_of(work: Callable[[Path], None], run: Path, into: Path) -> list[str]:
    def counted() -> None:
        made = before_call(-1, lambda: None)
        work(run)
        into.write_text(json.dumps(made))

    assert in_child(counted) == 0
    found: list[str] = json.loads(into.read_text())
    return found


# ------------------------------------------------------------------------------------------------------ hostile runs


def test_a_step_that_became_something_else_after_it_was_looked_at_is_left_alone(run: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    SAVER.save(victim, 1)
    planned_before = plan(run, keep_last=1)

    def swap(name: str, _: str) -> None:
        if name == "checkpoint-100":
            shutil.rmtree(run / "checkpoint-200")
            (run / "checkpoint-200").symlink_to(victim)

    with pytest.raises(UnsafeError):
        carried_out(planned_before, swap)
    assert SAVER.takes(victim)
    assert names(run) == {"checkpoint-200", "checkpoint-300", "checkpoint-400"}


def test_a_file_that_came_into_a_step_after_it_was_looked_at_keeps_it(run: Path) -> None:
    planned_before = plan(run, keep_last=1)
    (run / "checkpoint-100" / "mine.txt").write_text("mine")
    with pytest.raises(UnsafeError, match=r"has changed since it was (looked at|checked)"):
        carried_out(planned_before)
    assert (run / "checkpoint-100" / "mine.txt").read_text() == "mine"
    assert len(names(run)) == 4


@every("kind", ["link", "directory"])
def test_what_takes_the_place_of_a_step_while_it_is_moved_gets_its_name_back(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SAVER.run(tmp_path / "run", 100, 200)
    victim = tmp_path / "victim"
    SAVER.save(victim, 1)
    planned_before = plan(run, keep_last=1)
    rename, raced = os.rename, []

    def racing(*arguments: Any, **options: Any) -> None:
        if not raced:
            raced.append(rename(run / "checkpoint-100", tmp_path / "away"))
            if kind == "link":
                (run / "checkpoint-100").symlink_to(victim)
            else:
                rename(victim, run / "checkpoint-100")
        rename(*arguments, **options)

    monkeypatch.setattr(os, "rename", racing)
    with pytest.raises(UnsafeError):
        carried_out(planned_before)
    monkeypatch.undo()
    assert SAVER.takes(run / "checkpoint-100"), "what was put there, by whatever name, is whole"
    assert SAVER.takes(tmp_path / "away")


OUTSIDE = "../../mine.txt"
# Journals that came with a copy of the run, and what each has.
JOURNALS: Mapping[str, Any] = {
    "hidden names that lead out": {"step": "a", "do": "remove", "moves": {"a": OUTSIDE}, "marks": {"a": ""}},
    "less of a step that leads out": {"step": OUTSIDE, "do": "lessen", "moves": {OUTSIDE: "step-0"}, "marks": {}},
    "names that lead out": {"step": "a", "do": "remove", "moves": {OUTSIDE: "step-0"}, "marks": {OUTSIDE: ""}},
    "no names": {"step": "a", "do": "remove", "moves": ["a"], "marks": 3},
    "no marks": {"step": "a", "do": "remove", "moves": {"a": "step-0"}, "marks": {}},
    "marks that are no texts": {"step": "a", "do": "lessen", "moves": {"a": "step-0"}, "marks": {"a": 3}},
    "a name with an end in it": {"step": "a\0", "do": "remove", "moves": {"a\0": "step-0"}, "marks": {"a\0": ""}},
    "a name that is none": {"step": "\ud800", "do": "remove", "moves": {"\ud800": "step-0"}, "marks": {"\ud800": ""}},
    "something else to do": {"step": "a", "do": "more", "moves": {"a": "step-0"}, "marks": {"a": ""}},
    "no step": {"do": "lessen"},
    "no object": ["do"],
}


@every("journal", JOURNALS.values(), JOURNALS)
@every("name", [JOURNAL, DONE])
def test_a_journal_that_came_with_a_copy_of_a_run_leads_nowhere(name: str, journal: Any, tmp_path: Path) -> None:
    run = SAVER.run(tmp_path / "run", 100, 200)
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    (run / AREA).mkdir(mode=0o700)
    for inner, content in ((".lock", ""), ("step-0", ""), (name, json.dumps(journal))):
        (run / AREA / inner).write_text(content)
    before = files(run)
    thin(run, "--keep-last", 1, "--yes").refused(4, f"{name} is not valid.")
    assert mine.read_text() == "mine"
    assert files(run) == before


@every("name", [JOURNAL, DONE])
def test_a_journal_that_is_no_file_stays(name: str, tmp_path: Path) -> None:
    run = SAVER.run(tmp_path / "run", 100, 200)
    (run / AREA).mkdir(mode=0o700)
    (run / AREA / ".lock").touch()
    (run / AREA / name).symlink_to(run / "checkpoint-100" / "optimizer.pt")
    before = files(run)
    thin(run, "--keep-last", 1, "--yes").refused(1, f"{AREA}/{name} blocks the output: it is not a regular file")
    assert files(run) == before


def test_what_no_journal_names_is_not_replaced_in_the_area(run: Path) -> None:
    (run / AREA).mkdir(mode=0o700)
    for name in (".lock", "step-0"):
        (run / AREA / name).write_text("mine")
    before = files(run)
    thin(run, "--keep-last", 1, "--yes").refused(3, "No journal describes")
    assert files(run) == before


def test_of_a_step_of_several_files_none_goes_if_one_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        for part in ("model", "optim"):
            torch.save(state_of(number), tmp_path / f"{part}_{number}.pt")
    planned_before = plan(tmp_path, keep_last=1)
    before, rename = files(tmp_path), os.rename

    def racing(name: str, *arguments: Any, **options: Any) -> None:
        rename(name, *arguments, **options)
        if name == "model_1.pt":
            os.utime(tmp_path / "optim_1.pt", (1e9, 1e9))

    monkeypatch.setattr(os, "rename", racing)
    with pytest.raises(UnsafeError, match=r"has changed since it was (looked at|checked)"):
        carried_out(planned_before)
    assert files(tmp_path) == before


def test_less_of_a_step_that_changed_while_it_was_written_does_not_take_its_place(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned_before = plan(run, keep_last=1, as_="bf16")

    def writing(_: object, output: str, **options: object) -> None:
        os.mkdir(output)
        save_file(state_of(100), Path(output) / "model.safetensors")
        (run / "checkpoint-100" / "mine.txt").write_text("mine")

    monkeypatch.setattr("ckptconv.conversion.convert", writing)
    before = files(run)
    with pytest.raises(UnsafeError, match=r"has changed since it was (looked at|checked)"):
        carried_out(planned_before)
    assert files(run) == {**before, "checkpoint-100/mine.txt": b"mine"}
    assert AREA not in names(run)


def test_an_area_of_somebody_else_is_not_used(run: Path) -> None:
    (run / AREA).symlink_to(run.parent)
    thin(run, "--keep-last", 1, "--yes").refused(1, "blocks the output:")
    assert len(names(run)) == 5
    (run / AREA).unlink()
    (run / AREA).mkdir(mode=0o777)
    (run / AREA).chmod(0o777)
    thin(run, "--keep-last", 1, "--yes").refused(1, "blocks the output:")
    assert len(names(run)) == 5


@pytest.mark.skipif(os.geteuid() != 0, reason="it takes another user")
def test_a_step_of_another_user_in_a_run_of_ones_own_is_left_alone() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        place = Path(name)
        place.chmod(0o755)
        run = SAVER.run(place / "run", 100, 200, 300)
        for path in run.glob("*/*"):
            path.chmod(0o644)
        thin(run, "--keep-last", 1)
        for path in (run, run / "checkpoint-100", run / "checkpoint-300"):
            os.chown(path, 65534, 65534)
        before = files(run)

        def asked() -> None:
            os.setegid(65534)
            os.seteuid(65534)
            told = json.loads(done(thin(run, "--keep-last", 1, "--yes", "--json")).out)
            assert told["steps"][1]["why"] == ["contains a directory that cannot be written to"]

        assert in_child(asked) == 0
        assert files(run) == {path: data for path, data in before.items() if path[11] in "23"}


@pytest.mark.skipif(os.geteuid() != 0, reason="it takes another user")
@every("mode, words", [(0o555, "cannot be created: permission denied"), (0o1777, "could not be thinned")])
def test_a_run_that_may_not_be_changed_stays_as_it_is(mode: int, words: str) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        place = Path(name)
        place.chmod(0o755)
        run = SAVER.run(place / "run", 100, 200)
        for path in run.glob("*/*"):
            path.chmod(0o644)
        for path in run.iterdir():
            path.chmod(0o777)
        run.chmod(mode)
        before = files(run)

        def asked() -> None:
            os.setegid(65534)
            os.seteuid(65534)
            thin(run, "--keep-last", 1, "--yes").refused(1, words)

        assert in_child(asked) == 0
        assert files(run) == before
        assert AREA not in names(run)


def test_two_runs_do_not_work_at_once(run: Path) -> None:
    planned_before = plan(run, keep_last=1)

    def again(*_: object) -> None:
        thin(run, "--keep-last", 1, "--yes").refused(1, "is being written by another process")

    carried_out(planned_before, again)
    assert names(run) == {"checkpoint-400"}


def test_nothing_is_planned_while_another_run_works(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def planning(*arguments: Any) -> Thinning:
        if not asked:
            asked.append(True)
            thin(run, "--keep-last", 1, "--as", "bf16", "--yes").refused(1, "is being written by another process")
        return planned(*arguments)

    monkeypatch.setattr("ckptconv.features.thin.planning.planned", planning)
    done(thin(run, "--keep-last", 2, "--yes"))
    assert asked
    assert names(run) == {"checkpoint-300", "checkpoint-400"}


@every("change", [shutil.rmtree, lambda step: os.truncate(step / "model.safetensors", 900)], ["gone", "torn"])
def test_nothing_more_goes_once_the_last_good_step_is_not_what_it_was(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    run = SAVER.run(tmp_path / "run", 100, 200, 300)
    planned_before = plan(run, keep_last=1)
    with pytest.raises(UnsafeError, match="checkpoint-300 must be kept, but"):
        carried_out(planned_before, lambda *_: change(run / "checkpoint-300"))
    assert names(run) - {"checkpoint-300"} == {"checkpoint-200"}
    assert SAVER.takes(run / "checkpoint-200")


@pytest.mark.skipif("delta" not in WAYS, reason="there are no deltas")
def test_no_step_becomes_a_delta_of_one_that_changed_meanwhile(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, patch = files(run), ckptconv.patch

    def changing(*arguments: Any, **options: Any) -> None:
        patch(*arguments, **options)
        os.utime(run / "checkpoint-300" / "trainer_state.json", (1e9, 1e9))

    monkeypatch.setattr(ckptconv, "patch", changing)
    with pytest.raises(UnsafeError, match="checkpoint-300 must be kept, but"):
        carried_out(plan(run, keep_last=2, as_="delta"))
    assert files(run) == before


def test_of_a_file_with_the_whole_training_the_optimizer_goes_and_all_else_stays(tmp_path: Path) -> None:
    run, rng = tmp_path / "run", torch.get_rng_state()
    more = {"ema": state_of(2), "epoch": 3, "rng": rng}
    for number in (1, 2):
        (run / f"step-{number}").mkdir(parents=True)
        training = {"model": state_of(number), "optimizer": optimizer_of(number), **more}
        torch.save(training, run / f"step-{number}" / "checkpoint.pt")
    done(thin(run, "--keep-last", 1, "--drop", "optimizer", "--yes"))
    names = [f"{part}.{name}" for part in ("model", "ema") for name in state_of(1)]
    assert {*ckptconv.open(run / "step-1").keys()} == {*names, "rng"}
    assert ckptconv.open(run / "step-1").source.weights["epoch"] == 3
    told = json.loads(done(thin(run, "--keep-last", 1, "--drop", "optimizer", "--json")).out)
    assert told["steps"][0]["why"] == ["already reduced"]


@every("path", ["ema.safetensors", "ema_model.pt", "critic/model.safetensors"])
def test_no_less_is_kept_of_a_step_with_further_weights(path: str, tmp_path: Path) -> None:
    run = SAVER.run(tmp_path / "run", 100, 200)
    for number in (100, 200):
        further = run / f"checkpoint-{number}" / path
        further.parent.mkdir(exist_ok=True)
        torch.save(state_of(1), further) if path.endswith("pt") else save_file(state_of(1), further)
    before = files(run)
    for options in (("--drop", "optimizer"), ("--as", "bf16"), ("--as", "delta")):
        told = json.loads(done(thin(run, "--keep-last", 1, *options, "--yes", "--json")).out)
        assert told["steps"][0]["why"] == [f"reduced, it would lack checkpoint-100/{path}"]
    assert files(run) == before


@pytest.mark.parametrize("name", ["inner", "of two words"])
def test_a_directory_that_is_mounted_in_a_step_keeps_it(name: str, run: Path, tmp_path: Path) -> None:
    precious, place = tmp_path / "precious", run / "checkpoint-100" / name
    precious.mkdir()
    place.mkdir()
    (precious / "file").write_text("mine")
    if subprocess.run(["mount", "--bind", precious, place], check=False, capture_output=True).returncode:
        pytest.skip("nothing may be mounted here")
    try:
        assert "a file system mounted in it" in done(thin(run, "--keep-last", 1, "--yes")).out
        assert (precious / "file").read_text() == "mine"
        assert (run / "checkpoint-100" / "optimizer.pt").exists()
    finally:
        subprocess.run(["umount", place], check=True)


# ------------------------------------------------------------------------------------------------------- full disks

FILLED = ("write", "pwrite", "ftruncate", "mkdir", "fsync", "replace", "rename")


@pytest.mark.parametrize("way", WAYS)
def test_a_full_disk_leaves_each_step_as_it_was_or_as_it_was_to_be(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, run = SAVER.run(tmp_path / "source", 100, 200), tmp_path / "run"
    options = [f"--{name.rstrip('_').replace('_', '-')}={value}" for name, value in WAYS[way].items() if value != 2]
    failed = 0
    for call in FILLED:
        for after in range(40 if TIMES > 1 else 3):
            shutil.copytree(source, run)
            with failing(monkeypatch, call, after, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))):
                told = thin(run, "--keep-last", 1, *options, "--yes")
            if told.code:
                failed += 1
                told.refused(1, "no space left on device")
                is_as_it_was = files(run / "checkpoint-100") == files(source / "checkpoint-100")
                assert is_as_it_was or not (run / "checkpoint-100" / "optimizer.pt").exists(), (call, after)
                assert is_as_it_was or call == "rename"
                assert (AREA in names(run)) is not is_as_it_was, (call, after)
                again = json.loads(done(thin(run, "--keep-last", 1, *options, "--yes", "--json")).out)
                assert again["finished"] == ([] if is_as_it_was else ["checkpoint-100"])
            assert files(run / "checkpoint-200") == files(source / "checkpoint-200")
            assert not (run / "checkpoint-100" / "optimizer.pt").exists()
            shutil.rmtree(run)
    assert failed >= 4


# --------------------------------------------------------------------------------------- what an earlier run has left


def _moved(run: Path) -> None:
    """Leave a run as one that is killed when it has moved a step into the area."""

    def moving() -> None:
        with entered(str(run)) as area:
            mark = mark_of(entries_of(area.home, "checkpoint-100"))
            area.begin(Change("checkpoint-100", REMOVE, {"checkpoint-100": "step-0"}, {"checkpoint-100": mark}))
            area.take("checkpoint-100", mark, "step-0")
            os._exit(9)

    assert in_child(moving) == 9
    assert "checkpoint-100" not in names(run)


def test_a_step_that_was_only_moved_gets_its_name_again_and_stays_if_it_is_to_stay_now(run: Path) -> None:
    before = files(run)
    _moved(run)
    said = done(thin(run, "--keep-last", 1)).err
    assert f"{run}/{AREA} exists: a run of thin is active, or was interrupted" in said
    done(thin(run, "--keep-last", 3, "--keep-step", 100, "--yes"))
    assert files(run) == before
    assert AREA not in names(run)


def test_what_has_the_name_of_a_moved_step_by_now_is_not_replaced(run: Path) -> None:
    for is_file in (False, True):
        _moved(run)
        taken = run / "checkpoint-100"
        taken.write_text("mine") if is_file else taken.mkdir()
        for _ in range(2):
            thin(run, "--keep-last", 1, "--yes").refused(
                3, "cannot be renamed back to checkpoint-100", "Move the contents"
            )
            assert SAVER.takes(run / AREA / "step-0")
        assert taken.read_text() == "mine" if is_file else not names(taken)
        taken.unlink() if is_file else taken.rmdir()
        done(thin(run, "--keep-last", 4, "--yes"))
        assert SAVER.takes(run / "checkpoint-100")


def test_what_was_staged_for_less_of_a_step_goes_with_the_next_run(run: Path) -> None:
    with entered(str(run)) as area:
        area.begin(Change("checkpoint-100", LESSEN, {"checkpoint-100": "step-0"}, {"checkpoint-100": ""}))
        (run / AREA / ".step-0.ckptconv-0123abcd").mkdir()
    assert names(run / AREA) == {".lock", JOURNAL, ".step-0.ckptconv-0123abcd"}
    done(thin(run, "--keep-last", 4, "--yes"))
    assert names(run) == {f"checkpoint-{number}00" for number in range(1, 5)}


def test_what_no_journal_names_is_told_with_its_path_and_never_removed(run: Path) -> None:
    hidden = run / AREA / "step-0-0"
    hidden.mkdir(parents=True)
    (run / AREA).chmod(0o700)
    for path in (run / AREA / ".lock", run / AREA / "journal.jsonl", hidden / "mine.txt"):
        path.write_text("")
    before = files(run)
    commands = [("thin", run, "--keep-last", 4, *yes) for yes in ((), ("--yes",))]
    if "steps" in GROUPS:
        commands.append(("steps", run))
    for command in commands:
        said = done(ckptconv_here(*command)).err
        assert f"{run}/{AREA} contains entries that no journal describes: journal.jsonl, step-0-0" in said
        assert "Move the contents that you want to keep to another place, and remove the rest." in said
    assert files(run) == before


@every("changes", [False, True])
def test_where_the_system_exchanges_nothing_less_of_a_step_takes_its_place_by_two_renames(
    changes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SAVER.run(tmp_path / "run", 100, 200)
    rename = os.rename
    monkeypatch.setattr(area_module, "_renamed", lambda *_: False)

    def racing(name: str, *arguments: Any, **options: Any) -> None:
        rename(name, *arguments, **options)
        if changes and name == "checkpoint-100":
            (run / "checkpoint-100").mkdir()

    monkeypatch.setattr(os, "rename", racing)
    found = thin(run, "--keep-last", 1, "--as", "bf16", "--yes")
    if not changes:
        done(found)
        assert names(run / "checkpoint-100") >= {"model.safetensors"}
        assert AREA not in names(run)
        return
    for told in (found, thin(run, "--keep-last", 1, "--yes")):
        told.refused(
            3,
            f"has been replaced by something else. Its former content is in {run}/{AREA}/step-0.old.",
            "Move the contents that you want",
        )
        assert SAVER.takes(run / AREA / "step-0.old")
        assert names(run / "checkpoint-100") == set()


def test_options_of_other_programs_lead_to_its_own(tmp_path: Path) -> None:
    ckptconv_here("thin", tmp_path, "--dry-run").refused(2, "thin changes nothing without --yes.")
    for option in ("--keep", "--max-to-keep"):
        ckptconv_here("thin", tmp_path, option, "3").refused(2, "Use --keep-last N.")
    ckptconv_here("thin", tmp_path, "--keep-period", "1000").refused(2, "Use --keep-every N.")


def test_a_step_after_the_run_is_answered_with_the_option_for_it(run: Path) -> None:
    before = names(run)
    thin(run, "checkpoint-100", "--yes").refused(2, "Did you mean --remove checkpoint-100?")
    assert "Did you mean" not in thin(run, "checkpoint-100", "checkpoint-200").err
    assert names(run) == before
