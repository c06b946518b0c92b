"""The options of states: where they are written to, and what the option to read them was called."""

from __future__ import annotations

from pathlib import Path

import pytest
from features.dcp.cases import checkpoint_of

import ckptconv
from ckptconv.options.kinds import OptionWarning

STEP = checkpoint_of("fsdp2_w2_nested")


def test_a_former_name_of_the_option_to_read_states_is_told() -> None:
    with pytest.warns(OptionWarning, match="--states is called --with-states"):
        ckptconv.open(STEP, states=True)  # type: ignore[call-arg]


def test_the_optimizer_goes_to_a_path(tmp_path: Path) -> None:
    ckptconv.convert(STEP, optimizer=tmp_path / "states", dtype="keep", depfile=tmp_path / "m.d")
    assert (tmp_path / "states").is_dir()
    assert (tmp_path / "m.d").is_file()
