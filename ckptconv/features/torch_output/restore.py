"""Plans a `.pt` file: of the tree that a safetensors output and its structure record describe, or of any other tree.
Pure."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from ckptconv.errors import CkptconvError, UsageError
from ckptconv.features.torch_files import writable
from ckptconv.features.torch_files.refusing import refusal, shown
from ckptconv.features.torch_files.tree import TorchTree
from ckptconv.features.torch_output.selecting import not_undone, restored, selected_tree, tree_in
from ckptconv.features.unflattening.decoder import unflatten
from ckptconv.formats.model_files import SAFETENSORS
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs import computed, selection
from ckptconv.outputs.notices import Notices
from ckptconv.outputs.planning import Restored
from ckptconv.outputs.selected import Selected
from ckptconv.pickles.children import walk
from ckptconv.plan import FilePlan
from ckptconv.storage.paths import basename
from ckptconv.tensors.lazy import LazyTensor, Tagged


def plan_restored(source: Source, path: str, options: Options) -> tuple[FilePlan, Restored, Notices]:
    """Plan to write the tree of `source` to `path`: the part under a key, the values that globs choose, floats cast.

    Without `options.structure`, write a dict of the tensors by name. Raises UnsafeError for objects of classes that are
    not known to be data, unless `options.opaque` is "keep" or "drop"; and for an attack in any case.
    """
    tree = tree_in(source, options)
    notices = Notices(record=not_undone(source, options))
    unknown: dict[str, str] = {}
    demoted: dict[str, str] = {}
    selects = options.include or options.exclude or options.dtype not in (None, "keep") or not options.structure
    # Everything in safetensors can be written. For other formats, `selected` says if something cannot be.
    selects = selects or source.family != SAFETENSORS
    is_computed = any(way.tree for way in computed.ways_of(restored(source, options)))
    if selects or options.strip_prefix or options.rename or is_computed or _has_unlisted(tree):
        chosen = selected_tree(source, options)
        described = chosen.described
        unknown = {name: writable.unlisted(node) for name, node in described.found.items()}
        if options.structure:
            kinds = {name: _unlisted_kind(chosen.known[name]) for name in chosen.names}
            demoted = {name: kind for name, kind in kinds.items() if kind}
        if (unknown or demoted) and not options.opaque:
            values = [*described.found.values(), *(chosen.known[name] for name in demoted)]
            raise refusal(source.path, unknown | demoted, "a .pt file", values)
        if described.tensors and not chosen.names:
            raise UsageError(f"No tensors are left to write: all {len(described.tensors)} are excluded.")
        flat = {name: chosen.cast(name) for name in chosen.tensors}
        notices = _noticed(source, chosen, flat, notices, options)
        tree = unflatten(flat, described.structure if options.structure else None, live_values=False)
    try:
        written = TorchTree(tree, options.opaque)
        file = written.plan(basename(path), _stem(path))
    except CkptconvError as error:
        raise type(error)(f"{source.path}: {error.message}", error.hint) from error
    kept: dict[str, str] = {}
    if options.opaque == "keep":
        unknown, demoted, kept = {}, {}, unknown | demoted
    warnings = (*notices.warnings, *_warnings(unknown, demoted, kept))
    return file, Restored(written.tensors, unknown, written.overlaps), notices._replace(warnings=warnings)


def _warnings(left_out: Mapping[str, str], demoted: Mapping[str, str], kept: Mapping[str, str]) -> Iterator[str]:
    """Yield the warnings about values, by name, of classes that are not known to be data: those that are not written,
    tensors that are written as plain ones, and values that are written unchanged."""
    if left_out:
        yield f"left out, because only the names of their classes are known: {shown(left_out)}"
    if demoted:
        yield f"written as plain tensors, because only the names of their classes are known: {shown(demoted)}"
    if kept:
        yield f"torch.load with weights_only=False will run the code of the classes of these values: {shown(kept)}"


def _noticed(
    source: Source, chosen: Selected, flat: Mapping[str, LazyTensor], notices: Notices, options: Options
) -> Notices:
    """Return `notices` with those about the tensors of `source` that were chosen, which are stored as `flat`."""
    known, names = chosen.known, chosen.names
    cast = [old for old, new in names.items() if flat[new].dtype != known[old].dtype]
    if cast:
        selection.check_unscaled(cast, known, chosen.dtype)
    left = selection.left_alone({name: flat[name] for name in flat if name in chosen.uncastable}, chosen.dtype)
    return notices._replace(
        idle=chosen.idle(options, source.weights),
        warnings=(*chosen.warnings, *left),
        notes=chosen.notes,
        record=chosen.record or notices.record,
        reported=chosen.reporter(flat)(()),
        equal=chosen.equal,
    )


def _unlisted_kind(node: Any) -> str:
    """Return the subclass of a tensor if it is not known to be data, else ""."""
    kind = node.facts.kind if isinstance(node, Tagged) else "tensor"
    return kind if kind not in writable.KINDS and writable.is_unlisted_kind(kind) else ""


def _has_unlisted(tree: Any) -> bool:
    """Return whether `tree` contains an object of a class that is not known to be data."""
    return any(_unlisted_kind(node) or writable.unlisted(node) for node in walk(tree))


def _stem(path: str) -> str:
    """Return the directory inside the archive. As torch does, use the file's name, if that is plain text."""
    stem, _ = os.path.splitext(basename(path))
    return stem if stem and stem.isascii() and stem.isprintable() else "archive"
