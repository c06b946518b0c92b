"""Llama and Gemma of MaxText, as its own tables and hooks convert them. These are loaded alone: its other modules need
JAX. Its arrays are those of numpy here, which the hooks take too. The map of Gemma 3 writes numbered layers, and the
others stacked ones."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 – gives numpy bfloat16
import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma2Config,
    Gemma3Config,
    GemmaConfig,
    LlamaConfig,
)

from maps.alone import only
from maps.cases import Case, Tensors

PACKAGES = ("maxtext", "numpy", "transformers")
_MADE = "the tables and hooks of maxtext/checkpoint_conversion/utils/param_mapping.py"
# The rows that MaxText adds to the embeddings of Gemma, and the axis in which it stacks layers.
_PADDED, _SCAN_AXIS = 3, 1
_SIZES = {
    "vocab_size": 11, "hidden_size": 12, "intermediate_size": 10, "num_attention_heads": 3, "num_key_value_heads": 1,
    "head_dim": 6, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
_TIED = {"tie_word_embeddings": True}
Arrays = dict[str, np.ndarray[Any, Any]]


def _weights(config: Any) -> Arrays:
    """Return weights of a model of transformers, at random, so that no product with a number is exact."""
    torch.manual_seed(0)
    shapes = {name: weight.shape for name, weight in AutoModelForCausalLM.from_config(config).state_dict().items()}
    tied = config.tie_word_embeddings
    return {name: torch.randn(shape).numpy() for name, shape in shapes.items() if not (tied and "lm_head" in name)}


def _seeing(config: Any) -> Arrays:
    """Return weights of a model with a vision tower, under the names that MaxText gives them."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    names = {name: name.replace("vision_tower.", "vision_tower.vision_model.") for name in model.state_dict()}
    shapes = {names[name]: weight.shape for name, weight in model.state_dict().items() if "lm_head" not in name}
    return {name: torch.randn(shape).numpy() for name, shape in shapes.items()}


def _hooked(array: Any, shape: Sequence[int], hooks: Any) -> np.ndarray[Any, Any]:
    for hook in hooks if isinstance(hooks, list) else [hooks] if hooks else []:
        array = hook(array, tuple(shape))
    return np.asarray(array).reshape(shape)


class _Tables:
    """MaxText's tables and hooks for a family of models, with stacked layers if `is_scanned`."""

    def __init__(self, module: Any, family: str, config: Any, is_scanned: bool) -> None:
        settings = {**config.to_dict(), "head_dim": config.get_text_config().head_dim}
        self._config = config
        self._names = getattr(module, f"{family}_MAXTEXT_TO_HF_PARAM_MAPPING")(settings, None, is_scanned)
        hooks = getattr(module, f"{family}_MAXTEXT_TO_HF_PARAM_HOOK_FN")
        self._to_hf, self._to_maxtext = (hooks(settings, None, is_scanned, saving_to_hf=to) for to in (True, False))

    def _entries(self) -> Iterator[tuple[str, str, list[str], bool]]:
        """Yield each key, MaxText's name, transformers' names, and whether layers are stacked."""
        for key, names in self._names.items():
            is_stacked = isinstance(names, list)
            yield key, key.removeprefix("params-").replace("-", "."), names if is_stacked else [names], is_stacked

    def to_maxtext(self, hf: Arrays) -> Arrays:
        """Return MaxText's arrays, as `to_maxtext.py` makes them."""
        made: Arrays = {}
        for key, name, layers, is_stacked in self._entries():
            if layers[0] in hf:  # or tied to the embeddings
                shape = self._shape(name, hf[layers[0]].shape)
                parts = [_hooked(hf[layer], shape, self._to_maxtext.get(key)) for layer in layers]
                made[name] = np.stack(parts, _SCAN_AXIS) if is_stacked else parts[0]
        return made

    def _shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        return _shape(self._config, name, shape)

    def to_hf(self, arrays: Arrays, weights: Arrays) -> Arrays:
        """Return weights of the same shapes as `weights`, as `to_huggingface.py` makes them."""
        made: Arrays = {}
        for key, name, layers, is_stacked in self._entries():
            for at, layer in enumerate(layers if name in arrays else ()):
                part = arrays[name].take(at, _SCAN_AXIS) if is_stacked else arrays[name]
                made[layer] = _hooked(part, weights[layer].shape, self._to_hf.get(key))
        return made


def _shape(config: Any, name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of an array of MaxText for one layer, by that of the weight of transformers."""
    heads, size = config.num_attention_heads, config.head_dim
    if "embedder" in name:
        return shape[0] + _PADDED * ("gemma" in config.model_type), shape[1]
    if "out.kernel" in name:
        return heads, size, shape[0]
    if name.endswith(("query.kernel", "key.kernel", "value.kernel")):
        return shape[1], shape[0] // size, size
    return tuple(reversed(shape))


class _Seeing(_Tables):
    """Gemma 3, whose tables have the vision tower too."""

    def _shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        vision = self._config.vision_config
        heads = vision.num_attention_heads
        if not name.startswith("vision_encoder."):
            return _shape(self._config.get_text_config(), name, shape)
        if name.endswith("pos_embedding"):
            return (1, *shape)
        if "MultiHead" in name and "out" not in name:
            return (*reversed(shape[1:]), heads, shape[0] // heads)
        if name.endswith("out.kernel"):
            return heads, shape[1] // heads, shape[0]
        return (*shape[2:], *shape[1::-1]) if len(shape) == 4 or name.endswith("kernel") else tuple(shape)


class _Halves(_Tables):
    """A model that turns halves, as RotaryEmbedding of layers/embeddings.py does: without `adjust_rope`, which is for
    LLaMARotaryEmbedding, that turns pairs."""

    def __init__(self, module: Any, family: str, config: Any, is_scanned: bool) -> None:
        super().__init__(module, family, config, is_scanned)
        for table in (self._to_hf, self._to_maxtext):
            for key, hooks in table.items():
                chain = hooks if isinstance(hooks, list) else [hooks]
                table[key] = [hook for hook in chain if hook.__name__ != "adjust_rope"]


class _Gemma:
    """Gemma 1, as convert_gemma_chkpt.py has it: that script starts from Gemma's own arrays, which are transformers'
    weights in another layout. It has no way back: that is by the hooks of Gemma 2, which undo the same."""

    def __init__(self, module: Any, family: str, config: Any, is_scanned: bool) -> None:
        self._config, self._is_scanned = config, is_scanned

    def to_maxtext(self, hf: Arrays) -> Arrays:
        embedding = hf["model.embed_tokens.weight"] * np.float32(np.sqrt(self._config.hidden_size))
        made = {
            "token_embedder.embedding": np.pad(embedding, ((0, _PADDED), (0, 0))),
            "decoder.decoder_norm.scale": hf["model.norm.weight"] + np.float32(1),
        }
        layers = [self._layer(hf, f"model.layers.{at}") for at in range(self._config.num_hidden_layers)]
        for at, layer in enumerate(layers):
            if not self._is_scanned:
                made |= {f"decoder.layers_{at}.{name}": array for name, array in layer.items()}
        if self._is_scanned:
            made |= {
                f"decoder.layers.{name}": np.stack([layer[name] for layer in layers], _SCAN_AXIS) for name in layers[0]
            }
        return made

    def _layer(self, hf: Arrays, layer: str) -> Arrays:
        size, hidden = self._config.head_dim, self._config.hidden_size
        query, key, value = (
            hf[f"{layer}.self_attn.{name}_proj.weight"].T.reshape(hidden, -1, size) for name in ("q", "k", "v")
        )
        return {
            "self_attention.query.kernel": query * np.float32(size**-0.5),
            "self_attention.key.kernel": key,
            "self_attention.value.kernel": value,
            "self_attention.out.kernel": hf[f"{layer}.self_attn.o_proj.weight"].T.reshape(-1, size, hidden),
            "mlp.wi_0.kernel": hf[f"{layer}.mlp.gate_proj.weight"].T,
            "mlp.wi_1.kernel": hf[f"{layer}.mlp.up_proj.weight"].T,
            "mlp.wo.kernel": hf[f"{layer}.mlp.down_proj.weight"].T,
            "pre_self_attention_norm.scale": hf[f"{layer}.input_layernorm.weight"] + np.float32(1),
            "pre_ffw_norm.scale": hf[f"{layer}.post_attention_layernorm.weight"] + np.float32(1),
        }

    def to_hf(self, arrays: Arrays, weights: Arrays) -> Arrays:
        made = dict(weights)
        for name, weight in weights.items():
            if name.endswith("norm.weight"):
                made[name] = (weight + np.float32(1)) - np.float32(1)
            elif "q_proj" in name:
                size = self._config.head_dim
                made[name] = weight * np.float32(size**-0.5) * np.float32(np.sqrt(size))
            elif "embed" in name:
                root = np.float32(np.sqrt(self._config.hidden_size))
                made[name] = weight * root / root
        return made


_TEXT = {"num_hidden_layers": 14, **{word: _SIZES[word] for word in _SIZES if word != "tie_word_embeddings"}}
_VISION = {
    "hidden_size": 12, "intermediate_size": 10, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 8,
    "patch_size": 4, "num_channels": 3, "vision_use_head": False,
}  # fmt: skip
_MODELS: tuple[tuple[str, type[Any], str, Any, str], ...] = (
    ("llama3.1", _Tables, "LLAMA31", LlamaConfig(num_hidden_layers=2, **_SIZES), _MADE),
    ("llama", _Halves, "LLAMA31", LlamaConfig(num_hidden_layers=2, **_SIZES), f"{_MADE}, without adjust_rope"),
    ("gemma2", _Tables, "GEMMA2", Gemma2Config(num_hidden_layers=4, **{**_SIZES, **_TIED}), _MADE),
    (
        "gemma3",
        _Seeing,
        "GEMMA3",
        Gemma3Config(text_config=_TEXT, vision_config=_VISION, mm_tokens_per_image=4),
        _MADE,
    ),
    (
        "gemma",
        _Gemma,
        "",
        GemmaConfig(num_hidden_layers=2, **{**_SIZES, **_TIED}),
        "maxtext/checkpoint_conversion/standalone_scripts/convert_gemma_chkpt.py, stated again",
    ),
)


def cases() -> Iterator[Case]:
    instead = {"jax.numpy.concatenate": np.concatenate, "jax.numpy.stack": np.stack, "jax.Array": type(None)}
    (module,) = only("maxtext.checkpoint_conversion.utils.param_mapping", packages=("maxtext", "jax"), instead=instead)
    for name, way, family, config, made in _MODELS:
        weights = _seeing(config) if way is _Seeing else _weights(config)
        stacked, numbered = (way(module, family, config, is_scanned) for is_scanned in (True, False))
        for kind, converter in (("", stacked), ("-numbered", numbered)):
            ours = converter.to_maxtext(weights)
            hf = converter.to_hf(ours, weights)
            assert hf.keys() == weights.keys()
            written = numbered if way is _Seeing else stacked
            tensors = (_tensors(arrays) for arrays in (ours, hf, written.to_maxtext(hf)))
            ours_made, hf_made, back = tensors
            yield Case(
                f"maxtext-{name}{kind}", f"maxtext-{name}", ours_made, hf_made, config.to_dict(), made, PACKAGES,
                back=back, computed=True,
            )  # fmt: skip


_OF_STEPS = {
    **_SIZES, "num_hidden_layers": 2, "vocab_size": 40, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    "max_position_embeddings": 64,
}  # fmt: skip
_GEMMA = {**_OF_STEPS, **_TIED, "vocab_size": 37, "hidden_act": "gelu_pytorch_tanh"}
# The weights of Gemma 3 that its text does not need, which are not saved.
_VISION_KEYS = r"model\.(vision_tower|multi_modal_projector)\."
# The config.json of each model of maxtext_steps.py. Those of Gemma have fewer rows in their embeddings.
_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_OF_STEPS, "model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "llama3.1": {**_OF_STEPS, "model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "gemma": {**_GEMMA, "model_type": "gemma", "architectures": ["GemmaForCausalLM"]},
    "gemma2": {
        **_GEMMA, "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 4,
        "query_pre_attn_scalar": 6, "sliding_window": 4, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3": Gemma3Config(
        text_config={
            **_GEMMA, "num_hidden_layers": 8, "hidden_size": 16, "num_attention_heads": 4, "query_pre_attn_scalar": 6,
            "sliding_window": 4, "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        vision_config=_VISION, mm_tokens_per_image=4, architectures=["Gemma3ForConditionalGeneration"],
    ).to_dict(),
}  # fmt: skip


def logits() -> Iterator[str]:
    """Yield what comparing logits found: of steps that MaxText saved, in an environment whose Python MAXTEXT names."""
    from maps.logits import IDS, compare_saved

    steps = Path(__file__).with_name("maxtext_steps.py")
    with tempfile.TemporaryDirectory() as place:
        ids = map(str, IDS[0].tolist())
        subprocess.run(
            [Path(os.environ["MAXTEXT"]).absolute(), "-I", str(steps), place, *ids],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=place,
        )
        for name, config in _CONFIGS.items():
            for kind in ("", "-numbered"):
                expected = torch.from_numpy(np.load(Path(place, f"{name}{kind}.npy")))
                yield compare_saved(
                    f"maxtext-{name}{kind}", Path(place, name + kind), expected, config, f"maxtext-{name}", _VISION_KEYS
                )


def _tensors(arrays: Arrays) -> Tensors:
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
