"""verify reads small tensors that follow each other together, and finds in each what differs."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptconv as library
from ckptconv import convert
from ckptconv.errors import DifferenceError

DTYPES = (torch.float32, torch.float32, torch.float64, torch.float16, torch.int8, torch.bool)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A file of torch.save, and what it was converted to: scalars, empty and transposed ones among 300 small tensors,
    some of them in another order in each file, and one that is larger than what is read together."""
    dice, generator = random.Random(3), torch.Generator().manual_seed(3)
    tensors: dict[str, torch.Tensor] = {}
    for number in range(300):
        shape = [dice.choice((1, 2, 5, 17)) for _ in range(dice.randrange(4))]
        tensor = (torch.randn(shape, generator=generator) * 50).to(dice.choice(DTYPES))
        if number % 20 == 7 and tensor.dim() > 1:
            tensor = tensor.transpose(0, 1)
        tensors[f"layer.{number}.weight"] = tensor
    tensors["empty"] = torch.zeros(0, 3)
    tensors["large"] = torch.randn(200_000, generator=generator)
    tensors["after"] = torch.randn(7, generator=generator)
    place = tmp_path_factory.mktemp("neighbours")
    torch.save(tensors, place / "small.pt")
    convert(str(place / "small.pt"), str(place / "small.safetensors"))
    return place / "small.pt", place / "small.safetensors"


def test_they_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    pread = os.pread

    def counting(descriptor: int, length: int, offset: int) -> bytes:
        read.append(length)
        return pread(descriptor, length, offset)

    source, output = tmp_path / "alike.pt", tmp_path / "alike.safetensors"
    torch.save({f"layer.{number:03}.weight": torch.full((2000,), float(number)) for number in range(300)}, source)
    convert(str(source), str(output))
    monkeypatch.setattr(os, "pread", counting)
    assert library.verify(source, output).bytes_compared == 300 * 8000
    assert len(read) < 50
    # A block of each file is held at a time, and no more.
    assert max(read) <= 1 << 19


def test_each_that_differs_is_named_with_its_first_index(made: tuple[Path, Path], tmp_path: Path) -> None:
    source, output = made
    values, wrong = load_file(output), tmp_path / "wrong.safetensors"
    changed: dict[str, tuple[Any, Any]] = {}
    for name in (*list(values)[::13], "after", "large"):
        if values[name].numel():
            flat = values[name].flatten().clone()
            before = flat[-1].item()
            flat[-1] = not before if flat.dtype == torch.bool else before // 2 - 7
            values[name] = flat.reshape(values[name].shape)
            changed[name] = before, flat[-1].item()
    save_file(values, wrong, {"format": "pt"})
    with pytest.raises(DifferenceError) as caught:
        library.verify(source, wrong, structure=False)
    found = {each["tensor"]: each for each in caught.value.difference["differences"]}
    assert found.keys() == changed.keys()
    for name, (expected, other) in changed.items():
        assert found[name]["index"] == [extent - 1 for extent in values[name].shape]
        assert found[name]["expected"].split(" (")[0].lower() == str(expected).lower(), name
        assert found[name]["found"].split(" (")[0].lower() == str(other).lower(), name
        assert found[name]["elements"] == 1


def test_tensors_far_apart_are_not_read_across(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source of which two small tensors at its ends are chosen."""
    torch.save({"first": torch.ones(4), "between": torch.ones(40_000), "last": torch.ones(4)}, tmp_path / "ends.pt")
    options: dict[str, Any] = {"exclude": ["between"]}
    convert(str(tmp_path / "ends.pt"), str(tmp_path / "ends.safetensors"), **options)
    done = library.verify(tmp_path / "ends.pt", tmp_path / "ends.safetensors", **options)
    assert done.tensors == 2
    assert done.bytes_compared == 32
    assert done.bytes_read < 20_000
