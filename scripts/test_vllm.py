"""Has vLLM's own loader read layers of multi-token prediction that we graft from a release, without a GPU.

    test_vllm.py [MODEL...]

A release is a tiny model of transformers whose layers beyond the last become those that predict further tokens, under
the names of real releases. A model that was trained is saved without them, and gets them by `--graft`. vLLM makes its
configurations, its model for drafts, whose parameters are all NaN then, and loads the output. Each parameter must have
been set to what the same loader gets of the release, or, of an embedding and a head that all layers share, to that of
the trained model. Nothing is computed with the parameters. The exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from formats import verified

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
HIDDEN, ROWS, LAYERS = 64, 96, 2
_SIDES: dict[str, Any] = {
    "hidden_size": HIDDEN, "vocab_size": ROWS, "num_hidden_layers": LAYERS + 1, "num_attention_heads": 4,
    "intermediate_size": 96, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}  # fmt: skip
_GROUPS: dict[str, Any] = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_routed_experts": 4}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "num_key_value_heads": 4, "n_shared_experts": 1,
}  # fmt: skip
# The projection that joins a state with the next embedding, and norms.
_BEHIND = {
    **dict.fromkeys(("enorm", "hnorm", "shared_head.norm"), (HIDDEN,)),
    "eh_proj": (HIDDEN, 2 * HIDDEN),
    **dict.fromkeys(("embed_tokens", "shared_head.head"), (ROWS, HIDDEN)),
}


class Model(NamedTuple):
    """A model: its class in transformers, the values of its configuration, those that releases state too, the names of
    its further layer, where that of transformers has `layer`, and of what is beside that."""

    cls: str
    config: dict[str, Any]
    stated: dict[str, Any]
    layer: str
    more: dict[str, tuple[int, ...]]
    glob: str


# Those that are of all layers, and not in the further one.
_OF_ALL = ("model.embed_tokens.weight", "lm_head.weight")
_LAST = f"model.layers.{LAYERS}"
_FURTHER = {f"{_LAST}.{name}": shape for name, shape in _BEHIND.items()}
MODELS = {
    "deepseek_v3": Model(
        "DeepseekV3ForCausalLM", {**_GROUPS, **_LATENT}, {"topk_method": "noaux_tc"}, _LAST, _FURTHER, f"{_LAST}.*"
    ),
    "glm4_moe": Model(
        "Glm4MoeForCausalLM",
        {**_GROUPS, "num_key_value_heads": 2, "head_dim": 16, "n_shared_experts": 1, "use_qk_norm": True},
        {},
        _LAST,
        _FURTHER,
        f"{_LAST}.*",
    ),
    "glm4_moe_lite": Model(
        "Glm4MoeLiteForCausalLM", {**_GROUPS, **_LATENT}, {"topk_method": "noaux_tc"}, _LAST, _FURTHER, f"{_LAST}.*"
    ),
    "qwen3_next": Model(
        "Qwen3NextForCausalLM",
        {
            "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
            "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention", "full_attention"],
        },
        {},
        "mtp.layers.0",
        {
            **dict.fromkeys(("mtp.norm", "mtp.pre_fc_norm_hidden", "mtp.pre_fc_norm_embedding"), (HIDDEN,)),
            "mtp.fc": (HIDDEN, 2 * HIDDEN),
        },
        "mtp.*",
    ),
    "ernie4_5_moe": Model(
        "Ernie4_5_MoeForCausalLM",
        # Of further layers, releases have no experts.
        {
            "num_key_value_heads": 2, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1, "moe_layer_end_index": 1,
        },
        {},
        "model.mtp_block.0",
        {
            **dict.fromkeys(("model.mtp_emb_norm.0", "model.mtp_hidden_norm.0"), (HIDDEN,)),
            "model.mtp_linear_proj.0": (HIDDEN, 2 * HIDDEN),
        },
        "model.mtp_*",
    ),
}  # fmt: skip


def saved(model: Model, seed: int, place: Path, further: bool) -> None:
    """Save a model with random numbers, with its `further` layer, or without."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    torch.manual_seed(seed)
    cls = getattr(transformers, model.cls)
    config = cls.config_class(**{**_SIDES, **model.config}, architectures=[model.cls])
    cls(config).bfloat16().save_pretrained(place)
    tensors = load_file(place / "model.safetensors")
    last = {name: tensor for name, tensor in tensors.items() if name.startswith(f"{_LAST}.")}
    tensors = {name: tensor for name, tensor in tensors.items() if name not in last}
    if further:
        tensors |= {model.layer + name.removeprefix(_LAST): tensor for name, tensor in last.items()}
        tensors |= {f"{name}.weight": torch.randn(shape).bfloat16() for name, shape in model.more.items()}
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    stated = json.loads((place / "config.json").read_text())
    stated |= {**model.stated, "num_hidden_layers": LAYERS, "num_nextn_predict_layers": int(further)}
    stated |= {"layer_types": stated["layer_types"][:LAYERS]} if "layer_types" in stated else {}
    (place / "config.json").write_text(json.dumps(stated))


def prepare(place: Path) -> None:
    """Have vLLM take the processor for its device, and be the only rank."""
    os.environ.update(VLLM_TARGET_DEVICE="cpu", VLLM_LOGGING_LEVEL="ERROR")
    import vllm.platforms
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{place}/store", 0, backend="gloo")
        initialize_model_parallel(1)


def loaded(place: Path) -> dict[str, Any]:
    """Return the parameters of vLLM's model for drafts, as its loader sets them from the model at `place`: those that
    it does not set are NaN."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    drafting = {"method": "mtp", "num_speculative_tokens": 1}
    words: dict[str, Any] = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 64}
    config = EngineArgs(str(place), speculative_config=drafting, dtype="bfloat16", **words).create_engine_config()
    drafts = config.speculative_config.draft_model_config
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        model = initialize_model(vllm_config=config, model_config=drafts)
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)
        get_model_loader(config.load_config).load_weights(model, drafts)
    return {name: parameter.data for name, parameter in model.named_parameters()}


def check(model: Model, place: Path) -> str:
    """Return what is wrong with a model whose further layer was grafted; "" if nothing is."""
    import torch
    from safetensors.torch import load_file

    import ckptconv

    saved(model, 0, place / "release", further=True)
    saved(model, 1, place / "trained", further=False)
    ckptconv.convert(place / "trained", place / "whole", graft=f"{place / 'release'}:{model.glob}", **verified())
    whole, release = (loaded(place / name) for name in ("whole", "release"))
    trained = load_file(place / "trained" / "model.safetensors")
    if unset := [name for name, parameter in whole.items() if parameter.isnan().any()]:
        return f"not set: {', '.join(unset)}"
    for name, parameter in whole.items():
        # vLLM adds rows of zeros to those of the vocabulary.
        known = release[name], *([trained[name]] if name in _OF_ALL else [])
        if not any(torch.equal(parameter[: len(own)], own) for own in known):
            return f"{name} is neither that of the release, nor one of all layers"
    return ""


def main() -> int:
    """Check the models that are named, all by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; all by default")
    wrong = 0
    with tempfile.TemporaryDirectory() as directory:
        prepare(Path(directory))
        for name in parser.parse_args().models or MODELS:
            why = check(MODELS[name], Path(directory, name))
            print(f"{name}: {why or 'every parameter is set'}", flush=True)
            wrong += bool(why)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
