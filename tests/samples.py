"""Sound checkpoints to be changed: small, and with as many kinds of tensors as there are."""

from __future__ import annotations

import io
from typing import Any

import torch


def trees() -> list[Any]:
    made = torch.Generator().manual_seed(0)
    flat = torch.randn(60, generator=made)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        network = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    return [
        {"a": torch.randn(3, 4, generator=made), "b": flat[5:20].view(3, 5), "c": flat[5:20].view(3, 5).t()},
        {"p": torch.nn.Parameter(torch.ones(2)), "n": {"x": [torch.arange(5), torch.tensor(1.5)], "y": (1, None)}},
        {
            "h": torch.randn(4, generator=made).half(),
            "u": torch.arange(6).to(torch.uint16),
            "e": torch.arange(3.0).expand(2, 3),
        },
        {
            "s": torch.eye(3).to_sparse(),
            "k": torch.randn(2, dtype=torch.complex64, generator=made).conj(),
            "z": torch.empty(0),
        },
        network.state_dict(),
    ]


def saved(tree: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(tree, buffer, **options)
    return buffer.getvalue()


TREES = trees()
ZIPS = [saved(tree) for tree in TREES] + [saved(TREES[0], pickle_protocol=4)]
STREAMS = [saved(tree, _use_new_zipfile_serialization=False) for tree in TREES]
