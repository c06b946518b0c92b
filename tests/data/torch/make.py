"""Makes the files beside it: python make.py, with the release of torch that is to write them.

They go into a directory named after the release, and those that features read into folders of their tests. The wheels
of releases that are out of use want CUDA: to import one without it (pip install --no-deps), put libraries of the names
that `ldd` misses on LD_LIBRARY_PATH, with functions that do nothing.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import nn

warnings.simplefilter("ignore")


class Block(nn.Module):
    """Parameters, buffers, a tie, and tensors that are none of these."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4, bias=False))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.arange(4.0))
        self.bias = nn.Parameter(torch.arange(4).to(torch.bfloat16), requires_grad=False)
        self.rate = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.norm(self.embed(x))) * self.scale * self.rate + self.bias.float().sum())


def tensors() -> dict[str, Any]:
    base = torch.arange(24).reshape(4, 6)
    names = ("uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "bool")
    made: dict[str, Any] = {name: base.to(getattr(torch, name)) for name in (*names, "complex64", "complex128")}
    for name in ("float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64"):
        dtype = getattr(torch, name, None)
        # Some releases have dtypes that they cannot save.
        with contextlib.suppress(KeyError, TypeError, AttributeError):
            tensor = torch.arange(8, dtype=torch.uint8).view(dtype)
            torch.save(tensor, io.BytesIO())
            torch.save(tensor, io.BytesIO(), _use_new_zipfile_serialization=False)
            made[name] = tensor
    floats = made["float32"]
    return {
        **made,
        "transposed": floats.t(),
        "column": floats[:, 2],
        "expanded": floats[0, 3].expand(3, 3),
        "empty": floats[:0],
        "scalar": torch.tensor(2.5),
        "parameter": nn.Parameter(torch.ones(3)),
        "conjugate": made["complex64"].conj(),
        "negative": torch._neg_view(torch.arange(3.0)),
    }


def training() -> dict[str, Any]:
    torch.manual_seed(0)
    model = Block()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.arange(5)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "epoch": 3,
        "shape": torch.Size([2, 3]),
        "device": torch.device("cuda:1"),
        "dtype": torch.bfloat16,
        "rng": torch.get_rng_state(),
        "nested": [OrderedDict(a=(1, None)), {"b": {1, 2}}],
    }


def main() -> None:
    release = torch.__version__.partition("+")[0]
    directory = Path(__file__).parent / release
    directory.mkdir(exist_ok=True)
    features = Path(__file__).parents[2] / "features"
    streams, programs = (features / name / "data" / release for name in ("torch_stream", "script"))
    streams.mkdir(parents=True, exist_ok=True)
    programs.mkdir(parents=True, exist_ok=True)
    for name, tree in {"tensors": tensors(), "training": training(), "module": nn.Linear(2, 3)}.items():
        torch.save(tree, directory / f"{name}.pt")
        torch.save(tree, streams / f"{name}.pt", _use_new_zipfile_serialization=False)
    torch.manual_seed(0)
    model = Block().eval()
    torch.jit.script(model).save(str(programs / "scripted.pt"))
    torch.jit.trace(model, torch.arange(5)).save(str(programs / "traced.pt"))
    print(release, *sorted(path.name for path in directory.iterdir()))


if __name__ == "__main__":
    main()
