"""Compare what a source gives with a reference, by names, shapes, dtypes and ties, and say what differs. Pure."""

from __future__ import annotations

import glob
import itertools
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ckptconv.errors import DifferenceError
from ckptconv.formats import model_files
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs.targets import is_output_name
from ckptconv.plan import NUMBERED, Data, FilePlan, shard_names
from ckptconv.result import LikeReport, LikeRow
from ckptconv.storage.paths import basename
from ckptconv.tensors.dtypes import DType, can_cast
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.text import some

# The most differences of one kind that an error lists; it counts them all.
MOST_LISTED = 1000
# Names that are tried for a hint, of those that are missing and of those that have no place.
_TRIED = 50
# Names that a suggestion leaves out one by one.
_EXCLUDED = 3
# torch's name for the files of a sharded set, of which an output of the same files has its own.
_TORCH_SHARD = re.compile(rf"(?:diffusion_)?pytorch_model((?:{NUMBERED})?)\.bin")


class Typed(Protocol):
    """What is compared of a tensor: a `LazyTensor`, or anything else with a dtype and a shape."""

    @property
    def dtype(self) -> DType: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class Comparison(NamedTuple):
    """How the tensors that are given compare with those that are wanted, by name.

    `matched` are wanted and given, of the same shape and a dtype that can be cast; `missing` are not given; `extra` are
    not wanted, and not tied to one that is. `shapes` are given in another shape, `dtypes` in a dtype that cannot be
    cast. `aliases` are given and not wanted, and tied to one that is: {removed: kept}. `others` are given under another
    name that is tied to the one that is wanted: {wanted: given}. The order is that of what they are taken from: `extra`
    and `aliases` from what is given, the rest from what is wanted.
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
        """The names that differ, by how they do."""
        every = {"missing": self.missing, "extra": self.extra, "shape": self.shapes, "dtype": self.dtypes}
        return {what: names for what, names in every.items() if names}


def compare(
    given: Mapping[str, Typed],
    wanted: Mapping[str, Typed],
    ties: Mapping[str, str] | None = None,
    wanted_ties: Mapping[str, str] | None = None,
    *,
    fixed: Collection[str] = (),
    casts: bool = True,
) -> Comparison:
    """Compare the tensors `given` with those that are `wanted`.

    `ties` are names among `given` whose bytes another has, and `wanted_ties` are such names that stand for one that is
    wanted: {removed: kept}. Tensors of the names `fixed` are never cast. Unless it `casts`, dtypes do not matter.
    """
    ties = dict(ties or {})
    others: dict[str, str] = {}
    for alias, kept in (wanted_ties or {}).items():
        if alias in given and alias not in wanted and kept in wanted and kept not in given:
            others.setdefault(kept, alias)
    given = {**given, **{kept: given[alias] for kept, alias in others.items()}}
    ties.update((kept, ties.get(alias, alias)) for kept, alias in others.items())
    fixed = {*fixed, *(kept for kept, alias in others.items() if alias in fixed)}
    here = [name for name in wanted if name in given]
    shapes = tuple(name for name in here if given[name].shape != wanted[name].shape)
    differing = set(shapes)
    dtypes = tuple(
        name
        for name in here
        if casts and name not in differing and not _fits(given[name].dtype, wanted[name].dtype, name in fixed)
    )
    differing.update(dtypes)
    stored: dict[str, str] = {}
    for name in here:
        stored.setdefault(ties.get(name, name), name)
    left = [name for name in given if name not in wanted]
    aliases = {name: stored[owner] for name in left if (owner := ties.get(name, name)) in stored}
    return Comparison(
        matched=tuple(name for name in here if name not in differing),
        missing=tuple(name for name in wanted if name not in given),
        extra=tuple(name for name in left if name not in aliases),
        shapes=shapes,
        dtypes=dtypes,
        aliases=aliases,
        others=others,
    )


def _fits(given: DType, wanted: DType, is_fixed: bool) -> bool:
    """Whether a tensor of one dtype can be stored in the other: only floats are cast, as --dtype does."""
    return given == wanted or (not is_fixed and given.kind == "f" and can_cast(given.name, wanted.name))


# --------------------------------------------------------------------------------------------------------- what is said


def check(
    found: Comparison, given: Mapping[str, Typed], wanted: Mapping[str, Typed], source: Source, options: Options
) -> None:
    """Raise DifferenceError if `source`, with its reference, has a difference that the options do not allow."""
    allowed = {"missing"} if options.partial or options.fill else set()
    kinds = {what: names for what, names in found.kinds.items() if what not in allowed}
    if not kinds:
        return
    rows = [
        {"tensor": name, "what": what, "expected": _described(wanted.get(name)), "found": _described(given.get(name))}
        for what, names in kinds.items()
        for name in names[:MOST_LISTED]
    ]
    told = "; ".join(f"{len(names)} {_WORDS[what]}: {some(names, 3)}" for what, names in kinds.items())
    reference = source.reference.path if source.reference else ""
    raise DifferenceError(
        f"{source.path} does not give the tensors of {reference}: {told}.",
        " ".join(_hints(kinds, given, wanted)),
        what="reference",
        file=reference,
        counts={"matched": len(found.matched), **{what: len(names) for what, names in kinds.items()}},
        tensors=rows,
    )


_WORDS = {
    "missing": "missing",
    "extra": "that it does not have",
    "shape": "of another shape",
    "dtype": "of a dtype that cannot be cast to its",
}


def _described(kind: Typed | None) -> dict[str, Any] | None:
    return None if kind is None else {"dtype": kind.dtype.name, "shape": list(kind.shape)}


def _hints(
    kinds: Mapping[str, Sequence[str]], given: Mapping[str, Typed], wanted: Mapping[str, Typed]
) -> Iterator[str]:
    """Yield what a user may do about differences."""
    missing, extra = kinds.get("missing", ()), kinds.get("extra", ())
    renaming = _renaming([name for name in wanted if name not in given], extra, given, wanted)
    if renaming:
        yield renaming
        return
    if missing:
        yield "Missing ones are taken from there with --fill, or left out with --partial."
    if extra:
        yield "What is too much is left out with --exclude."
    if missing and extra:
        yield "Names of another framework are changed with --map."
    if "shape" in kinds:
        yield "No shape is changed: it is another model, or its layout is another framework's, which --map changes."
    if "dtype" in kinds:
        yield "With --dtype keep, dtypes stay those of the input."


def _renaming(
    missing: Sequence[str], extra: Sequence[str], given: Mapping[str, Typed], wanted: Mapping[str, Typed]
) -> str:
    """Suggest the change of a prefix that gives the most names of `extra` a name of `missing` with the same shape, and
    what else it takes then; "" if there is none that helps half of either."""
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
        return [name for name, goal in goals if goal in lacking and given[name].shape == wanted[goal].shape]

    best = max((each for each, _ in tried.most_common(_TRIED)), key=lambda change: len(helped(change)), default=None)
    named = helped(best) if best else []
    if best is None or 2 * len(named) < min(len(extra), len(missing)):
        return ""
    old, new = best
    option = f"--rename '^{re.escape(old)}={new}'" if new else f"--strip-prefix {shlex.quote(old)}"
    others = sorted(set(extra).difference(named))
    if others and old and not any(name in given for name in wanted):
        option += f" --include {shlex.quote(f'{glob.escape(old)}*')}"
        others = [name for name in others if name.startswith(old)]
    option += "".join(f" --exclude {shlex.quote(glob.escape(name))}" for name in others[:_EXCLUDED])
    left = len(missing) - len(named)
    more = f" The other {left:,} missing are taken from there with --fill, or left out with --partial." if left else ""
    return f"With {option} {len(named):,} of these {len(extra):,} have names of the reference.{more}"


def _common_end(name: str, goal: str) -> int:
    """Return the length of the longest common end of two names, in whole words between dots."""
    pairs = zip(reversed(name.split(".")), reversed(goal.split(".")), strict=False)
    words = [one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return len(".".join(words))


# --------------------------------------------------------------------------------------------------- what is taken over


class Likeness(NamedTuple):
    """What an output takes over from its reference, at the path `reference`.

    `dtypes` are those of its tensors, aliases included, by name; {} if the user asked for another. `files` are the
    files of the output by name of tensor; {} if the reference has none that an output could be like. `missing` are
    tensors of the reference that the output leaves out, `filled` those that it takes from there. `others` are tensors
    that the source has under another of their names: {name: name before}.
    """

    reference: str
    dtypes: Mapping[str, str]
    files: Mapping[str, str]
    missing: tuple[str, ...] = ()
    filled: tuple[str, ...] = ()
    others: Mapping[str, str] = {}


def left_out(like: Likeness, source: str) -> tuple[str, ...]:
    """Return a warning that names what `source` lacks of the reference, if that is anything; else ()."""
    names = like.missing
    what = "tensor is" if len(names) == 1 else "tensors are"
    told = f"{len(names):,} {what} left out that {like.reference} has, as {source} lacks them: {some(names)}."
    return (told,) if names else ()


def files_of(reference: Source, stored: Mapping[str, LazyTensor]) -> dict[str, str]:
    """Return the file of an output for each of the tensors `stored` in a reference; {} if its files are those of a
    training, and not of a model.

    Files have the names of the reference's where an output's may; else they are numbered.
    """
    paths = list(reference.shards)
    if not paths:
        return {} if reference.default_shard_size else dict.fromkeys(stored, reference.stem + model_files.SUFFIX)
    names = [_TORCH_SHARD.sub(rf"{reference.stem}\1.safetensors", basename(path)) for path in paths]
    if not all(map(is_output_name, names)) or len(set(names)) < len(names):
        names = shard_names(reference.stem, model_files.SUFFIX, paths)
    name_of = dict(zip(paths, names, strict=True))
    first = {tensor: next((file.stored.path for file in each.inputs()), paths[0]) for tensor, each in stored.items()}
    return {tensor: name_of[path] for tensor, path in first.items()}


def grouped(names: Iterable[str], files: Mapping[str, str]) -> dict[str, list[str]]:
    """Return {file: its tensors} for tensors of these `names`; `files` are the files by tensor."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(files[name], []).append(name)
    return dict(sorted(groups.items()))


def report(like: Likeness, origins: Mapping[str, tuple[str, str]], stored: Mapping[str, LazyTensor]) -> LikeReport:
    """Return what a user should know. `origins` are the names and dtypes that tensors have in the source, by name;
    `stored` are the tensors of the output."""
    given = [(origins[name][1], tensor.dtype.name) for name, tensor in stored.items() if name in origins]
    casts = Counter(f"{old} to {new}" for old, new in given if old != new)
    return LikeReport(like.reference, len(given), list(like.missing), list(like.filled), dict(casts))


def rows(origins: Mapping[str, tuple[str, str]], files: Iterable[FilePlan]) -> list[LikeRow]:
    """Return a row for each tensor of the output's `files`; `origins` are as in `report`."""
    return [
        LikeRow(part.name, part.tensor.dtype.name, file.name, *origins.get(part.name, (None, part.tensor.dtype.name)))
        for file in files
        for part in file.parts
        if isinstance(part, Data)
    ]
