"""What an output must hold, and the comparison of names, dtypes, shapes and structure with what it holds."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptconv.errors import DifferenceError
from ckptconv.formats.change import UNCHANGED, Change
from ckptconv.formats.source import Source
from ckptconv.options.kinds import Rules
from ckptconv.options.table import Options
from ckptconv.outputs import selection
from ckptconv.outputs.pipeline import selected
from ckptconv.outputs.selection import Rename
from ckptconv.structure import keymap
from ckptconv.tensors.lazy import LazyTensor, same_bytes
from ckptconv.text import some
from ckptconv.verification import renaming
from ckptconv.verification.output import Written
from ckptconv.verification.pairs import Differences
from ckptconv.verification.runs import ExpectedPair

# Metadata entries that are never aliases: a tensor with such a name is stored.
_RESERVED = ("format", "total_size", "ckptconv.structure", "ckptconv.map", "ckptconv.alone")


@dataclass(eq=False, repr=False)
class Expected:
    """What an output must hold: tensors by name, in order, and as functions of the aliases found, the structure record
    and the metadata of each file.

    `flat`: without a record, the order of names means nothing. `inert`: every
    tensor, if there is any, is part of an object known by name only. `change` is what a configuration is to
    say of the weights, and `record` what a manifest is to say of how they were selected.
    """

    tensors: dict[str, LazyTensor]
    structure: Callable[[Mapping[str, str]], str | None]
    flat: bool
    metadata: Callable[[Mapping[str, str]], Mapping[str, str]]
    inert: bool = False
    change: Change = UNCHANGED
    record: Mapping[str, Any] = field(default_factory=dict)


def expected_of(source: Source, asked: Options, holds: str) -> Expected:
    """Return the weights or states that the options select, with every name, aliases included."""
    chosen = selected(source, asked, rename_of(asked), holds)
    tensors = {name: chosen.cast(name) for name in chosen.tensors}
    if chosen.of_states:
        tensors.update((removed, tensors[kept]) for removed, kept in chosen.owners.items())
    inert, change = chosen.described.inert, chosen.change(source)
    return Expected(tensors, chosen.structure, not chosen.structured, chosen.stated, inert, change, chosen.record)


def rename_of(asked: Options) -> Rename:
    """Return the function that renames. Rules that come from a file are applied in a process of their own."""
    if isinstance(asked.rename, Rules):
        return functools.partial(renaming.renamed, where="The manifest")
    return selection.renamed


def compare_names(
    source: Source, expected: Expected, found: Written, asked: Options, wrong: Differences
) -> list[ExpectedPair]:
    """Compare names, dtypes and shapes; return the pairs of tensors whose elements can be compared."""
    _check_names(source, expected, found, asked, wrong)
    tensors, homes = expected.tensors, found.homes
    pairs = [
        ExpectedPair(tensors[name], got, homes[name], name) for name, got in found.tensors.items() if name in tensors
    ]
    for removed, kept in found.aliases.items():
        want, same = tensors[removed], tensors.get(kept)
        # Two names for the same bytes of the source need one comparison.
        if want is not same and (same is None or same_bytes(want) is None or same_bytes(want) != same_bytes(same)):
            pairs.append(ExpectedPair(want, found.tensors[kept], homes[kept], removed))
    alike = []
    for pair in pairs:
        error = other_kind(pair)
        if error:
            wrong.add(error)
        else:
            alike.append(pair)
    return alike


def other_kind(pair: ExpectedPair) -> DifferenceError | None:
    """Return what is wrong if dtypes or shapes differ."""
    want, got, path, name = pair
    if want.dtype == got.dtype and want.shape == got.shape:
        return None
    for what, expected, found in (
        ("dtype", want.dtype.name, got.dtype.name),
        ("shape", list(want.shape), list(got.shape)),
    ):
        if expected != found:
            return DifferenceError(
                f"{path}: {name!r} has {what} {found}, but the source has {what} {expected}.",
                "If the conversion had --dtype, give it here too." if what == "dtype" else "",
                what=what,
                tensor=name,
                file=path,
                expected=expected,
                found=found,
            )
    return None


def _check_names(source: Source, expected: Expected, found: Written, asked: Options, wrong: Differences) -> None:
    """Compare the names: every name of the source is stored or an alias of a stored one, and there is no other."""
    for removed, kept in found.aliases.items():
        why = ""
        if asked.tied == "duplicate":
            why = "every name should have its own bytes"
        elif removed not in expected.tensors or removed in _RESERVED:
            why = "no tensor of that name belongs there"
        elif removed in found.tensors:
            why = f"{removed!r} is stored separately"
        elif kept not in found.tensors:
            why = f"the tensor {kept!r} does not exist"
        if why:
            raise DifferenceError(
                f"{found.path}: its metadata says that {removed!r} is stored as {kept!r}, but {why}.",
                what="alias",
                tensor=removed,
                found=kept,
            )
    missing = [name for name in expected.tensors if name not in found.tensors and name not in found.aliases]
    if missing:
        error = DifferenceError(
            f"{found.path} lacks {_tensors(missing)} of {source.path}: {some(missing)}.",
            "If the conversion left them out (--exclude, --include, --key), give that option here too.",
            what="missing",
            tensor=missing[0],
            tensors=[{"what": "missing", "tensor": name} for name in missing],
        )
        wrong.add(error)
    unexpected = [name for name in found.tensors if name not in expected.tensors]
    if unexpected:
        error = DifferenceError(
            f"{found.homes[unexpected[0]]} holds {_tensors(unexpected)} that {source.path} does not have: "
            f"{some(unexpected)}.",
            what="unexpected",
            tensor=unexpected[0],
            file=found.homes[unexpected[0]],
            tensors=[{"what": "unexpected", "tensor": name, "file": found.homes[name]} for name in unexpected],
        )
        wrong.add(error)


def check_structure(expected: Expected, found: Written) -> None:
    """Check that the record is the source's, or, without one, that the stored tensors are in the source's order."""
    want = expected.structure(found.aliases)
    if expected.flat and found.structure is None:
        return
    stored = [name for name in expected.tensors if name not in found.aliases]
    if want is None and expected.flat:
        raise DifferenceError(
            f"{found.structure_path}: it has a structure record, but should not.",
            "If the conversion had no --no-structure, leave it out here too.",
            what="structure",
            file=found.structure_path,
        )
    if want is None:
        if found.structure is None and list(found.tensors) == stored:
            return
        want = keymap.plain_record(stored)
    if found.structure == want:
        return
    got = found.structure
    at = next(
        (i for i, (a, b) in enumerate(zip(want, got or "", strict=False)) if a != b), min(len(want), len(got or ""))
    )
    where = "is missing" if got is None else f"differs from character {at} on: {got[at : at + 60]!r}"
    raise DifferenceError(
        f"{found.structure_path}: the structure record {where}; expected {want[at : at + 60]!r}.",
        what="structure",
        file=found.structure_path,
        index=[at],
        expected=want[at : at + 60],
        found=None if got is None else got[at : at + 60],
    )


def check_shards(found: Written, asked: Options) -> None:
    """Check that no file of several tensors exceeds `max_shard_size`."""
    if not asked.max_shard_size:
        return
    sizes: Counter[str] = Counter()
    for name, tensor in found.tensors.items():
        sizes[found.homes[name]] += tensor.nbytes
    counts = Counter(found.homes.values())
    for path, size in sizes.items():
        if counts[path] > 1 and size > asked.max_shard_size:
            raise DifferenceError(
                f"{path} holds {size} bytes of tensors, more than --max-shard-size allows ({asked.max_shard_size}).",
                what="file",
                file=path,
                expected=asked.max_shard_size,
                found=size,
            )


def _tensors(names: Sequence[str]) -> str:
    return "a tensor" if len(names) == 1 else f"{len(names)} tensors"
