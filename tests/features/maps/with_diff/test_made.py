"""A checkpoint as a map makes it is compared with another one."""

from __future__ import annotations

from pathlib import Path

import torch
from checkpoints import ckptconv_here
from safetensors.torch import save_file


def test_what_a_map_makes_of_the_first_is_compared(place: Path) -> None:
    told = 'drop = ["*._extra_state"]\n[[rule]]\none = "{l}.qkv : (q + k) h"\nother = ["{l}.q : q h", "{l}.k : k h"]\n'
    (place / "my.toml").write_text(f"{told}[sizes]\nq = 8\nk = 4\n")
    torch.save({"0.qkv": torch.arange(48.0).reshape(12, 4), "0._extra_state": torch.ones(2)}, "m.pt")
    assert ckptconv_here("convert", "m.pt", "other.safetensors", "--map", "my.toml").code == 0
    run = ckptconv_here("diff", "m.pt", "other.safetensors", "--map", "my.toml")
    assert (run.code, "equal: 2 tensors" in run.out) == (0, True)
    assert "left out, because the map my.toml drops them: '0._extra_state'" in run.err
    assert ckptconv_here("diff", "m.pt", "other.safetensors").code == 1


TITAN = {"tok_embeddings.weight", "norm.weight", "output.weight", "layers.0.attention.wv.weight"}


def test_maps_between_the_names_of_both_sides_are_named(place: Path) -> None:
    state = {name: torch.ones(2, 3) for name in TITAN}
    torch.save(state, "titan.pt")
    assert ckptconv_here("convert", "titan.pt", "hf.safetensors", "--map", "torchtitan-llama3").code == 0
    for words in (("titan.pt", "hf.safetensors"), ("hf.safetensors", "titan.pt")):
        run = ckptconv_here("diff", *words)
        assert (run.code, "--strip-prefix" in run.out) == (1, False)
        (hint,) = [line for line in run.out.splitlines() if line.startswith("The tensors of A get the names of B with")]
        assert "torchtitan-llama3" in hint
        # Of the names that the map knows, it makes those of B.
        assert ckptconv_here("diff", *words, "--map", "torchtitan-llama3").code == 0
    torch.save({**state, "mine": torch.ones(1)}, "titan.pt")
    assert "get the names of B" not in ckptconv_here("diff", "titan.pt", "hf.safetensors").out


def test_a_map_that_only_keeps_or_drops_names_is_no_hint(place: Path) -> None:
    base = {f"model.layers.0.self_attn.{name}.weight": torch.ones(2, 2) for name in ("q_proj", "v_proj")}
    save_file({**base, "model.embed_tokens.weight": torch.ones(3, 2)}, "base.safetensors")
    factors = {f"base_model.model.{name[:-7]}.lora_{side}.weight": torch.ones(2, 2) for name in base for side in "AB"}
    save_file(factors, "adapter_model.safetensors")
    for words in (("base.safetensors", "adapter_model.safetensors"), ("adapter_model.safetensors", "base.safetensors")):
        assert "get the names of B" not in ckptconv_here("diff", *words).out


def test_a_prefix_of_few_names_is_no_hint(place: Path) -> None:
    torch.save({f"{name}.w": torch.ones(1) for name in ("m.a", "b", "c", "d", "e")}, "one.pt")
    torch.save({f"{name}.w": torch.ones(1) for name in ("a", "B", "C", "D", "E")}, "two.pt")
    assert "--strip-prefix" not in ckptconv_here("diff", "one.pt", "two.pt").out
