"""A map changes the names and layouts of weights and moments alike in a universal checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cells import VERIFIED
from checkpoints import ckptconv_here, done

MAP = 'about = "x"\nsource = "x"\n[[rule]]\na = "w.{l} : m n"\nb = "v.{l} : n m"\n'


@pytest.mark.parametrize("renamed", [False, True])
def test_moments_are_mapped_with_their_weights(renamed: bool, tmp_path: Path) -> None:
    prefix = "net." if renamed else ""
    weights = {f"{prefix}w.{at}": torch.nn.Parameter(torch.rand(2, 3)) for at in range(2)}
    optimizer = torch.optim.AdamW(weights.items(), lr=0.5)
    for weight in weights.values():
        weight.grad = torch.rand(2, 3)
    optimizer.step()
    state = {name: weight.detach() for name, weight in weights.items()}
    torch.save({"model": state, "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    (tmp_path / "map.toml").write_text(MAP)
    words = [tmp_path / "a.pt", tmp_path / "global_step1", *(["--strip-prefix", "net."] if renamed else [])]
    done(ckptconv_here("convert", *words, "--to", "universal", "--map", tmp_path / "map.toml"))
    for at, weight in enumerate(weights.values()):
        place = tmp_path / "global_step1" / "zero" / f"v.{at}"
        for file, tensor in (("fp32", weight.detach()), *optimizer.state[weight].items()):
            written = torch.load(place / f"{file}.pt", weights_only=False)
            written = written["param"] if isinstance(written, dict) else written
            assert torch.equal(torch.as_tensor(written), tensor.T if tensor.dim() else tensor)
    (tmp_path / "map.toml").unlink()
    if VERIFIED:
        done(ckptconv_here("verify", tmp_path / "a.pt", tmp_path / "global_step1"))
