"""Files of adapters and quantized tensors, as PEFT and bitsandbytes save them: parts come out as they are."""

from __future__ import annotations

from pathlib import Path

import torch
from cells import VERIFY
from checkpoints import DATA, ckptconv_here, done
from compare import assert_same
from effort import every
from reading import state_in
from safetensors.torch import load_file

ADAPTERS = DATA / "adapters"


def converted(source: Path, output: Path, *options: str) -> Path:
    done(ckptconv_here("convert", source, output, *VERIFY, *options))
    return output


@every(
    "file, kept",
    [
        ("dora.bin", set()),
        ("int8.pt", {"SCB"}),
        ("nf4.pt", {"weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"}),
        ("adam8bit.pt", {"qmap1", "qmap2", "absmax1", "absmax2"}),
    ],
)
def test_files_of_peft_and_bitsandbytes(file: str, kept: set[str], tmp_path: Path) -> None:
    """They come back as they were; a cast leaves alone what values are quantized with."""
    converted(ADAPTERS / file, tmp_path / "m.safetensors")
    theirs = torch.load(ADAPTERS / file, weights_only=True)
    assert_same(state_in(tmp_path / "m.safetensors"), theirs)
    cast = load_file(converted(ADAPTERS / file, tmp_path / "c.safetensors", "--dtype", "bf16"))
    ended = {name.removeprefix("state.0.__bnb_optimizer_quant_state__."): tensor for name, tensor in cast.items()}
    assert {name for name, tensor in ended.items() if tensor.dtype == torch.float32} == kept


def test_a_cast_leaves_what_bitsandbytes_scales_with_as_it_is(tmp_path: Path) -> None:
    alone = {
        "a.weight.absmax": torch.rand(4),
        "a.weight.quant_map": torch.rand(16),
        "b.SCB": torch.rand(3),
        "s.__bnb_optimizer_quant_state__.absmax1": torch.rand(2),
    }
    state = {
        **alone,
        "a.weight": torch.zeros(8, 1, dtype=torch.uint8),
        "a.weight.quant_state.bitsandbytes__nf4": torch.zeros(5, dtype=torch.uint8),
        "b.weight": torch.zeros(3, 3, dtype=torch.int8),
        "c.weight": torch.ones(2),
        "c.absmax": torch.ones(2),
    }
    torch.save(state, tmp_path / "m.pt")
    run = done(ckptconv_here("pt2safetensors", tmp_path / "m.pt", "--dtype", "bf16", *VERIFY, "--json"))
    assert "4 tensors" in run.json["warnings"][0]
    found = load_file(tmp_path / "m.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in alone.items())
    assert {found[name].dtype for name in ("c.weight", "c.absmax")} == {torch.bfloat16}
