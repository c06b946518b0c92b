"""Has Megatron-core's distributed optimizer train on from the states of torch's AdamW, on the CPU with gloo.

    test_megatron_states.py [MODEL...]

Tiny models of transformers take two steps with AdamW, are saved, and take two more. The checkpoint, of torch.save or of
FSDP2, becomes a step of Megatron-core, which loads it with StrictHandling.RAISE_ALL and takes the same two steps, on
one rank, and with two ranks in tensor, pipeline and, if there are experts, expert parallelism: the weights must be
equal, bit for bit. The gradients and the expected weights are steps too, and Megatron-core gives each rank its part.
The exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import runpy
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch._C._distributed_c10d import FileStore, HashStore
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.multiprocessing.spawn import spawn

ROOT = Path(__file__).resolve().parents[1]
LOADING = runpy.run_path(str(ROOT / "scripts/test_megatron.py"))
SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-7}
PADDING = LOADING["PADDING"]
# Models, the forms in which they are saved, and how often they are loaded: on the first meshes of `MESHES`.
MESHES = LOADING["MESHES"]
CASES: dict[str, tuple[tuple[str, ...], int]] = {
    "llama": (("file", "fsdp2"), 3),
    "qwen3": (("file",), 3),
    "qwen3_moe": (("file", "fsdp2"), 4),
    "deepseek_v3": (("file",), 4),
}
BUFFER = "e_score_correction_bias"


class Nest(torch.nn.Module):
    """A module with tensors under their dotted names."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            *path, last = name.split(".")
            module: torch.nn.Module = self
            for step in path:
                if step not in module._modules:
                    module.add_module(step, torch.nn.Module())
                module = module.get_submodule(step)
            if last == BUFFER:
                module.register_buffer(last, tensor.clone())
            else:
                module.register_parameter(last, torch.nn.Parameter(tensor.clone()))


def gradients(step: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the gradients of a step, by name of the parameter; zeros for buffers."""
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(tensor.shape, generator=generator) * (not name.endswith(BUFFER))
        for name, tensor in sorted(tensors.items())
    }


def train_in_torch(tensors: Mapping[str, torch.Tensor], form: str, place: Path) -> None:
    """Train for two steps and save in this form; then save the gradients of two more, and the weights after them."""
    model = Nest(tensors)
    if form == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, **SETTINGS)
    for step in range(4):
        if step == 2:
            save(model, optimizer, form, place / form)
        by_name = gradients(step, tensors)
        if step >= 2:
            save_model(by_name, place / f"gradients-{step}")
        for name, parameter in model.named_parameters():
            gradient = by_name[name]
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        optimizer.step()
    state: Any = get_model_state_dict(model)
    whole = {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in state.items()}
    save_model(whole, place / "expected")


def save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, form: str, path: Path) -> None:
    """Save a training as its program does."""
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    path.mkdir()
    if form == "fsdp2":
        save_distributed(state, checkpoint_id=path)
    else:
        torch.save(state, path / "train.pt")


def save_model(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Save tensors as transformers does."""
    path.mkdir()
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")


def in_megatron(place: Path, name: str, which: str) -> None:
    """Write tensors of a model of transformers as a step of Megatron-core."""
    shutil.copy(place / "hf/config.json", place / which)
    words = ("--to", "megatron", "--map", f"megatron-{name}", "--size", f"_={PADDING}")
    LOADING["convert"]("convert", place / which, place / f"{which}-megatron/release", *words)


def start(rank: int, mesh: tuple[int, int, int], name: str, store: Path) -> tuple[Any, Any, dict[str, Any]]:
    """Return a model of Megatron-core on this rank, its optimizer, and the metadata of checkpoints."""
    warnings.filterwarnings("ignore")
    runpy.run_path(str(ROOT / "tests/features/megatron_core/data/make.py"))["_without_gpus"]()
    torch.distributed.init_process_group(
        "gloo", store=FileStore(str(store), max(mesh)), rank=rank, world_size=max(mesh)
    )
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer

    def without_step(self: Any, parameter: Any, tensors: Any) -> None:
        # With torch's Adam, Megatron-core 0.16 looks for the step among the tensors of a parameter.
        group, number = self.model_param_group_index_map[parameter]
        main = self.optimizer.param_groups[group]["params"][number]
        main.data.copy_(tensors["param"])
        for key in ("exp_avg", "exp_avg_sq"):
            self.optimizer.state[main][key].copy_(tensors[key])

    distrib_optimizer.quantize_param_shard = lambda *_: None
    distrib_optimizer.DistributedOptimizer._set_main_param_and_optimizer_states = without_step
    LOADING["on_cpu"]()
    parallel_state.initialize_model_parallel(
        *mesh[:2], expert_model_parallel_size=mesh[2], create_gloo_process_groups=True
    )
    module = LOADING["build"](name, mesh)
    sharing = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = DistributedDataParallel(module.config, sharing, module)
    settings = OptimizerConfig(
        optimizer="adam", lr=SETTINGS["lr"], min_lr=0.0, weight_decay=0.3, params_dtype=torch.float32, clip_grad=0.0,
        use_distributed_optimizer=True,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(settings, [model])
    optimizer.step()  # torch's Adam has no states before
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return model, optimizer, {"dp_cp_group": group}


def save_in_megatron(rank: int, name: str, run: Path) -> None:
    """Save a step of a training on one rank, as Megatron-core does."""
    model, optimizer, metadata = start(rank, (1, 1, 1), name, run.parent / "store-example")
    from megatron.core import dist_checkpointing

    own = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
    weights = model.module.sharded_state_dict(metadata={**metadata, **own})
    states = optimizer.sharded_state_dict(weights, metadata={**metadata, **own})
    step = run / "iter_0000001"
    step.mkdir(parents=True)
    (run / "latest_checkpointed_iteration.txt").write_text("1")
    dist_checkpointing.save({"model": weights, "optimizer": states, "iteration": 1}, str(step), content_metadata=own)


def train_in_megatron(rank: int, mesh: tuple[int, int, int], name: str, place: Path, step: Path) -> None:
    """Load the step on a rank, and compare the weights after two further steps."""
    model, optimizer, metadata = start(rank, mesh, name, step.parent / "store")
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    def tensors_of(which: str) -> dict[str, torch.Tensor]:
        wanted = model.module.sharded_state_dict(metadata=metadata)
        state = dist_checkpointing.load(wanted, str(place / f"{which}-megatron/release"))
        # What is loaded may lie in the model's own parameters.
        return {key: value.clone() for key, value in state.items() if isinstance(value, torch.Tensor)}

    gradients_of = [tensors_of(f"gradients-{number}") for number in (2, 3)]
    expected = tensors_of("expected")
    metadata |= dist_checkpointing.load_content_metadata(str(step))
    wanted = model.module.sharded_state_dict(metadata=metadata)
    states = optimizer.sharded_state_dict(wanted, is_loading=True, metadata=metadata)
    loaded = dist_checkpointing.load({"model": wanted, "optimizer": states}, str(step), strict=StrictHandling.RAISE_ALL)
    model.module.load_state_dict(loaded["model"], strict=True)
    optimizer.load_state_dict(loaded["optimizer"])
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for state in part.optimizer.state.values():
            state["step"] = state["step"].clone()  # Megatron-core gives all parameters one tensor, and all count it up
    parameters = dict(model.module.named_parameters())
    for by_name in gradients_of:
        for key, parameter in parameters.items():
            parameter.main_grad.copy_(by_name[key])
        optimizer.step()
    differing = [key for key, parameter in parameters.items() if not torch.equal(expected[key], parameter.detach())]
    if differing:
        raise SystemExit(f"{name} at {mesh}: other weights after two steps: {', '.join(differing)}")


def run(name: str) -> None:
    """Prove one model."""
    forms, count = CASES[name]
    has_experts = count == len(MESHES)
    for form in forms:
        with tempfile.TemporaryDirectory() as directory:
            place = Path(directory)
            LOADING["make"](name, place)
            train_in_torch(load_file(place / "hf/model.safetensors"), form, place)
            for which in ("gradients-2", "gradients-3", "expected"):
                in_megatron(place, name, which)
            shutil.copy(place / "hf/config.json", place / form)
            training = place / form / ("train.pt" if form == "file" else "")
            if has_experts:
                spawn(save_in_megatron, (name, place / "example"), nprocs=1)  # type: ignore[no-untyped-call]
            for mesh in MESHES[:count]:
                step = place / f"run-{'-'.join(map(str, mesh))}/iter_0000002"
                words = ["--map", f"megatron-{name}", "--size", f"_={PADDING}", "--chunks", str(mesh[0])]
                if has_experts and mesh[2] == 1:
                    words += ["--like", str(place / "example")]
                saved = ("convert", training, step, "--to", "megatron", "--key", "model", "--states", training)
                LOADING["convert"](*saved, *words, "--verify")
                spawn(train_in_megatron, (mesh, name, place, step), nprocs=max(mesh))  # type: ignore[no-untyped-call]
                form_of_values = "common.pt" if (step / "common.pt").exists() else "common_state"
                print(
                    f"{name}, of {form}, with {form_of_values}: the same weights after two further steps with {mesh} "
                    "(tensor, pipeline, expert)",
                    flush=True,
                )


def main() -> None:
    """Prove the models."""
    warnings.filterwarnings("ignore")
    from megatron.core import __version__

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(CASES)}; all by default")
    names = parser.parse_args().models or [*CASES]
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    print(f"Megatron-core {__version__}")
    for name in names:
        run(name)


if __name__ == "__main__":
    main()
