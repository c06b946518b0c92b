"""The maps that give a checkpoint the names of the one that it is to be like."""

from __future__ import annotations

from pathlib import Path

import torch
from checkpoints import ckptconv_here, done
from safetensors.torch import load_file, save_file


def test_maps_between_the_names_of_the_input_and_of_the_reference_are_named(place: Path) -> None:
    titan = {"tok_embeddings.weight": torch.ones(8, 4), "norm.weight": torch.ones(4), "output.weight": torch.ones(8, 4)}
    save_file(titan, "titan.safetensors")
    hf = {"model.embed_tokens.weight": "tok_embeddings.weight", "model.norm.weight": "norm.weight"}
    hf |= {"lm_head.weight": "output.weight"}
    save_file({name: torch.zeros_like(titan[old]) for name, old in hf.items()}, "hf.safetensors")
    words = ("convert", "titan.safetensors", "out.safetensors", "--like", "hf.safetensors")
    for option in ((), ("--partial",), ("--fill",)):
        said = ckptconv_here(*words, *option).refused(1, "The built-in maps ", "use --map NAME ")
        assert "torchtitan-llama3" in said
        assert "--exclude" not in said
    done(ckptconv_here(*words, "--map", "torchtitan-llama3"))
    out = load_file("out.safetensors")
    assert all(torch.equal(out[name], titan[old]) for name, old in hf.items())
    # Other names are no map's.
    save_file({"a": torch.ones(2)}, "other.safetensors")
    said = ckptconv_here("convert", "other.safetensors", "x.safetensors", "--like", "hf.safetensors").refused(1)
    assert "built-in map" not in said
