"""torchtitan's models, as its StateDictAdapters convert them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.nn import functional
from torchtitan.models import deepseek_v3, gpt_oss, llama3, qwen3
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter
from torchtitan.models.gpt_oss.state_dict_adapter import GptOssStateDictAdapter
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

from maps.alone import only
from maps.cases import Case, numbered, same

only(packages=("fla",))  # kernels for GPUs
from torchtitan.models import qwen3_5  # noqa: E402
from torchtitan.models.qwen3_5.state_dict_adapter import Qwen35StateDictAdapter  # noqa: E402

PACKAGES = ("torch", "torchtitan")
_BACKEND = "flex"
_QWEN35 = {
    "text_config": {"linear_num_key_heads": 2, "linear_key_head_dim": 3},
    "vision_config": {"in_channels": 3, "temporal_patch_size": 2, "patch_size": 2},
}
_DEEPSEEK = {"n_routed_experts": 4, "num_hidden_layers": 3}
# What torchtitan 0.3 adds to the names of parameters: their axes.
_AXES = re.compile(r"_[EGDF]+$")


def cases() -> Iterator[Case]:
    """Yield each model's tensors and what torchtitan's adapter makes of them."""
    for name, config, adapter, hf_config in (
        ("torchtitan-llama3", llama3_model(), Llama3StateDictAdapter, llama3_hf()),
        (
            "torchtitan-qwen3",
            qwen3_model(),
            Qwen3StateDictAdapter,
            {"num_attention_heads": 3, "num_key_value_heads": 1},
        ),
        ("torchtitan-qwen3-moe", qwen3_moe_model(), Qwen3StateDictAdapter, {"num_experts": 3}),
        ("torchtitan-qwen3_5", qwen35_model(), Qwen35StateDictAdapter, _QWEN35),
        ("torchtitan-qwen3_5-moe", qwen35_moe_model(), Qwen35StateDictAdapter, _QWEN35),
        ("torchtitan-deepseek_v3", deepseek_model(), DeepSeekV3StateDictAdapter, _DEEPSEEK),
        ("torchtitan-deepseek_v3-lite", deepseek_model(q_lora_rank=0), DeepSeekV3StateDictAdapter, _DEEPSEEK),
    ):
        with torch.device("meta"):
            shapes = config.build().state_dict()
        ours = numbered(shapes)
        hf = adapter(config, None).to_hf(dict(ours))
        back = adapter(config, None).from_hf(dict(hf))
        if not same(back, {each: ours[each] for each in back}):
            raise ValueError(f"{name}: from_hf does not undo to_hf")
        yield Case(name, _map(name), ours, hf, hf_config, f"{adapter.__name__}.to_hf, and from_hf back", PACKAGES,
            lost=tuple(ours.keys() - back.keys()))  # fmt: skip
    yield _gpt_oss()


def _gpt_oss() -> Case:
    """Return gpt-oss. torchtitan's adapter gives experts the names and the layout of MXFP4's, and has the names of 0.2.
    transformers holds what MXFP4 gives with the last two axes exchanged."""
    config = gpt_oss_model()
    with torch.device("meta"):
        shapes = config.build().state_dict()
    ours = numbered(shapes)
    known = {_AXES.sub("", name): tensor for name, tensor in ours.items()}
    adapter = GptOssStateDictAdapter(config, None)
    made = adapter.to_hf(dict(known))
    adapter._validate_hf_rope_config = lambda *_: None
    lost = known.keys() - adapter.from_hf(dict(made)).keys()
    hf = {
        name.removesuffix("_blocks"): tensor.transpose(1, 2) if name.endswith("_blocks") else tensor
        for name, tensor in made.items()
    }
    told = "GptOssStateDictAdapter.to_hf, and experts from MXFP4's layout to that of transformers"
    return Case("torchtitan-gpt_oss", "torchtitan-gpt_oss", ours, hf, {"num_local_experts": 3}, told, PACKAGES,
        lost=tuple(name for name in ours if _AXES.sub("", name) in lost))  # fmt: skip


def logits() -> Iterator[str]:
    """Yield what comparing logits found: of a Llama 3 saved by torch.distributed.checkpoint, as torchtitan does it."""
    from torch.distributed.checkpoint.state_dict_saver import save

    from maps.logits import IDS, compare

    model = llama3_model().build()
    for module in model.modules():
        if type(module).__name__ == "FlexAttention":
            module.forward = _causal
    yield compare(
        "torchtitan-llama3",
        model,
        lambda each: each(IDS, positions=torch.arange(IDS.numel())[None]),
        lambda each, place: save(each.state_dict(), checkpoint_id=place),
        llama3_hf(),
        "torchtitan-llama3",
    )


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
    """Attend as torchtitan's FlexAttention does, which is compiled. Batch, position, head, and element of a head."""
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def _map(name: str) -> str:
    return name.removesuffix("-moe").removesuffix("-lite")


def llama3_hf() -> dict[str, Any]:
    """Return the config.json of the llama: more query heads than key heads."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 24, "intermediate_size": 20,
        "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 37,
        "max_position_embeddings": 64, "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    }  # fmt: skip


def llama3_model() -> Any:
    """Return torchtitan's config of the same model."""
    hf = llama3_hf()
    rope = ComplexRoPE.Config(dim=hf["head_dim"], max_seq_len=64, theta=hf["rope_theta"], scaling="none")
    layers = llama3._build_llama3_layers(
        n_layers=hf["num_hidden_layers"],
        dim=hf["hidden_size"],
        n_heads=hf["num_attention_heads"],
        n_kv_heads=hf["num_key_value_heads"],
        hidden_dim=hf["intermediate_size"],
        rope=rope,
        attn_backend=_BACKEND,
    )
    return _around(llama3.Llama3Model.Config, hf["hidden_size"], hf["vocab_size"], layers)


def qwen3_model() -> Any:
    layers = qwen3._build_qwen3_layers(
        n_layers=2, dim=20, n_heads=3, n_kv_heads=1, head_dim=8, hidden_dim=28, attn_backend=_BACKEND,
        rope=CosSinRoPE.Config(dim=8, max_seq_len=64, theta=1e6),
    )  # fmt: skip
    return _around(qwen3.Qwen3Model.Config, 20, 41, layers)


def qwen3_moe_model() -> Any:
    layers = qwen3._build_qwen3_moe_layers(
        n_layers=2, dim=20, n_heads=4, n_kv_heads=2, head_dim=6, moe_hidden_dim=7, num_experts=3, top_k=2,
        attn_backend=_BACKEND, moe_comm_backend="standard",
        rope=CosSinRoPE.Config(dim=6, max_seq_len=64, theta=1e6),
    )  # fmt: skip
    return _around(qwen3.Qwen3Model.Config, 20, 41, layers)


def qwen35_model() -> Any:
    return _qwen35(qwen3_5._build_qwen35_layers, hidden_dim=28)


def qwen35_moe_model() -> Any:
    sizes = {"moe_hidden_dim": 7, "num_experts": 3, "top_k": 2, "shared_expert_hidden_dim": 9}
    return _qwen35(qwen3_5._build_qwen35_moe_layers, **sizes)


def _qwen35(build: Any, **more: Any) -> Any:
    """Return a model whose layers `build` makes: linear attention, and then full attention."""
    layers = build(
        n_layers=2, dim=20, n_heads=4, n_kv_heads=2, head_dim=8, rotary_dim=4, n_key_heads=2, n_value_heads=4,
        key_head_dim=3, value_head_dim=5, full_attention_interval=2, attn_backend=_BACKEND,
        rope=qwen3_5.MRoPE.Config(dim=4, max_seq_len=64, theta=1e7, mrope_section=[1, 1, 0]), **more,
    )  # fmt: skip
    vision = qwen3_5._qwen35_vision_encoder_config(
        dim=8, ffn_dim=12, num_layers=2, num_heads=2, patch_size=2, temporal_patch_size=2, spatial_merge_size=2,
        out_hidden_size=20, num_position_embeddings=16,
    )  # fmt: skip
    return _around(qwen3_5.Qwen35Model.Config, 20, 41, layers, vision_encoder=vision)


def gpt_oss_model() -> Any:
    attention = partial(gpt_oss._make_gptoss_attn_config, n_heads=6, n_kv_heads=2, head_dim=4)
    with mock.patch.object(gpt_oss, "_make_gptoss_attn_config", attention):
        layers = gpt_oss._build_gptoss_layers(
            n_layers=2, dim=20, hidden_dim=7, num_experts=3, top_k=2, load_balance_coeff=1e-3, attn_backend=_BACKEND,
            moe_comm_backend="standard", rope=CosSinRoPE.Config(dim=4, max_seq_len=64, theta=1e6),
        )  # fmt: skip
    return _around(gpt_oss.GptOssModel.Config, 20, 41, layers)


def deepseek_model(q_lora_rank: int = 9) -> Any:
    layers = deepseek_v3._build_dsv3_layers(
        n_layers=3, n_dense_layers=1, dim=20, n_heads=3, q_lora_rank=q_lora_rank, kv_lora_rank=10, qk_nope_head_dim=6,
        qk_rope_head_dim=4, v_head_dim=5, mscale=1.0, dense_hidden_dim=13, moe_hidden_dim=7, num_experts=4,
        num_shared_experts=2, router_top_k=2, router_score_func="sigmoid", attn_backend=_BACKEND,
        moe_comm_backend="standard", non_blocking_capacity_factor=None,
        rope=ComplexRoPE.Config(dim=4, max_seq_len=64, theta=1e4, scaling="none"),
    )  # fmt: skip
    further = deepseek_v3._build_mtp_layers(layers[-1], dim=20, num_mtp_layers=1) if q_lora_rank else []
    return _around(deepseek_v3.DeepSeekV3Model.Config, 20, 41, layers, mtp_layers=further)


def _around(kind: Any, dim: int, vocab: int, layers: Any, **more: Any) -> Any:
    """Return the config of a model of `kind` with embeddings and a head around its layers."""
    return kind(
        dim=dim,
        vocab_size=vocab,
        tok_embeddings=Embedding.Config(num_embeddings=vocab, embedding_dim=dim, param_init=None),
        norm=RMSNorm.Config(normalized_shape=dim, param_init=None),
        lm_head=Linear.Config(in_features=dim, out_features=vocab, param_init=None),
        layers=layers,
        **more,
    )
