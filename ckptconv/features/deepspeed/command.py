"""`ckptconv zero-to-fp32`: DeepSpeed's checkpoints to safetensors."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ckptconv.cli.making import convert_one
from ckptconv.cli.options import CONVERTING, Destination, destination, named, taking
from ckptconv.errors import UsageError

# Words for what it reads, in names of commands that there are not.
INPUT_WORDS = {"zero-to-fp32": ("zero", "zero1", "zero2", "zero3", "deepspeed", "ds")}
# Commands that report what conversions report.
OF_CONVERSIONS = ("zero-to-fp32",)


@taking(
    *named("into tag exclude_frozen_parameters optimizer order for_hub universal zero_stage fresh_optimizer per_rank"),
    *named("safe_serialization"),
    *CONVERTING,
)
def zero_to_fp32(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT",
            show_default=False,
            help="The directory that contains `latest`, or the directory of a tag.",
        ),
    ],
    output: Destination = None,
    **options: Any,
) -> None:
    """Join the fp32 weights of a DeepSpeed checkpoint.

    These are the master weights of ZeRO 1, 2 or 3. Weights that exist only in 16 bits are cast to float32, unless
    --dtype says keep. CHECKPOINT is the directory that contains `latest`, or the directory of one tag. OUTPUT is a
    directory, or one file if its name ends in .safetensors. Optimizer states are read only with --optimizer, which
    makes OUTPUT optional.

    \b
    Examples:
      ckptconv zero-to-fp32 runs/7b/checkpoints model/
      ckptconv zero-to-fp32 -t global_step1000 checkpoints model.safetensors
    """
    from ckptconv.outputs.kinds import FURTHER

    options.pop("safe_serialization", None)
    output = destination(output, options)
    if output is None and not any(options.get(name) for name in FURTHER):
        raise UsageError("zero-to-fp32 requires OUTPUT: a directory, or a name that ends in .safetensors.")
    convert_one("zero-to-fp32", "deepspeed", checkpoint, output, options)
