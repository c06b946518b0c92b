"""The refusal of values whose classes are known only by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptconv.errors import CkptconvError, UnsafeError
from ckptconv.features.torch_files.tree import TorchTree
from ckptconv.text import some


def refusal(path: str, classes: Mapping[str, str], output: str, values: list[Any]) -> UnsafeError:
    """Return the error for `values` of these `classes`, by name, that `output` holds only if the user says so."""
    try:
        TorchTree(values, "keep")
        may_keep = True
    except CkptconvError:
        may_keep = False
    is_one = len(classes) == 1
    objects = "an object of a class that is" if is_one else f"{len(classes)} objects of classes that are"
    run, them = ("that class, so it is", "it") if is_one else ("these classes, so they are", "them")
    keep = f"--opaque keep if you trust {them}, "
    return UnsafeError(
        f"{path} contains {objects} known only by name: {shown(classes)}. Loading {output} would import and run "
        f"{run} written only on request.",
        f"Use {keep if may_keep else ''}--opaque drop to write everything else, or leave {them} out with --exclude.",
    )


def shown(classes: Mapping[str, str]) -> str:
    """Return a few of the values with their classes, for a message."""
    return some(classes.items(), form=lambda item: f"{item[0][:100]!r} ({item[1][:100]})")
