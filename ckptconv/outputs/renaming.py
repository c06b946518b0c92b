"""Rename tensors: --strip-prefix and --rename. Pure."""

from __future__ import annotations

import functools
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ckptconv.errors import UsageError
from ckptconv.formats.optimizers import key_to_add
from ckptconv.options.kinds import parse_rule
from ckptconv.options.table import Options
from ckptconv.structure import keymap
from ckptconv.structure.record import Flattened
from ckptconv.text import LONGEST, brief, some

# A note on a nested state.
KEPT = "the structure record, and .pt files restored from it, keep the old keys; --no-structure changes this."


def renamed(names: Iterable[str], prefix: str, rules: Sequence[str]) -> dict[str, str]:
    """Return {old: new} for `names`: strip `prefix`, then apply each rule REGEX=REPLACEMENT in turn. Raise
    UsageError for an invalid rule, if two names become one, or if one becomes empty."""
    changes = [change for _, change in steps_of(prefix, rules)]
    return collected((old, functools.reduce(lambda name, change: change(name), changes, old)) for old in names)


def collected(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return {old: new} for the pairs (old, new). Raise UsageError if two names become one, or one becomes empty."""
    result: dict[str, str] = {}
    taken: dict[str, str] = {}
    for old, new in pairs:
        if new in taken:
            raise UsageError(
                f"Renaming would give {taken[new]!r} and {old!r} the same name, {new!r}.",
                "Change --strip-prefix or --rename, or leave one tensor out with --exclude.",
            )
        if old and (not new or new[0] == "." != old[0]):
            raise UsageError(
                f"Renaming leaves {f'{new!r}, which begins with a dot,' if new else 'an empty name'} for {old!r}.",
                f"Change --strip-prefix or --rename{': a dot belongs to the prefix' if new else ', or use --exclude'}.",
            )
        taken[new] = old
        result[old] = new
    return result


def recorded(tree: Any, described: Flattened, names: Mapping[str, str]) -> tuple[Flattened, tuple[str, ...]]:
    """Return the `described` tree with the structure record of a `.pt` file of it under new names, and notes."""
    state, notes = with_keys(tree, described.tensors, names)
    if state is not None:
        return described._replace(structure=keymap.describe(state).structure), notes
    record = keymap.remap(described.structure, names)
    return described._replace(structure=record), (KEPT,) if record else ()


def with_keys(tree: Any, known: Mapping[str, Any], names: Mapping[str, str]) -> tuple[Any, tuple[str, ...]]:
    """Return the state dict `tree` with the keys `names` {old: new}, and notes; None if it is no dict of the tensors
    that are `known`, but nested, so that names are no keys."""
    if type(tree) not in (dict, OrderedDict) or tree.keys() != known.keys():
        return None, ()
    lost = vars(tree) if type(tree) is OrderedDict else ()
    notes = (f"left out: {some(lost, form=str)} of the state dict, which contains the old names.",) if lost else ()
    return type(tree)((new, tree[old]) for old, new in names.items()), notes


def steps_of(prefix: str, rules: Sequence[str]) -> list[tuple[str, Callable[[str], str]]]:
    """Return the renaming options as given, each with the function that applies it to a name, in order."""
    steps: list[tuple[str, Callable[[str], str]]] = []
    if prefix:
        steps.append((f"--strip-prefix {prefix!r}", lambda name: name.removeprefix(prefix)))
    for rule in rules:
        pattern, replacement = parse_rule(rule, "--rename")
        steps.append((f"--rename {rule!r}", functools.partial(_substituted, pattern, replacement)))
    return steps


def _substituted(pattern: re.Pattern[str], replacement: str, name: str) -> str:
    try:
        return pattern.sub(replacement, name)
    except (re.error, IndexError) as error:
        raise UsageError(f"--rename {pattern.pattern}={replacement} cannot be applied: {error}.") from error


def idle(names: Iterable[str], options: Options, tree: Any) -> dict[str, str]:
    """Return the renaming options that change none of `names` of `tree`, and why: {option: reason}."""
    stages = steps_of(options.strip_prefix, options.rename)
    first: dict[str, str] = {}
    changing: set[str] = set()
    for name in names:
        for option, change in stages:
            new = change(name)
            first.setdefault(option, name)
            if new != name:
                changing.add(option)
            name = new
        if len(changing) == len(first):
            break
    idle = {option: name for option, name in first.items() if option not in changing}
    return {
        option: f"changes no name; the first name is {name[:LONGEST]!r}{_whole_prefix(option, name, options, tree)}"
        for option, name in idle.items()
    }


def _whole_prefix(option: str, name: str, options: Options, tree: Any) -> str:
    """Return advice on an `option` for a prefix that occurs later in a name; "" for others."""
    prefix, key = options.strip_prefix if option.startswith("--strip-prefix ") else "", key_to_add(tree, options)
    before, inside, after = name.partition(f".{prefix}") if prefix else ("", "", "")
    whole = before + inside + "." * after.startswith(".")
    if key and inside and whole.startswith(f"{key}."):
        return f": give --key {key} --strip-prefix {brief(whole.removeprefix(f'{key}.'), LONGEST)}"
    return f": give the whole beginning, {brief(whole, LONGEST)}" if inside else ""
