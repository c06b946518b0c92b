"""Has Megatron-core load steps that we write of models of transformers, on the CPU with gloo.

    test_megatron.py [MODEL...]

Tiny models of transformers become steps of Megatron-core. Megatron-core loads each with StrictHandling.RAISE_ALL, so
that every key must be there and no other, and into the model with strict=True: on one rank, and with two ranks in
tensor, pipeline and expert parallelism. The logits must be those of transformers. Then it saves what it loaded: that
becomes a model of transformers again, which must have the tensors of the first, bit for bit. With a configuration that
follows from run_config.yaml alone, as Megatron-Bridge wrote it of such a model, it must have the same logits.
Transformer Engine needs a GPU, so the layers are Megatron-core's own. The exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import spawn
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[1]
# Megatron-Bridge wrote them.
RUN_CONFIGS = ROOT / "tests/features" / "megatron_bridge/data/run_configs.tar.xz"
VOCABULARY, PADDING = 120, 8
BASE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCABULARY, "max_position_embeddings": 64,
    "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "attention_dropout": 0.0, "tie_word_embeddings": False,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "head_dim": 8, "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4, "n_shared_experts": 1,
    "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    "num_nextn_predict_layers": 0, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama+scaling": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    },
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "deepseek_v3": LATENT,
    "deepseek_v3+yarn": {
        **LATENT,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32,
            "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 1.0,
        },
    },
}  # fmt: skip
# Ranks in tensor, pipeline and expert parallelism; the last for models with experts.
MESHES = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2))
# The largest difference of logits: float32, added up in another order.
CLOSE = 1e-5
IDS = torch.arange(12)[None] * 7 % VOCABULARY


def family(name: str) -> str:
    """Return the type of a model, of which there may be several."""
    return name.partition("+")[0]


def make(name: str, place: Path) -> None:
    """Save a model of transformers with random weights, and its logits."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = (
        AutoModelForCausalLM.from_config(AutoConfig.for_model(family(name), **{**BASE, **MODELS[name]})).float().eval()
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, float(parameter.dim() == 1), 0.1)
    for buffer_name, buffer in model.named_buffers():
        if "correction_bias" in buffer_name:
            torch.nn.init.normal_(buffer, 0.0, 0.01)
    model.save_pretrained(place / "hf")
    with torch.no_grad():
        torch.save(model(IDS).logits, place / "logits.pt")


def convert(*words: object) -> None:
    """Run ckptconv."""
    program = [sys.executable, "-m", "ckptconv", *map(str, words), "--quiet"]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    subprocess.run(program, check=True, env={**os.environ, "PYTHONPATH": paths})


class Attention(torch.nn.Module):
    """The attention of latent keys, which Megatron-core has from Transformer Engine only."""

    def __init__(self, softmax_scale: float = 1.0, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> torch.Tensor:
        queries, keys, values = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        scores = queries @ keys.transpose(2, 3) * self.scale
        later = torch.triu(torch.ones(scores.shape[-2:], dtype=torch.bool), 1)
        made: torch.Tensor = (scores.masked_fill(later, float("-inf")).softmax(-1) @ values).permute(2, 0, 1, 3)
        return made.reshape(made.shape[0], made.shape[1], -1)


def on_cpu() -> None:
    """Have Megatron-core do without CUDA."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    multi_latent_attention.TELinear = type(None)
    moe_utils.te_general_gemm = None
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]


def yarn(hf: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of Megatron-core for YaRN of a model with latent attention; none without it."""
    made = dict(hf.get("rope_scaling", {}))
    return {"rotary_scaling_factor": made.pop("factor"), **made} if made else {}


def settings(name: str, hf: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of Megatron-core for a model."""
    made: dict[str, Any] = {}
    if family(name) != "deepseek_v3":
        made |= {"num_query_groups": hf["num_key_value_heads"], "kv_channels": hf["head_dim"]}
    made["qk_layernorm"] = family(name) != "llama"
    if "num_experts_per_tok" in hf:
        made |= {
            "num_moe_experts": 4, "moe_ffn_hidden_size": hf["moe_intermediate_size"], "moe_router_topk": 2,
            "moe_token_dispatcher_type": "allgather", "moe_router_load_balancing_type": "none",
        }  # fmt: skip
    if family(name) == "deepseek_v3":
        dense = hf["first_k_dense_replace"]
        made |= {
            "q_lora_rank": hf["q_lora_rank"], "kv_lora_rank": hf["kv_lora_rank"],
            "qk_head_dim": hf["qk_nope_head_dim"], "qk_pos_emb_head_dim": hf["qk_rope_head_dim"],
            "v_head_dim": hf["v_head_dim"], "moe_layer_freq": [0] * dense + [1] * (hf["num_hidden_layers"] - dense),
            "moe_shared_expert_intermediate_size": hf["moe_intermediate_size"], "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": hf["routed_scaling_factor"],
            "moe_router_dtype": "fp32", "rope_type": "rope", "rotary_base": 10000, "apply_rope_fusion": False,
        }  # fmt: skip
        made |= yarn(hf)
    return made


def build(name: str, mesh: tuple[int, int, int]) -> Any:
    """Return a model of Megatron-core on this rank."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    hf = {**BASE, **MODELS[name]}
    tensor, pipeline, expert = mesh
    config = (MLATransformerConfig if family(name) == "deepseek_v3" else TransformerConfig)(
        num_layers=hf["num_hidden_layers"], hidden_size=hf["hidden_size"], layernorm_epsilon=hf["rms_norm_eps"],
        num_attention_heads=hf["num_attention_heads"], ffn_hidden_size=hf["intermediate_size"],
        normalization="RMSNorm", gated_linear_unit=True, activation_func=functional.silu, hidden_dropout=0.0,
        attention_dropout=0.0, add_bias_linear=False, use_cpu_initialization=True, bias_activation_fusion=False,
        masked_softmax_fusion=False, gradient_accumulation_fusion=False, pipeline_dtype=torch.float32,
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, expert_model_parallel_size=expert,
        **settings(name, hf),
    )  # fmt: skip
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    for layer in spec.layer_specs if family(name) == "deepseek_v3" else ():
        layer.submodules.self_attention.submodules.core_attention = Attention
    return GPTModel(
        config=config, transformer_layer_spec=spec, rope_scaling="rope_scaling" in hf, rope_scaling_factor=32.0,
        vocab_size=VOCABULARY + PADDING, max_sequence_length=64,
        position_embedding_type="rope", rotary_base=10000, parallel_output=False,
        share_embeddings_and_output_weights=hf["tie_word_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
    ).eval()  # fmt: skip


def computed(model: Any, rank: int, world: int, mesh: tuple[int, int, int]) -> torch.Tensor | None:
    """Return the logits of a model of Megatron-core; None unless this rank has its last layers."""
    from megatron.core import parallel_state

    mask = torch.triu(torch.ones(IDS.numel(), IDS.numel(), dtype=torch.bool), 1)[None, None]
    half = world // mesh[1]
    with torch.no_grad():
        if not parallel_state.is_pipeline_first_stage():
            between = torch.empty(IDS.numel(), 1, BASE["hidden_size"])
            torch.distributed.recv(between, rank - half)
            model.set_input_tensor(between)
        made: torch.Tensor = model(IDS, torch.arange(IDS.numel())[None], mask)
        if not parallel_state.is_pipeline_last_stage():
            torch.distributed.send(made.contiguous(), rank + half)
            return None
    return made


def load(rank: int, world: int, name: str, place: Path, step: Path, mesh: tuple[int, int, int]) -> None:
    """Load the step on a rank, compare the logits, and save the model again."""
    warnings.filterwarnings("ignore")
    store = FileStore(str(place / f"store-{'-'.join(map(str, mesh))}"), world)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.validation import StrictHandling

    on_cpu()
    parallel_state.initialize_model_parallel(*mesh[:2], expert_model_parallel_size=mesh[2])
    model = build(name, mesh)
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    wanted = model.sharded_state_dict(metadata=metadata)
    state = dist_checkpointing.load(wanted, str(step), strict=StrictHandling.RAISE_ALL)
    model.load_state_dict({key: value for key, value in state.items() if key in wanted}, strict=True)
    made = computed(model, rank, world, mesh)
    if made is not None:
        differs = (made[..., :VOCABULARY] - torch.load(place / "logits.pt")).abs().max().item()
        if not differs < CLOSE:
            raise SystemExit(f"{name} at {mesh}: the logits differ by {differs}")
    again = place / f"again-{'-'.join(map(str, mesh))}" / "iter_0000001"
    if rank == 0:
        again.mkdir(parents=True)
        (again.parent / "latest_checkpointed_iteration.txt").write_text("1")
    torch.distributed.barrier()
    dist_checkpointing.save(model.sharded_state_dict(metadata=metadata), str(again))
    torch.distributed.barrier()


def arguments(step: Path) -> argparse.Namespace:
    """Return the arguments of a training in a step."""
    made: argparse.Namespace = torch.load(step / "common.pt", weights_only=False)["args"]
    return made


def check_configuration(name: str, saved: Path, place: Path) -> None:
    """Compare the logits of transformers with the configuration that follows from run_config.yaml alone."""
    from transformers import AutoModelForCausalLM

    yaml: Any = import_module("yaml")
    with tarfile.open(RUN_CONFIGS) as tar:
        written = name if f"{name}-new.yaml" in tar.getnames() else family(name)
        content = yaml.safe_load(tar.extractfile(f"{written}-new.yaml"))
    if written != name:
        # Megatron-Bridge gives properties of the same names these values.
        content["model"] |= yarn(MODELS[name])
    # The embeddings of this step have so many rows.
    content["model"]["make_vocab_size_divisible_by"] = VOCABULARY + PADDING
    (saved / "iter_0000001/run_config.yaml").write_text(yaml.safe_dump(content))
    convert("convert", saved, place / "configured", "--map", f"megatron-{family(name)}", "--copy-config")
    model = AutoModelForCausalLM.from_pretrained(place / "configured").float().eval()
    with torch.no_grad():
        logits = model(IDS).logits
    if not torch.equal(logits, torch.load(place / "logits.pt")):
        raise SystemExit(f"{name}: other logits with the configuration that follows from run_config.yaml")
    print(f"{name}: the same logits with the configuration that follows from run_config.yaml", flush=True)


def run(name: str) -> None:
    """Prove one model."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        make(name, place)
        convert(
            "convert", place / "hf", place / "run", "--to", "megatron", "--map", f"megatron-{family(name)}", "--size",
            f"_={PADDING}", "--verify",
        )  # fmt: skip
        expected = load_file(place / "hf/model.safetensors")
        for mesh in MESHES:
            if mesh[2] > 1 and "num_experts_per_tok" not in MODELS[name]:
                continue
            world = max(mesh)
            spawn(load, (world, name, place, place / "run/release", mesh), nprocs=world)  # type: ignore[no-untyped-call]
            saved = place / f"again-{'-'.join(map(str, mesh))}"
            back = place / f"{saved.name}.safetensors"
            if world == 1 and RUN_CONFIGS.exists():
                check_configuration(name, saved, place)
            (saved / "config.json").write_text((place / "hf/config.json").read_text())
            convert("dcp2safetensors", saved, back, "--map", f"megatron-{family(name)}")
            found = load_file(back)
            args = vars(arguments(place / "run/release"))
            has_scaling = "use_rope_scaling" in args or args.get("rope_type") == "yarn"
            if has_scaling != ("rope_scaling" in MODELS[name]):
                raise SystemExit(f"{name}: the arguments do not say whether rotary embeddings are scaled")
            if found.keys() != expected.keys() or not all(torch.equal(found[key], expected[key]) for key in expected):
                raise SystemExit(f"{name} at {mesh}: what was saved again is not what was converted")
            print(f"{name}: loaded, computed and saved again with {mesh} (tensor, pipeline, expert)", flush=True)


def main() -> None:
    """Prove the models."""
    import megatron.core

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; all by default")
    names = parser.parse_args().models or [*MODELS]
    print(json.dumps({"torch": torch.__version__, "megatron-core": megatron.core.__version__}))
    for name in names:
        run(name)


if __name__ == "__main__":
    main()
