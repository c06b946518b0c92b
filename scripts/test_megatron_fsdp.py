"""Has Megatron-FSDP train on from the states of torch's AdamW, on the CPU with gloo, and reads what it saves then.

    test_megatron_fsdp.py [MODEL...]

Tiny models of transformers take two steps with AdamW, are saved, and take two more. The checkpoint becomes a step of
Megatron-core (`torch_dist`), and that one of Megatron-FSDP (`fsdp_dtensor`). Megatron-FSDP loads it in bf16 with fp32
masters, every key that it asks for must be there, and takes the same two steps: on one rank, on two, and with two ranks
in tensor and in expert parallelism. Its masters must be the weights of the uninterrupted run, bit for bit. It asks for
the settings and states of torch's AdamW, and of FusedAdam of Transformer Engine and apex. Then it saves. What it saved
becomes a model of transformers, which must have these weights too, and a step of Megatron-core. Without a GPU, layers
are Megatron-core's own: names that differ in those of Transformer Engine are translated. The exit code is 1 if anything
differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import runpy
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch._C._distributed_c10d import FileStore, HashStore
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn
from torch.optim.adamw import adamw

ROOT = Path(__file__).resolve().parents[1]
LOADING = runpy.run_path(str(ROOT / "scripts/test_megatron.py"))
TRAINING = runpy.run_path(str(ROOT / "scripts/test_megatron_states.py"))
MODELS = ("llama", "qwen3_moe", "deepseek_v3")
PADDING = LOADING["PADDING"]
# Norms of Megatron-core's own layers, and where they are in those of Transformer Engine.
NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
# Ranks, those of them in tensor and in expert parallelism, and whether the optimizer is FusedAdam. The last is for
# models with experts.
RUNS = ((1, 1, 1, False), (2, 1, 1, True), (2, 2, 1, False), (2, 1, 2, True))
EXPERT = re.compile(r"(.+\.experts)\.local_experts\.(\d+)\.(linear_fc[12]\.weight)(_[wv])?")


class Cpu(str):
    """The name of the current device: of a tensor's, and in that of a GPU."""

    def __format__(self, _: str) -> str:
        return "0"


class Stream:
    """A stream or an event of CUDA, which has nothing to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    wait_event = record = wait = synchronize = wait_stream

    def record_event(self, *_: Any) -> Stream:
        return Stream()


class FusedAdam(torch.optim.Optimizer):
    """The settings and states of FusedAdam, with the arithmetic of torch's AdamW.

    Source: transformer_engine/pytorch/optimizers/fused_adam.py of Transformer Engine (d0067d0d), and
    apex/optimizers/fused_adam.py. A group has the step, and a parameter has none.
    """

    def __init__(self, params: Any, lr: float, betas: Any, eps: float, weight_decay: float, **_: Any) -> None:
        settings = {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, *_: Any, **__: Any) -> None:  # type: ignore[override]
        """Take a step."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                for key in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(key, torch.zeros_like(parameter))
                before = torch.tensor(group["step"] - 1.0)
                adamw(
                    [parameter], [parameter.grad], [state["exp_avg"]], [state["exp_avg_sq"]], [], [before],
                    foreach=False, amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
                    weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
                )  # fmt: skip


def of_rank(name: str, whole: torch.Tensor, parameter: Any, ranks: int) -> torch.Tensor:
    """Return the part of a tensor that belongs to this one of so many tensor-parallel ranks."""
    from megatron.core import parallel_state
    from megatron.core.distributed.fsdp.src.megatron_fsdp.utils import get_mcore_tensor_parallel_partition_dim

    axis = get_mcore_tensor_parallel_partition_dim(parameter)
    if ranks == 1 or axis is None:
        return whole
    rank = parallel_state.get_tensor_model_parallel_rank()
    parts = whole.chunk(2) if "linear_fc1.weight" in name else (whole,)
    return torch.cat([part.chunk(ranks, axis)[rank] for part in parts], axis)


def on_cpu() -> None:
    """Have Megatron-FSDP do without CUDA."""
    runpy.run_path(str(ROOT / "tests/features/megatron_core/data/make.py"))["_without_gpus"]()
    LOADING["on_cpu"]()
    cuda: Any = torch.cuda
    cuda.current_device = lambda: Cpu("cpu")
    cuda.Stream = cuda.Event = Stream
    cuda.current_stream = lambda *_: Stream()
    cuda.stream = lambda *_: contextlib.nullcontext()
    cuda.empty_cache = lambda: None
    mesh: Any = DeviceMesh
    of_groups = mesh.from_group
    mesh.from_group = staticmethod(lambda group, _=None, device_type="", **given: of_groups(group, "cpu", **given))


def of_engine(name: str, known: Iterable[str], before: str) -> str:
    """Return the name that a parameter of Megatron-core's own layers has in those of Transformer Engine: the one that
    is `known` after `before`."""
    if match := EXPERT.fullmatch(name):
        name = f"{match[1]}.{match[3]}{match[2]}{match[4] or ''}"
    names = [name, *(name.replace(norm, inside) for norm, inside in NORMS.items())]
    return next((each for each in names if f"{before}{each}" in known), name)


def translated(tensors: Mapping[str, Any], known: Iterable[str], before: str, after: str = "") -> dict[str, Any]:
    """Return what is asked for, by the names of Transformer Engine's layers."""
    own = {key.removesuffix(after) for key in known}
    return {of_engine(name, own, before): of for name, of in tensors.items()}


def train(rank: int, which: tuple[int, int, int, bool], name: str, place: Path, step: Path) -> None:
    """Load the step on a rank, compare the weights after two further steps, and save."""
    warnings.filterwarnings("ignore")
    on_cpu()
    ranks, tensor, expert, fused = which
    store = FileStore(str(place / f"store-{which}"), ranks)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    from megatron.core import optimizer as optimizers
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor
    from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer
    from megatron.core.transformer import fsdp_dtensor_checkpoint as handling
    from megatron.core.transformer.module import Float16Module

    def everywhere(self: Any) -> None:
        # Megatron-core leaves out parameters of which a rank has nothing, and asks all ranks about each then.
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    distrib_optimizer.DistributedOptimizer._init_optimizer_states_with_dummy_values = everywhere
    parallel_state.initialize_model_parallel(tensor, expert_model_parallel_size=expert, create_gloo_process_groups=True)
    if fused:
        optimizers.Adam, optimizers.USING_PYTORCH_OPTIMIZER = FusedAdam, False
    module = LOADING["build"](name, (tensor, 1, expert))
    module.config.bf16, module.config.params_dtype = True, torch.bfloat16
    sharing = DistributedDataParallelConfig(
        use_distributed_optimizer=True, use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params"
    )
    model = FullyShardedDataParallel(
        module.config, sharing, Float16Module(module.config, module), device=torch.device("cpu")
    )
    settings = OptimizerConfig(
        optimizer="adam", lr=TRAINING["SETTINGS"]["lr"], min_lr=0.0, weight_decay=0.3, bf16=True, clip_grad=0.0,
        params_dtype=torch.bfloat16, use_distributed_optimizer=True,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(settings, [model])
    known = FileSystemReader(step).read_metadata().state_dict_metadata

    def described(*, is_loading: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """What Megatron-LM asks for and saves (preprocess_fsdp_dtensor_state_dict), and what it loads then."""
        metadata = {"distrib_optim_sharding_type": "fsdp_dtensor"}
        weights = {key: of for key, of in model.module.state_dict().items() if not key.endswith("_extra_state")}
        own = optimizer.sharded_state_dict({}, is_loading=is_loading, metadata=metadata)
        both = handling.handle_swiglu_in_state_dict(model.module, weights, own)
        if module.config.num_moe_experts:
            both = (handling.handle_experts_in_state_dict(both[0], module.config.num_moe_experts), both[1])
        states = translated(both[1]["state"], known, "optimizer.state.", ".exp_avg")
        meta = translated(own["param_to_group_meta"], known, "optimizer.param_to_group_meta.", ".lr")
        wanted = {
            "model": translated(both[0], known, "model."),
            "optimizer": {"state": states, "param_to_group_meta": meta},
            "iteration": 0, "checkpoint_version": 0.0, "args": None,
            "opt_param_scheduler": dict.fromkeys(
                ("max_lr", "lr_warmup_steps", "num_steps", "lr_decay_style", "lr_decay_steps", "min_lr", "start_wd",
                 "end_wd", "wd_incr_style", "wd_incr_steps")
            ),
        }  # fmt: skip
        preprocess_state_dict_for_uneven_dtensor(wanted)
        return wanted, own

    wanted, own = described(is_loading=True)
    load_distributed(wanted, checkpoint_id=step, planner=DefaultLoadPlanner(allow_partial_load=False))
    meta = wanted["optimizer"]["param_to_group_meta"]
    own["param_to_group_meta"] = dict(zip(own["param_to_group_meta"], meta.values(), strict=True))
    optimizer.load_state_dict(own)
    expected = load_file(place / "expected.safetensors")
    parameters: dict[str, Any] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            bare = re.sub(r"(?:module\.)+", "", optimizer._param_name(parameter), count=1)
            parameters[of_engine(bare, expected, "")] = parameter
    for number in (2, 3):
        by_name = load_file(place / f"gradients-{number}.safetensors")
        for key, parameter in parameters.items():
            local = parameter.to_local()
            gradient = (
                of_rank(key, by_name[key], parameter, tensor).flatten()[parameter.megatron_fsdp_slice].view(local.shape)
            )
            parameter.grad = DTensor.from_local(
                gradient, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
                stride=parameter.stride(),
            )  # fmt: skip
        optimizer.optimizer.step()
    for key, parameter in parameters.items():
        local = parameter.to_local().detach()
        own_part = (
            of_rank(key, expected[key], parameter, tensor).flatten()[parameter.megatron_fsdp_slice].view(local.shape)
        )
        if local.dtype != torch.float32 or not torch.equal(local, own_part):
            raise SystemExit(f"{name}, {which}: another {key} after two steps")
    compared: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(compared, [*parameters])
    if {key for keys in compared for key in keys} != {key for key in expected if "expert_bias" not in key}:
        raise SystemExit(f"{name}: of {len(expected)} weights, others were compared: {compared}")
    saved, _ = described(is_loading=False)
    saved |= {key: wanted[key] for key in ("args", "checkpoint_version", "opt_param_scheduler")} | {"iteration": 4}
    save_distributed(saved, checkpoint_id=place / f"saved-{which}/iter_0000004")


def run(name: str) -> None:
    """Prove one model."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        LOADING["make"](name, place)
        TRAINING["train_in_torch"](load_file(place / "hf/model.safetensors"), "file", place)
        words = ("--map", f"megatron-{name}", "--size", f"_={PADDING}")
        convert = LOADING["convert"]
        for part in ("gradients-2", "gradients-3", "expected", "file"):
            shutil.copy(place / "hf/config.json", place / part)
            if part != "file":
                convert("convert", place / part, place / f"{part}.safetensors", *words)
        training, dist, step = place / "file/train.pt", place / "dist/iter_0000002", place / "fsdp/iter_0000002"
        convert("convert", training, dist, "--to", "megatron", "--key", "model", "--states", training, *words)
        convert("convert", dist, step, "--to", "megatron-fsdp", "--states", dist, "--chunks", "3", "--verify")
        for which in RUNS:
            if which[2] > 1 and "num_experts_per_tok" not in LOADING["MODELS"][name]:
                continue
            spawn(train, (which, name, place, step), nprocs=which[0])  # type: ignore[no-untyped-call]
            saved = place / f"saved-{which}"
            (saved / "latest_checkpointed_iteration.txt").write_text("4")
            convert("convert", saved, place / f"back-{which}.safetensors", *words)
            found, expected = (
                load_file(place / f"back-{which}.safetensors"),
                load_file(place / "expected/model.safetensors"),
            )
            same = [key for key, tensor in expected.items() if key in found and torch.equal(found[key], tensor)]
            if found.keys() != expected.keys() or len(same) < len(expected):
                other = sorted({*expected, *found} - {*same})
                raise SystemExit(f"{name}: what Megatron-FSDP saved on {which} is read otherwise: {other}")
            convert(
                "convert",
                saved,
                place / f"again-{which}/iter_0000004",
                "--to",
                "megatron",
                "--states",
                saved,
                "--verify",
            )
            print(f"{name}: the same weights after two further steps on {which}, and saved again", flush=True)


def main() -> None:
    """Prove the models."""
    warnings.filterwarnings("ignore")
    from megatron.core import __version__

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; all by default")
    names = parser.parse_args().models or [*MODELS]
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    print("(ranks, tensor, expert, whether with FusedAdam)")
    print(json.dumps({"torch": torch.__version__, "megatron-core": __version__}))
    for name in names:
        run(name)


if __name__ == "__main__":
    main()
