"""`ckptconv dcp2safetensors`: checkpoints of torch.distributed.checkpoint to safetensors."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ckptconv.cli.making import convert_one
from ckptconv.cli.options import CONVERTING, Destination, destination, named, taking
from ckptconv.errors import UsageError

# Words for what it reads.
INPUT_WORDS = {"dcp2safetensors": ("dcp", "distcp", "fsdp")}
OTHER_WORDS = {"dcp2safetensors": ("format-utils", "consolidate-dcp")}
# Commands whose report is that of a conversion.
OF_CONVERSIONS = ("dcp2safetensors",)


@taking(*named("into optimizer order for_hub universal zero_stage fresh_optimizer master unstack"), *CONVERTING)
def dcp2safetensors(
    directory: Annotated[
        str, typer.Argument(metavar="DIR", show_default=False, help="The directory of .metadata, or of the run.")
    ],
    output: Destination = None,
    **options: Any,
) -> None:
    """Convert a torch.distributed.checkpoint directory (FSDP) to safetensors.

    DIR contains .metadata and .distcp files, or is the directory in which FSDP, torchtitan, OLMo-core, accelerate or
    Lightning put such a directory. The output has the model, under its own names: the part below `model`, `state_dict`
    or `module`, or everything except the optimizer. --key selects another part, --key . everything. OUTPUT is a
    directory, or one file if its name ends in .safetensors; with --optimizer it may be omitted.

    \b
    Examples:
      ckptconv dcp2safetensors checkpoints/step-1000 model/
      ckptconv dcp2safetensors step-1000 model/ --optimizer optimizer/
    """
    from ckptconv.outputs.kinds import FURTHER

    output = destination(output, options)
    if output is None and not any(options.get(name) for name in FURTHER):
        raise UsageError("dcp2safetensors requires OUTPUT: a directory, or a name that ends in .safetensors.")
    convert_one("dcp2safetensors", "dcp", directory, output, options)
