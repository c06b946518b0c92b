"""`ckptconv thin` beside outputs of this program, and with several entries of one number: none takes a step's place."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from checkpoints import Run, ckptconv_here, done
from effort import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from saved_steps import SAVERS

from ckptconv.errors import UsageError
from ckptconv.features.removal.area import REMOVE
from ckptconv.features.runs.names import number_of
from ckptconv.features.thin.options import THIN
from ckptconv.features.thin.planning import planned
from ckptconv.formats.registered import DESCRIBING
from ckptconv.options.option import filled

SAVER = SAVERS["trainer"]


def thin(run: Path, *options: object) -> Run:
    return ckptconv_here("thin", run, "--age", 0, *options)


def names(run: Path) -> set[str]:
    return {path.name for path in run.iterdir()}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = SAVER.run(tmp_path / "run", 5, 6, 7)
    done(ckptconv_here("convert", run / "checkpoint-7", f"{run}/checkpoint-7-safetensors/"))
    return run


def test_an_output_does_not_take_the_place_of_its_step_and_stays(run: Path) -> None:
    found = done(thin(run, "--keep-last", 1, "--yes"))
    assert names(run) == {"checkpoint-7", "checkpoint-7-safetensors"}
    assert SAVER.takes(run / "checkpoint-7")
    said = "not counted as steps, and kept unless --remove names them: checkpoint-7-safetensors (an output of ckptconv)"
    assert said in found.out.splitlines()


def test_an_output_goes_if_it_is_named_and_takes_nothing_along(run: Path) -> None:
    told = json.loads(done(thin(run, "--remove", "checkpoint-7-safetensors", "--yes", "--json")).out)
    assert names(run) == {"checkpoint-5", "checkpoint-6", "checkpoint-7"}
    assert [(step["name"], step["action"], step["why"]) for step in told["steps"]] == [
        ("checkpoint-5", "keep", ["not named"]),
        ("checkpoint-6", "keep", ["not named"]),
        ("checkpoint-7", "keep", ["the last good step"]),
        ("checkpoint-7-safetensors", "remove", []),
    ]
    assert told["beside"] == {}


def test_what_is_named_goes_unless_something_holds_it(run: Path) -> None:
    done(thin(run, "--remove", "checkpoint-6", "--remove", "checkpoint-7", "--keep-last", 2, "--yes"))
    assert names(run) == {"checkpoint-5", "checkpoint-7", "checkpoint-7-safetensors"}
    (run / "latest").write_text("checkpoint-7-safetensors")
    found = done(thin(run, "--remove", "checkpoint-7-safetensors", "--yes"))
    assert "latest names it" in found.out
    assert "checkpoint-7-safetensors" in names(run)
    thin(run, "--remove", "7").refused(
        2, "--remove 7: neither a step nor an entry", "Did you mean --remove checkpoint-7?"
    )
    assert thin(run, "--remove", "8").err.endswith("has this name.\n")
    thin(run, "--remove", "checkpoint-5", "--drop", "optimizer").refused(2, "cannot be combined with --drop or --as")


def test_of_several_entries_of_one_number_none_goes_unless_it_is_named(run: Path) -> None:
    shutil.copytree(run / "checkpoint-5", run / "checkpoint-5-best")
    shutil.copytree(run / "checkpoint-7", run / "step_7_hf")
    shutil.rmtree(run / "checkpoint-7-safetensors")
    found = json.loads(done(thin(run, "--keep-last", 1, "--yes", "--json")).out)
    assert names(run) == {"checkpoint-5", "checkpoint-5-best", "checkpoint-7", "step_7_hf"}
    assert found["steps"][0]["why"] == ["checkpoint-5-best has the same step number"]
    assert found["beside"] == {
        "checkpoint-5-best": "checkpoint-5 has the same step number",
        "step_7_hf": "checkpoint-7 has the same step number",
    }
    done(thin(run, "--keep-last", 1, "--remove", "checkpoint-5", "--yes"))
    assert names(run) == {"checkpoint-5-best", "checkpoint-7", "step_7_hf"}
    done(thin(run, "--keep-last", 2, "--remove", "step_7_hf", "--yes"))
    assert names(run) == {"checkpoint-5-best", "checkpoint-7"}
    done(thin(run, "--keep-last", 1, "--yes"))
    assert names(run) == {"checkpoint-7"}, "what has no other of its number is a step of its own"


def test_a_torn_step_with_a_good_copy_of_its_number_leaves_the_last_good_one_before_it(run: Path) -> None:
    shutil.copytree(run / "checkpoint-7", run / "checkpoint-7-best")
    (run / "checkpoint-7" / "model.safetensors").write_bytes(b"")
    done(thin(run, "--keep-last", 1, "--yes"))
    assert names(run) == {"checkpoint-6", "checkpoint-7", "checkpoint-7-best", "checkpoint-7-safetensors"}


def test_a_run_of_outputs_alone_is_thinned_as_any(run: Path, tmp_path: Path) -> None:
    place = tmp_path / "converted"
    for number in (5, 6, 7):
        done(ckptconv_here("convert", run / f"checkpoint-{number}", f"{place}/step-{number}-safetensors/"))
    done(thin(place, "--keep-last", 1, "--yes"))
    assert names(place) == {"step-7-safetensors"}


@pytest.mark.skipif(not DESCRIBING, reason="there are no virtual checkpoints")
def test_a_step_stays_that_a_virtual_checkpoint_beside_the_steps_is_made_of(run: Path) -> None:
    virtual = run / "checkpoint-5-virtual"
    virtual.mkdir()
    done(ckptconv_here("convert", run / "checkpoint-5", virtual / f"model{next(iter(DESCRIBING))}"))
    done(thin(run, "--keep-last", 1, "--yes"))
    assert names(run) == {"checkpoint-5", "checkpoint-5-virtual", "checkpoint-7", "checkpoint-7-safetensors"}


# ------------------------------------------------------------------------------------------------------ made up names

BASES = ("step-{}", "checkpoint-{}", "{}", "hf-step-{}", "epoch_{}")
ENDS = ("", "-hf", "-best", "_bf16", "-safetensors", "-hf-bf16")
ENTRIES = st.dictionaries(
    st.builds(
        lambda base, number, end: base.format(number) + end,
        st.sampled_from(BASES),
        st.integers(1, 4),
        st.sampled_from(ENDS),
    ).filter(lambda name: number_of(name) is not None),
    st.booleans(),
    min_size=1,
    max_size=7,
)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Mapping[bool, Path]:
    """A step of a trainer, and an output, by whether it is an output."""
    place = tmp_path_factory.mktemp("kinds")
    SAVER.save(place / "trained", 1)
    done(ckptconv_here("convert", place / "trained", f"{place}/output/"))
    return {False: place / "trained", True: place / "output"}


@given(entries=ENTRIES, kept=st.integers(1, 2))
@examples(40, HealthCheck.function_scoped_fixture)
def test_whatever_the_names_no_step_goes_for_an_output_or_for_what_is_not_known(
    entries: dict[str, bool], kept: int, kinds: Mapping[bool, Path]
) -> None:
    with tempfile.TemporaryDirectory(dir=kinds[True].parent) as place:
        for name, is_output in entries.items():
            shutil.copytree(kinds[is_output], Path(place) / name)
        try:
            thinning = planned(place, filled(THIN, {"age": 0, "keep_last": kept}), {}, inert=False)
        except UsageError as error:
            if "contains the steps of several runs" not in error.message:
                raise
            return  # nothing is removed
    steps = {step.judged.step.name: step.judged.step.number for step in thinning.steps}
    beside = {other.step.name for other in thinning.run.beside}
    assert {*steps, *beside} == {*entries}, "each entry is told of once"
    assert not beside & {*steps}
    assert len({*steps.values()}) == len(steps), "one step of each number"
    gone = {step.judged.step.name for step in thinning.of(REMOVE)}
    for name in gone:
        others = [other for other in entries if other != name and number_of(other) == number_of(name)]
        assert all(entries[other] for other in others), "what is not known has its number"
        if not entries[name]:
            left = [number or 0 for other, number in steps.items() if other not in gone and other != name]
            assert sum(number > (steps[name] or 0) for number in left) >= kept, "later steps stay"
