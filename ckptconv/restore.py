"""The way back: a `.pt` file of the tree that a safetensors output and its structure record describe. Pure."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from . import keymap, select, writable
from .errors import CkptconvError, UnsafeError, UsageError
from .formats.source import Source
from .outputs.torch_tree import TorchTree
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

    `left_out` are entries of classes that are not known to be data, by name: the class. `demoted` are tensors of such a
    class, which are written as plain ones, and `kept` what is written of such classes all the same. `unscaled` is what
    to say of 8-bit floats that were cast.
    """

    file: FilePlan
    tensors: int
    left_out: dict[str, str]
    demoted: dict[str, str]
    kept: dict[str, str]
    tree: TorchTree
    unscaled: tuple[str, ...] = ()

    def warnings(self) -> Iterator[str]:
        """What whoever had it converted should know."""
        yield from self.unscaled
        if self.left_out:
            yield f"left out, as their classes are known by name only: {_shown(self.left_out)}"
        if self.demoted:
            yield f"written as plain tensors, as their classes are known by name only: {_shown(self.demoted)}"
        if self.kept:
            yield f"torch.load with weights_only=False will run what is named by: {_shown(self.kept)}"

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
    opaque: str = "",
) -> Restored:
    """The plan to write the tree of `source` to `path`: under `key`, what the globs choose, floats as `dtype`.

    Raises UnsafeError for objects of classes that are not known to be data, unless `opaque` says to "keep" them, or to
    "drop" them; and for an attack in any case.
    """
    tree = select.subtree(source.weights, key, source.path) if key else source.weights
    found: dict[str, str] = {}
    demoted: dict[str, str] = {}
    unscaled: tuple[str, ...] = ()
    if include or exclude or dtype != "keep" or _has_unlisted(tree):
        leave_out = writable.leaving_out(include, exclude, opaque, found)
        tensors, structure, fixed, _ = keymap.describe(tree, leave_out=leave_out, tagged=True)
        names = set(select.matching(tensors, include, exclude))
        demoted = {name: _unlisted_kind(tensor) for name, tensor in tensors.items() if name in names}
        demoted = {name: kind for name, kind in demoted.items() if kind}
        if (found or demoted) and not opaque:
            raise _refusal(source.path, found | demoted)
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
        written = TorchTree(tree, opaque)
        file = written.plan(basename(path), _stem(path))
    except CkptconvError as error:
        raise type(error)(f"{source.path}: {error.message} Nothing was written.", error.hint) from error
    if opaque == "keep":
        return Restored(file, written.tensors, {}, {}, found | demoted, written, unscaled)
    return Restored(file, written.tensors, found, demoted, {}, written, unscaled)


def _unlisted_kind(node: Any) -> str:
    """The subclass that a tensor is of, if that is not known to be data."""
    kind = node.facts.kind if isinstance(node, Tagged) else "tensor"
    return kind if kind not in writable.KINDS and writable.is_unlisted_kind(kind) else ""


def _has_unlisted(tree: Any) -> bool:
    """Whether something in `tree` is of a class that is not known to be data."""
    return any(_unlisted_kind(node) or writable.unlisted(node) for node in keymap.walk(tree))


def _refusal(path: str, found: dict[str, str]) -> UnsafeError:
    one = "an object of a class that is" if len(found) == 1 else f"{len(found)} objects of classes that are"
    return UnsafeError(
        f"{path} holds {one} known by name only: {_shown(found)}. Whoever loads a .pt file with them runs what they "
        "name, so they are written only where that is asked for. Nothing was written.",
        "Use --opaque keep if you trust these names, --opaque drop to write everything else, or leave them out with "
        "--exclude.",
    )


def _shown(found: dict[str, str]) -> str:
    shown = ", ".join(f"{name[:100]!r} ({cls[:100]})" for name, cls in list(found.items())[:_SHOWN])
    return f"{shown} and {len(found) - _SHOWN} more" if len(found) > _SHOWN else shown


def _stem(path: str) -> str:
    """The directory inside the archive: torch takes the file's name for it, if that is plain text."""
    stem, _ = os.path.splitext(basename(path))
    return stem if stem and stem.isascii() and stem.isprintable() else "archive"
