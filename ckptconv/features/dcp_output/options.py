"""The options of conversions about checkpoints of torch.distributed.checkpoint as outputs."""

from __future__ import annotations

from ckptconv.options import NAMING, OUTPUT
from ckptconv.options.kinds import FLAG, TEXT, counted
from ckptconv.options.option import Given, deciding


class Cutting(Given):
    """The division of tensors into chunks, and the keys of weights and optimizer states."""

    chunks: int | None = deciding(
        counted(1, 1 << 20),
        "Cut every tensor into N parts along its first dimension, as N ranks save it, each rank into its own files.",
        metavar="N",
        group=OUTPUT,
        common="safetensors2dcp",
        fallback={"safetensors2dcp": "1, or as --like says"},
    )
    model_key: str = deciding(
        TEXT,
        "Store the weights under KEY, such as model; . is the top of the state dict; none leaves out the weights, for "
        "use with --states.",
        metavar="KEY",
        group=NAMING,
        fallback=".; model in a torch_checkpointing step; or as --like says",
    )
    optimizer_key: str = deciding(
        TEXT,
        "Store the optimizer states under KEY.",
        metavar="KEY",
        group=NAMING,
        fallback="optimizer, or as --like says",
    )
    flat_optimizer: bool = deciding(
        FLAG,
        "Store each state and setting of a parameter under a key of its own, as torchtitan and "
        "flatten_optimizer_state_dict do.",
        group=NAMING,
    )
    fill_states: bool = deciding(
        FLAG,
        "Write zeros as the optimizer states of parameters that have none yet: torch's strict load requires states "
        "for every parameter.",
        group=NAMING,
    )


GIVEN = Cutting
# Other words for it, as options.
OTHER_OPTIONS = {
    "--target-ckpt-format --ckpt-format --dist-ckpt-format": (
        "Use --to megatron for torch_dist, or --to megatron-fsdp for fsdp_dtensor."
    ),
    "--tensor-model-parallel-size --target-tensor-model-parallel-size --pipeline-model-parallel-size": (
        "A checkpoint of --to megatron loads with other numbers of ranks; --chunks N cuts its tensors for N of them."
    ),
    "--world-size --num-ranks --nranks --tp --tensor-parallel-size --tp-size --target-tp --pp --pipeline-parallel-size "
    "--ep --target-tensor-parallel-size --target-pipeline-parallel-size": (
        "Programs cut safetensors as they load them. Checkpoints of torch.distributed.checkpoint and Megatron-core "
        "load on any number of ranks, and --chunks N cuts their tensors for N."
    ),
    "--load-dir --save-dir --load --save": "Name INPUT first, then OUTPUT: they have no options.",
    "--reset-optimizer --new-optimizer": "--to dcp writes optimizer states only with --states: leave it out.",
}
