"""Llama 4 of torchtitan 0.2, the last releases that have it, as its StateDictAdapter converts it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from unittest import mock

import torch

sys.modules["torch.utils.tensorboard"] = mock.MagicMock(__spec__=None)  # which it imports, and does not use here
from torchtitan.models.llama4.model.args import TransformerModelArgs  # noqa: E402
from torchtitan.models.llama4.model.model import Transformer  # noqa: E402
from torchtitan.models.llama4.model.state_dict_adapter import Llama4StateDictAdapter  # noqa: E402
from torchtitan.models.moe import MoEArgs  # noqa: E402
from transformers import AutoModelForCausalLM, Llama4TextConfig  # noqa: E402

from maps.cases import Case, Tensors, numbered, same  # noqa: E402

PACKAGES = ("torch", "torchtitan", "transformers")
_DENSE = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def cases() -> Iterator[Case]:
    experts = MoEArgs(num_experts=3, num_shared_experts=1, top_k=1)
    settings = TransformerModelArgs(
        dim=24, n_layers=2, n_heads=6, n_kv_heads=2, vocab_size=37, multiple_of=4, max_seq_len=16, moe_args=experts
    )
    with torch.device("meta"):
        shapes = Transformer(settings).state_dict()
    ours = numbered(shapes)
    adapter = Llama4StateDictAdapter(settings, None)
    hf = adapter.to_hf(dict(ours))
    back = adapter.from_hf(dict(hf))
    if not same(back, {name: ours[name] for name in back}):
        raise ValueError("from_hf does not undo to_hf")
    # The adapter leaves out the layers without experts. Their names are those of the same layers of transformers.
    dense: Tensors = {
        f"language_model.model.layers.0.feed_forward.{other}.weight": ours[f"layers.0.feed_forward.{one}.weight"]
        for one, other in _DENSE.items()
    }
    hf |= dense
    _check(hf, settings)
    lost = tuple(ours.keys() - back.keys() - {f"layers.0.feed_forward.{each}.weight" for each in _DENSE})
    made = "Llama4StateDictAdapter.to_hf, and from_hf back; layers without experts by transformers' names"
    yield Case("torchtitan-llama4", "torchtitan-llama4", ours, hf, {"model_type": "llama4"}, made, PACKAGES, lost=lost)


def _check(hf: Tensors, settings: TransformerModelArgs) -> None:
    """Check that transformers' model has these names and shapes."""
    config = Llama4TextConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=4, vocab_size=37,
        num_local_experts=3, interleave_moe_layer_step=settings.interleave_moe_layer_step, pad_token_id=0,
        intermediate_size=hf["language_model.model.layers.1.feed_forward.experts.down_proj"].shape[1],
        intermediate_size_mlp=hf["language_model.model.layers.0.feed_forward.gate_proj.weight"].shape[0],
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).state_dict()
    if {f"language_model.{name}": tensor.shape for name, tensor in model.items()} != {
        name: tensor.shape for name, tensor in hf.items()
    }:
        raise ValueError("transformers' Llama 4 has other names or shapes")
