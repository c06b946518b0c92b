"""State dicts that are saved with the names and layouts of another model."""

from __future__ import annotations

from pathlib import Path

import pytest
from cells import VERIFIED
from features.like.test_like import NORM, layout, reference, tensors

import ckptconv
from ckptconv import DifferenceError

__all__ = ["reference"]


def test_a_state_dict_is_saved_like_a_reference(reference: Path, tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in tensors(2).items() if name != NORM}
    ckptconv.save_state_dict(state, tmp_path / "out", like=reference, fill=True, **VERIFIED)
    assert layout(tmp_path / "out") == layout(reference)
    with pytest.raises(DifferenceError, match="<state dict>"):
        ckptconv.save_state_dict(state, tmp_path / "other", like=reference)
