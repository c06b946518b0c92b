"""Names of tensors in adapters: those of PEFT's factors, and how to recognize adapters of other programs.

Source: PEFT 0.21, utils/save_and_load.py and tuners/lora.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ckptconv.errors import CkptconvError, UnsupportedError
from ckptconv.text import brief

# The name of the adapter, after the word for a factor; "weight" and "bias" are parameters of a module instead.
ADAPTER_NAME = r"(?:\.(?P<adapter>(?!(?:weight|bias)$)[^.]+))?"
FACTOR = re.compile(
    rf"(?P<module>.+?)(?P<depth>(?:\.base_layer)*)\.lora_(?P<embedding>embedding_)?(?P<side>[AB]){ADAPTER_NAME}"
    r"(?:\.(?P<parameter>weight|bias))?"
)
# Adapters of other programs: the beginnings of their names, parts of the names, the program, and their readers.
_OTHERS = (
    (
        ("lora_unet_", "lora_te", "lora_transformer_"),
        (".lora_down.", ".lora_up.", ".alpha"),
        "kohya's sd-scripts",
        "ComfyUI, stable-diffusion-webui, and load_lora_weights of diffusers",
    ),
    (
        ("unet.", "text_encoder", "transformer.transformer_", "transformer.single_", "transformer.blocks."),
        (".lora_A.", ".lora.down.", ".lora_linear_layer.", "_lora.down."),
        "diffusers",
        "load_lora_weights and fuse_lora of diffusers",
    ),
    (("",), (".lora_a", ".lora_b"), "MLX", "mlx_lm.fuse of mlx-lm"),
)


def is_adapter(names: Mapping[str, object]) -> bool:
    """Return whether any of these tensor names is that of a PEFT factor."""
    return any(".lora_" in name and FACTOR.fullmatch(name) for name in names)


def are_factors(weights: object) -> bool:
    """Return whether `weights` are a flat state dict of PEFT factors only."""
    names = [*weights] if isinstance(weights, Mapping) else []
    return bool(names) and all(isinstance(name, str) and FACTOR.fullmatch(name) for name in names)


def other_program(path: str, names: Mapping[str, object]) -> CkptconvError | None:
    """Return the error for an adapter of another program, if its names show the program."""
    for begins, holds, program, readers in _OTHERS:
        name = next((name for name in names if name.startswith(begins) and any(part in name for part in holds)), "")
        if name:
            return UnsupportedError(
                f"{path} is an adapter of {program}, as its tensor names show ({brief(name)}); only adapters of PEFT "
                "can be merged.",
                f"These read it: {readers}.",
            )
    return None
