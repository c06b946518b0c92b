"""Compares two checkpoints: matches tensors by name, and reports the differences. `diff` returns a `Difference`."""

from __future__ import annotations

import functools
import shlex
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from importlib import import_module
from typing import Any

from ckptconv.errors import LimitError, UsageError
from ckptconv.features.diff.changes import Change, Tolerance, widened
from ckptconv.features.diff.reading import Encoding, Pair, compare
from ckptconv.features.reporting.quantized import Quantization, Steps
from ckptconv.features.reporting.statistics import root
from ckptconv.formats.coded import parts_among
from ckptconv.formats.source import NOT_CONVERTED, STATES_ARE_CONVERTED, THEIR_STATES_ARE_CONVERTED, Source
from ckptconv.options.table import Options
from ckptconv.outputs import selection
from ckptconv.outputs.hints import globs_like
from ckptconv.outputs.notices import idle_sentences
from ckptconv.outputs.pipeline import selected
from ckptconv.outputs.selected import Selected
from ckptconv.outputs.selection import NoKeyError
from ckptconv.plan import MAX_GROWTH, ROOM_TO_GROW
from ckptconv.process import no_garbage, peak_rss
from ckptconv.result import Shown
from ckptconv.storage.progress import Progress
from ckptconv.structure.choice import Choice
from ckptconv.structure.dtype_views import original
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.text import quoted

# The results for a pair of tensors, in the order in which they are listed.
STATUSES = (ONLY_A, ONLY_B, SHAPE, DTYPE, CHANGED, EQUAL) = ("only_a", "only_b", "shape", "dtype", "changed", "equal")
# The modules of features whose `through_codes(pairs, options, count, is_tolerant)` returns the distances, in steps, of
# pairs that differ and have a side of codes, and a summary of all such pairs; {} and None if there are none. `count`
# counts the differing elements of further tensors; `is_tolerant` is whether the pairs were compared with a tolerance.
THROUGH_CODES: dict[str, str] = {
    "quantized": "ckptconv.features.quantized.steps",
}
# The module that shows a difference as lines of text. It imports this module.
SHOWING = "ckptconv.features.diff.showing"
# The prefix of the names of optimizer states.
_STATES = "optimizer."
# The most names, and the most dots in a name, that are tried for a prefix that only one side has.
_TRIED, _DEEPEST = 50, 60
# The most parts of a checkpoint that a hint leaves out.
_FEW_PARTS = 3


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor of A, of B, or of both."""

    name: str
    """Its name, as the options change it."""

    status: str
    """Whether it is on one side only, has another shape or dtype, or elements that differ, or is equal."""

    dtype_a: str | None
    """Its dtype in A; null if it is not there."""

    dtype_b: str | None
    """Its dtype in B; null if it is not there."""

    shape_a: tuple[int, ...] | None
    """Its shape in A."""

    shape_b: tuple[int, ...] | None
    """Its shape in B."""

    bytes_a: int | None
    """Its size in A."""

    bytes_b: int | None
    """Its size in B."""

    tied: str
    """The name whose tensor it is on each side that has it, if it is tied; else empty."""

    change: Change | None
    """The differences between the elements; null if all bytes are equal, if the elements cannot be compared, or if the
    differences were not measured."""

    steps: Steps | None = None
    """With `--dequantize`, the distance of a quantized weight from the other side, in steps; null if both are equal bit
    for bit, whatever the tolerance is."""

    @property
    def rank(self) -> tuple[int, float, str]:
        """The key to sort by: those that cannot be compared first, then by falling change; equal ones last, within a
        tolerance by falling change too."""
        change = self.change
        if self.status in (DTYPE, CHANGED, EQUAL) and change is not None:
            relative = change.relative
            size = relative if relative is not None else 0.0
            place = STATUSES.index(EQUAL if self.status == EQUAL else CHANGED)
            return place, -(float("inf") if change.not_finite else size), self.name
        return STATUSES.index(self.status), 0.0, self.name

    @property
    def is_alike(self) -> bool:
        """Whether both sides have the tensor, with one shape and dtype."""
        return self.status in (CHANGED, EQUAL)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape on the side that has it, A's if both do."""
        return self.shape_a if self.shape_a is not None else self.shape_b or ()

    @property
    def bytes(self) -> int:
        """The size of the larger side."""
        return max(self.bytes_a or 0, self.bytes_b or 0)


@dataclass(frozen=True, slots=True)
class DeltaFiles:
    """The delta that was written for a difference."""

    path: str
    """Its directory."""

    base_version: int
    """The version that the delta applies to."""

    version: int
    """The version that results."""

    encoding: str
    """The encoding of the changes."""

    checksum: str
    """The checksums of the new tensors."""

    tensors: int
    """Number of tensors that the delta changes."""

    bytes: int
    """The bytes of its files."""


@dataclass
class Difference(Shown):
    """The differences between A and B. Sizes are in bytes.

    Tied names count once in `elements`, `elements_differ`, `max_abs`, `max_rel` and `norm`.
    """

    input: str
    """A: its path."""

    other: str
    """B: its path."""

    format: str
    """The format of A, in words."""

    other_format: str
    """The format of B, in words."""

    equal: bool
    """Whether every tensor is on both sides, and equal."""

    rtol: float | None
    """The relative tolerance; null if bits were compared."""

    atol: float | None
    """The absolute tolerance; null if bits were compared."""

    tolerance: str | None
    """The rule that combines rtol and atol, symmetric or numpy; null if bits were compared."""

    counts: dict[str, int]
    """Number of names of each status."""

    elements: int
    """Number of elements that were compared. Tied names count once."""

    elements_differ: int | None
    """Number of compared elements that differ; null if that was not measured."""

    max_abs: float | None
    """The largest difference of two elements; null likewise."""

    max_rel: float | None
    """The largest difference divided by the larger of both absolute values; null likewise."""

    norm: float | None
    """The norm of all differences together; null likewise."""

    tensors: list[TensorDifference]
    """Every name, or as many as `--top` says: those that cannot be compared first, then by falling change."""

    warnings: list[str] = field(default_factory=list)
    """Warnings, one sentence each."""

    hints: list[str] = field(default_factory=list)
    """Hints at options that the user may have meant, one sentence each."""

    not_compared: list[str] = field(default_factory=list)
    """Top-level keys of both sides under which there are values other than tensors. These are not compared."""

    quantization: Quantization | None = None
    """With `--dequantize`, the distances of the weights that are quantized on either side; null if there are no such
    weights, or if the distances were not measured."""

    delta: DeltaFiles | None = None
    """The delta that `--delta` wrote; null without it."""

    bytes_compared: int = 0
    """Bytes of tensors that were compared, of both sides."""

    bytes_read: int = 0
    """Bytes read."""

    seconds: float = 0.0
    """Duration in seconds."""

    peak_rss_bytes: int = 0
    """The most memory that the process had."""

    def to_dict(self, top: int | None = None) -> dict[str, Any]:
        """Return it as the command prints it, of plain values: the schema is `diff.json`. At most `top` tensors."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        parts = {name: values[name] and asdict(values[name]) for name in ("delta", "quantization")}
        return {**values, **parts, "tensors": [_row(tensor) for tensor in self.tensors[:top]]}

    def __str__(self) -> str:
        """Return the text that the command prints, with the first of the tensors that differ."""
        lines = import_module(SHOWING).overview(self)
        return "\n".join("".join(words.text for words in line) for line in lines)


def _row(tensor: TensorDifference) -> dict[str, Any]:
    change = tensor.change and {**asdict(tensor.change), "relative": tensor.change.relative}
    return {**asdict(tensor), "change": change}


@dataclass
class _Side:
    """The tensors of one checkpoint by name, as they are compared, and their ties: {name: kept}.

    `known` are all names that it has. `choice` chooses names. `idle` are options without effect here: {option: reason}.
    `warnings` name the tensors that a map left out. `values` are keys that lead to values other than tensors.
    """

    known: Mapping[str, Any]
    choice: Choice
    idle: Mapping[str, str]
    warnings: Sequence[str] = ()
    values: Sequence[str] = ()
    tensors: dict[str, LazyTensor] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)

    def key(self, name: str) -> str:
        """Return the name whose bytes are compared for `name`."""
        return self.ties.get(name, name)


def difference(
    source_a: Source,
    source_b: Source,
    options: Options,
    *,
    optimizer: bool = False,
    tolerance: Tolerance | None = None,
    progress: Progress | None = None,
    on_total: Callable[[int], object] | None = None,
    changed: dict[str, Pair] | None = None,
    encoder: Encoding | None = None,
    measure: bool = True,
) -> Difference:
    """Compare two opened checkpoints.

    `options` choose and change names on both sides, and cast floats, as in a conversion. With `optimizer`, optimizer
    states are compared too, under `optimizer.<parameter>.<state>`. `progress` and `on_total` get the bytes of both
    sides. `changed`, if given, gets the pairs of tensors whose elements differ, by name; tied names share one pair.
    `encoder` encodes the changes in each pair. Without `measure`, the result only names the tensors that differ. Raise
    UsageError if a glob of `include` matches on neither side, and the errors of selecting and reading.
    """
    started = time.monotonic()
    with no_garbage():
        a, b = _sides(source_a, source_b, options, optimizer, is_one_key=encoder is not None)
        _check_globs(a, b)
        names = list(dict.fromkeys([*a.tensors, *b.tensors]))
        if not names:
            raise UsageError("No tensors to compare: the options select none.", "Change --include or --exclude.")
        pairs = dict(_pairs(names, a, b))
    if encoder:
        encoder.check({name: pair for (name, _), pair in pairs.items()})
    read = compare(list(pairs.values()), options, tolerance, progress, on_total, encoder, measure)
    steps, quantization = _through_codes(pairs, options, tolerance is not None) if measure else ({}, None)
    with no_garbage():
        changes = {key: pair.change() for key, pair in pairs.items() if measure}
        tensors = [_compared(name, a, b, pairs, changes, tolerance is not None) for name in names]
        if steps:
            tensors = [replace(tensor, steps=steps.get((a.key(tensor.name), b.key(tensor.name)))) for tensor in tensors]
    if changed is not None:
        both = ((name, pairs.get((a.key(name), b.key(name)))) for name in names)
        changed.update((name, pair) for name, pair in both if pair and pair.found)
    counts = Counter(tensor.status for tensor in tensors)
    a.choice.used |= b.choice.used
    unused = selection.idle_globs(list(dict.fromkeys([*a.known, *b.known])), a.choice)
    idle = {option: why for option, why in ({**unused, **a.idle} | unused).items() if option in {*unused, *b.idle}}
    measured = [change for change in changes.values() if change]
    return Difference(
        input=source_a.path,
        other=source_b.path,
        format=source_a.format,
        other_format=source_b.format,
        equal=len(tensors) == counts[EQUAL],
        rtol=tolerance and tolerance.rtol,
        atol=tolerance and tolerance.atol,
        tolerance=tolerance and tolerance.rule,
        counts={status: counts[status] for status in STATUSES},
        elements=sum(pair.one.numel for pair in pairs.values()),
        elements_differ=sum(change.elements for change in measured) if measure else None,
        max_abs=max((change.max_abs or 0 for change in measured), default=0) if measure else None,
        max_rel=max((change.max_rel or 0 for change in measured), default=0) if measure else None,
        norm=_norm(pairs.values()) if measure else None,
        tensors=sorted(tensors, key=lambda tensor: tensor.rank),
        warnings=[
            *dict.fromkeys(map(_not_compared, _warnings_of(source_a, source_b))),
            *(*a.warnings, *b.warnings, *idle_sentences(idle)),
        ],
        hints=[*_hints(tensors, {"A": source_a, "B": source_b}), *_of_codes(a, b), *_left(source_a, source_b)],
        not_compared=list(dict.fromkeys([*a.values, *b.values])),
        quantization=quantization,
        bytes_compared=sum(pair.nbytes for pair in pairs.values()),
        bytes_read=source_a.bytes_read + source_b.bytes_read + read,
        seconds=time.monotonic() - started,
        peak_rss_bytes=peak_rss(),
    )


def _left(*sources: Source) -> Iterable[str]:
    """Return a sentence for each part of the sources that conversions leave out."""
    notes = (note for source in sources for note in source.notes if note.startswith(NOT_CONVERTED))
    return dict.fromkeys(map(_not_compared, notes))


def _not_compared(note: str) -> str:
    """Return a sentence about a part that conversions leave out, as it is true of a comparison."""
    states = "--with-states for the optimizer states, "
    note = note.replace(THEIR_STATES_ARE_CONVERTED, states).replace(STATES_ARE_CONVERTED, ". Use --with-states for it")
    return note.replace(NOT_CONVERTED, "Not compared: ")


def _warnings_of(*sources: Source) -> Iterator[str]:
    """Yield the warnings about the sources. An option without effect on one of them may be meant for the other."""
    idle = [{_idle_option(text) for text in source.warnings} for source in sources]
    for text in (text for source in sources for text in source.warnings):
        if not (option := _idle_option(text)) or all(option in options for options in idle):
            yield text


def _idle_option(warning: str) -> str:
    """Return the option that has no effect, as a warning about a source says; "" for any other warning."""
    option, says, _ = warning.partition(" has no effect: ")
    return option if says and option.startswith("--") else ""


# ------------------------------------------------------------------------------------------------------------ pairing


def _sides(
    source_a: Source, source_b: Source, options: Options, optimizer: bool, *, is_one_key: bool
) -> tuple[_Side, _Side]:
    """Return the tensors to compare of both checkpoints. If one alone has the key, as the source of a conversion does,
    the other is taken whole, with a warning, unless `is_one_key`."""
    sides: list[_Side | NoKeyError] = []
    for source in (source_a, source_b):
        try:
            sides.append(_side(source, options, optimizer))
        except NoKeyError as error:
            sides.append(error)
    a, b = sides
    if isinstance(a, _Side) and isinstance(b, _Side):
        return a, b
    lacking = next(side for side in sides if isinstance(side, NoKeyError))
    if is_one_key or (isinstance(a, NoKeyError) and isinstance(b, NoKeyError)):
        raise lacking
    whole = options.replaced(key="")
    name, other = ("A", "B") if lacking is b else ("B", "A")
    warning = f"--key {options.key} was applied to {name} alone, because {other} has no such key."
    left, right = (
        _side(source, whole, optimizer) if side is lacking else side for source, side in ((source_a, a), (source_b, b))
    )
    assert isinstance(left, _Side)
    assert isinstance(right, _Side)
    left.warnings = [warning, *left.warnings]
    return left, right


def _side(source: Source, options: Options, optimizer: bool) -> _Side:
    """Return the tensors to compare of one checkpoint. A glob of `include` or `exclude` may match nothing, or
    everything: the other side may have other names."""
    choice = Choice(options.include, options.exclude)
    # Parameters without data are an error unless they are left out; the globs choose among them here.
    source = source._replace(unaccounted=[name for name in source.unaccounted if name in choice])
    without_globs = options.replaced(include=(), exclude=())
    weights = selected(source, without_globs)
    warnings, values = weights.warnings if weights.applied else (), () if choice else weights.first.described.values
    side = _Side(weights.known, choice, weights.idle(without_globs), warnings, values)
    _add(side, weights)
    _check_growth(source, side.tensors.values())
    if optimizer:
        _add(side, selected(source, without_globs, holds="optimizer"), _STATES)
    return side


def _check_growth(source: Source, tensors: Collection[LazyTensor]) -> None:
    """Raise LimitError for tensors that repeat a few elements so often that reading them would never end."""
    total = sum(tensor.nbytes for tensor in tensors)
    if total <= ROOM_TO_GROW:
        return
    files = dict.fromkeys(file.stored for tensor in tensors for file in tensor.inputs())
    stored = sum(file.size for file in files)
    if total > MAX_GROWTH * stored + ROOM_TO_GROW:
        raise LimitError(
            f"{source.path}: its tensors would take {total} bytes, but only {stored} bytes are stored, because some "
            "tensors repeat the same elements. No tensor was compared.",
            "Exclude these tensors with --exclude.",
        )


def _add(side: _Side, chosen: Selected, prefix: str = "") -> None:
    choice = side.choice
    old = {new: name for name, new in chosen.names.items()}

    def is_chosen(name: str) -> bool:
        # A state is named after its parameter.
        parameter = name.rpartition(".")[0] if prefix else name
        names = (name, old.get(parameter, name))
        return not any(map(choice.excludes, names)) and (not choice.include or any(map(choice.includes, names)))

    tensors = {name: chosen.cast(name) for name in chosen.tensors if not choice or is_chosen(name)}
    shared = {removed: kept for removed, kept in chosen.owners.items() if kept in tensors}
    tensors.update((removed, tensors[kept]) for removed, kept in shared.items() if removed not in tensors)
    side.ties.update((prefix + alias, prefix + kept) for alias, kept in selection.untie(tensors, shared).items())
    side.tensors.update((prefix + name, tensor) for name, tensor in tensors.items())


def _check_globs(a: _Side, b: _Side) -> None:
    """Raise UsageError for a glob of `include` that matches nothing on either side."""
    for glob in a.choice.include:
        if glob not in a.choice.used | b.choice.used:
            names = list(dict.fromkeys([*a.known, *b.known]))
            raise UsageError(f"--include {glob!r} matches no name on either side.", globs_like(glob, names))


def _pairs(names: Iterable[str], a: _Side, b: _Side) -> Iterator[tuple[tuple[str, str], Pair]]:
    """Yield the pairs to read: one for each two comparable tensors, by the kept names of both."""
    for name in names:
        tensor_a, tensor_b = _both(name, a, b)
        if tensor_a is not None and tensor_b is not None and _are_comparable(tensor_a, tensor_b):
            yield (a.key(name), b.key(name)), Pair(tensor_a, tensor_b)


def _both(name: str, a: _Side, b: _Side) -> tuple[LazyTensor | None, LazyTensor | None]:
    """Return the tensors of a name, None for a side that lacks it.

    Tensors that safetensors must store under another dtype are compared under their own, unless one side has lost it.
    """
    tensor_a, tensor_b = a.tensors.get(name), b.tensors.get(name)
    if tensor_a is None or tensor_b is None:
        return tensor_a, tensor_b
    both = original(tensor_a), original(tensor_b)
    return both if both[0] is not tensor_a and both[1] is not tensor_b else (tensor_a, tensor_b)


def _are_comparable(a: LazyTensor, b: LazyTensor) -> bool:
    alike = a.dtype == b.dtype or widened(a.dtype, b.dtype)
    return bool(alike) and tuple(a.shape) == tuple(b.shape)


def _through_codes(
    pairs: Mapping[tuple[Any, Any], Pair], options: Options, is_tolerant: bool
) -> tuple[dict[tuple[Any, Any], Steps], Quantization | None]:
    """Return the distances of the pairs with a quantized side that differ in bits, and a summary of all pairs with one.
    `is_tolerant`: the pairs were compared with a tolerance."""
    if not any(pair.one.computed or pair.other.computed for pair in pairs.values()):
        return {}, None
    for module in THROUGH_CODES.values():
        count = functools.partial(_counts, options=options)
        steps, together = import_module(module).through_codes(pairs, options, count, is_tolerant)
        if together:
            return steps, together
    return {}, None


def _counts(sides: Sequence[tuple[LazyTensor, LazyTensor]], options: Options) -> list[int]:
    """Return the number of differing elements of each of `sides`, two tensors."""
    pairs = [Pair(first, second) for first, second in sides]
    compare(pairs, options)
    return [pair.found.elements if pair.found else 0 for pair in pairs]


def _compared(
    name: str,
    a: _Side,
    b: _Side,
    pairs: Mapping[tuple[str, str], Pair],
    changes: Mapping[tuple[str, str], Change | None],
    is_tolerant: bool,
) -> TensorDifference:
    """Return the result for the tensors of one name. `is_tolerant`: values count, dtypes do not."""
    tensor_a, tensor_b = _both(name, a, b)
    key = a.key(name), b.key(name)
    change = None
    if tensor_a is None or tensor_b is None:
        status = ONLY_B if tensor_a is None else ONLY_A
    elif tuple(tensor_a.shape) != tuple(tensor_b.shape):
        status = SHAPE
    elif not _are_comparable(tensor_a, tensor_b):
        status = DTYPE
    else:
        change, measured = changes.get(key), pairs[key].found
        status = CHANGED if measured and measured.elements else EQUAL
        if tensor_a.dtype != tensor_b.dtype and not is_tolerant:
            status = DTYPE
    tied = {side.ties.get(name, "") for side, tensor in ((a, tensor_a), (b, tensor_b)) if tensor is not None}
    return TensorDifference(
        name=name,
        status=status,
        dtype_a=None if tensor_a is None else tensor_a.dtype.name,
        dtype_b=None if tensor_b is None else tensor_b.dtype.name,
        shape_a=None if tensor_a is None else tuple(tensor_a.shape),
        shape_b=None if tensor_b is None else tuple(tensor_b.shape),
        bytes_a=None if tensor_a is None else tensor_a.nbytes,
        bytes_b=None if tensor_b is None else tensor_b.nbytes,
        tied=tied.pop() if len(tied) == 1 else "",
        change=change,
    )


def _norm(pairs: Iterable[Pair]) -> float:
    """Return the norm of all differences."""
    return root(sum((pair.found.squares.change for pair in pairs if pair.found), Fraction(0)))


def _hints(tensors: Iterable[TensorDifference], sources: Mapping[str, Source]) -> Iterator[str]:
    """Yield hints on a prefix that only the names of one side have, with the option that removes it: --strip-prefix
    does so on both sides, and --key takes the part under it of the side that has it."""
    only = {status: [tensor.name for tensor in tensors if tensor.status == status] for status in (ONLY_A, ONLY_B)}
    for longer, shorter, side in ((ONLY_A, ONLY_B, "A"), (ONLY_B, ONLY_A, "B")):
        shorter_names = set(only[shorter])
        prefixes: Counter[str] = Counter()
        for name in only[longer][:_TRIED]:
            words = name.split(".")
            ends = (".".join(words[at:]) for at in range(1, min(len(words), _DEEPEST)))
            prefixes.update(name[: -len(end)] for end in ends if end in shorter_names)
        for prefix, _ in prefixes.most_common(1):
            count = sum(name.startswith(prefix) and name[len(prefix) :] in shorter_names for name in only[longer])
            if 2 * count < min(len(only[longer]), len(shorter_names)):
                continue
            without = (
                f"{count:,} name{'s' * (count > 1)} of {side} would match the other side without the prefix {prefix!r}:"
            )
            tree, key = sources[side].weights, prefix.removesuffix(".")
            if not any(name.startswith(prefix) for name in shorter_names):
                rest = _without_rest(only[longer], prefix, side, tensors)
                yield f"{without} --strip-prefix {shlex.quote(prefix)} removes it.{rest}"
            elif sources[side].structured and isinstance(tree, Mapping) and isinstance(tree.get(key), Mapping):
                yield f"{without} --key {shlex.quote(key)} compares this part of {side}."


def _without_rest(names: Iterable[str], prefix: str, side: str, tensors: Iterable[TensorDifference]) -> str:
    """Return options that leave out the `names` without `prefix`, which only `side` has, as a hint."""
    rest = {name.partition(".")[:2] for name in names if not name.startswith(prefix)}
    compared = {*(tensor.name for tensor in tensors), *(name.removeprefix(prefix) for name in names)}
    compared -= {name for name in names if not name.startswith(prefix)}
    if not 0 < len(rest) <= _FEW_PARTS or any((name.partition(".")[0], ".") in rest for name in compared):
        return ""
    globs = " ".join(f"--exclude {shlex.quote(f'{word}.*' if dot else word)}" for word, dot in sorted(rest))
    return f" {globs} excludes the remaining names, which only {side} has."


def _of_codes(a: _Side, b: _Side) -> Iterator[str]:
    """Yield a hint if the sides store weights in different parts, such as the codes and scales of one side alone."""
    coded = [parts_among(side.tensors) for side in (a, b)]
    if coded[0].keys() != coded[1].keys():
        sides = " and ".join(side for side, parts in zip("AB", coded, strict=True) if parts)
        weight = next(name for parts in coded for name in parts.values())
        yield (
            f"{sides} {'has' if len(sides) == 1 else 'have'} quantized weights, such as {quoted(weight)}. --dequantize "
            "compares the weights instead of their codes and scales."
        )
