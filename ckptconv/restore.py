"""The way back: a `.pt` file of the tree that a safetensors output and its structure record describe. Pure."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from . import foreign, keymap, select
from .errors import CkptconvError, UnsupportedError, UsageError
from .formats.source import Source
from .outputs.torch_tree import KINDS, TorchTree
from .plan import FilePlan
from .storage import basename
from .tensors import LazyTensor, Tagged

# What a file for torch.load is called.
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
# Entries that an error names.
_SHOWN = 5


@dataclass(frozen=True)
class Restored:
    """The plan of a `.pt` file, and how many tensors it has.

    `left_out` are entries of classes that are known by name only, by name: the class. `demoted` are tensors of such a
    class, which are written as plain ones. `unscaled` is what to say of 8-bit floats that were cast.
    """

    file: FilePlan
    tensors: int
    left_out: dict[str, str]
    demoted: dict[str, str]
    tree: TorchTree
    unscaled: tuple[str, ...] = ()

    def warnings(self) -> Iterator[str]:
        """What whoever had it converted should know."""
        yield from self.unscaled
        if self.left_out:
            yield f"left out, as their classes are known by name only: {_shown(self.left_out)}"
        if self.demoted:
            yield f"written as plain tensors, as their classes are known by name only: {_shown(self.demoted)}"

    def overlaps(self) -> Iterator[tuple[LazyTensor, LazyTensor]]:
        """Pairs of tensors that are equal unless tensors that shared memory have changed since."""
        return self.tree.overlaps()


def plan_restored(
    source: Source,
    path: str,
    *,
    key: str = "",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    dtype: str = "keep",
    drop_opaque: bool = False,
) -> Restored:
    """The plan to write the tree of `source` to `path`: under `key`, what the globs choose, floats as `dtype`.

    Raises UnsupportedError for objects of classes that are known by name only, unless they are to be dropped.
    """
    tree = select.subtree(source.weights, key, source.path) if key else source.weights
    left_out: dict[str, str] = {}
    demoted: dict[str, str] = {}
    unscaled: tuple[str, ...] = ()
    if include or exclude or dtype != "keep" or _has_foreign(tree):

        def leave_out(name: str, node: Any) -> bool:
            cls = foreign.class_of(node)
            if cls and select.is_chosen(name, include, exclude):
                left_out[name] = cls
            return bool(cls)

        tensors, structure, fixed, _ = keymap.describe(tree, leave_out=leave_out, tagged=True)
        names = set(select.matching(tensors, include, exclude))
        demoted = {name: tensor.facts.kind for name, tensor in tensors.items() if tensor.facts.kind not in KINDS}
        demoted = {name: kind for name, kind in demoted.items() if name in names}
        if (left_out or demoted) and not drop_opaque:
            raise _refusal(source.path, left_out | demoted)
        if tensors and not names:
            raise UsageError(f"Nothing is left to write: all {len(tensors)} tensors are excluded.")
        flat = {
            name: tensor.tensor if name in fixed else select.converted(name, tensor.tensor, dtype)
            for name, tensor in tensors.items()
            if name in names
        }
        cast = {name: tensors[name] for name in flat if flat[name].dtype != tensors[name].dtype}
        unscaled = select.unscaled(cast, tensors, dtype)
        structure = keymap.remap(structure, {name: None for name in tensors if name not in names})
        tree = keymap.unflatten(flat, structure, live_values=False)
    try:
        written = TorchTree(tree, plain=drop_opaque)
        file = written.plan(basename(path), _stem(path))
    except CkptconvError as error:
        raise type(error)(f"{source.path}: {error.message} Nothing was written.", error.hint) from error
    return Restored(file, written.tensors, left_out, demoted, written, unscaled)


def _has_foreign(tree: Any) -> bool:
    """Whether something in `tree` is of a class that is known by name only."""
    return any(
        (isinstance(node, Tagged) and node.facts.kind not in KINDS) or foreign.class_of(node)
        for node in keymap.walk(tree)
    )


def _refusal(path: str, found: dict[str, str]) -> UnsupportedError:
    one = "an object of a class that is" if len(found) == 1 else f"{len(found)} objects of classes that are"
    return UnsupportedError(
        f"{path} holds {one} known by name only: {_shown(found)}. Whoever loads a .pt file with them runs what they "
        "name, so they are not written. Nothing was written.",
        "Use --drop-opaque to write everything else, or leave them out with --exclude.",
    )


def _shown(found: dict[str, str]) -> str:
    shown = ", ".join(f"{name[:100]!r} ({cls[:100]})" for name, cls in list(found.items())[:_SHOWN])
    return f"{shown} and {len(found) - _SHOWN} more" if len(found) > _SHOWN else shown


def _stem(path: str) -> str:
    """The directory inside the archive: torch takes the file's name for it, if that is plain text."""
    stem, _ = os.path.splitext(basename(path))
    return stem if stem and stem.isascii() and stem.isprintable() else "archive"
