"""`ckptconv steps`: each step of a run is what its trainer's loader says it is, and the last good one is named."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from cells import of_features
from checkpoints import ZERO, Run, ckptconv_here, done
from effort import every
from processes import calls, in_child
from safetensors.torch import load_file, save_file
from saved_steps import SAVERS, Saver, state_of
from stores import PLACES, Served

import ckptconv
from ckptconv.cli.registered import COMMANDS
from ckptconv.features.steps.survey import survey


def steps(run: Path, *options: str) -> Run:
    return ckptconv_here("steps", run, *options)


def cuts(step: Path, files: list[str]) -> Iterator[str]:
    """Make of a whole step what a killed saver leaves, one after the other: the first files whole, one of them cut, and
    the others missing. Yield what is cut."""
    whole = {name: (step / name).read_bytes() for name in files}
    for at, name in enumerate(files):
        size = len(whole[name])
        for kept in sorted({0, 1, 9, size // 2, size - 64, size - 1}):
            for other in files:
                (step / other).unlink(missing_ok=True)
            for other in files[:at]:
                (step / other).write_bytes(whole[other])
            if kept >= 0:
                (step / name).write_bytes(whole[name][: max(kept, 0)])
            yield f"{name} at {kept}"
        (step / name).unlink()
        yield f"without {name}"
        (step / name).write_bytes(whole[name])
    for name, data in whole.items():
        (step / name).write_bytes(data)


@pytest.mark.parametrize("saver", SAVERS.values(), ids=SAVERS)
def test_of_a_step_that_was_cut_anywhere_the_last_good_one_is_what_the_loader_takes(
    saver: Saver, tmp_path: Path
) -> None:
    run = saver.run(tmp_path / "run", 10, 20)
    new = run / saver.name.format(30)
    files = list(saver.save(new, 30))
    for cut in cuts(new, files):
        taken = saver.takes(new)
        found = steps(run, "--json")
        assert found.json["last_good"] == str(new if taken else run / saver.name.format(20)), (cut, found.out)
        assert found.code == (0 if taken else 4), cut
    assert steps(run).code == 0
    assert saver.takes(new)


def test_convert_of_a_torn_run_says_which_step_is_the_last_good_one_and_last_good_takes_it(tmp_path: Path) -> None:
    for name, saver in SAVERS.items():
        run = saver.run(tmp_path / name, 10, 20)
        files = list(saver.save(run / saver.name.format(30), 30))
        os.truncate(run / saver.name.format(30) / files[0], 700)
        output = tmp_path / f"{name}.safetensors"
        good = run / saver.name.format(20)
        found = ckptconv_here("convert", run, output)
        assert found.code != 0, name
        assert f"The last good step of the run is {good}. To convert it, use convert" in found.err, found.err
        assert "download it again" not in found.err, found.err
        command = {"dcp": "dcp2safetensors", "deepspeed": "zero-to-fp32"}.get(name, "")
        if command in COMMANDS:
            assert f"The last good step of the run is {good}. " in ckptconv_here(command, run, output).err
        done(ckptconv_here("convert", "--last-good", run, output))
        for key, tensor in load_file(output).items():
            assert torch.equal(tensor, state_of(20)[key.removeprefix("model.")]), name
    ckptconv_here("convert", "--last-good", tmp_path / "trainer" / "checkpoint-10", output).refused(2, "is one step")


def test_the_last_good_step_is_named_where_another_is_the_reason_of_the_error(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    run = SAVERS["trainer"].run(tmp_path / "run" / "checkpoints", 10, 20)
    torn = run / "checkpoint-30"
    files = list(SAVERS["trainer"].save(torn, 30))
    os.truncate(torn / files[0], 700)
    good = f"The last good step of the run is {run / 'checkpoint-20'}"
    output = tmp_path / "out.safetensors"
    # Of the directory above, the advice to name the run would lead to the torn step.
    run_above = ckptconv_here("convert", tmp_path / "run", output)
    said = run_above.refused(2, f"{good}. To convert it, use convert --last-good.")
    assert "Give the checkpoint in" not in said
    done(ckptconv_here("convert", "--last-good", tmp_path / "run", output))
    # A step that the user named is no run, of which the option could take another.
    said = ckptconv_here("convert", torn, output).refused(4, f"{good}. ")
    assert "--last-good" not in said
    # Other errors have nothing to do with steps.
    assert good not in ckptconv_here("convert", run, tmp_path / "out.foo").refused(2, "ends in .foo")


def test_outputs_and_further_entries_of_a_number_are_listed_apart_and_are_never_the_last_good_step(
    tmp_path: Path,
) -> None:
    run = SAVERS["trainer"].run(tmp_path / "run", 6, 7)
    done(ckptconv_here("convert", run / "checkpoint-7", f"{run}/checkpoint-7-safetensors/"))
    shutil.copytree(run / "checkpoint-7", run / "checkpoint-7-best")
    why = {
        "checkpoint-7-safetensors": "an output of ckptconv",
        "checkpoint-7-best": "checkpoint-7 has the same step number",
    }
    found = done(steps(run, "--json"))
    assert found.json["beside"] == why
    assert [step["name"] for step in found.json["steps"]] == ["checkpoint-6", "checkpoint-7"]
    listed = ", ".join(f"{name} ({reason})" for name, reason in why.items())
    assert f"not counted as steps: {listed}" in done(steps(run)).out.splitlines()
    (run / "checkpoint-7" / "model.safetensors").write_bytes(b"")
    assert steps(run, "--last").out == f"{run}/checkpoint-6\n"


def test_last_good_takes_an_older_step_and_says_so_if_none_is_good(tmp_path: Path) -> None:
    run = SAVERS["trainer"].run(tmp_path / "b", 10, 20)
    os.truncate(run / "checkpoint-20" / "model.safetensors", 700)
    report = ckptconv.convert(run, tmp_path / "c.safetensors", last_good=True)
    assert report.input == str(run / "checkpoint-10")
    assert report.notes[0] == f"Took {run / 'checkpoint-10'}, the last good step by its sizes and markers."
    os.truncate(run / "checkpoint-10" / "model.safetensors", 700)
    found = ckptconv_here("convert", "--last-good", run, tmp_path / "d.safetensors")
    found.refused(4, f"No step of {run} is good. Nothing was written.")


def test_the_last_line_names_the_last_good_step_and_so_does_last_alone(tmp_path: Path) -> None:
    run = SAVERS["trainer"].run(tmp_path / "run", 5, 100)
    assert steps(run).out.splitlines()[-1] == f"last good: {run}/checkpoint-100"
    assert steps(run, "--last").out == f"{run}/checkpoint-100\n"
    os.truncate(run / "checkpoint-100" / "optimizer.pt", 1000)
    found = steps(run, "--last")
    assert (found.code, found.out) == (4, f"{run}/checkpoint-5\n")
    assert "checkpoint-100, the newest step, is not good" in found.err
    shutil.rmtree(run / "checkpoint-5")
    found = steps(run, "--last")
    assert (found.code, found.out) == (4, "")
    assert "No step is good." in found.err


def test_sizes_of_weights_optimizer_and_rest_add_up_to_those_of_the_files(tmp_path: Path) -> None:
    run = SAVERS["trainer"].run(tmp_path / "run", 5)
    (found,) = steps(run, "--json").json["steps"]
    weights = sum(tensor.nbytes for tensor in state_of(5).values())
    assert found["weights_bytes"] == weights
    assert found["optimizer_bytes"] >= 2 * weights
    size = sum(path.stat().st_size for path in (run / "checkpoint-5").iterdir())
    assert found["bytes"] == size == found["weights_bytes"] + found["optimizer_bytes"] + found["rest_bytes"]


@pytest.mark.parametrize("is_named", [True, False])
def test_an_optimizer_in_one_file_with_the_weights_is_not_counted_as_weights(tmp_path: Path, is_named: bool) -> None:
    weights = {"weight": torch.full((3, 4), 2.0), "bias": torch.zeros(3)}
    moments = {number: {"exp_avg": torch.ones(tensor.shape)} for number, tensor in enumerate(weights.values())}
    # A parameter too many: no number has a name, so the states cannot be converted.
    groups = [{"lr": 0.1, "params": [0, 1] if is_named else [0, 1, 7]}]
    saved = {"model": weights, "optimizer": {"state": moments, "param_groups": groups}, "epoch": 1}
    for number in (1, 2):
        torch.save(saved, tmp_path / f"ckpt_{number}.pt")
    (step, _) = steps(tmp_path, "--json", "--stats").json["steps"]
    assert (step["weights_bytes"], step["optimizer_bytes"]) == (15 * 4, 15 * 4)
    assert step["norm"] == pytest.approx(48**0.5)


def test_markers_and_geometry_are_told_apart_where_they_disagree(tmp_path: Path) -> None:
    run = SAVERS["trainer"].run(tmp_path / "run", 5, 6)
    (run / "checkpoint-6" / "trainer_state.json").unlink()
    old, new = steps(run, "--json").json["steps"]
    assert (old["whole"], old["marked"], old["good"]) == (True, True, True)
    assert (new["whole"], new["marked"], new["good"]) == (True, False, False)
    assert "trainer_state.json" in new["marks"]
    SAVERS["trainer"].run(run, 6)
    os.truncate(run / "checkpoint-6" / "model.safetensors", 2000)
    _, new = steps(run, "--json").json["steps"]
    assert (new["whole"], new["marked"], new["good"]) == (False, True, False)
    assert "complete by its markers: trainer_state.json" in steps(run).out


def test_what_latest_does_not_name_yet_is_not_the_last_good_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    source = ZERO / "z3_fp32_w4" / "checkpoint"
    (tag,) = [path for path in source.iterdir() if path.is_dir()]
    for number in (10, 20):
        shutil.copytree(tag, run / f"global_step{number}")
    (run / "latest").write_text("global_step10")
    found = steps(run, "--json")
    assert found.code == 4
    assert found.json["last_good"] == str(run / "global_step10")
    assert found.json["steps"][1]["whole"] is True
    assert "latest refers to global_step10, an earlier step" in found.json["steps"][1]["marks"]
    (run / "latest").write_text("global_step20")
    assert steps(run, "--last").out == f"{run}/global_step20\n"
    lost = next((run / "global_step20").glob("*optim_states.pt"))
    lost.unlink()
    assert steps(run, "--last").out == f"{run}/global_step10\n"


def test_the_number_of_a_rank_is_not_taken_for_that_of_the_step(tmp_path: Path) -> None:
    run = SAVERS["torch"].run(tmp_path / "run", 1, 2, 3)
    for step in (1, 2, 3):
        for rank in range(4):
            torch.save({"rank": rank}, run / f"step_{step}" / f"rng_state_{rank}.pth")
        torch.save({}, run / f"step_{step}" / f"notes_step_{step}.pth")
    assert [step["like"] for step in steps(run, "--json").json["steps"]] == ["step_3", "step_3", ""]


def _of_hugging_face(step: Path) -> Path:
    """As the Trainer saves a step with four processes, and as people rename it."""
    SAVERS["trainer"].save(step, 1)
    for rank in range(4):
        torch.save({}, step / f"rng_state_{rank}.pth")
    return step


# A step of each family, by what writes it to a directory.
ONE_STEP: dict[str, Callable[[Path], Path]] = {
    "Hugging Face": _of_hugging_face,
    **{name: step for steps in of_features("ONE_STEP") for name, step in steps.items()},
}


@every("family", ONE_STEP)
@every("name", ["step-100", "final"])
def test_a_step_of_any_family_is_not_a_run(name: str, family: str, tmp_path: Path) -> None:
    step = ONE_STEP[family](tmp_path / name)
    called = "one step of a run" if name == "step-100" else "a checkpoint"
    steps(step).refused(2, f"{step} is {called}, but the directory of a run was expected.")


def test_the_run_of_a_step_is_named(tmp_path: Path) -> None:
    for number in (10, 20):
        _of_hugging_face(tmp_path / "run" / f"checkpoint-{number}")
    wanted = f"Specify the directory that contains the steps: {tmp_path / 'run'}."
    steps(tmp_path / "run" / "checkpoint-10").refused(2, wanted)
    (tmp_path / "run" / "checkpoint-10").rename(tmp_path / "run" / "10")
    steps(tmp_path / "run" / "10").refused(2, wanted)
    assert f"last good: {tmp_path / 'run' / 'checkpoint-20'}" in steps(tmp_path / "run").out


def test_ranks_of_a_torn_step_are_no_steps(tmp_path: Path) -> None:
    step = tmp_path / "step-100"
    step.mkdir()
    for rank in range(4):
        torch.save({}, step / f"model_{rank}.pt")
    steps(step).refused(2, f"Specify the directory that contains the steps: {tmp_path}.")


def test_files_named_by_step_are_steps_with_their_optimizers(tmp_path: Path) -> None:
    for number in (100, 200):
        torch.save(state_of(number), tmp_path / f"model_{number}.pt")
        torch.save({"state": {}, "param_groups": []}, tmp_path / f"optim_{number}.pt")
    found = steps(tmp_path, "--json")
    assert [(step["name"], step["files"]) for step in found.json["steps"]] == [("model_100.pt", 2), ("model_200.pt", 2)]
    (tmp_path / "optim_200.pt").unlink()
    assert steps(tmp_path, "--last").out == f"{tmp_path}/model_100.pt\n"
    os.truncate(tmp_path / "model_200.pt", 500)
    assert steps(tmp_path, "--last").out == f"{tmp_path}/model_100.pt\n"


@pytest.mark.parametrize("is_zip", [True, False])
def test_files_of_torch_that_are_called_tar_are_steps(is_zip: bool, tmp_path: Path) -> None:
    for name in ("checkpoint-1", "checkpoint-2", "last", "model_best"):
        state = {"state_dict": state_of(1), "epoch": 1}
        torch.save(state, tmp_path / f"{name}.pth.tar", _use_new_zipfile_serialization=is_zip)
    assert done(steps(tmp_path, "--last")).out == f"{tmp_path}/checkpoint-2.pth.tar\n"
    os.truncate(tmp_path / "checkpoint-2.pth.tar", 90)
    assert steps(tmp_path, "--last").out == f"{tmp_path}/checkpoint-1.pth.tar\n"


def test_sizes_of_a_step_that_could_not_be_opened_are_not_told(tmp_path: Path) -> None:
    run = SAVERS["torch"].run(tmp_path / "run", 1, 2)
    os.truncate(run / "step_2" / "model.pt", 90)
    assert re.search(r"^step_2  \S+ \S+ +\? +\? +\?  -  ", steps(run).out, re.MULTILINE)


def test_steps_in_a_folder_of_checkpoints_and_of_lightning_are_found(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    place.mkdir()
    for epoch, step in ((0, 100), (1, 200)):
        torch.save({"state_dict": state_of(step)}, place / f"epoch={epoch}-step={step}.ckpt")
    (place / "last.ckpt").symlink_to("epoch=1-step=200.ckpt")
    found = steps(tmp_path, "--json").json
    assert [step["number"] for step in found["steps"]] == [100, 200]
    assert found["named"] == {"last.ckpt": "epoch=1-step=200.ckpt"}


def test_check_finds_what_changed_and_stats_what_is_not_finite(tmp_path: Path) -> None:
    run = SAVERS["torch"].run(tmp_path / "run", 1, 2)
    path = run / "step_2" / "model.pt"
    at = path.read_bytes().index(state_of(2)["a.weight"].numpy().tobytes())
    assert steps(run, "--check").code == 0
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\0\0\xc0\x7f")
    assert steps(run).code == 0
    found = steps(run, "--check", "--json")
    assert found.code == 4
    assert found.json["last_good"] == str(run / "step_1")
    assert "has changed since it was written" in found.json["steps"][1]["damage"]
    old, new = steps(run, "--stats", "--json").json["steps"]
    assert (old["nan"], old["inf"], new["nan"]) == (0, 0, 1)
    assert (old["good"], new["good"], new["whole"]) == (True, False, True)
    last = steps(run, "--stats", "--last")
    last.refused(4, "step_2, the newest step, is not good: 1 of its values are NaN.")
    assert last.out == f"{run / 'step_1'}\n"
    norm = torch.cat([tensor.flatten() for tensor in state_of(1).values()]).double().norm().item()
    assert old["norm"] == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize("kind", PLACES)
def test_a_run_on_a_store_is_what_it_is_here_and_takes_three_requests_a_step_at_most(
    kind: str, saver: str, tmp_path: Path
) -> None:
    # Three of them are opened, which takes up to thirteen each; the others are listed.
    count = 20
    name = SAVERS[saver].name
    run = SAVERS[saver].run(tmp_path / "run", *range(10, 10 + count))
    files = SAVERS[saver].save(run / name.format(9 + count), 9 + count)
    (run / name.format(7 + count) / files[0]).write_bytes(b"cut")
    (run / name.format(9 + count) / files[-1]).unlink()
    place = PLACES[kind]()
    url = place.put(run, "run")
    with place.link() if isinstance(place, Served) else nullcontext() as link:
        through = place.through(link).options if isinstance(place, Served) and link else place.options
        there = survey(url, storage_options=through)
        if link:
            asked = [f"{each.method} {each.path}" for each in link.asked]
            assert len(asked) <= 3 * count, asked
            link.asked.clear()
        ckptconv.convert(url, tmp_path / "out.safetensors", last_good=True, storage_options=through)
        if link:
            asked = [f"{each.method} {each.path}" for each in link.asked]
            assert len(asked) <= 3 * count, asked
    here = survey(str(run))
    assert there.last_good == f"{url}/{name.format(8 + count)}"
    for key, tensor in load_file(tmp_path / "out.safetensors").items():
        assert torch.equal(tensor, state_of(8 + count)[key.removeprefix("model.")])
    for far, near in zip(there.steps, here.steps, strict=True):
        assert (far.name, far.good, far.weights_bytes, far.bytes) == (
            near.name,
            near.good,
            near.weights_bytes,
            near.bytes,
        )


@every("kind", PLACES)
@every("saver", SAVERS)
@every("torn", [0, -1])
def test_a_short_torn_run_on_a_store_takes_three_requests_a_step_at_most(
    torn: int, saver: str, kind: str, tmp_path: Path
) -> None:
    run = SAVERS[saver].run(tmp_path / "run", 10, 20)
    newest = run / SAVERS[saver].name.format(30)
    (newest / SAVERS[saver].save(newest, 30)[torn]).write_bytes(b"cut" if torn == 0 else b"")
    place = PLACES[kind]()
    url = place.put(run, "run")
    with place.link() if isinstance(place, Served) else nullcontext() as link:
        options = place.through(link).options if isinstance(place, Served) and link else place.options
        there = survey(url, storage_options=options)
        assert link is None or len(link.asked) <= 3 * 3, link.asked
    assert there.last_good == f"{url}/{SAVERS[saver].name.format(20)}"


def test_check_compares_the_digests_of_our_own_manifests_and_is_no_yes_where_there_are_none(tmp_path: Path) -> None:
    for number in (1, 2):
        save_file(state_of(number), tmp_path / f"{number}.safetensors")
        for run, options in (("with", ("--digest", "sha256")), ("without", ())):
            step = tmp_path / run / f"step-{number}"
            done(ckptconv_here("convert", tmp_path / f"{number}.safetensors", step, *options))
    found = done(steps(tmp_path / "without", "--check"))
    assert "by its geometry, no recorded digests to compare" in found.out
    assert "yes" not in found.out
    assert "yes, 1 digests and checksums compared" in done(steps(tmp_path / "with", "--check")).out
    path = tmp_path / "with" / "step-2" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    found = steps(tmp_path / "with", "--check", "--json")
    assert (found.code, found.json["last_good"]) == (4, str(tmp_path / "with" / "step-1"))
    assert "its sha256 is" in found.json["steps"][1]["damage"]


def test_files_that_are_named_by_what_is_in_them_are_not_missed_in_other_steps(tmp_path: Path) -> None:
    run = SAVERS["torch"].run(tmp_path / "run", 1, 2)
    for number, name in ((1, "3fa2c1"), (2, "9bd40e")):
        (run / f"step_{number}" / "d").mkdir()
        (run / f"step_{number}" / "d" / name).write_bytes(b"data")
    assert steps(run).code == 0


def test_twice_as_many_steps_take_twice_the_work(tmp_path: Path) -> None:
    for count in (20, 40):
        run = SAVERS["torch"].run(tmp_path / f"{count}", 100)
        for number in range(101, 100 + count):
            shutil.copytree(run / "step_100", run / f"step_{number}")
    survey(str(tmp_path / "20"))
    few, many = (calls(lambda count=count: survey(str(tmp_path / f"{count}"))) for count in (20, 40))
    assert many < 2.5 * few


def test_a_run_without_steps_and_what_is_no_directory_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    steps(tmp_path).refused(2, "contains no steps")
    steps(tmp_path / "none").refused(2, "does not exist")
    SAVERS["torch"].run(tmp_path / "a", 1, 2)
    steps(tmp_path).refused(2, f"Specify the directory that contains the steps: {tmp_path / 'a'}.")
    shutil.rmtree(tmp_path / "a")
    for name in ("a", "b"):
        SAVERS["torch"].run(tmp_path / name, 1, 2)
    steps(tmp_path).refused(2, "contains the steps of several runs: a, b. Specify one of them.")
    save_file(state_of(0), tmp_path / "x.safetensors")
    refused = steps(tmp_path / "x.safetensors").refused(2, "but the directory of a run was expected")
    assert f"Specify the run directory: '{tmp_path}'." in refused


def test_a_directory_of_a_step_that_nothing_reads_is_not_good_and_no_error(tmp_path: Path) -> None:
    run = SAVERS["torch"].run(tmp_path / "run", 1)
    (run / "step_2").mkdir()
    (run / "step_2" / "data.bin.zst").write_bytes(b"what")
    (run / "step_3").mkdir()
    _, odd, empty = steps(run, "--json").json["steps"]
    assert (odd["whole"], odd["good"]) == (None, False)
    assert (empty["whole"], empty["why"]) == (False, "it contains no files")


HOSTILE_NAMES = [
    "step-90\nlast good: step-90",
    "step-91\x1b[2J",
    "step-92\udcff",
    f"step-{'9' * 18}",
    "step-\u0661\u0662",
    "step-93 ; rm -rf .",
    "-step-94",
]


def test_names_of_steps_add_no_lines_and_no_other_paths(tmp_path: Path) -> None:
    run = SAVERS["torch"].run(tmp_path / "run", 1, 2)
    for name in HOSTILE_NAMES:
        (run / name).mkdir()
        (run / name / "model.pt").write_bytes(b"cut")
    refused = steps(run)
    refused.refused(2, "contains the steps of several runs")
    assert "\x1b" not in refused.err
    found = steps(run / "*")
    assert (found.code, len(found.out.splitlines())) == (4, 2 + 2 + len(HOSTILE_NAMES))
    assert found.out.splitlines()[-1] == f"last good: {run}/step_2"
    assert "\x1b" not in found.out
    assert steps(run / "*", "--last").out == f"{run}/step_2\n"


def _pipes(step: Path) -> None:
    for name in ("model.pt", "optim.pt"):
        (step / name).unlink()
        os.mkfifo(step / name)


def _descriptions_that_are_pipes(step: Path) -> None:
    for name in (".metadata", "metadata.pkl", "model.safetensors", "trainer_state.json", "x.virtual.json"):
        os.mkfifo(step / name)


def _links_out(step: Path) -> None:
    for name in ("model.pt", "optim.pt"):
        (step / name).unlink()
        (step / name).symlink_to("/dev/zero")


def _circle(step: Path) -> None:
    (step / "model.pt").unlink()
    (step / "model.pt").symlink_to("model.pt")


def _deep(step: Path) -> None:
    (step / Path(*["d"] * 100)).mkdir(parents=True)
    (step / "model.pt").unlink()


STRANGE = {
    each.__name__.strip("_"): each for each in (_pipes, _descriptions_that_are_pipes, _links_out, _circle, _deep)
}


@every("strange", STRANGE)
def test_strange_entries_of_a_step_are_not_waited_for_and_only_it_is_not_good(strange: str, tmp_path: Path) -> None:
    run = SAVERS["torch"].run(tmp_path / "run", 1, 2, 3)
    STRANGE[strange](run / "step_3")
    for name in ("latest", "latest_checkpointed_iteration.txt"):
        os.mkfifo(run / name)
    found = steps(run, "--json")
    assert found.json["last_good"] == str(run / "step_2")
    assert found.code == 4


@pytest.mark.skipif(os.geteuid() != 0, reason="it takes another user")
def test_what_another_user_keeps_private_is_told_and_not_good() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        place = Path(name)
        place.chmod(0o755)
        (place / "private").mkdir(mode=0o700)
        run = SAVERS["torch"].run(place / "run", 1, 2, 3, 4)
        (run / "step_3").chmod(0o700)
        (run / "step_4" / "model.pt").chmod(0o600)
        (run / "link").symlink_to(place / "private" / "step_5")
        (run / "notes").mkdir(mode=0o700)
        steps(run)

        def asked() -> None:
            os.seteuid(65534)
            found = steps(run, "--json")
            assert found.json["last_good"] == str(run / "step_2")
            told = {step["name"]: (step["whole"], step["why"]) for step in found.json["steps"]}
            assert [told[f"step_{number}"][0] for number in (1, 2, 3, 4)] == [True, True, None, None]
            assert "step_3 cannot be listed" in told["step_3"][1]
            assert "model.pt cannot be read" in told["step_4"][1]

        assert in_child(asked) == 0
