"""Megatron-core's GPTModel, as mbridge converts it.

Transformer Engine, which Megatron trains with, needs a GPU. The models are made with Megatron-core's own layers, and
their parameters are given the names that they have with Transformer Engine's: those by which Megatron-core itself names
the norms in a distributed checkpoint, and mbridge the weights of experts.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from mbridge.core.bridge import Bridge
from mbridge.core.parallel_states import ParallelStates
from mbridge.models.deepseek_v3 import DeepseekV3Bridge
from mbridge.models.glm4moe import GLM4MoEBridge
from mbridge.models.llama import LLaMABridge
from mbridge.models.mixtral import MixtralBridge
from mbridge.models.qwen2 import Qwen2Bridge
from mbridge.models.qwen2moe import Qwen2MoEBridge
from mbridge.models.qwen3 import Qwen3Bridge
from mbridge.models.qwen3moe import Qwen3MoEBridge
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch.nn import functional
from transformers import AutoConfig

from maps.cases import Case, Tensors, numbered

PACKAGES = ("torch", "megatron-core", "mbridge", "transformers")
# The rows of embeddings are padded to a multiple of this.
_PAD = 16
# After how many layers mbridge takes DeepSeek's layer of further tokens to come.
_MTP_AT = 61
# Names with Megatron-core's layers, and with Transformer Engine's.
_NAMES = (
    (re.compile(r"\.input_layernorm\."), ".self_attention.linear_qkv.layer_norm_"),
    (re.compile(r"\.mlp\.experts\.local_experts\.(\d+)\.(linear_fc\d)\.weight"), r".mlp.experts.\2.weight\1"),
)
_DENSE_NORM = (re.compile(r"\.pre_mlp_layernorm\."), ".mlp.linear_fc1.layer_norm_")
_LATENT_NAMES = (
    (re.compile(r"\.q_layernorm\."), ".linear_q_up_proj.layer_norm_"),
    (re.compile(r"\.kv_layernorm\."), ".linear_kv_up_proj.layer_norm_"),
)


class WithBiases(LLaMABridge):  # type: ignore[misc,unused-ignore]
    """mbridge's Llama, which has the biases of queries, keys and values, with those of all other linear layers."""

    _ATTENTION_MAPPING: ClassVar = {
        **LLaMABridge._ATTENTION_MAPPING,
        "self_attention.linear_proj.bias": ["model.layers.{layer_number}.self_attn.o_proj.bias"],
    }
    _MLP_MAPPING: ClassVar = {
        **LLaMABridge._MLP_MAPPING,
        "mlp.linear_fc1.bias": [
            "model.layers.{layer_number}.mlp.gate_proj.bias",
            "model.layers.{layer_number}.mlp.up_proj.bias",
        ],
        "mlp.linear_fc2.bias": ["model.layers.{layer_number}.mlp.down_proj.bias"],
    }


BASE: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 37, "max_position_embeddings": 64, "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5, "attention_dropout": 0.0, "tie_word_embeddings": False,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "hidden_size": 20, "intermediate_size": 13, "num_hidden_layers": 3, "first_k_dense_replace": 1,
    "num_attention_heads": 3, "num_key_value_heads": 3, "q_lora_rank": 9, "kv_lora_rank": 10, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4, "v_head_dim": 5, "n_routed_experts": 4, "n_shared_experts": 2, "moe_intermediate_size": 7,
    "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "num_nextn_predict_layers": 0,
}  # fmt: skip
_EXPERTS = {"num_experts": 3, "moe_intermediate_size": 7, "num_experts_per_tok": 2, "norm_topk_prob": True}
_MODELS: dict[str, tuple[type[Bridge], dict[str, Any], dict[str, Any]]] = {
    "megatron-llama": (LLaMABridge, {"model_type": "llama"}, {}),
    "megatron-llama-biases": (
        WithBiases,
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
        {"add_bias_linear": True},
    ),
    "megatron-qwen2": (
        Qwen2Bridge,
        {"model_type": "qwen2", "head_dim": 4, "tie_word_embeddings": True},
        {"add_qkv_bias": True},
    ),
    "megatron-qwen3": (Qwen3Bridge, {"model_type": "qwen3"}, {"qk_layernorm": True}),
    "megatron-qwen3_moe": (
        Qwen3MoEBridge,
        {"model_type": "qwen3_moe", **_EXPERTS},
        {"qk_layernorm": True, "num_moe_experts": 3, "moe_ffn_hidden_size": 7},
    ),
    "megatron-qwen2_moe": (
        Qwen2MoEBridge,
        {"model_type": "qwen2_moe", "head_dim": 4, **_EXPERTS, "shared_expert_intermediate_size": 9},
        {
            "add_qkv_bias": True, "num_moe_experts": 3, "moe_ffn_hidden_size": 7,
            "moe_shared_expert_intermediate_size": 9, "moe_shared_expert_gate": True,
        },
    ),
    "megatron-glm4_moe": (
        GLM4MoEBridge,
        {
            "model_type": "glm4_moe", "num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 3,
            "moe_intermediate_size": 7, "num_experts_per_tok": 2, "n_shared_experts": 1, "use_qk_norm": True,
            "num_nextn_predict_layers": 1,
        },
        {
            "add_qkv_bias": True, "qk_layernorm": True, "num_moe_experts": 3, "moe_ffn_hidden_size": 7,
            "moe_shared_expert_intermediate_size": 7, "moe_layer_freq": [0, 1, 1], "mtp_num_layers": 1,
            "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid",
        },
    ),
    "megatron-mixtral": (
        MixtralBridge,
        {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 4},
        {"num_moe_experts": 3, "moe_ffn_hidden_size": 20},
    ),
    "megatron-deepseek_v3": (
        DeepseekV3Bridge,
        {"model_type": "deepseek_v3", **_LATENT, "num_nextn_predict_layers": 1},
        {
            "qk_layernorm": True, "num_moe_experts": 4, "moe_ffn_hidden_size": 7, "mtp_num_layers": 1,
            "moe_shared_expert_intermediate_size": 14, "moe_layer_freq": [0, 1, 1],
            "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid", "q_lora_rank": 9,
            "kv_lora_rank": 10, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": 5,
        },
    ),
}  # fmt: skip


def cases() -> Iterator[Case]:
    """Yield each model's tensors and what mbridge makes of them."""
    with alone():
        for name, (bridge, config, _) in _MODELS.items():
            padded = "deepseek" not in name
            ours = numbered(with_names(shapes(name, padded=padded)))
            hf_config = {**BASE, **config}
            converter = _converter(bridge, hf_config, padded=padded)
            hf: Tensors = {}
            back: Tensors = {}
            for ours_name, tensor in ours.items():
                made = dict(zip(*converter._weight_to_hf_format(ours_name, tensor), strict=True))
                layers = f".{hf_config['num_hidden_layers']}."
                hf |= {each.replace(f".{_MTP_AT}.", layers): part for each, part in made.items()}
                back[ours_name] = converter._weight_to_mcore_format(ours_name, list(made.values()))
            differs = {each for each in ours if not torch.equal(ours[each], back[each])}
            if not differs <= {"embedding.word_embeddings.weight", "output_layer.weight"}:
                raise ValueError(f"{name}: mbridge does not come back to {differs}")
            yield Case(
                name, name.removesuffix("-biases"), ours, hf, hf_config,
                f"mbridge's {bridge.__mro__[bridge is WithBiases].__name__}, weight by weight", PACKAGES,
                back={each: back[each] for each in differs},
            )  # fmt: skip


def logits() -> Iterator[str]:
    """Yield what comparing logits found: of models saved with Megatron-core's dist_checkpointing."""
    from maps.logits import IDS, compare

    mask = torch.triu(torch.ones(IDS.numel(), IDS.numel(), dtype=torch.bool), 1)[None, None]
    with alone():
        for name in (
            "megatron-llama",
            "megatron-llama-biases",
            "megatron-qwen2",
            "megatron-qwen3",
            "megatron-qwen3_moe",
        ):
            yield compare(
                name,
                model(name),
                lambda each: each(IDS, torch.arange(IDS.numel())[None], mask),
                lambda each, place: dist_checkpointing.save(each.sharded_state_dict(), str(place)),
                {**BASE, **_MODELS[name][1]},
                name.removesuffix("-biases"),
            )


def shapes(name: str, *, padded: bool) -> Tensors:
    """Return the state dict of a model of Megatron-core, without storage."""
    with torch.device("meta"):
        found: Tensors = model(name, padded=padded).state_dict()
    return found


def model(name: str, *, padded: bool = True) -> GPTModel:
    """Return a model of Megatron-core, with its own layers, on the device that torch has now."""
    _, hf, more = _MODELS[name]
    return gpt_model({**BASE, **hf}, more, padded=padded)


def gpt_model(hf: dict[str, Any], more: dict[str, Any], *, padded: bool) -> GPTModel:
    """Return a model of Megatron-core, of a configuration of Hugging Face and `more` settings of Megatron-core."""
    latent = "q_lora_rank" in more
    kind = MLATransformerConfig if latent else TransformerConfig
    if not latent:
        more = {"num_query_groups": hf["num_key_value_heads"], "kv_channels": hf["head_dim"], **more}
    config = kind(
        num_layers=hf["num_hidden_layers"], hidden_size=hf["hidden_size"],
        num_attention_heads=hf["num_attention_heads"], ffn_hidden_size=hf["intermediate_size"], normalization="RMSNorm",
        gated_linear_unit=True, activation_func=functional.silu, use_cpu_initialization=True,
        layernorm_epsilon=hf["rms_norm_eps"], hidden_dropout=0.0, attention_dropout=0.0, perform_initialization=False,
        bias_activation_fusion=False, **{"add_bias_linear": False, **more},
    )  # fmt: skip
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    if latent:
        # It asks for Transformer Engine's class, which is None here, and gives the attention what only that one takes.
        multi_latent_attention.TELinear = type(None)
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = IdentityOp
    further = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if config.mtp_num_layers else None
    vocab = -(-hf["vocab_size"] // _PAD) * _PAD if padded else hf["vocab_size"]
    return GPTModel(
        config=config, transformer_layer_spec=spec, mtp_block_spec=further, vocab_size=vocab, max_sequence_length=64,
        position_embedding_type="rope", rotary_base=int(hf["rope_theta"]),
        share_embeddings_and_output_weights=hf["tie_word_embeddings"],
    )  # fmt: skip


def with_names(tensors: Tensors) -> Tensors:
    """Return a state dict with Transformer Engine's names."""
    latent = any("linear_kv_up_proj" in name for name in tensors)
    made = {}
    for name, tensor in tensors.items():
        if name.endswith("_extra_state"):
            continue
        layer = name.partition(".mlp.")[0] if ".mlp." in name else name.rpartition(".pre_mlp_layernorm")[0]
        dense = f"{layer}.mlp.linear_fc1.weight" in tensors
        for pattern, instead in (
            *(_NAMES[1:] + _LATENT_NAMES if latent else _NAMES),
            *((_DENSE_NORM,) if dense else ()),
        ):
            name = pattern.sub(instead, name)
        made[name] = tensor
    return made


def _converter(bridge: Any, hf_config: dict[str, Any], *, padded: bool) -> Bridge:
    config = AutoConfig.for_model(**hf_config)
    for key, value in hf_config.items():
        setattr(config, key, value)
    made: Bridge = bridge.__new__(bridge)
    # Its tying of embeddings changes the class.
    made._DIRECT_MAPPING = dict(bridge._DIRECT_MAPPING)
    made.hf_config, made.dtype, made.mpu = config, torch.float32, ParallelStates()
    further = hf_config.get("num_nextn_predict_layers") or None
    deepseek = issubclass(bridge, DeepseekV3Bridge)
    layers = _MTP_AT if deepseek else config.num_hidden_layers
    made.config = type("Config", (), {"mtp_num_layers": further if deepseek else None, "num_layers": layers})()
    made._SHARED_STATE_DICT_MAPPING = {}  # which repeats embeddings and head for the layer of further tokens
    made.make_vocab_size_divisible_by = _PAD if padded else None
    made.vocab_size = config.vocab_size
    made.padded_vocab_size = -(-config.vocab_size // _PAD) * _PAD
    made._adjust_mapping_for_shared_weights()
    return made


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Run as the only process of a training."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    moe_utils.te_general_gemm = None  # which it asks for and does not define without Transformer Engine
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
