"""The program in `examples` that loads a step of DeepSpeed into a model."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest


def test_the_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[4] / "examples" / "load_zero.py"
    monkeypatch.setattr(sys, "argv", [str(example)])
    runpy.run_path(str(example), run_name="__main__")
    assert "without a file in between" in capsys.readouterr().out
