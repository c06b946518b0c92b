"""Rules for make of runs of Orbax, whose last step is found by a listing."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from features.orbax import writer

import ckptconv


def prerequisites(source: Path, output: Path, place: Path) -> set[str]:
    """What an output depends on by its rule."""
    ckptconv.convert(source, output, depfile=place / "out.d", overwrite=True)
    head = (place / "out.d").read_text().replace(" \\\n", "").splitlines()[0]
    return {os.path.relpath(name, place) for name in head.partition(": ")[2].split()}


def a_run(place: Path) -> Path:
    for number in (1, 2):
        writer.step(place / "run" / str(number) / "default", {"w": np.ones(3, np.float32)})
    return place / "run"


def test_an_output_of_a_run_depends_on_its_directory_where_a_step_may_come(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    of_run = prerequisites(run, tmp_path / "out.safetensors", tmp_path)
    assert "run" in of_run
    of_item = prerequisites(run / "2" / "default", tmp_path / "out.safetensors", tmp_path)
    assert of_item == of_run - {"run"}
    assert any(name.startswith("run/2/default/") for name in of_item)


def test_an_output_in_the_run_does_not_depend_on_its_directory(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    assert "run" not in prerequisites(run, run / "out.safetensors", tmp_path)
