"""Whisper and CLIP as OpenAI released them, and timm's vision transformers, as scripts of transformers 4 convert them.

They run under transformers 4.45, the last that has the scripts. The packages of the originals are not needed: their
models are made here, of the layers and names that they have.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from unittest import mock

import torch
from torch import nn
from transformers import CLIPConfig, CLIPModel, ViTConfig, ViTForImageClassification, WhisperConfig
from transformers import WhisperForConditionalGeneration as Whisper

from maps.cases import Case, Tensors, numbered, same

for missing in ("clip", "timm", "requests", "PIL"):
    sys.modules.setdefault(missing, mock.MagicMock(__spec__=None))
sys.modules["timm.data"] = ModuleType("timm.data")
sys.modules["timm.data"].__dict__.update(ImageNetInfo=None, infer_imagenet_subset=None)

from transformers.models.clip import convert_clip_original_pytorch_to_hf as clip  # noqa: E402
from transformers.models.vit import convert_vit_timm_to_pytorch as vit  # noqa: E402
from transformers.models.whisper import convert_openai_to_hf as whisper  # noqa: E402

PACKAGES = ("torch", "transformers")
_WIDE, _LAYERS = 8, 2


def cases() -> Iterator[Case]:
    yield _whisper()
    yield _vit()
    yield _clip()


def _pair(name: str, *shape: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer's weight and bias."""
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _empty(shapes: dict[str, tuple[int, ...]]) -> Tensors:
    return numbered({name: torch.empty(shape) for name, shape in shapes.items()})


def _whisper() -> Case:
    config = WhisperConfig(
        d_model=_WIDE, encoder_layers=_LAYERS, decoder_layers=_LAYERS, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=12, decoder_ffn_dim=12, vocab_size=19, num_mel_bins=5,
        max_source_positions=6, max_target_positions=7, pad_token_id=0, bos_token_id=0, eos_token_id=0,
        decoder_start_token_id=0,
    )  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "encoder.positional_embedding": (6, _WIDE), "decoder.positional_embedding": (7, _WIDE),
        "decoder.token_embedding.weight": (19, _WIDE), **_pair("encoder.conv1", _WIDE, 5, 3),
        **_pair("encoder.conv2", _WIDE, _WIDE, 3), **_pair("encoder.ln_post", _WIDE), **_pair("decoder.ln", _WIDE),
    }  # fmt: skip
    for side in ("encoder", "decoder"):
        for layer in range(_LAYERS):
            at = f"{side}.blocks.{layer}"
            for kind in ("attn", "cross_attn")[: 1 + (side == "decoder")]:
                for each in ("query", "key", "value", "out"):
                    shapes |= _pair(f"{at}.{kind}.{each}", _WIDE, _WIDE)
                del shapes[f"{at}.{kind}.key.bias"]
                shapes |= _pair(f"{at}.{kind}_ln", _WIDE)
            shapes |= {
                **_pair(f"{at}.mlp.0", 12, _WIDE),
                **_pair(f"{at}.mlp.2", _WIDE, 12),
                **_pair(f"{at}.mlp_ln", _WIDE),
            }
    ours = _empty(shapes)
    made = dict(ours)
    whisper.remove_ignore_keys_(made)
    whisper.rename_keys(made)
    model = Whisper(config)
    model.model.load_state_dict(made)
    hf = {name: tensor for name, tensor in model.state_dict().items() if name != "proj_out.weight"}
    return _case("openai-whisper", ours, hf, config, "rename_keys of transformers' convert_openai_to_hf.py")


def _vit() -> Case:
    config = ViTConfig(
        hidden_size=_WIDE, num_hidden_layers=_LAYERS, num_attention_heads=2, intermediate_size=12, image_size=8,
        patch_size=4, num_labels=3,
    )  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, _WIDE), "pos_embed": (1, 5, _WIDE), **_pair("patch_embed.proj", _WIDE, 3, 4, 4),
        **_pair("norm", _WIDE), **_pair("head", 3, _WIDE),
    }  # fmt: skip
    for layer in range(_LAYERS):
        at = f"blocks.{layer}"
        shapes |= {
            **_pair(f"{at}.norm1", _WIDE), **_pair(f"{at}.norm2", _WIDE), **_pair(f"{at}.attn.qkv", 3 * _WIDE, _WIDE),
            **_pair(f"{at}.attn.proj", _WIDE, _WIDE), **_pair(f"{at}.mlp.fc1", 12, _WIDE),
            **_pair(f"{at}.mlp.fc2", _WIDE, 12),
        }  # fmt: skip
    ours = _empty(shapes)
    made = dict(ours)
    for one, other in vit.create_rename_keys(config):
        vit.rename_key(made, one, other)
    vit.read_in_q_k_v(made, config)
    model = ViTForImageClassification(config)
    model.load_state_dict(made)
    return _case("timm-vit", ours, dict(model.state_dict()), config, "transformers' convert_vit_timm_to_pytorch.py")


class _Block(nn.Module):
    """A layer of CLIP's transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(_WIDE, 2)
        self.ln_1, self.ln_2 = nn.LayerNorm(_WIDE), nn.LayerNorm(_WIDE)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(_WIDE, 12), "c_proj": nn.Linear(12, _WIDE)})


def _blocks() -> nn.ModuleDict:
    return nn.ModuleDict({"resblocks": nn.Sequential(*(_Block() for _ in range(_LAYERS)))})


class _Clip(nn.Module):
    """CLIP with the names of OpenAI's clip/model.py."""

    def __init__(self) -> None:
        super().__init__()
        visual = nn.Module()
        visual.class_embedding = nn.Parameter(torch.empty(_WIDE))
        visual.positional_embedding = nn.Parameter(torch.empty(5, _WIDE))
        visual.proj = nn.Parameter(torch.empty(_WIDE, 6))
        visual.conv1 = nn.Conv2d(3, _WIDE, 4, 4, bias=False)
        visual.ln_pre, visual.ln_post, visual.transformer = nn.LayerNorm(_WIDE), nn.LayerNorm(_WIDE), _blocks()
        self.positional_embedding = nn.Parameter(torch.empty(7, _WIDE))
        self.text_projection = nn.Parameter(torch.empty(_WIDE, 6))
        self.logit_scale = nn.Parameter(torch.empty(()))
        self.visual, self.transformer = visual, _blocks()
        self.token_embedding, self.ln_final = nn.Embedding(19, _WIDE), nn.LayerNorm(_WIDE)


def _clip() -> Case:
    inner = {"hidden_size": _WIDE, "intermediate_size": 12, "num_hidden_layers": _LAYERS, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={**inner, "vocab_size": 19, "max_position_embeddings": 7},
        vision_config={**inner, "image_size": 8, "patch_size": 4},
        projection_dim=6,
    )
    original, model = _Clip(), CLIPModel(config)
    ours = numbered(original.state_dict())
    original.load_state_dict(ours)
    clip.copy_text_model_and_projection(model, original)
    clip.copy_vison_model_and_projection(model, original)
    model.logit_scale = original.logit_scale
    return _case(
        "openai-clip", ours, dict(model.state_dict()), config, "transformers' convert_clip_original_pytorch_to_hf.py"
    )


def _case(name: str, ours: Tensors, hf: Tensors, config: object, made: str) -> Case:
    """Return a case, which has to hold the same numbers on both sides."""
    one, other = (torch.cat([each.reshape(-1) for each in side.values()]).sort()[0] for side in (ours, hf))
    if not same({"all": one}, {"all": other}):
        raise ValueError(f"{name}: the script does not give every element once")
    return Case(name, name, ours, hf, {"model_type": config.model_type}, made, PACKAGES)  # type: ignore[attr-defined]
