"""What a conversion would give, worked out from its plan: `inspect --as`. Pure; no tensor data is read."""

from __future__ import annotations

import shlex
from typing import Any

from ckptconv.formats.source import Source
from ckptconv.options import Options
from ckptconv.plan import Data, Plan
from ckptconv.planning import weights_output
from ckptconv.targets import Target
from ckptconv.tensors import Concat, Convert, File, Inline, LazyTensor, Narrow, Partitioned, Stored, Tagged, View

# For each family of formats the command that converts it, and what its output is called.
_COMMANDS = {
    "torch": ("pt2safetensors", "OUTPUT"),
    "deepspeed": ("zero-to-fp32", "OUTPUT"),
    "dcp": ("dcp2safetensors", "OUTPUT"),
    "safetensors": ("safetensors2pt", "OUTPUT.pt"),
}


def command_for(source: Source) -> tuple[str, str]:
    """The command that converts `source`, and a name for what it makes."""
    return _COMMANDS.get(source.family, _COMMANDS["torch"])


def forecast(source: Source, dtype: str | None, max_shard_size: int | None = None) -> dict[str, Any]:
    """The conversion of `source` to `dtype` (None: as it is done by default): files, bytes, and bytes to be read.

    Of safetensors it is the one to a file for torch.load. Raises what planning the conversion raises.
    """
    command, output = command_for(source)
    is_torch = source.family == "safetensors"
    options = Options(dtype=dtype, max_shard_size=max_shard_size)
    made = weights_output(source, Target(output, is_file=is_torch, is_torch=is_torch), options)
    asked = f" --dtype {dtype}" if dtype else ""
    asked += f" --max-shard-size {max_shard_size}" if max_shard_size else ""
    return {
        "dtype": dtype or source.default_dtype,
        "command": f"ckptconv {command} {shlex.quote(source.path)} {output}{asked}",
        "bytes": made.plan.nbytes,
        "files": [{"name": file.name, "bytes": file.size, "tensors": file.tensors} for file in made.plan.files],
        "shards": sum(file.tensors > 0 for file in made.plan.files),
        "bytes_to_read": source.bytes_read + bytes_to_read(made.plan),
        "input_bytes": sum(file.size for file in {file.stored: None for file in made.plan.inputs()}),
    }


def bytes_to_read(plan: Plan) -> int:
    """About how many bytes of its inputs carrying out `plan` reads."""
    packed: dict[File, None] = {}
    total = 0
    for file in plan.files:
        for part in file.parts:
            if isinstance(part, Data):
                inputs = [each for each in part.tensor.inputs() if each.packed]
                packed.update(dict.fromkeys(inputs))
                total += 0 if inputs else _stored_bytes(part.tensor)
    # What is packed is unpacked whole.
    return total + sum(file.packed.nbytes for file in packed if file.packed)


def _stored_bytes(tensor: LazyTensor) -> int:
    """How many bytes of files the elements of `tensor` are."""
    if isinstance(tensor, (Tagged, View, Convert)):
        return _stored_bytes(tensor.tensor)
    if isinstance(tensor, Concat):
        return sum(map(_stored_bytes, tensor.parts))
    if isinstance(tensor, Narrow):
        extent = tensor.tensor.shape[tensor.dim]
        return _stored_bytes(tensor.tensor) * tensor.length // extent if extent else 0
    if isinstance(tensor, Stored):
        size = tensor.dtype.itemsize
        for extent, stride in zip(tensor.shape, tensor.strides, strict=True):
            size *= extent if stride else min(extent, 1)
        return size
    return tensor.nbytes if isinstance(tensor, Partitioned) or not isinstance(tensor, Inline) else 0
