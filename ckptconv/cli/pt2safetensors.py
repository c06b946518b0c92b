"""`ckptconv pt2safetensors`: files of torch.save to safetensors."""

from __future__ import annotations

from typing import Any

from ckptconv.cli.making import convert_one
from ckptconv.cli.options import CONVERTING, Destination, Input, destination, named, taking


@taking(*named("into optimizer order for_hub universal zero_stage fresh_optimizer raw alone"), *CONVERTING)
def pt2safetensors(source: Input, output: Destination = None, **options: Any) -> None:
    """Convert .pt, .pth, .bin and .ckpt files to safetensors.

    The structure of a nested state is stored in a record with the tensors. Without OUTPUT, x.pt becomes x.safetensors.
    INPUT may be a directory with a set of shards, or with one file per rank, as FSDP and verl write them: these are
    joined.

    \b
    Examples:
      ckptconv pt2safetensors model.pt
      ckptconv pt2safetensors --key state_dict epoch=3.ckpt model.safetensors
      ckptconv pt2safetensors global_step_100/actor model/ --optimizer optimizer/
    """
    convert_one("pt2safetensors", "torch", source, destination(output, options), options)
