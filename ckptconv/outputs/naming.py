"""The tensors of a source by the names that options are about. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ckptconv.errors import UsageError
from ckptconv.formats.optimizers import optimizers_in, subtree, weights_key
from ckptconv.formats.source import Source, StoredTensors
from ckptconv.options.table import Options
from ckptconv.outputs import selection
from ckptconv.pickles import nodes
from ckptconv.structure.choice import Choice
from ckptconv.structure.record import Flattened
from ckptconv.tensors.lazy import same_bytes


class Named(NamedTuple):
    """The tensors of a source by the names that options are about, and the source's ties {alias: owner} of these.

    `optimizers` are the names under which it has optimizers among them; `edit` changes a configuration to one that is
    true of the tensors.
    """

    described: Flattened
    ties: Mapping[str, str]
    structured: bool
    choice: Choice
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()
    edit: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None

    def without_record(self, warning: str) -> Named:
        """Return the tensors without the structure record, which no longer fits, and with a `warning` about that."""
        described = self.described._replace(structure=None)
        return self._replace(described=described, structured=False, warnings=(*self.warnings, warning))


def tree_of(source: Source, options: Options) -> Any:
    """Return the source's tree, or the part that `options.key` names in it."""
    if not options.key:
        return source.weights
    return selection.subtree(source.tree(options.key), options.key, source.path)


def named(source: Source, options: Options) -> Named:
    """Return the tensors under the key, by the names of the structure record, or those of the file if it has others."""
    choice = Choice(options.include, options.exclude)
    tree = tree_of(source, options)
    described = flattened(source, tree, choice)
    around = weights_key(tree).rpartition(".")[0]
    optimizers = tuple(f"{around}.{name}".lstrip(".") for name, _ in optimizers_in(subtree(tree, around)))
    optimizers = optimizers or tuple("" for _ in optimizers_in([tree]))  # the tree is one
    structured, stored = source.structured and options.structure, source.stored
    if not stored or options.key or stored.tensors.keys() == described.tensors.keys():
        return Named(described, source.owners, structured, choice, optimizers=optimizers)
    # The record's names differ from the file's, as in the output of a conversion that renamed tensors: use the file's.
    choice = Choice(options.include, options.exclude)
    warnings: tuple[str, ...] = ()
    if structured and (choice or (options.tied != "alias" and stored.aliases)):
        structured = False
        why = "--include or --exclude" if choice else "--tied duplicate"
        reason = f"the tensors were renamed, and with {why} the record would not match them"
        warnings = (f"{source.path}: its structure record was left out, because {reason}.",)
    described = _as_stored(stored, described, structured)
    return Named(described, stored.aliases, structured, choice, warnings, optimizers=optimizers)


def flattened(source: Source, tree: Any, choice: Choice) -> Flattened:
    """Flatten `tree` to tensors, with a record of those that are chosen. Raise UnsupportedError for tensors without
    data, unless they are excluded by name."""
    if not source.structured:
        return Flattened(dict(tree), None, frozenset())
    from ckptconv.structure import keymap  # a flat tree needs none

    without: list[str] = []

    def leave_out(name: str, node: Any) -> bool:
        reason = nodes.lacks_data(node)
        without.extend([name] if reason else [])
        return bool(reason)

    flattened = keymap.describe(tree, leave_out=leave_out, choice=choice)
    if flattened.found:
        lacking = {name: nodes.lacks_data(node) for name, node in flattened.found.items()}
        raise nodes.without_data(source.path, lacking)
    if without and not flattened.tensors:
        raise UsageError(f"No tensors are left to convert: all {len(without)} are excluded.")
    return flattened


def _as_stored(stored: StoredTensors, described: Flattened, structured: bool) -> Flattened:
    """Return `described` with the tensors under the names that the file has for them, and the file's own record."""
    uncastable = {same_bytes(described.tensors[name]) for name in described.uncastable}
    names = frozenset(name for name, tensor in stored.tensors.items() if same_bytes(tensor) in uncastable)
    record = stored.record if structured else None
    return described._replace(tensors=dict(stored.tensors), structure=record, uncastable=names, quantized={})
