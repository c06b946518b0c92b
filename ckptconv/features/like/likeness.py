"""Compare the tensors of a source with a reference, by names, shapes, dtypes and ties. Pure."""

from __future__ import annotations

import functools
import glob
import itertools
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from ckptconv.errors import DifferenceError, UsageError
from ckptconv.features.like.options import LikeOptions
from ckptconv.features.like.report import LikeReport, LikeRow
from ckptconv.features.model_facts import places
from ckptconv.formats import model_files
from ckptconv.formats.adapter_names import is_adapter
from ckptconv.formats.source import Source
from ckptconv.options import registered
from ckptconv.options.table import Options
from ckptconv.outputs.computed import Computing, From
from ckptconv.outputs.selected import Reporter, Selected
from ckptconv.outputs.shards import shard_names
from ckptconv.outputs.targets import is_output_name
from ckptconv.plan import NUMBERED, Data, FilePlan
from ckptconv.storage.paths import basename
from ckptconv.tensors.dtypes import DType, can_cast
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.text import count_of, some

# The modules whose `between` names the maps from some names to others.
_MAPPING: tuple[str, ...] = (
    "ckptconv.features.maps.fitting",
)  # fmt: skip
# The most differences of one kind that an error lists; it counts them all.
MOST_LISTED = 1000
# Names that are tried for a hint, of those that are missing and of those that have no place.
_TRIED = 50
# Names that a suggestion leaves out one by one.
_EXCLUDED = 3
# torch's name for the files of a sharded set, of which an output of the same files has its own.
_TORCH_SHARD = re.compile(rf"(?:diffusion_)?pytorch_model((?:{NUMBERED})?)\.bin")


class Typed(Protocol):
    """A tensor to compare: a `LazyTensor`, or anything else with a dtype and a shape."""

    @property
    def dtype(self) -> DType: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class Comparison(NamedTuple):
    """The comparison of the input's tensors with those wanted, by name.

    `matched` are wanted and in the input, of the same shape and a dtype that can be cast; `missing` are not in the
    input; `extra` are not wanted, and not tied to one that is. `shapes` have another shape in the input, `dtypes` a
    dtype that cannot be cast. `aliases` are in the input and not wanted, and tied to one that is: {removed: kept}.
    `others` are in the input under another name that is tied to the wanted one: {wanted: name}. `extra` and `aliases`
    are in the order of the input, the rest in that of the reference.
    """

    matched: tuple[str, ...]
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    shapes: tuple[str, ...]
    dtypes: tuple[str, ...]
    aliases: Mapping[str, str]
    others: Mapping[str, str]

    @property
    def kinds(self) -> dict[str, tuple[str, ...]]:
        """The names that differ, by the kind of difference."""
        every = {"missing": self.missing, "extra": self.extra, "shape": self.shapes, "dtype": self.dtypes}
        return {kind: names for kind, names in every.items() if names}


def compare(
    tensors: Mapping[str, Typed],
    wanted: Mapping[str, Typed],
    ties: Mapping[str, str] | None = None,
    wanted_ties: Mapping[str, str] | None = None,
    *,
    uncastable: Collection[str] = (),
    casts: bool = True,
) -> Comparison:
    """Compare `tensors` of an input with those that are `wanted`.

    `ties` are names among `tensors` whose bytes another has, and `wanted_ties` are such names that stand for a wanted
    one: {removed: kept}. Tensors of the names `uncastable` are never cast. Unless it `casts`, dtypes do not matter.
    """
    ties = dict(ties or {})
    others: dict[str, str] = {}
    for alias, kept in (wanted_ties or {}).items():
        if alias in tensors and alias not in wanted and kept in wanted and kept not in tensors:
            others.setdefault(kept, alias)
    tensors = {**tensors, **{kept: tensors[alias] for kept, alias in others.items()}}
    ties.update((kept, ties.get(alias, alias)) for kept, alias in others.items())
    uncastable = {*uncastable, *(kept for kept, alias in others.items() if alias in uncastable)}
    common = [name for name in wanted if name in tensors]
    shapes = tuple(name for name in common if tensors[name].shape != wanted[name].shape)
    differing = set(shapes)
    dtypes = tuple(
        name
        for name in common
        if casts and name not in differing and not _fits(tensors[name].dtype, wanted[name].dtype, name in uncastable)
    )
    differing.update(dtypes)
    stored: dict[str, str] = {}
    for name in common:
        stored.setdefault(ties.get(name, name), name)
    left = [name for name in tensors if name not in wanted]
    aliases = {name: stored[owner] for name in left if (owner := ties.get(name, name)) in stored}
    return Comparison(
        matched=tuple(name for name in common if name not in differing),
        missing=tuple(name for name in wanted if name not in tensors),
        extra=tuple(name for name in left if name not in aliases),
        shapes=shapes,
        dtypes=dtypes,
        aliases=aliases,
        others=others,
    )


def _fits(dtype: DType, wanted: DType, is_fixed: bool) -> bool:
    """Return whether a tensor of one dtype can be stored in the other: only floats are cast, as with --dtype."""
    return dtype == wanted or (not is_fixed and dtype.kind == "f" and can_cast(dtype.name, wanted.name))


# ------------------------------------------------------------------------------------------------------------- messages


def check(
    comparison: Comparison, tensors: Mapping[str, Typed], wanted: Mapping[str, Typed], source: Source, options: Options
) -> None:
    """Raise DifferenceError if `source`, with its reference, has a difference that the options do not allow."""
    like = LikeOptions.of(options)
    allowed = {"missing"} if like.partial or like.fill else set()
    kinds = {kind: names for kind, names in comparison.kinds.items() if kind not in allowed}
    if not kinds:
        return
    rows = [
        {"tensor": name, "what": kind, "expected": _described(wanted.get(name)), "found": _described(tensors.get(name))}
        for kind, names in kinds.items()
        for name in names[:MOST_LISTED]
    ]
    differences = "; ".join(f"{len(names)} {_WORDS[kind]}: {some(names, 3)}" for kind, names in kinds.items())
    reference = source.reference.path if source.reference else ""
    raise DifferenceError(
        f"{source.path} does not match the tensors of {reference}: {differences}.",
        " ".join(_of_maps(source, comparison.kinds) or _hints(kinds, tensors, wanted)),
        what="reference",
        file=reference,
        counts={"matched": len(comparison.matched), **{kind: len(names) for kind, names in kinds.items()}},
        tensors=rows,
    )


_WORDS = {
    "missing": "missing",
    "extra": "not in the reference",
    "shape": "with another shape",
    "dtype": "with a dtype that cannot be cast to the reference's dtype",
}


def _described(kind: Typed | None) -> dict[str, Any] | None:
    return None if kind is None else {"dtype": kind.dtype.name, "shape": list(kind.shape)}


def _of_maps(source: Source, kinds: Mapping[str, Sequence[str]]) -> list[str]:
    """Return advice about the maps that give all names of the source the names of the reference, if it has no map."""
    extra, missing = kinds.get("extra", ()), kinds.get("missing", ())
    if "map" in source.computed or not (extra and missing):
        return []
    maps = [name for module in _MAPPING for name in import_module(module).between(extra, missing)]
    shown = f"The built-in map{'s' * (len(maps) > 1)} {some(maps, form=str)}"
    advice = f"{shown} can convert the names: use --map NAME with the map of the program that wrote the input."
    return [advice] if maps else []


def _hints(
    kinds: Mapping[str, Sequence[str]], tensors: Mapping[str, Typed], wanted: Mapping[str, Typed]
) -> Iterator[str]:
    """Yield advice about differences."""
    missing, extra = kinds.get("missing", ()), kinds.get("extra", ())
    renaming = _renaming([name for name in wanted if name not in tensors], extra, tensors, wanted)
    if renaming:
        yield renaming
        return
    if is_adapter(dict.fromkeys(extra)):
        yield "Merge an adapter into its base with: ckptconv merge BASE ADAPTER OUTPUT."
        return
    if any(wanted[name].dtype.itemsize == 1 for name in kinds.get("dtype", ())):
        yield "The weights of the reference are quantized, but --like requires a reference with plain weights."
        return
    if missing:
        yield "Copy missing tensors from the reference with --fill, or omit them with --partial."
    for head in (name for name in extra if name.endswith("lm_head.weight")):
        stored = ((name, tensors[name]) for name in wanted if "embed" in name and name in tensors)
        if embeddings := next((name for name, tensor in stored if tensor.shape == tensors[head].shape), ""):
            yield f"{head} is stored separately from {embeddings}: exclude it only if both have the same values."
    if extra:
        yield "Exclude extra tensors with --exclude."
    if missing and extra:
        yield "Convert the names of another framework with --map."
    if resized := _resized(kinds.get("shape", ()), tensors, wanted):
        yield resized
    elif "shape" in kinds:
        yield (
            "--like does not change shapes: the input is another model, or has the layout of another framework, which "
            "--map converts."
        )
    if "dtype" in kinds:
        yield "Use --dtype keep to keep the dtypes of the input."


def _resized(names: Sequence[str], tensors: Mapping[str, Typed], wanted: Mapping[str, Typed]) -> str:
    """Return advice about a vocabulary that was resized, if all of these `names` are of one; else ""."""
    shapes = {(tensors[name].shape, wanted[name].shape) for name in names}
    if not all(map(places.is_of_vocabulary, names)) or any(
        len(own) != len(theirs) or own[1:] != theirs[1:] for own, theirs in shapes
    ):
        return ""
    rows = {(own[0], theirs[0]) for own, theirs in shapes}
    if len(rows) != 1:
        return ""
    ((own, theirs),) = rows
    cut = "" if own < theirs or registered.missing("vocab") else f" To omit the new rows, add --vocab {theirs}."
    return (
        f"The vocabulary of the input has {own} rows, but that of the reference, its config.json and its tokenizer "
        f"has {theirs}. Put the config.json (with vocab_size {own}) and the tokenizer from the training next to the "
        f"input, and convert with --copy-config or --for-hub, without --like.{cut}"
    )


def _renaming(
    missing: Sequence[str], extra: Sequence[str], tensors: Mapping[str, Typed], wanted: Mapping[str, Typed]
) -> str:
    """Suggest the change of a prefix that gives the most names of `extra` a name of `missing` with the same shape, and
    the further options; "" if no change helps half of either."""
    tried: Counter[tuple[str, str]] = Counter()
    for name in extra[:_TRIED]:
        for goal in missing[:_TRIED]:
            end = _common_end(name, goal)
            if end and "=" not in goal:
                tried[name[: len(name) - end], goal[: len(goal) - end]] += 1
    lacking = set(missing)

    def helped(change: tuple[str, str]) -> list[str]:
        old, new = change
        goals = ((name, new + name[len(old) :]) for name in extra if name.startswith(old))
        return [name for name, goal in goals if goal in lacking and tensors[name].shape == wanted[goal].shape]

    best = max(
        (prefixes for prefixes, _ in tried.most_common(_TRIED)), key=lambda change: len(helped(change)), default=None
    )
    named = helped(best) if best else []
    if best is None or 2 * len(named) < min(len(extra), len(missing)):
        return ""
    old, new = best
    option = f"--rename '^{re.escape(old)}={new}'" if new else f"--strip-prefix {shlex.quote(old)}"
    others = sorted(set(extra).difference(named))
    if others and old and not any(name in tensors for name in wanted):
        option += f" --include {shlex.quote(f'{glob.escape(old)}*')}"
        others = [name for name in others if name.startswith(old)]
    option += "".join(f" --exclude {shlex.quote(glob.escape(name))}" for name in others[:_EXCLUDED])
    left = len(missing) - len(named)
    more = (
        (f" Copy the other {left:,} missing tensors from the reference with --fill, or omit them with --partial.")
        if left
        else ""
    )
    return f"Use {option} to match {len(named):,} of these {len(extra):,} names with the reference.{more}"


def _common_end(name: str, goal: str) -> int:
    """Return the length of the longest common end of two names, in whole words between dots."""
    pairs = zip(reversed(name.split(".")), reversed(goal.split(".")), strict=False)
    words = [word for word, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return len(".".join(words))


# -------------------------------------------------------------------------------------------------------- the selection


def files_of(reference: Source, stored: Mapping[str, LazyTensor]) -> dict[str, str]:
    """Return the file of an output for each of the tensors `stored` in a reference; {} if its files are those of a
    training, and not of a model.

    Files have the names of the reference's where an output's may; else they are numbered.
    """
    paths = list(reference.shards)
    if not paths:
        return {} if reference.defaults.shard_size else dict.fromkeys(stored, reference.stem + model_files.SUFFIX)
    names = [_TORCH_SHARD.sub(rf"{reference.stem}\1.safetensors", basename(path)) for path in paths]
    if not all(map(is_output_name, names)) or len(set(names)) < len(names):
        names = shard_names(reference.stem, model_files.SUFFIX, paths)
    name_of = dict(zip(paths, names, strict=True))
    first = {tensor: next((file.stored.path for file in lazy.inputs()), paths[0]) for tensor, lazy in stored.items()}
    return {tensor: name_of[path] for tensor, path in first.items()}


def _check_like(source: Source, options: LikeOptions) -> None:
    """Raise UsageError for options about a reference without one, or that exclude each other."""
    names = " and ".join(name for name in ("--partial", "--fill") if getattr(options, name[2:]))
    if names and source.reference is None:
        raise UsageError(f"{names} requires a reference.", "Specify a reference with --like REF.")
    if options.partial and options.fill:
        raise UsageError(
            "--partial and --fill cannot be combined: --partial omits missing tensors, --fill copies them from the "
            "reference.",
            "Use one of them.",
        )


def _selected(chosen: Selected, source: Source, options: Options, theirs: Selected | None) -> Selected:
    """Return `chosen` with the names, dtypes and tensors of `theirs`, which is all of the source's reference.

    No structure record then belongs to the output: the reference has none.
    """
    like = LikeOptions.of(options)
    _check_like(source, like)
    reference = source.reference
    if reference is None or theirs is None:
        return chosen
    removed = theirs.aliases()
    wanted = {name: theirs.cast(name) for name in theirs.tensors if name not in removed}
    casts = options.dtype is None
    ties, their_ties = (
        ({}, {}) if options.tied == "duplicate" else (chosen.recorded_aliases(), theirs.recorded_aliases())
    )
    comparison = compare(chosen.tensors, wanted, ties, their_ties, uncastable=chosen.uncastable, casts=casts)
    others = {name: chosen.tensors[before] for name, before in comparison.others.items()}
    check(comparison, {**chosen.tensors, **others}, wanted, source, options)
    filled = comparison.missing if like.fill else ()
    missing = comparison.missing if like.partial else ()
    dtypes = {name: wanted[name].dtype.name for name in wanted} if casts else {}
    dtypes.update({alias: dtypes[kept] for alias, kept in comparison.aliases.items() if casts})
    uncastable = {name for name, before in comparison.others.items() if before in chosen.uncastable}
    tell = functools.partial(
        _reporter, LikeReport(reference.path, 0, list(missing), list(filled), {}), comparison, options
    )
    return chosen._replace(
        tensors={**chosen.tensors, **others, **{name: wanted[name] for name in filled}},
        structured=False,
        owners=dict(comparison.aliases),
        tied=True,
        dtype="keep" if casts else chosen.dtype,
        dtypes=dtypes,
        widen_only=chosen.widen_only and not casts,
        uncastable=chosen.uncastable | uncastable | theirs.uncastable.intersection(filled),
        files=files_of(reference, wanted),
        missing=missing,
        warnings=(*chosen.warnings, *_left_out(missing, reference.path, source.path)),
        equal=(*chosen.equal, *(pair for pair in reference.equal if pair[0] in filled)),
        record={**chosen.record, "like": From(reference.path)},
        reporters=(*chosen.reporters, tell),
    )


def _left_out(names: Sequence[str], reference: str, source: str) -> Iterator[str]:
    """Yield a warning of the `names` that `source` lacks of the reference, if there are any."""
    if names:
        yield f"omitted {count_of(len(names), 'tensor')} of {reference} that {source} lacks: {some(names)}."


def _reporter(
    report: LikeReport, comparison: Comparison, options: Options, chosen: Selected, stored: Mapping[str, LazyTensor]
) -> Reporter:
    """Return the function that returns the `report`, whose remaining facts are known now."""
    origins = {new: (old, chosen.tensors[new].dtype.name) for old, new in chosen.names.items()}
    origins.update((name, origins[before]) for name, before in comparison.others.items())
    dtypes = [(origins[name][1], tensor.dtype.name) for name, tensor in stored.items() if name in origins]
    report.matched = len(dtypes)
    report.casts = dict(Counter(f"{old} to {new}" for old, new in dtypes if old != new))

    def reported(files: Sequence[FilePlan]) -> Mapping[str, Any]:
        report.tensors = _rows(origins, files) if options.dry_run else []
        return {"like": report}

    return reported


def _rows(origins: Mapping[str, tuple[str, str]], files: Iterable[FilePlan]) -> list[LikeRow]:
    """Return a row for each tensor of the output's `files`; `origins` are the names and dtypes that tensors have in the
    source, by name."""
    return [
        LikeRow(part.name, part.tensor.dtype.name, file.name, *origins.get(part.name, (None, part.tensor.dtype.name)))
        for file in files
        for part in file.parts
        if isinstance(part, Data)
    ]


COMPUTING = Computing(
    heading={"like?": str},
    selected=_selected,
    asked=lambda told, seen: {"like": seen(told["like"])},
    lost=("the conversion used a reference", "Specify the reference with --like REF."),
)
