"""Prefixes that wrappers of models put before the names of all tensors. Pure."""

from __future__ import annotations

from collections.abc import Collection

# Prefixes that wrappers add to every name: Lightning, DistributedDataParallel and DeepSpeed's engine, torch.compile.
WRAPPERS = ("_forward_module.", "module.", "_orig_mod.", "model.")


def wrapper(names: Collection[str], known: Collection[str] = ()) -> str:
    """Return the wrapper prefixes that all names share; only as many as it takes until all names are `known`."""
    prefix = ""
    while names and not (known and all(name[len(prefix) :] in known for name in names)):
        more = next((w for w in WRAPPERS if all(name.startswith(prefix + w) for name in names)), "")
        if not more:
            break
        prefix += more
    return prefix
