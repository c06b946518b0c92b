"""Has Megatron-Bridge's own loader resume from steps that we write with an optimizer, on the CPU with gloo.

    test_megatron_bridge.py

A tiny model is trained for two steps with torch's AdamW, and becomes a numbered step of Megatron-core. What
Megatron-Bridge calls to resume a training (`_load_checkpoint_from_path`) loads it into the model, the distributed
optimizer and the schedule of learning rates: on one rank, and on two in tensor parallelism. Two further steps must give
the weights of the uninterrupted run, bit for bit. The exit code is 1 if anything differs.

`pretrain` itself asserts that CUDA is there. What Megatron-Bridge imports beside for GPUs and data is absent: it is not
called here.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import runpy
import shutil
import sys
import tempfile
import types
import typing
import warnings
from collections.abc import Sequence
from importlib import import_module, util
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch._C._distributed_c10d import HashStore
from torch.multiprocessing.spawn import spawn

ROOT = Path(__file__).resolve().parents[1]
STATES = runpy.run_path(str(ROOT / "scripts/test_megatron_states.py"))
LOADING = STATES["LOADING"]
ABSENT_CLASS = runpy.run_path(str(ROOT / "scripts/test_megatron_adapters.py"))["Absent"]
MESHES = ((1, 1, 1), (2, 1, 1))
NAME = "llama"
# The settings of the schedule that the step says: AdamW's own, which stay as they are.
RATE, DECAY = STATES["SETTINGS"]["lr"], 0.1
# Packages that Megatron-Bridge imports, and that need a GPU or are for data.
ABSENT = (
    "transformer_engine", "modelopt", "megatron.energon", "datasets", "multistorageclient", "webdataset", "PIL",
    "omegaconf", "hydra", "pandas", "torch.utils.tensorboard",
)  # fmt: skip


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the absent packages, all of whose names are a class that nothing is of."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        if any(name == package or name.startswith(f"{package}.") for package in ABSENT):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module: Any = types.ModuleType(spec.name)
        module.__version__ = "1.0.0"
        module.__getattr__ = lambda name: getattr(ABSENT_CLASS, name)
        return module  # type: ignore[no-any-return]

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def bridge() -> Any:
    """Return the module of Megatron-Bridge that loads checkpoints."""
    any_typing: Any = typing
    any_typing.override = lambda method: method
    package = types.ModuleType("megatron.bridge")
    (place,) = [path for above in sys.path if (path := Path(above or ".") / "megatron/bridge").is_dir()]
    package.__path__ = [str(place)]
    sys.modules["megatron.bridge"] = package
    sys.meta_path.insert(0, Finder())
    return import_module("megatron.bridge.training.checkpointing")


def resume(rank: int, mesh: tuple[int, int, int], place: Path, step: Path) -> None:
    """Load the step on a rank as Megatron-Bridge does, and compare the weights after two further steps."""
    warnings.filterwarnings("ignore")
    # These ask for Transformer Engine, and do without.
    for module in ("models.gpt.gpt_layer_specs", "transformer.multi_latent_attention", "transformer.moe.moe_layer"):
        import_module(f"megatron.core.{module}")
    store = place / f"store-{'-'.join(map(str, mesh))}"
    model, optimizer, metadata = STATES["start"](rank, mesh, NAME, store)
    from megatron.core import dist_checkpointing
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.process_groups_config import ProcessGroupCollection

    def tensors_of(which: str) -> dict[str, torch.Tensor]:
        wanted = model.module.sharded_state_dict(metadata=dict(metadata))
        state = dist_checkpointing.load(wanted, str(place / f"{which}-megatron/release"))
        return {key: value.clone() for key, value in state.items() if isinstance(value, torch.Tensor)}

    gradients_of = [tensors_of(f"gradients-{number}") for number in (2, 3)]
    expected = tensors_of("expected")
    schedule = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=RATE, min_lr=RATE, lr_warmup_steps=0, lr_decay_steps=1,
        lr_decay_style="constant", start_wd=DECAY, end_wd=DECAY, wd_incr_steps=1, wd_incr_style="constant",
    )  # fmt: skip
    loading = bridge()
    settings = import_module("megatron.bridge.training.config")
    train_state = import_module("megatron.bridge.training.state").TrainState()
    # What `pretrain` sets up beside the model, as far as loading asks for it.
    loading.update_num_microbatches = lambda **_: None
    loading.is_last_rank = lambda: False
    loading.fault_tolerance = SimpleNamespace(on_checkpoint_loaded=lambda **_: None)
    config = SimpleNamespace(
        checkpoint=settings.CheckpointConfig(load=str(step.parent), ckpt_format="torch_dist", load_rng=False),
        model=model.module.config, optimizer=SimpleNamespace(use_distributed_optimizer=True), peft=None,
        ddp=SimpleNamespace(use_megatron_fsdp=False), rng=SimpleNamespace(data_parallel_random_init=False),
        dist=SimpleNamespace(use_decentralized_pg=False), logger=SimpleNamespace(log_progress=False),
    )  # fmt: skip
    state = SimpleNamespace(cfg=config, train_state=train_state)
    state.wandb_logger = state.mlflow_logger = state.comet_logger = state.tensorboard_logger = None
    groups = ProcessGroupCollection.use_mpu_process_groups()
    with contextlib.redirect_stdout(sys.stderr):
        number, _ = loading._load_checkpoint_from_path(
            str(step.parent), state, [model], optimizer, schedule, checkpointing_context={}, pg_collection=groups
        )
    if number != 2:
        raise SystemExit(f"{mesh}: it resumes at {number}")
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for of_parameter in part.optimizer.state.values():
            of_parameter["step"] = of_parameter["step"].clone()
    parameters = dict(model.module.named_parameters())
    for by_name in gradients_of:
        for key, parameter in parameters.items():
            parameter.main_grad.copy_(by_name[key])
        optimizer.step()
        schedule.step(1)
    differing = [key for key, parameter in parameters.items() if not torch.equal(expected[key], parameter.detach())]
    if differing:
        raise SystemExit(f"{mesh}: other weights after two steps: {', '.join(differing)}")


def main() -> None:
    """Resume on each mesh."""
    warnings.filterwarnings("ignore")
    from megatron.core import __version__

    if util.find_spec("megatron.bridge") is None:
        raise SystemExit("Megatron-Bridge is not installed: PYTHONPATH names its place.")
    print(f"Megatron-core {__version__}, Megatron-Bridge {version('megatron-bridge')}")
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        LOADING["make"](NAME, place)
        STATES["train_in_torch"](load_file(place / "hf/model.safetensors"), "file", place)
        for which in ("gradients-2", "gradients-3", "expected"):
            STATES["in_megatron"](place, NAME, which)
        shutil.copy(place / "hf/config.json", place / "file")
        training, step = place / "file/train.pt", place / "run/iter_0000002"
        words = ("--map", f"megatron-{NAME}", "--size", f"_={STATES['PADDING']}", "--verify")
        LOADING["convert"](
            "convert", training, step, "--to", "megatron", "--key", "model", "--states", training, *words
        )
        for mesh in MESHES:
            spawn(resume, (mesh, place, step), nprocs=max(mesh))  # type: ignore[no-untyped-call]
            print(f"{NAME}: resumed, the same weights after two further steps with {mesh} (tensor, pipeline, expert)")


if __name__ == "__main__":
    main()
