"""--keep without --quantize is met with a command that leaves tensors in their dtype."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ckptconv_here
from effort import every
from safetensors.torch import load_file

import ckptconv
from ckptconv.errors import UsageError


@every("options", [{}, {"key": "model", "strip_prefix": "module."}])
def test_keep_without_quantize_is_met_with_a_command_that_leaves_a_dtype(
    options: dict[str, Any], tmp_path: Path
) -> None:
    tensors = {"block.w": torch.ones(2, 2), "block.norm": torch.ones(2), "norm": torch.ones(2)}
    model = tmp_path / "model.pt"
    torch.save({"model": {f"module.{name}": tensor for name, tensor in tensors.items()}} if options else tensors, model)
    with pytest.raises(UsageError, match="--keep has no effect without --quantize") as caught:
        ckptconv.convert(model, tmp_path / "out", dtype="bf16", keep="*norm*", **options)
    first, _, command = caught.value.hint.rpartition(": ")
    assert ("write CONVERTED without --keep and --dtype" in first) == bool(options)
    converted = tmp_path / "converted.safetensors"
    ckptconv.convert(model, converted, fsync=False, **options)
    words = command.rstrip(".").replace("CONVERTED", str(converted)).replace("OUTPUT", str(tmp_path / "out"))
    assert ckptconv_here(*shlex.split(words)[1:], "--no-fsync").code == 0
    dtypes = {name: tensor.dtype for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items()}
    assert dtypes == {"block.w": torch.bfloat16, "block.norm": torch.float32, "norm": torch.float32}
