"""Has Megatron-core's distributed optimizer train on from the states of torch's AdamW, on the CPU with gloo.

    test_megatron_states.py

A tiny GPT takes two steps with torch's AdamW, is saved by torch.save, and takes two more. The file becomes a step of
Megatron-core, which loads it with StrictHandling.RAISE_ALL and takes the same two steps: the weights must be equal, bit
for bit. The exit code is 1 if they are not.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore

ROOT = Path(__file__).resolve().parents[1]
SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-7}


def gradients(step: int, parameters: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the gradients of a step, by name of the parameter."""
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(parameter.shape, generator=generator) for name, parameter in sorted(parameters.items())}


def train_in_torch(parameters: dict[str, Any], place: Path) -> dict[str, torch.Tensor]:
    """Train for two steps, save, and return the weights after two more."""
    order = sorted(parameters, key=lambda name: parameters[name].dim() == 1)
    groups: list[dict[str, Any]] = [
        {
            "params": [parameters[name] for name in order if (parameters[name].dim() == 1) == vectors],
            "weight_decay": decay,
        }
        for vectors, decay in ((False, 0.1), (True, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, **SETTINGS)
    for step in range(4):
        if step == 2:
            state = optimizer.state_dict()
            named = {
                order[number]: {key: value.clone() for key, value in own.items()}
                for number, own in state["state"].items()
            }
            named_groups = [
                {**group, "params": [order[number] for number in group["params"]]} for group in state["param_groups"]
            ]
            model = {name: parameter.detach().clone() for name, parameter in parameters.items()}
            torch.save({"model": model, "optimizer": {"state": named, "param_groups": named_groups}}, place)
        for name, gradient in gradients(step, parameters).items():
            parameters[name].grad = gradient
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def train_in_megatron(config: Any, model: Any, step: Path) -> dict[str, torch.Tensor]:
    """Load the step, and return the weights after two further steps."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.validation import StrictHandling
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
    model = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), model)
    settings = OptimizerConfig(
        optimizer="adam", lr=SETTINGS["lr"], min_lr=0.0, weight_decay=0.3, params_dtype=torch.float32, clip_grad=0.0,
        use_distributed_optimizer=True,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(settings, [model])
    parameters = dict(model.module.named_parameters())
    optimizer.step()  # torch's Adam has no states before
    metadata = dict(dist_checkpointing.load_content_metadata(str(step)))
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    wanted = model.module.sharded_state_dict(metadata=metadata)
    states = optimizer.sharded_state_dict(wanted, is_loading=True, metadata=metadata)
    loaded = dist_checkpointing.load({"model": wanted, "optimizer": states}, str(step), strict=StrictHandling.RAISE_ALL)
    model.module.load_state_dict(loaded["model"], strict=True)
    optimizer.load_state_dict(loaded["optimizer"])
    inner = getattr(optimizer, "optimizer", None) or optimizer.chained_optimizers[0].optimizer
    for state in inner.state.values():
        state["step"] = state["step"].clone()  # Megatron-core gives all parameters one tensor, which each counts up
    for number in (2, 3):
        for name, gradient in gradients(number, parameters).items():
            parameters[name].main_grad.copy_(gradient)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def main() -> None:
    """Train in torch, and on in Megatron-core."""
    warnings.filterwarnings("ignore")
    maker = runpy.run_path(str(ROOT / "tests/features/megatron_core/data/make.py"))
    maker["_without_gpus"]()
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    from megatron.core import __version__, parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(create_gloo_process_groups=True)
    torch.manual_seed(3)
    try:
        model_parallel_cuda_manual_seed(3)
    except Exception as error:  # there is no GPU
        print(error)
    config, model = maker["_model"]({}, bf16=False)
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        expected = train_in_torch(dict(model.named_parameters()), place / "train.pt")
        step = place / "run/iter_0000002"
        words = [
            "convert",
            place / "train.pt",
            step,
            "--to",
            "megatron",
            "--key",
            "model",
            "--states",
            place / "train.pt",
        ]
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        program = [sys.executable, "-m", "ckptconv", *map(str, words), "--verify", "--quiet"]
        subprocess.run(program, check=True, env={**os.environ, "PYTHONPATH": paths})
        found = train_in_megatron(config, model, step)
    differing = [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])]
    if differing:
        raise SystemExit(f"Megatron-core {__version__}: other weights after two steps: {', '.join(differing)}")
    print(f"Megatron-core {__version__}: the same weights after two further steps")


if __name__ == "__main__":
    main()
