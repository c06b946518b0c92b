"""Parts of tiny models of transformers are compared with the models, cut in memory.

Each model has random weights, and is saved by `save_pretrained`. A part of that has to load without missing, unexpected
or mismatched names, and its logits have to equal those of the model whose layers, or rows of routers and experts, were
taken in memory, bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from formats import verified

NEEDED = ("torch", "transformers", "compressed_tensors")
LAYERS, EXPERTS = 6, 8
_BASE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_MOE: dict[str, Any] = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT: dict[str, Any] = {
    "n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 2,
}  # fmt: skip
_NARROW: dict[str, Any] = {
    **_LATENT, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
# Settings by kind; None for one that the kind has not.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen2": {}, "qwen3": {}, "gemma2": {}, "olmo3": {}, "cohere2": {}, "exaone4": {}, "lfm2": {},
    "gpt2": {"n_layer": LAYERS, "n_embd": 32, "n_head": 4},
    "ernie4_5_moe": {"moe_num_experts": EXPERTS, "moe_k": 2, "moe_intermediate_size": 16},
    "minimax_m2": {"num_local_experts": EXPERTS, "num_experts_per_tok": 2},
    "hunyuan_v1_moe": {"num_experts": EXPERTS, "moe_topk": 2},
    "qwen3_moe": _MOE, "mixtral": {"num_local_experts": EXPERTS, "num_experts_per_tok": 2},
    "qwen2_moe": {**_MOE, "shared_expert_intermediate_size": 16},
    "deepseek_v3": _NARROW,
    "gpt_oss": {"num_local_experts": EXPERTS, "num_experts_per_tok": 2},
    "qwen3_next": {
        **_MOE, "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "full_attention_interval": 3,
    },
    "llama4_text": {
        "num_local_experts": EXPERTS, "num_experts_per_tok": 1, "intermediate_size_mlp": 48,
        "interleave_moe_layer_step": 2,
    },
    "gemma3_text": {"sliding_window_pattern": 3},
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "mamba", "moe", "attention"], "n_routed_experts": EXPERTS,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16,
        "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8,
        "use_mamba_kernels": False,
    },
    "glm4_moe": _LATENT,
    "jamba": {
        "num_experts": EXPERTS, "num_experts_per_tok": 2, "attn_layer_period": 3, "attn_layer_offset": 1,
        "expert_layer_period": 2, "expert_layer_offset": 1, "use_mamba_kernels": False, "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "granitemoehybrid": {
        "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "shared_intermediate_size": 16,
        "layer_types": ["mamba", "mamba", "attention"] * 2, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8,
        "mamba_expand": 2, "mamba_chunk_size": 8,
    },
    "glm4_moe_lite": _NARROW, "glm_moe_dsa": _NARROW, "deepseek_v32": _NARROW, "deepseek_v2": _NARROW,
    "kimi_linear": {**_NARROW, "num_experts": EXPERTS}, "dots1": _LATENT, "exaone_moe": {**_LATENT, **_MOE},
    "bailing_hybrid": {**_NARROW, "num_local_experts": EXPERTS, "layer_group_size": 3},
    "afmoe": {**_MOE, "num_dense_layers": 2, "sliding_window": 8, "num_shared_experts": 1},
    "lfm2_moe": {**_MOE, "num_dense_layers": 2, "layer_types": ["conv", "full_attention", "conv"] * 2},
    "phimoe": {"num_local_experts": EXPERTS, "num_experts_per_tok": 2}, "olmoe": _MOE,
    "kolibri1": {**_MOE, "num_local_experts": EXPERTS, "shared_expert_intermediate_size": 16},
    "falcon_h1": {
        "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64, "mamba_d_state": 8, "mamba_n_groups": 1,
        "mamba_chunk_size": 8,
    },
    "bamba": {
        "attn_layer_indices": [1, 4], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_expand": 2,
        "mamba_n_groups": 1, "mamba_chunk_size": 8,
    },
    "gpt_neox": {}, "falcon": {"head_dim": None}, "mpt": {"d_model": 32, "n_heads": 4, "n_layers": LAYERS}, "bloom": {},
    "minicpm3": {**_NARROW, "n_routed_experts": None}, "bert": {"is_decoder": True},
    "modernbert-decoder": {}, "diffllama": {}, "gpt_neox_japanese": {}, "rwkv": {"attention_hidden_size": 32},
}  # fmt: skip
# Parts that are refused, as no configuration is true of them, with a word of the error: of layers that are not the
# first ones, or of all.
REFUSED: dict[str, tuple[str, bool]] = {
    "modernbert-decoder": ("attn_norm", False), "diffllama": ("lambda_k1", False), "rwkv": ("pre_ln", False),
    "gpt_neox_japanese": ("dense_bias", True),
}  # fmt: skip
_FIRST, _OTHERS, _KEPT = [0, 1, 2], [1, 2, 4], [0, 2, 5, 7]
# Attributes of modules and configurations that count experts, and lists with an entry for each layer.
_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "num_routed_experts")
_STACKS = ("layers", "h", "layer", "blocks")
_LISTS = ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers")


# The models whose experts compressed-tensors prunes too: patterns of the names of routers and of experts.
_PRUNED = {
    "qwen3_moe": (r"mlp\.gate\.weight$", r"mlp\.experts\."),
    "mixtral": (r"\.gate\.weight$", r"\.experts\."),
    "deepseek_v3": (r"mlp\.gate\.weight$", r"mlp\.experts\."),
    "gpt_oss": (r"mlp\.router\.weight$", r"mlp\.experts\."),
}


def check(place: Path, seed: int) -> Iterator[tuple[str, str]]:
    """Yield the name of each case, and what is wrong with it."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    for kind, more in MODELS.items():
        torch.manual_seed(seed)
        settings = {name: value for name, value in {**_BASE, **more}.items() if value is not None}
        config = transformers.AutoConfig.for_model(kind, **settings)
        model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
        model.save_pretrained(place / kind)
        yield from _parts(place / kind, model, kind)
        if kind in _PRUNED:
            yield f"{kind} pruned by compressed-tensors", _pruned(place / kind, *_PRUNED[kind])
    yield from _components(place, seed)


def _parts(place: Path, model: Any, kind: str) -> Iterator[tuple[str, str]]:
    has_experts = any(getattr(model.config, name, None) == EXPERTS for name in _COUNTS)
    for layers, experts in (
        (_FIRST, None),
        (_OTHERS, None),
        *([(None, _KEPT), (_FIRST, _KEPT)] if has_experts else []),
    ):
        said = {name: value for name, value in (("layers", layers), ("experts", experts)) if value}
        why = _compared(place, model, said)
        word, is_always = REFUSED.get(kind, ("", False))
        if word and (is_always or layers == _OTHERS):
            why = "" if why.startswith("refused: ") and word in why else f"not refused for {word}: {why}"
        yield f"{kind} {said}", why


def _compared(place: Path, model: Any, part: dict[str, list[int]]) -> str:
    """Return what is wrong with a part; "" if nothing is."""
    from transformers import AutoModelForCausalLM

    import ckptconv

    out = place.with_name(f"{place.name}-{'-'.join(part)}-{len(part)}")
    try:
        ckptconv.convert(place, out, overwrite=True, fsync=False, **verified(), **part)  # type: ignore[arg-type]
    except ckptconv.CkptconvError as error:
        return f"refused: {error}"
    try:
        loaded, found = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, dtype="float32")
    except Exception as error:
        return f"from_pretrained: {type(error).__name__}: {error}"
    wrong = {name: sorted(map(str, each)) for name, each in found.items() if each}
    return f"{wrong}" if wrong else _differing(loaded, _in_memory(model, **part))


def _pruned(place: Path, routers: str, experts: str) -> str:
    """Return what differs between a part with the experts that compressed-tensors keeps, and what it writes itself."""
    import json

    import torch
    from compressed_tensors.entrypoints.convert import MagnitudeExpertPruner, convert_checkpoint
    from safetensors.torch import load_file

    import ckptconv

    theirs, ours = (place.with_name(f"{place.name}-{word}") for word in ("pruned", "kept"))
    pruner = MagnitudeExpertPruner.from_pretrained(str(place), routers, experts, sparsity=0.5)
    convert_checkpoint(str(place), str(theirs), pruner, max_workers=1, device="cpu")
    kept = [pruner.retained_experts[name] for name in sorted(pruner.retained_experts)]
    ckptconv.convert(place, ours, experts=kept, fsync=False, **verified())
    both = [
        {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
        for path in (theirs, ours)
    ]
    if both[0].keys() != both[1].keys():
        return f"names differ: {sorted(both[0].keys() ^ both[1].keys())[:4]}"
    wrong = [name for name, tensor in both[0].items() if not torch.equal(tensor, both[1][name])]
    counts = [
        {name: value for name, value in json.loads((path / "config.json").read_text()).items() if name in _COUNTS}
        for path in (theirs, ours)
    ]
    return f"tensors differ: {wrong[:4]}" if wrong else "" if counts[0] == counts[1] else f"counts differ: {counts}"


def _differing(one: Any, other: Any) -> str:
    import torch

    tokens = torch.arange(3, 23).view(2, 10)
    # The sums of some processors depend on where in memory a matrix begins.
    for model in (one, other):
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()
    with torch.no_grad():
        logits = [model.eval()(input_ids=tokens, use_cache=False).logits for model in (one, other)]
    if not all(each.isfinite().all() for each in logits):
        return "logits are not finite"
    return "" if torch.equal(*logits) else f"logits differ by up to {(logits[0] - logits[1]).abs().max().item()}"


def _in_memory(model: Any, layers: list[int] | None = None, experts: list[int] | None = None) -> Any:
    """Return a copy of a model with these layers, and experts of each."""
    import torch

    model = copy.deepcopy(model)
    if experts:
        for name, module in model.named_modules():
            is_place = {*name.split(".")} & {"experts", "gate", "router", "moe_statics", "block_sparse_moe"}
            _take(module, experts, all_of_it=bool(is_place))
        for each in (*model.modules(), model.config):
            for name in _COUNTS:
                if getattr(each, name, None) == EXPERTS:
                    setattr(each, name, len(experts))
    if layers:
        stacks = ((each, name) for each in model.modules() for name in _STACKS if hasattr(each, name))
        base, name = next(
            found
            for found in stacks
            if isinstance(getattr(*found), torch.nn.ModuleList) and len(getattr(*found)) == LAYERS
        )
        setattr(base, name, torch.nn.ModuleList([getattr(base, name)[number] for number in layers]))
        for config in {id(each): each for each in (model.config, getattr(base, "config", model.config))}.values():
            for name in _LISTS:
                value = vars(config).get(name)
                if isinstance(value, list) and len(value) == LAYERS:
                    setattr(config, name, [value[number] for number in layers])
            if "num_hidden_layers" in vars(config):
                config.num_hidden_layers = len(layers)
    return model


def _take(module: Any, experts: list[int], all_of_it: bool) -> None:
    """Take the rows of these experts from the tensors of a module, or from its biases alone, and modules from lists."""
    import torch

    if all_of_it and isinstance(module, torch.nn.ModuleList) and len(module) == EXPERTS:
        kept = [module[number] for number in experts]
        del module[:]
        module.extend(kept)
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        if EXPERTS in (tensor.shape[:1] + tensor.shape[-1:]) and (
            all_of_it or name.endswith(("correction_bias", "expert_bias"))
        ):
            held = tensor.data[experts] if tensor.shape[0] == EXPERTS else tensor.data[..., experts]
            setattr(module, name, torch.nn.Parameter(held) if isinstance(tensor, torch.nn.Parameter) else held)
    if all_of_it and isinstance(module, torch.nn.Linear) and module.out_features == EXPERTS:
        module.out_features = len(experts)


def _components(place: Path, seed: int) -> Iterator[tuple[str, str]]:
    """The language model of one that sees images is that of the whole, and the vision model too."""
    import torch
    from transformers import AutoModel, AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

    import ckptconv

    torch.manual_seed(seed)
    eyes = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
        "patch_size": 8,
    }  # fmt: skip
    config = Gemma3Config(text_config={**_BASE, "sliding_window_pattern": 3}, vision_config=eyes, mm_tokens_per_image=1)
    model = Gemma3ForConditionalGeneration(config).eval().float()
    model.save_pretrained(place / "gemma3")
    for component, kind in (("text", AutoModelForCausalLM), ("vision", AutoModel)):
        whole: Any = ckptconv.convert
        whole(place / "gemma3", place / component, component=component, fsync=False, **verified())
        loaded, found = kind.from_pretrained(place / component, output_loading_info=True, dtype="float32")
        wrong = {name: sorted(map(str, each)) for name, each in found.items() if each}
        if wrong or component == "vision":
            own = {
                name.rpartition("vision_tower.")[2]: each for name, each in model.named_parameters() if "vision" in name
            }
            equal = all(torch.equal(each, own[name]) for name, each in loaded.named_parameters()) if not wrong else True
            yield f"gemma3 {component}", f"{wrong}" if wrong else "" if equal else "weights differ"
        else:
            yield f"gemma3 {component}", _differing(loaded, model)
    ckptconv.convert(place / "gemma3", place / "few", layers=_FIRST, fsync=False, **verified())
    loaded, found = Gemma3ForConditionalGeneration.from_pretrained(place / "few", output_loading_info=True)
    wrong = {name: sorted(map(str, each)) for name, each in found.items() if each}
    yield "gemma3 layers", f"{wrong}" if wrong else _differing(loaded, _in_memory(model, _FIRST))
