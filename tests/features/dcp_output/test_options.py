"""The options of states: where they are written to, where they are read from, and what these were called."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path

import pytest
from cells import VERIFIED, of_features, verifying
from checkpoints import ckptconv_here
from features.dcp.cases import checkpoint_of

import ckptconv
from ckptconv import UsageError
from ckptconv.options.kinds import OptionWarning

STEP = checkpoint_of("fsdp2_w2_nested")


def test_a_former_name_works_and_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    step = str(STEP)
    for words, told in FORMER.items():
        run = ckptconv_here(*words.format(step=step).split())
        assert run.code == 0, run.err
        assert run.err.count(f"ckptconv: {told}\n") == 1, words
        assert "is called" not in ckptconv_here(*words.format(step=step).split(), "-q").err
        twice = words.format(step=step).replace(" --optimizer", " --states STEP --optimizer", 1)
        assert ckptconv_here(*twice.replace("STEP", step).split()).code == 2, words


READ = "--optimizer is called --states here: it reads the states from PATH."
FORMER = {
    "safetensors2dcp {step} a --optimizer {step}": READ,
    "convert {step} b --to dcp --optimizer {step}": READ,
    **({"verify {step} b --optimizer {step}": READ} if VERIFIED else {}),
}


@verifying
def test_in_python_too(tmp_path: Path) -> None:
    step = STEP
    for call in (
        lambda **states: ckptconv.convert(step, tmp_path / "out", to="dcp", **states),
        lambda **states: ckptconv.verify(step, tmp_path / "out", **states),
        *(functools.partial(call, step) for calls in of_features("TAKING_STATES") for call in calls),
    ):
        with pytest.warns(OptionWarning, match="--optimizer is called --states"):
            call(optimizer=step)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call(states=step)
        with pytest.raises(UsageError, match=r"the same option|reads the optimizer states"):
            call(states=step, optimizer=step)


def test_states_that_are_read_from_nowhere_are_told_by_their_option(tmp_path: Path) -> None:
    run = ckptconv_here("convert", STEP, tmp_path / "out", "--to", "dcp", "--states", tmp_path / "none")
    run.refused(2, f"--states {tmp_path / 'none'} does not exist, but the optimizer states should be read from it.")
