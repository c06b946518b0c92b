"""A checkpoint that is opened with a map."""

from __future__ import annotations

from pathlib import Path

from cells import VERIFIED, verifying
from features.maps.test_map import SIZES, expected, place, same, weights
from safetensors.torch import load_file

import ckptconv
from ckptconv import convert

__all__ = ["place"]


def test_an_opened_checkpoint_has_the_names_of_the_map(place: Path) -> None:
    with ckptconv.open("model.pt", map="my.toml", size=SIZES) as opened:
        same({name: tensor.torch() for name, tensor in opened.items()}, expected(weights()))


@verifying
def test_a_checkpoint_that_is_open_is_converted_with_a_map(place: Path) -> None:
    with ckptconv.open("model.pt") as opened:
        convert(opened, "hf/", map="my.toml", size=SIZES, tied="duplicate", **VERIFIED)
        assert ckptconv.verify(opened, "hf/", map="my.toml", size=SIZES).aliases == {}
    same(load_file("hf/model.safetensors"), expected(weights()))
    with ckptconv.open("model.pt", map="my.toml", size=SIZES) as opened:
        convert(opened, "again.safetensors", tied="duplicate")
    same(load_file("again.safetensors"), expected(weights()))
