"""What torch.load makes of a file, and whether it is what we read; tensors and objects to put into such files."""

from __future__ import annotations

import collections
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from evaluate import evaluate
from torch import nn

from ckptconv.pickles.nodes import NumpyArray, NumpyScalar, Size, TorchConstant
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Tagged


def bits(tensor: torch.Tensor) -> bytes:
    # A tensor may count as contiguous and still have a stride of 0, which `view` does not like.
    plain = torch.empty(tensor.shape, dtype=tensor.dtype)
    plain.copy_(tensor.detach())
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def same(ours: Any, theirs: Any, path: str = "") -> None:
    """Assert that what we read is what torch.load makes."""
    if isinstance(theirs, torch.Tensor):
        assert isinstance(ours, Tagged), path
        assert f"torch.{ours.dtype}" == str(theirs.dtype), path
        assert ours.shape == theirs.shape, path
        assert evaluate(ours) == bits(theirs), path
        # Cut into pieces of 64 bytes, or what is large into some thousand.
        limit = max(64, 1 << (ours.nbytes >> 11).bit_length())
        assert evaluate(ours, order="source", limit=limit) == bits(theirs), path
        facts = ours.facts
        assert facts.strides == theirs.stride(), path
        assert facts.storage_offset == theirs.storage_offset(), path
        assert facts.storage_nbytes == theirs.untyped_storage().nbytes(), path
        assert facts.requires_grad == theirs.requires_grad, path
        assert (facts.kind == "parameter") == isinstance(theirs, nn.Parameter), path
        attributes = {k: v for k, v in vars(theirs).items() if not k.startswith("_backward")} or None
        same(facts.attributes, attributes, path + ".attributes")
    elif isinstance(theirs, dict):
        assert type(ours) is type(theirs), path
        assert list(ours) == list(theirs), path
        for key, value in theirs.items():
            same(ours[key], value, f"{path}/{key}")
        if getattr(theirs, "__dict__", None):
            same(vars(ours), vars(theirs), path + ".__dict__")
    elif isinstance(theirs, (list, tuple, collections.deque)):
        assert type(ours) is (Size if type(theirs) is torch.Size else type(theirs)), path
        assert len(ours) == len(theirs), path
        for index, value in enumerate(theirs):
            same(ours[index], value, f"{path}[{index}]")
    elif isinstance(theirs, np.ndarray):
        assert type(ours) is NumpyArray, path
        back = np.frombuffer(ours.data, ours.dtype).reshape(ours.shape, order=ours.order)
        # numpy turns arrays of the other byte order when it reads them, at some protocols.
        assert back.dtype.newbyteorder("=") == theirs.dtype.newbyteorder("="), path
        assert back.astype(theirs.dtype).tobytes() == theirs.tobytes(), path
    elif isinstance(theirs, np.generic):
        assert type(ours) is NumpyScalar, path
        assert ours.dtype == theirs.dtype.str, path
        assert ours.data == theirs.tobytes(), path
    elif isinstance(theirs, (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)):
        assert type(ours) is TorchConstant, path
        assert f"torch.{ours.name}" == str(theirs), path
    elif isinstance(theirs, torch.device):
        assert ours == TorchConstant("device", str(theirs)), path
    else:
        assert type(ours) is type(theirs), path
        assert repr(ours) == repr(theirs), path


def numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of random bits."""
    count = torch.empty(shape, dtype=dtype).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))
    return (raw % 2).view(dtype).reshape(shape) if dtype is torch.bool else raw.view(dtype).reshape(shape)


# All of torch's that a tensor can be saved in; those of odd widths exist by name only.
SAVABLE = sorted(
    {d for d in vars(torch).values() if isinstance(d, torch.dtype) and str(d).removeprefix("torch.") in DTYPES
     and not str(d).startswith("torch.q")}, key=str
)  # fmt: skip


class Attack:
    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch '{self.canary}'",)
