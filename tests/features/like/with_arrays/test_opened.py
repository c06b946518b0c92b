"""A checkpoint that is opened with the names and layouts of another model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cells import verified
from checkpoints import contents, load_with_aliases
from features.like.test_like import NORM, reference, source, without

import ckptconv
from ckptconv import DifferenceError, convert

__all__ = ["reference", "source"]


def test_it_has_the_tensors_that_a_conversion_writes(source: Path, reference: Path, tmp_path: Path) -> None:
    less = without(source, NORM)
    convert(less, tmp_path / "out", like=reference, fill=True)
    with ckptconv.open(less, like=reference, fill=True) as opened:
        expected = load_with_aliases(tmp_path / "out")
        assert opened.keys() == expected.keys()
        assert all(torch.equal(tensor[...], expected[name]) for name, tensor in opened.items())
        convert(opened, tmp_path / "again", fill=True)
        verified(opened, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "out")
    with pytest.raises(DifferenceError, match=NORM):
        list(ckptconv.open(less, like=reference))
