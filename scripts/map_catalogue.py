"""The page of the maps that come with the program, which scripts/reference.py writes."""

from __future__ import annotations

import json
from pathlib import Path

from ckptconv.features.maps.file import catalogue, from_catalogue

CASES = Path(__file__).parents[1] / "tests" / "features" / "maps" / "data"

_MAPS = """\
`--map NAME` gives a checkpoint the names and layouts of the other side of a built-in map, in either
direction. Each was made from the framework's own source, named here and in the map (`ckptconv maps show NAME`).

Tiny models with odd sizes, made by the frameworks, are in `tests/features/maps/data` with what the frameworks' own
converters made of them. `make test` compares each map with that, both ways, bit for bit. `make test-maps` installs the
frameworks and compares what they make now; it also converts checkpoints that torchtitan and Megatron-core have just
saved, and compares the logits that transformers computes with those of the original model. `make test-maxtext` does the
same with steps of Llama, Llama 3.1, Gemma, Gemma 2 and the text of Gemma 3 that MaxText 0.2.5 has computed with and
saved, with stacked and with numbered layers."""
_CONVERTERS = """\
## Tested conversions

| map | models | converter |
|---|---|---|"""
_MORE = """\
## Limits

- **Sizes.** The number of heads is in no shape. It is taken from `config.json` beside the checkpoint (or Meta's
  `params.json`), or given: `--size n=32`. The way from Hugging Face to Megatron-core has no padding to look at:
  `--size _=64` are the rows to add to the embeddings.
- **Tied embeddings** are stored once by Megatron-core and twice by torchtitan. The second, `lm_head.weight`, is
  kept, and readers tie it.
- **Multi-token-prediction layers** (MTP) continue the numbering after the last decoder layer in Hugging Face's files of
  DeepSeek V3 and GLM. The maps have them, but not the embeddings and the head that the files repeat in such a layer.
- **gpt-oss** has one layout in transformers 4 and 5, and needs no map between these.
- **NeMo 2** has the names of Megatron-core after `module.`: add `--strip-prefix module.` to Megatron's maps.
- **Gemma's norms** hold the difference from one on both sides: Megatron-core's with `layernorm_zero_centered_gamma`,
  which Megatron-Bridge and NeMo set.
- **Qwen3-Next** has no map for Megatron-core. Megatron-Bridge subtracts one from a norm, which is no move of elements,
  and ms-swift orders the same tensors in another way.
- **MaxText** stores queries divided by the square root of the head size, Gemma's embeddings multiplied by that of the
  hidden size, and Gemma's norms plus one: these maps compute as MaxText's converter does. They read stacked and
  numbered layers, and write stacked ones.
- **GPT-2** has the same names on both sides: say what to make, `--map gpt2-linear:hf` or
  `--map gpt2-linear:linear`.

## Files of model-parallel ranks

Meta's `consolidated.00.pth`, `consolidated.01.pth` … and Megatron-LM's `mp_rank_00/model_optim_rng.pt` … do not say
which part of a tensor each rank has. A map does: name the directory, and give one.

- A rank's part is called `0.layers.0.attention.wq.weight`, with the rank before the name: `{r}.layers.{l}.…` in a
  map, and an axis `r` on the other side.
- What each rank has whole (norms, routers) is there once, under its own name. It must be equal in all ranks.
- Of Megatron-LM's, what is known to be shared out by rows or columns is joined already; only the first matrix of a
  feed-forward layer, which holds gate and up of each rank, is left in parts. Layers are numbered through all
  pipeline stages, virtual ones too, and experts through all ranks.
- Meta's files of Llama 1 and 2 share out columns of the embeddings, those of Llama 3 rows: `meta-llama2` or
  `meta-llama3`."""


def page(made: str) -> str:
    """The maps that come with the program, in Markdown, from what they say of themselves."""
    found = [from_catalogue(name) for name in catalogue()]
    lines = ["# Built-in maps", "", f"<!-- {made} -->", "", _MAPS, ""]
    lines += ["| map | sides | | made from |", "|---|---|---|---|"]
    lines += [
        f"| `{each.name}` | `{' ⇄ '.join(each.sides)}` | {_cell(each.about)} | {_cell(each.words['source'])} |"
        for each in found
    ]
    lines += ["", _CONVERTERS]
    cases = [
        json.loads(path.read_text("utf-8")) | {"case": path.parent.name} for path in sorted(CASES.glob("*/case.json"))
    ]
    for each in cases:
        versions = ", ".join(f"{name} {number}" for name, number in each["versions"].items() if name != "torch")
        lines.append(f"| `{each['map']}` | `{each['case']}` | {_cell(each['made'])}: {versions} |")
    return "\n".join([*lines, "", _MORE]) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")
