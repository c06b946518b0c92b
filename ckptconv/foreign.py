"""What a tree holds beside data: tensors that have none here, and classes and functions known by name only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptconv.errors import UnsupportedError
from ckptconv.tree import Composite, Global, Opaque

# Tensors made of several whose parts are known.
COMPOSITES = frozenset(
    {"sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "nested", "quantized", "meta"}
)
_META = "saved from the meta device"
_DISTRIBUTED = "distributed over several processes, each of which saved its own part"
_ADVICE = {
    _META: "Save the checkpoint again with its weights loaded, or leave them out with --exclude.",
    _DISTRIBUTED: (
        "Save with torch.distributed.checkpoint and convert its directory (ckptconv dcp2safetensors), or gather whole "
        "tensors before saving; leave them out with --exclude."
    ),
}
_SHOWN = 5


def class_of(node: Any) -> str:
    """The class or function that `node`, a node of a tree, is known by; "" for data."""
    if type(node) is Composite:
        return "" if node.kind in COMPOSITES else node.kind
    return node.name if type(node) is Opaque else str(node) if type(node) is Global else ""


def lacks_data(node: Any) -> str:
    """Why the data of a tensor is not in its file; "" for what is not such a tensor."""
    if type(node) is Composite and node.kind == "meta":
        return _META
    name = class_of(node)
    distributed = name.startswith("torch.distributed.") and name.endswith((".DTensor", ".ShardedTensor"))
    return _DISTRIBUTED if distributed else ""


def without_data(where: str, found: Mapping[str, str]) -> UnsupportedError:
    """The error for tensors whose data the file `where` lacks: the reasons, by name."""
    reason = next(iter(found.values()))
    names = [name for name, why in found.items() if why == reason]
    count = f"{len(names)} tensor{'' if len(names) == 1 else 's'}"
    return UnsupportedError(
        f"{where} lacks the data of {count}, {reason}: {shown(names)}. Nothing was written.", _ADVICE[reason]
    )


def shown(names: list[str], most: int = _SHOWN) -> str:
    """A few of the names, for people."""
    few = ", ".join(repr(name if len(name) <= 100 else f"{name[:100]}…") for name in names[:most])
    return f"{few} and {len(names) - most} more" if len(names) > most else few
