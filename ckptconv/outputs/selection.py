"""Choosing and changing what is converted: key, include, exclude, strip, rename, tied names, dtype. All pure.

A subtree is chosen before flattening; everything else works on flat names.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

from ckptconv.errors import UsageError
from ckptconv.options import parse_rule
from ckptconv.structure.choice import Choice
from ckptconv.tensors.dtypes import DTYPES, can_cast
from ckptconv.tensors.lazy import Convert, LazyTensor, same_bytes
from ckptconv.tensors.moves import Cast
from ckptconv.text import some

# Of a name, so much is shown.
_LONGEST = 200


def subtree(tree: Any, key: str, where: str) -> Any:
    """The part of `tree` under the dotted `key`; where keys hold dots themselves, the longest match at each step.

    "." is all of it. Raises UsageError, naming the keys there are, where nothing is under it.
    """
    rest, passed = "" if key == "." else key, ""
    while rest:
        children = _children(tree)
        match = max((name for name in children if rest == name or rest.startswith(name + ".")), key=len, default=None)
        if match is None:
            at = f"under {passed!r} of {where}" if passed else f"at the top of {where}"
            raise UsageError(f"There is no key {rest!r} {at}.", _candidates(rest, list(children)))
        tree = children[match]
        passed = f"{passed}.{match}" if passed else match
        rest = rest[len(match) + 1 :]
    return tree


def _children(tree: Any) -> dict[str, Any]:
    if isinstance(tree, Mapping):
        return {str(key): value for key, value in tree.items() if isinstance(key, (str, int))}
    if isinstance(tree, (list, tuple)):
        return {str(index): value for index, value in enumerate(tree)}
    return {}


def _candidates(wanted: str, names: Sequence[str], most: int = 8) -> str:
    if not names:
        return "There are no keys there."
    close = difflib.get_close_matches(wanted, names, n=3, cutoff=0.6)
    if close:
        return f"Did you mean {' or '.join(map(repr, close))}?"
    return f"There are: {some(names, most, repr)}."


def matching(names: Iterable[str], choice: Choice) -> list[str]:
    """Those of `names` that are chosen.

    Raises UsageError for a pattern of `include` that matches nothing, now or before, and where there are no names.
    """
    names = list(names)
    if not choice:
        return names
    chosen = [name for name in names if name in choice]
    for pattern in choice.include:
        if not names or (pattern not in choice.used and not any(fnmatch.fnmatchcase(name, pattern) for name in names)):
            raise UsageError(
                f"--include {pattern!r} matches none of the {len(names)} names.", _candidates(pattern, names)
            )
    return chosen


def idle_globs(names: Sequence[str], choice: Choice) -> dict[str, str]:
    """The globs of `exclude` that have matched nothing, and why: {option: reason}. `names` are those there are."""
    found = (pattern for pattern in choice.exclude if pattern not in choice.used)
    return {f"--exclude {each!r}": f"matches nothing. {_candidates(each, names)[:-1]}" for each in found}


def renamed(names: Iterable[str], prefix: str, rules: Sequence[str]) -> dict[str, str]:
    """New names by old: `prefix` stripped, then every rule REGEX=REPLACEMENT applied in turn.

    Raises UsageError for a rule that is none, and where two names become one.
    """
    stages = renaming(prefix, rules)
    if not stages:
        return {name: name for name in names}

    def changed(name: str) -> str:
        for _, change in stages:
            name = change(name)
        return name

    return collected((old, changed(old)) for old in names)


def collected(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """New names by old, of (old, new). Raises UsageError where two names become one."""
    result: dict[str, str] = {}
    taken: dict[str, str] = {}
    for old, new in pairs:
        if new in taken:
            raise UsageError(
                f"Renaming gives {taken[new]!r} and {old!r} the same name {new!r}. Nothing was written.",
                "Change --strip-prefix or --rename, or leave one of them out with --exclude.",
            )
        taken[new] = old
        result[old] = new
    return result


def renaming(prefix: str, rules: Sequence[str]) -> list[tuple[str, Callable[[str], str]]]:
    """The options that rename, as they were given, and what each makes of a name, in their order."""
    found: list[tuple[str, Callable[[str], str]]] = []
    if prefix:
        found.append((f"--strip-prefix {prefix!r}", lambda name: name.removeprefix(prefix)))
    for rule in rules:
        pattern, replacement = parse_rule(rule, "--rename")
        found.append((f"--rename {rule!r}", functools.partial(_substituted, pattern, replacement)))
    return found


def _substituted(pattern: re.Pattern[str], replacement: str, name: str) -> str:
    try:
        return pattern.sub(replacement, name)
    except (re.error, IndexError) as error:
        raise UsageError(f"--rename {pattern.pattern}={replacement} cannot be applied: {error}.") from error


def idle(names: Iterable[str], prefix: str, rules: Sequence[str]) -> dict[str, str]:
    """Which of the options that rename change none of `names`, and why: {option: reason}."""
    stages = renaming(prefix, rules)
    first: dict[str, str] = {}
    changing: set[str] = set()
    for name in names if stages else ():
        for option, change in stages:
            new = change(name)
            first.setdefault(option, name)
            if new != name:
                changing.add(option)
            name = new
        if len(changing) == len(first):
            break
    return {
        option: f"changes no name; the first is {name[:_LONGEST]!r}"
        for option, name in first.items()
        if option not in changing
    }


def untie(flat: Mapping[str, LazyTensor], owners: Mapping[str, str]) -> dict[str, str]:
    """Names whose bytes another name holds already: {removed: kept}.

    `owners` are ties the source names itself; otherwise the first of the tensors that are the same bytes is kept.
    """
    aliases = {alias: owner for alias, owner in owners.items() if alias in flat and owner in flat}
    first: dict[Hashable, str] = {}
    for name, tensor in flat.items():
        if name in aliases:
            continue
        key = same_bytes(tensor)
        if key is None:
            continue
        kept = first.setdefault(key, name)
        if kept != name:
            aliases[name] = kept
    # An owner may itself be the same bytes as a tensor before it.
    return {alias: aliases.get(owner, owner) for alias, owner in aliases.items()}


def converted(name: str, tensor: LazyTensor, dtype: str, widen_only: bool = False) -> LazyTensor:
    """`tensor` with floating elements as `dtype`; other tensors as they are.

    `widen_only` leaves alone what is wider already, or is an 8-bit float. Raises UsageError for a cast there is not.
    """
    source = tensor.dtype
    if dtype == "keep" or source.kind != "f" or source.name == dtype:
        return tensor
    target = DTYPES[dtype]
    if widen_only and (source.itemsize > target.itemsize or source.itemsize == 1):
        return tensor
    if not can_cast(source.name, target.name):
        raise UsageError(
            f"{name!r} is a tensor of {source}, which cannot be converted to {dtype}.", "Use --dtype keep."
        )
    return Convert(tensor, Cast(source.name, target.name), target)


# What the scales of a tensor of 8-bit floats are called: behind its name, or, of a `weight`, in its place.
_SCALES = ("_scale_inv", "_scale", "_scales", ".scale")
_SCALES_OF_WEIGHT = ("scale_inv", "scale", "scales", "scale_weight")
# Tensors that a message names.
_SHOWN = 5


def unscaled(cast: Mapping[str, LazyTensor], names: Collection[str], dtype: str) -> tuple[str, ...]:
    """What to say of tensors of 8-bit floats that are `cast` to `dtype`, and have scales among `names`."""
    found = {}
    for name, tensor in cast.items():
        if tensor.dtype.kind == "f" and tensor.dtype.itemsize == 1:
            module, dot, last = name.rpartition(".")
            beside = (module + dot + scale for scale in _SCALES_OF_WEIGHT if last == "weight")
            scale = next((each for each in (*(name + suffix for suffix in _SCALES), *beside) if each in names), "")
            if scale:
                found[name] = scale
    if not found:
        return ()
    shown = some(found.items(), _SHOWN, lambda each: f"{each[0][:_LONGEST]!r} ({each[1][:_LONGEST]!r})")
    text = (
        f"8-bit floats were cast to {dtype} without their scales, which are tensors of their own: {shown}. The "
        "values are the weights only when they are scaled; --dtype keep leaves them as they are."
    )
    return (text,)
