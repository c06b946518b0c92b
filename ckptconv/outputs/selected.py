"""From a source and options to names and tensors: what an output is to hold, for planning and verifying. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ckptconv.errors import CorruptError, UnsupportedError, UsageError
from ckptconv.formats.source import Source
from ckptconv.options import Options
from ckptconv.outputs import selection
from ckptconv.pickles import nodes
from ckptconv.structure import keymap
from ckptconv.structure.choice import Choice
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.text import some

# Gives names their new ones, {old: new}, by --strip-prefix and --rename.
Rename: TypeAlias = "Callable[[Iterable[str], str, Sequence[str]], dict[str, str]]"


@dataclass(frozen=True)
class Selected:
    """What is selected of a source.

    `names` are those that are converted, {old: new}, of those that there are in `known`. `tensors` are by new name, as
    the source has them; `cast` gives them as they are stored. `described` is the tree they come from, under its old
    names, and `structured` whether its structure record belongs to the output. `owners` are the ties that the source
    tells of, {alias: owner} among the new names.
    """

    names: dict[str, str]
    known: Mapping[str, Any]
    tensors: dict[str, LazyTensor]
    described: keymap.Flattened
    structured: bool
    owners: dict[str, str]
    choice: Choice
    dtype: str
    widen_only: bool
    fixed: frozenset[str] = frozenset()

    def cast(self, name: str) -> LazyTensor:
        """The tensor of this new name with its elements as they are stored."""
        tensor = self.tensors[name]
        return tensor if name in self.fixed else selection.converted(name, tensor, self.dtype, self.widen_only)

    def structure(self, aliases: Mapping[str, str]) -> str | None:
        """The structure record where `aliases` {removed: kept} are stored under other names; None where it needs
        none."""
        record = self.described.structure
        if record is None and self.structured and any(old != new for old, new in self.names.items()):
            record = keymap.plain_record(self.names)
        return keymap.remap(record, self.names, aliases) if self.structured else None


def selected(source: Source, options: Options, rename: Rename = selection.renamed) -> Selected:
    """What the options select of the weights: a subtree, names that are chosen and changed, dtypes.

    Raises UsageError where nothing is left, CorruptError and UnsupportedError for tensors that cannot be converted.
    """
    tree = selection.subtree(source.tree(options.key), options.key, source.path) if options.key else source.weights
    choice = Choice(options.include, options.exclude)
    described = _flattened(source, tree, choice)
    flat = described.tensors
    names = _names(source, flat, options, choice, rename)
    # A whole state without a tensor is kept by its record alone; a part that was asked for is a slip.
    if not flat and (options.key or not source.structured):
        where = f"under {options.key!r} of {source.path}" if options.key else f"in {source.path}"
        raise UsageError(f"There is no tensor {where}: nothing to convert.")
    if flat and not names:
        raise UsageError(f"Nothing is left to convert: all {len(flat)} tensors are excluded.")
    dtype = options.dtype or source.default_dtype
    return Selected(
        names,
        flat,
        {new: flat[old] for old, new in names.items()},
        described,
        source.structured and options.structure,
        _owners(source, names),
        choice,
        dtype,
        widen_only=source.default_dtype == dtype == "float32",
        fixed=frozenset(names[name] for name in described.fixed if name in names),
    )


def selected_states(source: Source, options: Options, rename: Rename = selection.renamed) -> Selected:
    """What the options select of the optimizer states: named <parameter>.<state>, and nested as torch has them.

    Parameters are called as the weights are. Half-precision states are widened as the weights are by default, and never
    narrowed. `owners` are names of states that are those of another parameter.
    """
    optimizer = source.states()
    if optimizer is None:
        raise UsageError(f"{source.path} holds no optimizer states that can be told by parameter, for --optimizer.")
    choice = Choice(options.include, options.exclude)
    known = dict.fromkeys([*_flattened(source, source.weights, choice).tensors, *optimizer["state"]])
    names = _names(source, known, options, choice, rename)
    states = {names[name]: state for name, state in optimizer["state"].items() if name in names}
    groups = [
        {**group, "params": [names[name] for name in group["params"] if name in names]}
        for group in optimizer["param_groups"]
    ]
    described = keymap.flatten_states(states, groups)
    owners = {}
    for alias, owner in _owners(source, names).items() if options.tied == "alias" else ():
        for key in states.get(owner, {}):
            kept, removed = f"{owner}.{key}", f"{alias}.{key}"
            if kept in described.tensors and removed not in described.tensors:
                owners[removed] = kept
    dtype = "keep" if options.dtype == "keep" else source.default_dtype
    tensors = described.tensors
    return Selected(names, known, tensors, described, options.structure, owners, choice, dtype, widen_only=True)


def _flattened(source: Source, tree: Any, choice: Choice) -> keymap.Flattened:
    """The tensors of `tree`, and a record of those that are chosen. Raises UnsupportedError for those without data,
    unless they are left out by name."""
    if not source.structured:
        return keymap.Flattened(dict(tree), None, frozenset())
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
        raise UsageError(f"Nothing is left to convert: all {len(without)} tensors are excluded.")
    return flattened


def _names(source: Source, flat: Mapping[str, Any], options: Options, choice: Choice, rename: Rename) -> dict[str, str]:
    """What is converted, and under which names: {old: new}."""
    names = selection.matching(flat, choice)
    _check_pieces(source, flat)
    lost = [name for name in source.unaccounted if not options.include and not choice.excludes(name)]
    if lost:
        raise CorruptError(
            f"{source.path} names {len(lost)} parameters whose data is nowhere in it: {', '.join(lost[:5])}"
            f"{', …' if len(lost) > 5 else ''}. Nothing was written.",
            "They are tied or frozen parameters of a release that did not save them; leave them out with --exclude.",
        )
    return rename(names, options.strip_prefix, options.rename)


def _check_pieces(source: Source, names: Iterable[str]) -> None:
    """Raise UnsupportedError where `names` are those of pieces of parameters."""
    found = [name for name in names if source.pieces and source.pieces.search(name)]
    if found:
        raise UnsupportedError(
            f"{source.path} was saved with FSDP's LOCAL_STATE_DICT: {some(found, 1, repr)} are flat parameters, each "
            "of them several parameters in one, whose shapes are not in the checkpoint. Nothing was written.",
            "Load it in the training run, and save it with SHARDED_STATE_DICT or FULL_STATE_DICT.",
        )


def _owners(source: Source, names: Mapping[str, str]) -> dict[str, str]:
    """The ties that the source tells of, among the new names."""
    return {names[a]: names[o] for a, o in source.owners.items() if a in names and o in names}
