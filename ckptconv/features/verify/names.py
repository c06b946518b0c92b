"""Compare the names, dtypes, shapes and structure of an output with those that it must have."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptconv.errors import DifferenceError
from ckptconv.features.pairs.runs import ExpectedPair
from ckptconv.features.verify import CONVERTED_SO, renaming
from ckptconv.features.verify.output import Written
from ckptconv.features.verify.pairs import Differences
from ckptconv.formats.source import Source
from ckptconv.options.kinds import Rules
from ckptconv.options.table import Options
from ckptconv.outputs import selection
from ckptconv.outputs.notices import UNCHANGED, Change
from ckptconv.outputs.pipeline import selected
from ckptconv.outputs.selection import Rename
from ckptconv.structure.record import plain_record
from ckptconv.tensors.lazy import LazyTensor, same_bytes
from ckptconv.text import some

# Metadata entries that are never aliases: a tensor with such a name is stored.
_RESERVED = ("format", "total_size", "ckptconv.structure", "ckptconv.map", "ckptconv.alone")


@dataclass(eq=False, repr=False)
class Expected:
    """The required content of an output: tensors by name, in order, and as functions of the aliases found, the
    structure record and the metadata of each file.

    `flat`: without a record, the order of names means nothing. `inert`: every tensor, if there is any, is part of an
    object known by name only. `change` is the statement of a configuration about the weights, and `record` that of a
    manifest about their selection.
    """

    tensors: dict[str, LazyTensor]
    structure: Callable[[Mapping[str, str]], str | None]
    flat: bool
    metadata: Callable[[Mapping[str, str]], Mapping[str, str]]
    inert: bool = False
    change: Change = UNCHANGED
    record: Mapping[str, Any] = field(default_factory=dict)


def expected_of(source: Source, options: Options, holds: str) -> Expected:
    """Return the weights or states that the options select, with every name, aliases included."""
    chosen = selected(source, options, rename_of(options), holds)
    tensors = {name: chosen.cast(name) for name in chosen.tensors}
    if chosen.of_states:
        tensors.update((removed, tensors[kept]) for removed, kept in chosen.owners.items())
    inert, change = chosen.described.inert, chosen.change(source)
    return Expected(tensors, chosen.structure, not chosen.structured, chosen.stated, inert, change, chosen.record)


def rename_of(options: Options) -> Rename:
    """Return the function that renames. Rules that come from a file are applied in a process of their own."""
    if isinstance(options.rename, Rules):
        return functools.partial(renaming.renamed, where="The manifest")
    return selection.renamed


def compare_names(
    source: Source, expected: Expected, written: Written, options: Options, wrong: Differences
) -> list[ExpectedPair]:
    """Compare names, dtypes and shapes; return the pairs of tensors whose elements can be compared."""
    _check_names(source, expected, written, options, wrong)
    tensors, homes = expected.tensors, written.homes
    pairs = [
        ExpectedPair(tensors[name], got, homes[name], name) for name, got in written.tensors.items() if name in tensors
    ]
    for removed, kept in written.aliases.items():
        want, same = tensors[removed], tensors.get(kept)
        # Two names for the same bytes of the source need one comparison.
        if want is not same and (same is None or same_bytes(want) is None or same_bytes(want) != same_bytes(same)):
            pairs.append(ExpectedPair(want, written.tensors[kept], homes[kept], removed))
    alike = []
    for pair in pairs:
        error = other_kind(pair)
        if error:
            wrong.add(error)
        else:
            alike.append(pair)
    return alike


def other_kind(pair: ExpectedPair) -> DifferenceError | None:
    """Return the error if dtypes or shapes differ."""
    want, got, path, name = pair
    if want.dtype == got.dtype and want.shape == got.shape:
        return None
    for aspect, expected, actual in (
        ("dtype", want.dtype.name, got.dtype.name),
        ("shape", list(want.shape), list(got.shape)),
    ):
        if expected != actual:
            return DifferenceError(
                f"{path}: {name!r} has {aspect} {actual}, but the source has {aspect} {expected}.",
                "Use the same --dtype as the conversion, or none if it had none; or specify its --manifest."
                if aspect == "dtype"
                else "",
                what=aspect,
                tensor=name,
                file=path,
                expected=expected,
                found=actual,
            )
    return None


def _check_names(source: Source, expected: Expected, written: Written, options: Options, wrong: Differences) -> None:
    """Compare the names: every name of the source is stored or an alias of a stored one, and there is no other."""
    for removed, kept in written.aliases.items():
        why = ""
        if options.tied == "duplicate":
            why = "--tied duplicate requires separate bytes for every name"
        elif removed not in expected.tensors or removed in _RESERVED:
            why = "no tensor of that name was expected"
        elif removed in written.tensors:
            why = f"{removed!r} is stored separately"
        elif kept not in written.tensors:
            why = f"the tensor {kept!r} does not exist"
        if why:
            raise DifferenceError(
                f"{written.path}: its metadata records that {removed!r} is stored as {kept!r}, but {why}.",
                CONVERTED_SO,
                what="alias",
                tensor=removed,
                found=kept,
            )
    missing = [name for name in expected.tensors if name not in written.tensors and name not in written.aliases]
    if missing:
        error = DifferenceError(
            f"{written.path} lacks {_tensors(missing)} of {source.path}: {some(missing)}.",
            _option_for(missing, [*written.tensors], source) + CONVERTED_SO,
            what="missing",
            tensor=missing[0],
            tensors=[{"what": "missing", "tensor": name} for name in missing],
        )
        wrong.add(error)
    unexpected = [name for name in written.tensors if name not in expected.tensors]
    if unexpected:
        error = DifferenceError(
            f"{written.homes[unexpected[0]]} contains {_tensors(unexpected)} that {source.path} does not have: "
            f"{some(unexpected)}.",
            what="unexpected",
            tensor=unexpected[0],
            file=written.homes[unexpected[0]],
            tensors=[{"what": "unexpected", "tensor": name, "file": written.homes[name]} for name in unexpected],
        )
        wrong.add(error)


def _option_for(missing: Sequence[str], stored: Sequence[str], source: Source) -> str:
    """Return the hint at an option that leaves a prefix of `missing` names out, as the `stored` ones do; else ""."""
    prefixes = (name.removesuffix(stored[0]) for name in missing if stored and name.endswith(f".{stored[0]}"))
    prefix = next(prefixes, "")
    if not prefix or not {prefix + name for name in stored}.issubset(missing):
        return ""
    is_part = source.structured and len(stored) < len(missing)
    option = f"--key {prefix[:-1]}" if is_part else f"--strip-prefix {prefix}"
    return f"The output has the names of a conversion with {option}. "


def check_structure(expected: Expected, written: Written) -> None:
    """Check that the record is the source's, or, without one, that the stored tensors are in the source's order."""
    want = expected.structure(written.aliases)
    if expected.flat and written.structure is None:
        return
    stored = [name for name in expected.tensors if name not in written.aliases]
    if want is None and expected.flat:
        raise DifferenceError(
            f"{written.structure_path} contains a structure record, but none was expected.",
            "If the conversion did not use --no-structure, omit it here too.",
            what="structure",
            file=written.structure_path,
        )
    if want is None:
        if written.structure is None and list(written.tensors) == stored:
            return
        want = plain_record(stored)
    if written.structure == want:
        return
    got = written.structure
    at = next(
        (i for i, (a, b) in enumerate(zip(want, got or "", strict=False)) if a != b), min(len(want), len(got or ""))
    )
    where = "is missing" if got is None else f"differs at character {at}: found {got[at : at + 60]!r}"
    raise DifferenceError(
        f"{written.structure_path}: the structure record {where}; expected {want[at : at + 60]!r}.",
        "Use --for-hub or --no-structure if the conversion did. `ckptconv diff` compares any two checkpoints.",
        what="structure",
        file=written.structure_path,
        index=[at],
        expected=want[at : at + 60],
        found=None if got is None else got[at : at + 60],
    )


def check_shards(written: Written, options: Options) -> None:
    """Check that no file of several tensors exceeds `max_shard_size`."""
    if not options.max_shard_size:
        return
    sizes: Counter[str] = Counter()
    for name, tensor in written.tensors.items():
        sizes[written.homes[name]] += tensor.nbytes
    counts = Counter(written.homes.values())
    for path, size in sizes.items():
        if counts[path] > 1 and size > options.max_shard_size:
            raise DifferenceError(
                f"{path} contains {size} bytes of tensors, but --max-shard-size allows {options.max_shard_size}.",
                what="file",
                file=path,
                expected=options.max_shard_size,
                found=size,
            )


def _tensors(names: Sequence[str]) -> str:
    return "a tensor" if len(names) == 1 else f"{len(names)} tensors"
