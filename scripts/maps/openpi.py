"""π0 and π0.5 of openpi, as its script converts them from JAX. openpi is on no registry: OPENPI is a checkout of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from maps.alone import only
from maps.cases import Case, Tensors, numbered

PACKAGES = ("torch",)
_MADE = "slice_paligemma_state_dict and slice_gemma_state_dict of examples/convert_jax_model_to_pytorch.py"
_LAYERS, _HEADS, _SIZE = 2, 3, 4
# What the vision tower, the language model and the action expert have of elements along each axis.
_VISION = SimpleNamespace(hidden_size=12, num_hidden_layers=_LAYERS)
_TEXT = SimpleNamespace(hidden_size=12, num_hidden_layers=_LAYERS, num_attention_heads=_HEADS, head_dim=_SIZE)
_EXPERT = {"vocab_size": 9, "hidden_size": 7, "num_hidden_layers": _LAYERS, "num_attention_heads": _HEADS}
# Linear layers beside the two, (in, out), by whether it is π0.5.
_LINEAR = {
    False: {
        "state_proj": (3, 7), "action_in_proj": (3, 7), "action_out_proj": (7, 3), "action_time_mlp_in": (14, 7),
        "action_time_mlp_out": (7, 7),
    },
    True: {"action_in_proj": (3, 7), "action_out_proj": (7, 3), "time_mlp_in": (7, 7), "time_mlp_out": (7, 7)},
}  # fmt: skip


def _shapes(newer: bool) -> dict[str, tuple[int, ...]]:
    """Return the shapes of openpi's parameters by their paths, with slashes."""
    hidden, expert, wide, layers = 12, 7, 10, _LAYERS
    block = "img/Transformer/encoderblock"
    attention = f"{block}/MultiHeadDotProductAttention_0"
    shapes: dict[str, tuple[int, ...]] = {
        "img/embedding/kernel": (2, 2, 3, hidden),
        "img/embedding/bias": (hidden,),
        "img/pos_embedding": (1, 6, hidden),
        "img/Transformer/encoder_norm/scale": (hidden,),
        "img/Transformer/encoder_norm/bias": (hidden,),
        "img/head/kernel": (hidden, hidden),
        "img/head/bias": (hidden,),
        "llm/embedder/input_embedding": (9, hidden),
        f"{block}/MlpBlock_0/Dense_0/kernel": (layers, hidden, wide),
        f"{block}/MlpBlock_0/Dense_0/bias": (layers, wide),
        f"{block}/MlpBlock_0/Dense_1/kernel": (layers, wide, hidden),
        f"{block}/MlpBlock_0/Dense_1/bias": (layers, hidden),
        f"{attention}/out/kernel": (layers, _HEADS, _SIZE, hidden),
        f"{attention}/out/bias": (layers, hidden),
    }
    for name in ("LayerNorm_0", "LayerNorm_1"):
        shapes |= {f"{block}/{name}/{part}": (layers, hidden) for part in ("scale", "bias")}
    for name in ("query", "key", "value"):
        shapes[f"{attention}/{name}/kernel"] = (layers, hidden, _HEADS, _SIZE)
        shapes[f"{attention}/{name}/bias"] = (layers, _HEADS, _SIZE)
    for suffix, width in (("", hidden), ("_1", expert)):
        shapes |= {
            f"llm/layers/attn/q_einsum{suffix}/w": (layers, _HEADS, width, _SIZE),
            f"llm/layers/attn/kv_einsum{suffix}/w": (layers, 2, 1, width, _SIZE),
            f"llm/layers/attn/attn_vec_einsum{suffix}/w": (layers, _HEADS, _SIZE, width),
            f"llm/layers/mlp{suffix}/gating_einsum": (layers, 2, width, wide),
            f"llm/layers/mlp{suffix}/linear": (layers, wide, width),
        }
        for name, stack in (
            ("layers/pre_attention_norm", (layers,)),
            ("layers/pre_ffw_norm", (layers,)),
            ("final_norm", ()),
        ):
            if newer and suffix:
                shapes[f"llm/{name}{suffix}/Dense_0/kernel"] = (*stack, width, 3 * width)
                shapes[f"llm/{name}{suffix}/Dense_0/bias"] = (*stack, 3 * width)
            else:
                shapes[f"llm/{name}{suffix}/scale"] = (*stack, width)
    return shapes


def _converted(newer: bool, arrays: Mapping[str, Any], linear: Tensors) -> Tensors:
    """Return what openpi makes of the arrays of PaliGemma and the action expert, and of linear layers."""
    sys.path.insert(0, str(Path(os.environ["OPENPI"], "examples")))
    (script,) = only("convert_jax_model_to_pytorch", packages=("flax", "orbax", "tyro", "openpi"))
    made, rest = script.slice_paligemma_state_dict(
        dict(arrays), SimpleNamespace(vision_config=_VISION, text_config=_TEXT)
    )
    of_expert = script.slice_gemma_state_dict(
        rest,
        SimpleNamespace(**_EXPERT, head_dim=_SIZE),
        num_expert=1,
        checkpoint_dir="pi05" if newer else "pi0",
        pi05=newer,
    )
    turned = {
        name.replace("kernel", "weight"): tensor.T if name.endswith("kernel") else tensor
        for name, tensor in linear.items()
    }
    return {**made, **of_expert, **turned}


def cases() -> Iterator[Case]:
    for newer in (False, True):
        layers = {
            f"{name}.{part}": shape if part == "kernel" else shape[1:]
            for name, shape in _LINEAR[newer].items()
            for part in ("kernel", "bias")
        }
        named = {f"PaliGemma.{name.replace('/', '.')}": shape for name, shape in _shapes(newer).items()}
        ours = numbered({name: torch.empty(shape) for name, shape in {**named, **layers}.items()})
        arrays = {
            name.removeprefix("PaliGemma.").replace(".", "/"): tensor.numpy()
            for name, tensor in ours.items()
            if name in named
        }
        hf = _converted(newer, arrays, {name: ours[name] for name in layers})
        name = "openpi-pi05" if newer else "openpi-pi0"
        yield Case(name, "openpi-pi0", ours, hf, {}, _MADE, PACKAGES)
