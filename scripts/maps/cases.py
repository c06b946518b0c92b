"""What a converter of maps is held to: a model's tensors under a framework's names, and what the framework's own
converter makes of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """`ours` are the tensors of the framework, `hf` what its converter makes of them, `config` a config.json of Hugging
    Face.

    `map` is the map that goes from the one to the other; `sizes` are those that neither shapes nor `config` say.
    `back` is what the converter makes of `hf` where that differs from `ours`, and `lost` names what it leaves out.
    `made` says which converter it was. If it computes, `computed`, elements are not whole numbers, and are kept as
    they are; `back` is then all that it makes of `hf`.
    """

    name: str
    map: str
    ours: Tensors
    hf: Tensors
    config: Mapping[str, Any]
    made: str
    packages: tuple[str, ...]
    sizes: Mapping[str, int] = field(default_factory=dict)
    back: Tensors = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    computed: bool = False

    def save(self, parent: Path) -> None:
        """Write it to a directory of its name in `parent`."""
        place = parent / self.name
        place.mkdir(parents=True, exist_ok=True)
        for name, tensors in (("ours", self.ours), ("hf", self.hf), ("back", self.back)):
            if tensors:
                save_file(tensors if self.computed else small(tensors), place / f"{name}.safetensors")
        told = {
            "map": self.map,
            "made": self.made,
            "versions": {each: version(each) for each in self.packages},
            "sizes": dict(self.sizes),
            "lost": sorted(self.lost),
            **({"computed": True} if self.computed else {}),
        }
        (place / "config.json").write_text(json.dumps(dict(self.config), indent=1) + "\n")
        (place / "case.json").write_text(json.dumps(told, indent=1) + "\n")


def numbered(shapes: Mapping[str, torch.Tensor]) -> Tensors:
    """Return tensors of the shapes of others whose elements are 0, 1, 2 … from the first of the first to the last."""
    made, start = {}, 0
    for name, tensor in shapes.items():
        end = start + tensor.numel()
        made[name] = torch.arange(start, end, dtype=torch.float32).reshape(tensor.shape)
        start = end
    if start > 1 << 16:
        raise ValueError(f"{start} elements: 16 bits cannot tell them apart")
    return made


def small(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Return `tensors` with their whole numbers in 16 bits."""
    return {name: tensor.to(torch.int32).to(torch.int16).contiguous() for name, tensor in tensors.items()}


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Whether two have the same names, shapes and elements."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
