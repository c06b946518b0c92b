"""Make the checkpoints *.tar.xz here: real ones of Megatron-core, on CPUs, of a few processes.

    PYTHONPATH=<where megatron-core was unpacked> python make.py CASE DIRECTORY
    tar -C DIRECTORY -cJf CASE.tar.xz CASE          # and without `megatron_` in the archive's name

A case trains a tiny GPT for two steps and saves it as Megatron-LM does. Beside the checkpoint, `expected.pt` has what
the live model held: "model", "masters" and "states" under the names of the checkpoint, with layers stacked.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.checkpoint.filesystem import SerializationFormat

# Ranks; sizes of the tensor, pipeline and expert parallel groups; experts; the sharding of a distributed optimizer.
CASES: dict[str, dict[str, Any]] = {
    # Megatron-core 0.19.2, which also wants triton on the path
    "megatron_hashed_tp2_dp2": {"ranks": 4, "tp": 2, "sharding": "fully_reshardable", "integrity": True},
    # Megatron-core 0.16.1
    "megatron_reshardable_tp2_dp2": {"ranks": 4, "tp": 2, "sharding": "fully_reshardable"},
    "megatron_float16_pp2": {"ranks": 2, "pp": 2, "sharding": ""},
    "megatron_buckets_dp2": {"ranks": 2, "sharding": "dp_reshardable"},
    "megatron_unstacked_tp2": {"ranks": 2, "tp": 2, "sharding": "fully_reshardable", "homogeneous": False},
    # Megatron-core 0.12.3
    "megatron_flattened_tp2_dp2": {"ranks": 4, "tp": 2, "sharding": "fully_sharded_model_space"},
    "megatron_moe_ep2_chained": {"ranks": 2, "ep": 2, "experts": 2, "sharding": "fully_sharded_model_space"},
    "megatron_gathered_dp2": {"ranks": 2, "sharding": "dp_zero_gather_scatter"},
}
HIDDEN, LAYERS, VOCABULARY = 8, 2, 16


def _without_gpus() -> None:
    """Let Megatron-core's code, which asks for GPUs everywhere, work on CPUs."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.get_rng_state = lambda *_: torch.zeros(16, dtype=torch.uint8)  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    np.product = np.prod  # which numpy 2 has no more
    kind = torch.Tensor.type

    def on_gpu(self: torch.Tensor, *args: Any, **settings: Any) -> Any:
        found = kind(self, *args, **settings)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    torch.Tensor.type = on_gpu  # type: ignore[method-assign]
    for name in ("tensor", "zeros", "empty", "full", "ones"):
        made = getattr(torch, name)

        def on_cpu(*args: Any, made: Any = made, **settings: Any) -> Any:
            if settings.get("device") == "cuda":
                settings["device"] = "cpu"
            return made(*args, **settings)

        setattr(torch, name, on_cpu)

    # gloo has no reduction of slices: a reduction of all gives the same.
    def reduce_scatter(output: Any, whole: Any, op: Any = None, group: Any = None, async_op: bool = False) -> None:
        copy = whole.clone()
        dist.all_reduce(copy, group=group)
        rank = dist.get_rank(group)
        output.copy_(copy[rank * output.numel() : (rank + 1) * output.numel()] / dist.get_world_size(group))

    dist.reduce_scatter_tensor = reduce_scatter
    dist._reduce_scatter_base = reduce_scatter


def _model(case: dict[str, Any], bf16: bool) -> tuple[Any, Any]:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.parallel_state import is_pipeline_first_stage, is_pipeline_last_stage
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=8,
        num_attention_heads=2,
        num_query_groups=2,
        use_cpu_initialization=True,
        tensor_model_parallel_size=case.get("tp", 1),
        pipeline_model_parallel_size=case.get("pp", 1),
        expert_model_parallel_size=case.get("ep", 1),
        num_moe_experts=case.get("experts"),
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="LayerNorm",
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        pipeline_dtype=torch.bfloat16 if bf16 else torch.float32,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(num_experts=case.get("experts")),
        vocab_size=VOCABULARY,
        max_sequence_length=16,
        pre_process=is_pipeline_first_stage(),
        post_process=is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    return config, model


def _work(rank: int, name: str, directory: str) -> None:
    case = CASES[name]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29641", RANK=str(rank), WORLD_SIZE=str(case["ranks"]))
    _without_gpus()
    dist.init_process_group("gloo", rank=rank, world_size=case["ranks"])
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module

    distrib_optimizer.quantize_param_shard = lambda *_: None  # there are no parameters in 8 bits
    # Newer releases of torch want a further argument than Megatron-core 0.12 gives.
    written = functools.partial(filesystem_async._write_item, serialization_format=SerializationFormat.TORCH_SAVE)
    filesystem_async._write_item = written

    parallel_state.initialize_model_parallel(
        case.get("tp", 1),
        case.get("pp", 1),
        expert_model_parallel_size=case.get("ep", 1),
        create_gloo_process_groups=True,
    )
    torch.manual_seed(7)
    try:
        model_parallel_cuda_manual_seed(7)
    except Exception as error:
        print(error)
    config, model = _model(case, bf16=True)
    sharding = case["sharding"]
    integrity = {"verify_integrity": True} if case.get("integrity") else {}
    model = Float16Module(config, model)
    model = DistributedDataParallel(
        config, DistributedDataParallelConfig(use_distributed_optimizer=bool(sharding), bucket_size=500), model
    )
    settings = OptimizerConfig(
        optimizer="adam",
        lr=0.01,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=bool(sharding),
        clip_grad=0.0,
    )
    optimizer = get_megatron_optimizer(settings, [model])
    own, common = torch.Generator().manual_seed(rank), torch.Generator().manual_seed(9)
    for _ in range(2):
        # Any gradients do: what is saved is what counts. But all ranks that have a parameter have the same.
        for parameter in model.parameters():
            generator = own if getattr(parameter, "tensor_model_parallel", False) else common
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
        optimizer.step()
    metadata = {"distrib_optim_sharding_type": sharding} if sharding else {}
    metadata["non_homogeneous_layers"] = not case.get("homogeneous", True)
    if metadata["non_homogeneous_layers"]:
        metadata["singleton_local_shards"] = True
        metadata["chained_optim_avoid_prefix"] = True
    try:
        sharded = model.module.sharded_state_dict(metadata=metadata)
    except TypeError:
        sharded = model.module.sharded_state_dict()
    state: dict[str, Any] = {
        "args": argparse.Namespace(
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            tensor_model_parallel_size=case.get("tp", 1),
            pipeline_model_parallel_size=case.get("pp", 1),
            expert_model_parallel_size=case.get("ep", 1),
            world_size=case["ranks"],
            lr=0.01,
            params_dtype=torch.bfloat16,
            data_path=["a", "b"],
        ),
        "checkpoint_version": 3.0,
        "iteration": 20,
        "num_floating_point_operations_so_far": 12,
        "model": sharded,
        "optimizer": _sharded_states(optimizer, sharded, sharding, metadata),
        "opt_param_scheduler": {"max_lr": 0.01, "num_steps": 20, "lr_decay_style": "cosine"},
        "rng_state": dist_checkpointing.mapping.ShardedObject(
            "rng_state",
            [{"torch_rng_state": torch.zeros(8, dtype=torch.uint8), "random_rng_state": (3, (1, 2), None)}],
            (case.get("pp", 1), case.get("tp", 1)),
            (parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()),
            replica_id=parallel_state.get_data_parallel_rank(),
        ),
    }
    live = _held(model, optimizer, sharded)
    place = Path(directory) / name
    iteration = place / "checkpoint" / "iter_0000020"
    if rank == 0:
        iteration.mkdir(parents=True)
    dist.barrier()
    default_strategy = dist_checkpointing.serialization.get_default_save_sharded_strategy
    # Megatron-core 0.19 has no other backend to choose.
    strategy = default_strategy() if integrity else default_strategy("torch_dist", 1)
    strategy.thread_count = 1
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    if case.get("parallel", True):
        strategy = FullyParallelSaveStrategyWrapper(
            strategy, parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
    dist_checkpointing.save(state, str(iteration), strategy, **integrity)
    gathered: list[Any] = [None] * case["ranks"]
    dist.all_gather_object(gathered, live)
    if rank == 0:
        (place / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("20")
        torch.save(_whole(gathered), place / "expected.pt")
    dist.barrier()
    dist.destroy_process_group()


def _sharded_states(optimizer: Any, sharded: Any, sharding: str, metadata: dict[str, Any]) -> Any:
    if not sharding:
        return optimizer.sharded_state_dict(sharded)
    try:
        return optimizer.sharded_state_dict(sharded, metadata=metadata)
    except TypeError:  # Megatron-core 0.12
        return optimizer.sharded_state_dict(sharded, sharding_type=sharding)


def _held(model: Any, optimizer: Any, sharded: Any) -> list[Any]:
    """What this rank holds: (kind, name, shape of the whole, offsets, data)."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    found: list[Any] = []

    def add(kind: str, described: Any, data: Any) -> None:
        if isinstance(described, ShardedTensorFactory):
            built = described.build_fn(described.key, data, described.replica_id, None)
        else:
            built = [SimpleNamespace(**{**vars(described), "data": data})]
        found.extend(
            (kind, each.key, each.global_shape, each.global_offset, each.data.detach().clone())
            for each in (nested_values(built) if isinstance(built, dict) else built)
        )

    by_parameter = {}
    for each in nested_values(sharded):
        if isinstance(each, (ShardedTensor, ShardedTensorFactory)):
            add("model", each, each.data)
            by_parameter[id(each.data)] = each
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if hasattr(part, "gbuf_ranges"):
            whole = part.get_parameter_state_dp_zero()
            if whole is None:
                continue
            for number, _ in enumerate(part.gbuf_ranges):
                buffer = part.buffers[number]
                for tensors in whole[number].values():
                    for parameter, (start, stop, _) in buffer.param_index_map.items():
                        for key in {"param", "fp32_param", "exp_avg", "exp_avg_sq"} & tensors.keys():
                            data = tensors[key][start:stop].reshape(parameter.shape)
                            add("masters" if "param" in key else key, by_parameter[id(parameter)], data)
        else:
            for group, masters in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
                for parameter, master in zip(group, masters, strict=True):
                    described = by_parameter[id(parameter)]
                    add("masters", described, master.data)
                    for key in ("exp_avg", "exp_avg_sq"):
                        add(key, described, part.optimizer.state[master][key])
    return found


def _whole(gathered: list[Any]) -> dict[str, Any]:
    made: dict[str, Any] = {"model": {}, "masters": {}, "states": {}}
    for held in gathered:
        for kind, name, shape, offsets, data in held:
            into, key = (made[kind], name) if kind in made else (made["states"], f"{name}.{kind}")
            whole = into.setdefault(key, torch.full(shape, float("nan"), dtype=data.dtype))
            sizes = (1,) * (len(shape) - data.ndim) + tuple(data.shape)
            whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))] = data.reshape(sizes)
    for part in made.values():
        assert not any(tensor.isnan().any() for tensor in part.values())
    return made


if __name__ == "__main__":
    mp.spawn(_work, args=(sys.argv[1], sys.argv[2]), nprocs=CASES[sys.argv[1]]["ranks"])
