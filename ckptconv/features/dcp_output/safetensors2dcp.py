"""`ckptconv safetensors2dcp`: any checkpoint to one of torch.distributed.checkpoint."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ckptconv.cli.making import convert_one
from ckptconv.cli.options import CONVERTING, named, required, taking
from ckptconv.features.dcp_output.states_option import STATES_READ
from ckptconv.options.table import TO_CHECKPOINT

# Commands whose report is that of a conversion.
OF_CONVERSIONS = ("safetensors2dcp",)


@taking(
    *named("into"),
    TO_CHECKPOINT,
    *named("chunks model_key optimizer_key flat_optimizer fill_states"),
    *(
        each.explained("Split the tensors into the same keys, chunks and files as the checkpoint in REF.")
        for each in named("like")
    ),
    STATES_READ,
    *named("order opaque drop_opaque raw alone tag exclude_frozen_parameters master unstack per_rank"),
    *(name for name in CONVERTING if name not in named("copy_config like partial fill")),
)
def safetensors2dcp(
    source: Annotated[
        str, typer.Argument(metavar="INPUT", show_default=False, help="Safetensors, or a checkpoint of any format.")
    ],
    output: Annotated[str | None, typer.Argument(metavar="OUTPUT", show_default=False, help="A new directory.")] = None,
    **options: Any,
) -> None:
    """Write a checkpoint that torch.distributed.checkpoint loads.

    dcp.load reads OUTPUT into FSDP2, DDP and plain models, on any number of ranks. Names stay unchanged; --model-key
    model stores them where {"model": model.state_dict()} looks for them. INPUT is safetensors, or a checkpoint of any
    other format: a .pt file, a DeepSpeed run, another checkpoint of torch. Other values are written as torch writes
    them. A rank reads whole chunks: --chunks N makes chunks smaller, --like DIR uses the chunks of DIR. With --to
    torch-checkpointing, OUTPUT is a step that CheckpointManager.load of torch_checkpointing reads.

    \b
    Examples:
      ckptconv safetensors2dcp model/ checkpoints/step-0 --chunks 8
      ckptconv safetensors2dcp model/ step-0 --states optimizer/ --model-key model
      ckptconv safetensors2dcp runs/7b/checkpoints step-0 --states runs/7b/checkpoints --flat-optimizer
      ckptconv safetensors2dcp model/ step-0 --like checkpoints/step-1000
      ckptconv safetensors2dcp model/ checkpoint-500 --to accelerate --states optimizer/
    """
    convert_one("safetensors2dcp", "", source, required(output, options), {"to": "dcp", **options})
