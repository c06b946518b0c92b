"""Values of a wrong type, in every place where the library takes a path, a function, a mapping or text: each is a
UsageError that shows the value, before anything is written."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import of_features

import ckptconv

# {call: what it does with a value}. Each takes one in the place of a path.
PATHS: dict[str, Callable[[Any], object]] = {
    "convert": lambda value: ckptconv.convert(value, "out"),
    **{name: call for calls in of_features("PATHS") for name, call in calls.items()},
}
# {what is no path: how the message shows it}
NO_PATHS: dict[str, tuple[Any, str]] = {
    "None": (None, "None is not a path."),
    "number": (5, "5 is not a path."),
    "bytes": (b"model.pt", "b'model.pt' is not a path."),
    "tensor": (torch.ones(2), "Tensor is not a path."),
    "module": (torch.nn.Linear(2, 2), "Linear is not a path."),
    "NUL": ("a\0b", "names cannot contain a NUL character."),
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": torch.ones(2)}, "model.pt")


def refused(call: Callable[[Any], object], value: Any, said: str) -> None:
    with pytest.raises(ckptconv.UsageError) as caught:
        call(value)
    assert said in str(caught.value)
    assert [path.name for path in Path().iterdir()] == ["model.pt"]


def test_what_is_no_path() -> None:
    for call in PATHS.values():
        for value, said in NO_PATHS.values():
            refused(call, value, said)


def test_no_paths_and_an_empty_one() -> None:
    for call in itertools.chain(*of_features("SEVERAL")):
        refused(PATHS[call], [], "No path was given.")
        refused(PATHS[call], [""], "A path is empty.")


OTHERS: dict[str, tuple[Callable[[Any], object], Any, str]] = {
    "output": (lambda value: ckptconv.convert("model.pt", value), 5, "OUTPUT 5 is not a path."),
    "on_total": (lambda value: ckptconv.convert("model.pt", "out", on_total=value), 5, "on_total 5 is not a function"),
    "before_commit": (
        lambda value: ckptconv.convert("model.pt", "out", before_commit=value),
        "x",
        "before_commit 'x' is not a function",
    ),
    **{name: case for cases in of_features("OTHER_VALUES") for name, case in cases.items()},
}


def test_other_values() -> None:
    for call, value, said in OTHERS.values():
        refused(call, value, said)
