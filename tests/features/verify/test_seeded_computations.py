"""Faults planted into outputs that are computed: into what computes them, and into the files. Verify finds each,
and says where it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import of_features
from computed import JOBS, NAMES, sources
from faults import Plant, wrapped
from safetensors.torch import load_file, save_file

from ckptconv import verify
from ckptconv.errors import DifferenceError
from ckptconv.outputs import shards

Patch = pytest.MonkeyPatch
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sources(tmp_path_factory.mktemp("computed"))


# ------------------------------------------------------------------------------------------------ what computes


def exchanged(one: str, other: str) -> Plant:
    """Two tensors are stored under each other's names, with the parts of quantized ones."""

    def wrong(right: Any, tensors: Any, *rest: Any) -> Any:
        planned = dict(tensors)
        for name in tensors:
            if name.startswith(one):
                there = other + name.removeprefix(one)
                planned[name], planned[there] = tensors[there], tensors[name]
        return right(planned, *rest)

    return wrapped(shards, "file_plans", wrong)


ANOTHER_LAYER, GATE_AND_UP = exchanged(NAMES[0], NAMES[2]), exchanged(NAMES[0], NAMES[1])
MADE: dict[str, tuple[Plant, list[str]]] = {
    "the weight of another layer": (ANOTHER_LAYER, ["merge", "dora", "average", "fp8-block", "int4-g32", "requantize"]),
    "gate and up exchanged": (GATE_AND_UP, ["merge", "average", "mxfp8", "average-int4"]),
    **{fault: made for faults in of_features("MADE") for fault, made in faults.items()},
}


@pytest.mark.parametrize(
    ("fault", "job"), [(fault, job) for fault, (_, jobs) in MADE.items() for job in jobs if job in JOBS]
)
def test_a_fault_of_what_computes_is_found(
    fault: str, job: str, here: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    make, source = JOBS[job]
    MADE[fault][0](monkeypatch)
    with pytest.raises(DifferenceError) as error:
        make(here, source, tmp_path / "checked", verify=True, fsync=False)
    assert error.value.difference["tensor"].startswith("model.layers.")
    assert not list(tmp_path.glob("checked/*.safetensors"))
    make(here, source, tmp_path / "out", fsync=False)
    monkeypatch.undo()
    with pytest.raises(DifferenceError) as error:
        verify(here / source, tmp_path / "out")
    assert error.value.difference["tensor"].startswith("model.layers.")


# ------------------------------------------------------------------------------------------------ files


def a_byte(tensors: Tensors, name: str) -> list[int] | None:
    """Change the lowest bit of one element, and return its index."""
    place = tuple(extent * 2 // 3 for extent in tensors[name].shape)
    bits = tensors[name].view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensors[name].itemsize])
    bits[place] ^= 1
    return list(place)


def another_layer(tensors: Tensors, name: str) -> list[int] | None:
    other = name.replace("layers.0", "layers.1")
    tensors[name], tensors[other] = tensors[other], tensors[name]
    return None


@pytest.mark.parametrize("fault", [a_byte, another_layer])
@pytest.mark.parametrize("job", JOBS)
def test_a_fault_of_a_file_is_found_and_located(
    fault: Callable[..., Any], job: str, here: Path, tmp_path: Path
) -> None:
    make, source = JOBS[job]
    make(here, source, tmp_path / "out", fsync=False)
    verify(here / source, tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    whole = path.read_bytes()
    for name in [name for name in load_file(path) if name.startswith(NAMES[0])]:
        path.write_bytes(whole)
        tensors = load_file(path)
        index = fault(tensors, name)
        # Shapes, and scales of few powers of two, are those of the other layer.
        if torch.equal(tensors[name], load_file(path)[name]):
            continue
        save_file(tensors, path, metadata={"format": "pt"})
        with pytest.raises(DifferenceError) as error:
            verify(here / source, tmp_path / "out")
        found = error.value.difference
        assert found["tensor"] == name
        assert found["what"] == "value"
        assert index is None or (found["index"], found["elements"]) == (index, 1)
        assert repr(name) in str(error.value)
