"""Writes files as torch did before 0.1.10: tar archives."""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

CLASSES = {
    torch.float32: torch.FloatStorage,
    torch.float64: torch.DoubleStorage,
    torch.float16: torch.HalfStorage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
}


class Part:
    """A part of a storage, which releases of the time could save: elements `offset` to `offset` + `numel`."""

    def __init__(self, tensor: torch.Tensor, offset: int, numel: int) -> None:
        self.tensor, self.offset, self.numel = tensor, offset, numel


class Writer(pickle.Pickler):
    """Writes the members that torch 0.1.9 wrote: the object first, to learn of its tensors."""

    def __init__(self, value: Any) -> None:
        self.out = io.BytesIO()
        super().__init__(self.out, 2)
        self.tensors: dict[int, torch.Tensor] = {}
        self.storages: dict[int, torch.Tensor] = {}
        self.views: list[tuple[int, int, int, int]] = []
        self.alive: list[Any] = []
        self.classes: set[type] = set()
        self.dump(value)

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, type) and issubclass(value, nn.Module) and value not in self.classes:
            self.classes.add(value)
            return value, "model.py", "class Model: pass"
        if isinstance(value, Part):
            key = 7_000 + len(self.views)
            self.views.append((key, self.storage_of(value.tensor), value.offset, value.numel))
            return key
        if isinstance(value, torch.Tensor):
            self.tensors[id(value)] = value
            self.storage_of(value)
            self.alive.append(value)
            return id(value)
        return None

    @staticmethod
    def key_of(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata

    def storage_of(self, tensor: torch.Tensor) -> int:
        self.alive.append(tensor.untyped_storage())
        self.storages.setdefault(self.key_of(tensor), tensor)
        return self.key_of(tensor)

    def members(self) -> dict[str, bytes]:
        storages = pickle.dumps(len(self.storages), 2)
        for key, tensor in self.storages.items():
            raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy().tobytes()
            storages += pickle.dumps((key, "cpu", CLASSES[tensor.dtype]), 2)
            storages += struct.pack("<q", len(raw) // tensor.itemsize) + raw
        storages += pickle.dumps(self.views, 2)
        tensors = pickle.dumps(len(self.tensors), 2)
        for key, tensor in self.tensors.items():
            tensors += pickle.dumps((key, self.key_of(tensor), torch.FloatTensor), 2)
            geometry = (*tensor.size(), *tensor.stride(), tensor.storage_offset())
            tensors += struct.pack(f"<i4x{len(geometry)}q", tensor.dim(), *geometry)
        return {"storages": storages, "tensors": tensors, "pickle": self.out.getvalue()}


def pack(members: dict[str, bytes], path: Path, form: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w:", format=form) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            info.mtime = 1479513600.25  # what os.stat gives, and an extended header takes
            archive.addfile(info, io.BytesIO(content))
    return path


def storages(*entries: Any, views: Any = (), count: Any = None) -> bytes:
    made = pickle.dumps(len(entries) if count is None else count, 2)
    for description, numel, raw in entries:
        made += pickle.dumps(description, 2) + struct.pack("<q", numel) + raw
    return made + pickle.dumps(list(views) if isinstance(views, tuple) else views, 2)


def tensors(*entries: tuple[Any, int, Sequence[int]], count: Any = None) -> bytes:
    made = pickle.dumps(len(entries) if count is None else count, 2)
    for description, dimensions, geometry in entries:
        made += pickle.dumps(description, 2) + struct.pack(f"<i4x{len(geometry)}q", dimensions, *geometry)
    return made
