"""Sound checkpoints to be changed: small, and with as many kinds of tensors as there are."""

from __future__ import annotations

import io
import pickle
import types
from typing import Any
from unittest import mock

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


def saved_as_stream(tree: Any, **options: Any) -> bytes:
    """In the format before torch 1.6. It names storages by their addresses, and sorts them: here they are numbered."""
    numbers: dict[str, str] = {}

    def numbered(key: str) -> str:
        return numbers.setdefault(key, str(len(numbers)))

    class Pickler(pickle.Pickler):
        def __init_subclass__(cls) -> None:
            given = cls.persistent_id

            def persistent_id(self: Any, value: Any) -> Any:
                pid = given(self, value)
                return pid and (*pid[:2], numbered(pid[2]), *pid[3:])

            cls.persistent_id = persistent_id

    def dump(value: Any, file: Any, protocol: int) -> None:
        pickle.dump([*map(numbered, value)] if type(value) is list else value, file, protocol)

    module = types.SimpleNamespace(__name__="pickle", Pickler=Pickler, dump=dump)
    with mock.patch.object(torch.serialization, "sorted", list, create=True):
        return saved(tree, _use_new_zipfile_serialization=False, pickle_module=module, **options)


TREES = trees()
ZIPS = [saved(tree) for tree in TREES] + [saved(TREES[0], pickle_protocol=4)]
STREAMS = [saved_as_stream(tree) for tree in TREES]
