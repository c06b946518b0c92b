"""The way back: a `.pt` file of the tree that a safetensors output and its structure record describe. Pure."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from . import foreign, keymap, select
from .errors import CkptconvError, UnsupportedError, UsageError
from .formats.source import Source
from .options import Options
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
    class, which are written as plain ones. `idle` are options that were given and change nothing: {option: reason}.
    """

    file: FilePlan
    tensors: int
    left_out: dict[str, str]
    demoted: dict[str, str]
    tree: TorchTree
    idle: Mapping[str, str]

    def warnings(self) -> Iterator[str]:
        """What whoever had it converted should know."""
        if self.left_out:
            yield f"left out, as their classes are known by name only: {_shown(self.left_out)}"
        if self.demoted:
            yield f"written as plain tensors, as their classes are known by name only: {_shown(self.demoted)}"

    def overlaps(self) -> Iterator[tuple[LazyTensor, LazyTensor]]:
        """Pairs of tensors that are equal unless tensors that shared memory have changed since."""
        return self.tree.overlaps()


def plan_restored(source: Source, path: str, options: Options) -> Restored:
    """The plan to write the tree of `source` to `path`: under a key, what the globs choose, floats of another dtype.

    Without `options.structure` it is the tensors by name. Raises UnsupportedError for objects of classes that are known
    by name only, unless they are to be dropped.
    """
    dtype, drop_opaque = options.dtype or "keep", options.drop_opaque
    choice = select.Choice(options.include, options.exclude)
    tree = select.subtree(source.weights, options.key, source.path) if options.key else source.weights
    idle: dict[str, str] = {}
    left_out: dict[str, str] = {}
    demoted: dict[str, str] = {}
    if choice or dtype != "keep" or not options.structure or _has_foreign(tree):
        leave_out = (lambda _, node: bool(foreign.class_of(node))) if options.structure else None
        described = keymap.describe(tree, leave_out=leave_out, tagged=True, choice=choice)
        left_out = {name: foreign.class_of(node) for name, node in described.left_out.items()}
        tensors = described.tensors
        names = set(select.matching(tensors, choice))
        idle = select.idle_globs(list(tensors), choice)
        demoted = {name: tensor.facts.kind for name, tensor in tensors.items() if tensor.facts.kind not in KINDS}
        demoted = {name: kind for name, kind in demoted.items() if name in names and options.structure}
        if (left_out or demoted) and not drop_opaque:
            raise _refusal(source.path, left_out | demoted)
        if tensors and not names:
            raise UsageError(f"Nothing is left to write: all {len(tensors)} tensors are excluded.")
        flat = {
            name: tensor.tensor if name in described.fixed else select.converted(name, tensor.tensor, dtype)
            for name, tensor in tensors.items()
            if name in names
        }
        tree = keymap.unflatten(flat, described.structure if options.structure else None, live_values=False)
    try:
        written = TorchTree(tree, plain=drop_opaque)
        file = written.plan(basename(path), _stem(path))
    except CkptconvError as error:
        raise type(error)(f"{source.path}: {error.message} Nothing was written.", error.hint) from error
    return Restored(file, written.tensors, left_out, demoted, written, idle)


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
