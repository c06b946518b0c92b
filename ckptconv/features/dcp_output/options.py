"""The options of conversions about checkpoints of torch.distributed.checkpoint as outputs."""

from __future__ import annotations

from ckptconv.options import NAMING, OUTPUT
from ckptconv.options.kinds import FLAG, TEXT, counted
from ckptconv.options.option import Given, deciding


class Cutting(Given):
    """The division of tensors into chunks, and the keys of weights and optimizer states."""

    chunks: int | None = deciding(
        counted(1, 1 << 20),
        "Split every tensor into N parts along its first dimension, in separate files, as N ranks save it.",
        metavar="N",
        group=OUTPUT,
        common="safetensors2dcp",
        fallback={"safetensors2dcp": "1, or as in --like"},
    )
    model_key: str = deciding(
        TEXT,
        "In a checkpoint of torch.distributed.checkpoint, store the weights under KEY, such as model; . is the top of "
        "the state dict; none leaves out the weights, for use with --states.",
        metavar="KEY",
        group=NAMING,
        fallback=".; model in a torch_checkpointing step; or as in --like",
    )
    optimizer_key: str = deciding(
        TEXT,
        "In a checkpoint of torch.distributed.checkpoint, store the optimizer states under KEY.",
        metavar="KEY",
        group=NAMING,
        fallback="optimizer, or as in --like",
    )
    flat_optimizer: bool = deciding(
        FLAG,
        "Store each state and setting of a parameter under a separate key, like torchtitan and "
        "flatten_optimizer_state_dict.",
        group=NAMING,
    )
    fill_states: bool = deciding(
        FLAG,
        "Write zeros for missing optimizer states, because torch's strict load requires states for every parameter.",
        group=NAMING,
    )


GIVEN = Cutting
# Other words for it, as options.
OTHER_OPTIONS = {
    "--nproc --num-processes --nproc-per-node": (
        "--jobs N sets the number of threads; --chunks N splits the tensors of a checkpoint of "
        "torch.distributed.checkpoint as N ranks save them."
    ),
    "--target-ckpt-format --ckpt-format --dist-ckpt-format": (
        "Use --to megatron for torch_dist, or --to megatron-fsdp for fsdp_dtensor."
    ),
    "--tensor-model-parallel-size --target-tensor-model-parallel-size --pipeline-model-parallel-size": (
        "A checkpoint of --to megatron loads on any number of ranks; --chunks N splits its tensors for N ranks."
    ),
    "--world-size --num-ranks --nranks --tp --tensor-parallel-size --tp-size --target-tp --pp --pipeline-parallel-size "
    "--ep --target-tensor-parallel-size --target-pipeline-parallel-size": (
        "Programs split safetensors when they load them. Checkpoints of torch.distributed.checkpoint and "
        "Megatron-core load on any number of ranks; --chunks N splits their tensors for N ranks."
    ),
    "--tp --tensor-parallel-size --tp-size --target-tp --pp --pipeline-parallel-size --ep --world-size "
    "--target-tensor-parallel-size --target-pipeline-parallel-size": (
        "Outputs are not split by rank: programs split whole files when they load them."
    ),
    "--load-dir --load --save": "Give INPUT first, then OUTPUT, without options.",
    "--reset-optimizer --new-optimizer": (
        "To start with a new optimizer, leave out --states: --to dcp writes optimizer states only with --states."
    ),
}
