"""Select and change the tensors to convert: key, include, exclude, ties, dtype. Pure.

A subtree is selected before flattening; everything else works on flat names.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from ckptconv.errors import UsageError
from ckptconv.structure.choice import Choice
from ckptconv.tensors.dtypes import DTYPES, DType, can_cast
from ckptconv.tensors.lazy import LazyTensor, View, same_bytes, untagged
from ckptconv.text import LONGEST, some

# Maps old names to new ones, {old: new}, by --strip-prefix and --rename.
Rename: TypeAlias = "Callable[[Iterable[str], str, Sequence[str]], dict[str, str]]"


class NoKeyError(UsageError):
    """A checkpoint has nothing under a key."""


def subtree(tree: Any, key: str, where: str) -> Any:
    """Return the part of `tree` under the dotted `key`, all for "."; if keys contain dots, each step matches the
    longest.

    Raise NoKeyError, listing the keys there are, if nothing is under it.
    """
    left, passed = "" if key == "." else key, ""
    while left:
        children = _children(tree)
        match = max((name for name in children if left == name or left.startswith(name + ".")), key=len, default=None)
        if match is None:
            at = f"under {passed!r} of {where}" if passed else f"at the top of {where}"
            from ckptconv.outputs.hints import keys_like

            raise NoKeyError(f"The key {left!r} does not exist {at}.", keys_like(left, children, passed))
        tree = children[match]
        passed = f"{passed}.{match}" if passed else match
        left = left[len(match) + 1 :]
    return tree


def _children(tree: Any) -> dict[str, Any]:
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree if isinstance(tree, (list, tuple)) else ())
    return {str(key): value for key, value in items if isinstance(key, (str, int))}


def matching(names: Iterable[str], choice: Choice) -> list[str]:
    """Return those of `names` that are chosen.

    Raise UsageError for a glob that matches none, and should.
    """
    names = list(names)
    if not choice:
        return names
    chosen = [name for name in names if name in choice]
    for glob in (*choice.include, *choice.exclude):
        if not any(fnmatch.fnmatchcase(name, glob) for name in names):
            from ckptconv.outputs.hints import check_glob

            check_glob(glob, names, choice)
    return chosen


def idle_globs(names: Sequence[str], choice: Choice) -> dict[str, str]:
    """Return the globs of `exclude` that matched nothing, and why: {option: reason}. `names` are all there are."""
    idle = [pattern for pattern in choice.exclude if pattern not in choice.used]
    if idle:
        from ckptconv.outputs.hints import globs_like
    return {f"--exclude {pattern!r}": f"matches nothing. {globs_like(pattern, names)}" for pattern in idle}


def renamed(names: Iterable[str], prefix: str, rules: Sequence[str]) -> dict[str, str]:
    """Return {old: new} for `names`, with those that --strip-prefix and --rename give. Raise UsageError if they give
    none, or one name twice."""
    if not prefix and not rules:
        return {name: name for name in names}
    from ckptconv.outputs import renaming

    return renaming.renamed(names, prefix, rules)


def untie(flat: Mapping[str, LazyTensor], owners: Mapping[str, str]) -> dict[str, str]:
    """Return the names whose bytes another name already holds: {removed: kept}.

    `owners` are ties that the source names itself. Otherwise, of tensors with the same bytes, the first is kept.
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
    # An owner may itself be an alias of an earlier tensor.
    return {alias: aliases.get(owner, owner) for alias, owner in aliases.items()}


def goal(source: DType, dtype: str, widen_only: bool = False) -> DType:
    """Return the dtype that `converted` gives to a tensor of dtype `source`."""
    if dtype == "keep" or source.kind != "f" or source.name == dtype:
        return source
    target = DTYPES[dtype]
    return source if widen_only and (source.itemsize > target.itemsize or source.itemsize == 1) else target


def converted(name: str, tensor: LazyTensor, dtype: str, widen_only: bool = False) -> LazyTensor:
    """Return `tensor` with floating-point elements cast to `dtype`; return other tensors unchanged.

    `widen_only` leaves wider tensors and 8-bit floats unchanged. Raise UsageError for an unsupported cast.
    """
    source, target = tensor.dtype, goal(tensor.dtype, dtype, widen_only)
    if source == target:
        return tensor
    if not can_cast(source.name, target.name):
        raise UsageError(
            f"{name!r} is a tensor of {source}, which cannot be converted to {dtype}.", "Use --dtype keep."
        )
    from ckptconv.tensors import casting  # most conversions cast nothing

    return casting.cast(tensor, target)


# Names of tensors that bitsandbytes stores with a weight of 4 bits, named with its state; with one of 8 bits; and the
# states of its optimizers.
_BNB_PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
_BNB_STATE, _BNB_SCALE, _BNB_OPTIMIZER = ".quant_state.bitsandbytes__", ".SCB", ".__bnb_optimizer_quant_state__."


def scales(flat: Mapping[str, LazyTensor]) -> set[str]:
    """Return the names of tensors that must not be cast, by the names that bitsandbytes gives to scales."""
    names: set[str] = set()
    # Searching all names at once takes a tenth of the time; hardly any file has such names.
    together = "." + "\n.".join(flat)
    if not any(mark in together for mark in (_BNB_STATE, _BNB_SCALE, _BNB_OPTIMIZER)):
        return names
    for name in flat:
        if _BNB_STATE in name:
            names.update(name.partition(_BNB_STATE)[0] + part for part in _BNB_PARTS)
        elif (dotted := f".{name}").endswith(_BNB_SCALE) or _BNB_OPTIMIZER in dotted:
            names.add(name)
    return names & flat.keys()


def left_alone(uncastable: Mapping[str, LazyTensor], dtype: str) -> tuple[str, ...]:
    """Return a warning about the floats among `uncastable` that a cast to `dtype` leaves as they are; else ()."""
    left = [
        name
        for name, tensor in uncastable.items()
        if dtype != "keep"
        and tensor.dtype.kind == "f"
        and tensor.dtype.name != dtype
        and not isinstance(untagged(tensor), View)
    ]
    if not left:
        return ()
    shown = some(left, _SHOWN, lambda name: repr(name[:LONGEST]))
    one = "1 tensor is part of a quantized tensor and was"
    subject = one if len(left) == 1 else f"{len(left)} tensors are parts of quantized tensors and were"
    return (f"{subject} not cast to {dtype}: {shown}. Use --dequantize to convert the weights to {dtype}.",)


def left_wider(tensors: Mapping[str, LazyTensor], dtype: str) -> tuple[str, ...]:
    """Return a warning about floats wider than `dtype` that widening alone leaves as they are; else ()."""
    wider = [
        name
        for name, tensor in tensors.items()
        if dtype != "keep" and tensor.dtype.kind == "f" and tensor.dtype.itemsize > DTYPES[dtype].itemsize
    ]
    if not wider:
        return ()
    which = f"{len(wider)} tensors keep" if len(wider) > 1 else "1 tensor keeps"
    return (f"{which} a wider dtype than {dtype}: {some(wider, _SHOWN)}. Use --dtype to cast these.",)


# Tensors that a message lists.
_SHOWN = 5


def check_unscaled(cast: Collection[str], known: Mapping[str, LazyTensor], dtype: str) -> tuple[str, ...]:
    """Raise UsageError if any of the tensors to `cast` is part of a quantized weight among those that are `known`.
    Return a warning if there are such weights, which a cast to `dtype` leaves as they are; else ()."""
    from ckptconv.formats.coded import parts_among  # casts of tensors that may be quantized are few

    parts = parts_among(known)
    coded = dict.fromkeys(parts[name] for name in cast if name in parts)
    if coded:
        are = "weight is" if len(coded) == 1 else "weights are"
        raise UsageError(
            f"{len(coded):,} {are} quantized ({some(coded, _SHOWN)}), but casting codes and scales to {dtype} does not "
            "convert them to weights.",
            f"Use --dequantize to convert them to {dtype} weights, or --dtype keep to leave them unchanged.",
        )
    said = f"--dtype does not change quantized weights; --dequantize converts them to {dtype}."
    return (said,) if parts and dtype != "keep" else ()
