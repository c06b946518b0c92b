"""Applies a map: from names and lazy tensors to those of the other side. Pure.

Each tensor of the source belongs to one use of one rule, or its name is kept or dropped. A use of a rule is the set of
tensors that its names find for one value of its free indices. The pieces of one side are regular patterns of elements
(a start, and a step for each axis) in its tensors; the sums of the other side put them together again.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

from ckptconv.errors import CorruptError, LimitError, UsageError
from ckptconv.features.maps.claims import Claims, Templates, Use, check_way_back, claimed, lacking, source_side
from ckptconv.features.maps.file import Map
from ckptconv.features.maps.notation import (
    PADDING,
    MapAxis,
    MapTensor,
    Node,
    Product,
    Rule,
    Sum,
    axes_in,
    expand,
    written,
)
from ckptconv.features.maps.sizes import Alternatives, Equation, Expression, KnownSizes, resolve, solve
from ckptconv.features.maps.values import computed
from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.lazy import Concat, Equal, LazyTensor, Zeros
from ckptconv.tensors.slices import Steps, strided, viewed
from ckptconv.tensors.strides import contiguous_strides
from ckptconv.text import count_of, quoted, some

# The most tensors that a map makes from a checkpoint, and the most elements of one: elements of any dtype can be
# counted in bytes.
MAX_ELEMENTS = 1 << 59
MAX_TARGETS = 1 << 20
# The most parts of source tensors that are joined for all tensors.
MAX_JOINED = 1 << 22
# Casts a part of a tensor. The second argument are the names of the tensor's sources.
Cast: TypeAlias = "Callable[[LazyTensor, Sequence[str]], LazyTensor]"
# The rule that made each tensor, and the values of its indices.
_MadeBy: TypeAlias = "dict[str, tuple[Rule | None, Mapping[str, str | int]]]"


@dataclass(frozen=True)
class Applied:
    """The result of a map for a checkpoint.

    `tensors` are by their new names; `sources` are the old names from which each is made. `kept` and `dropped` are old
    names that no rule has, by the glob that matched. `padding` counts the elements that were dropped as padding, by old
    name. `sizes` are all sizes that were determined and are the same wherever they are used: `n`, or for an axis of a
    single rule `RULE.n`. `source` and `target` are the names of the sides. `unchecked` names the sizes that only shapes
    decide, although the map has an expression for them: the configuration lacks its values. `computed` are the new
    names whose values a rule computes. `lacking` are the required names of which the checkpoint has none. `equal` are
    tensors of which one was kept, by its new name: they have to be equal. `copied`: new names have the same tensor, and
    each is to be stored. `alternative` is a new name whose rule has alternatives, and the other one's name, if any.
    """

    map: Map
    source: str
    target: str
    tensors: dict[str, LazyTensor]
    sources: dict[str, tuple[str, ...]]
    kept: dict[str, str]
    dropped: dict[str, str]
    padding: dict[str, int]
    sizes: dict[str, int] = field(default_factory=dict)
    unchecked: tuple[str, ...] = ()
    computed: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    equal: tuple[Equal, ...] = ()
    copied: bool = False
    alternative: tuple[str, str] | None = None

    def record(self) -> dict[str, Any]:
        """Return the record of the map for an output, in the form that `chosen.of_record` reads."""
        return {
            "name": self.map.name,
            "sha256": self.map.digest,
            "from": self.source,
            "to": self.target,
            "sizes": dict(sorted(self.sizes.items())),
            "text": self.map.text,
        }


def unchanged(tensor: LazyTensor, _: Sequence[str]) -> LazyTensor:
    """Return the tensor without a cast."""
    return tensor


def apply_map(
    map_: Map,
    tensors: Mapping[str, LazyTensor],
    *,
    sizes: Mapping[str, int] | None = None,
    config: Mapping[str, object] | None = None,
    target: str = "",
    shapes: Mapping[str, Sequence[int]] | None = None,
    cast: Cast = unchanged,
    wanted: Collection[str] = (),
) -> Applied:
    """Return the tensors of the other side of `map_`.

    `sizes` are given sizes, such as {"n": 32}; `config` is a config.json. `target` names the side to make; the default
    is the side that the names of `tensors` are not from. `shapes` are known shapes of tensors to make, by name. `cast`
    gives parts of one tensor with different dtypes the same dtype. Of alternatives, those with `wanted` names are made,
    or with names of `shapes`. Raise UsageError, which names rule and tensor, if
    the map does not fit; CorruptError for a stack with a gap.
    """
    side = 1 - map_.side(target) if target else source_side(map_, tensors)
    known = resolve(map_.sizes, config, sizes)
    map_ = _shifted(_as_named(map_, side, wanted or shapes or ()), known, config or {})
    claims = claimed(map_, side, tensors)
    uses = _uses(map_, side, claims, tensors)
    _solve_globals(map_, side, uses, tensors, known, shapes or {})
    check = _Told(map_.sizes, config or {}, frozenset(sizes or ()))
    result = _Made(map_, side, tensors, known, shapes or {}, cast, check, uses)
    for name in tensors:
        if name in claims.kept:
            result.keep(name)
        elif name in claims.found:
            use = uses.pop(claims.found[name].use, None)
            if use:
                result.make(use)
    check_way_back(map_, 1 - side, result.made_by)
    return Applied(
        map_,
        map_.sides[side],
        map_.sides[1 - side],
        result.tensors,
        result.sources,
        claims.kept,
        claims.dropped,
        result.padding,
        result.sizes(),
        tuple(check.unchecked.values()),
        tuple(name for name, (rule, _) in result.made_by.items() if rule and rule.values[1 - side]),
        lacking(map_, side, claims),
        tuple(result.equal),
        any(rule is not None and rule.copied for rule, _ in result.made_by.values()),
        next(_alternatives(map_, side, result.made_by), None),
    )


def _as_named(map_: Map, side: int, names: Collection[str]) -> Map:
    """Return `map_`, which makes those alternatives of its rules whose tensors have `names` on the other side."""
    claims_of = Templates(map_, 1 - side).claims(names, ()).values() if names else ()
    wanted = {claim.rule for claims in claims_of for claim in claims}
    rules = list(map_.rules)
    for at in wanted:
        first = next((other for other, rule in enumerate(rules) if _is_made_for(rule, rules[at], side)), at)
        if first not in wanted:
            for number, is_made in ((at, True), (first, False)):
                read = rules[number].read
                rules[number] = replace(rules[number], read=(read[0], is_made) if side else (is_made, read[1]))
    return replace(map_, rules=tuple(rules))


def _is_made_for(rule: Rule, other: Rule, side: int) -> bool:
    """Return whether names of a side select `rule`, and not its alternative `other`."""
    names = [[tensor.name for tensor in alternative.sides[side]] for alternative in (rule, other)]
    return rule.number == other.number and rule.read[side] and not other.read[side] and names[0] == names[1]


def _alternatives(map_: Map, side: int, made_by: _MadeBy) -> Iterator[tuple[str, str]]:
    """Yield names that were made, each with that of an alternative which was not."""
    others = [rule for rule in map_.rules if not rule.read[side]]
    for name, (rule, values) in made_by.items():
        for other in others:
            if rule is not None and _is_made_for(rule, other, side):
                made = [tensor.name.of(values) for tensor in rule.sides[1 - side]]
                template = other.sides[1 - side][min(made.index(name), len(other.sides[1 - side]) - 1)].name
                if values.keys() >= {*template.indices} and template.of(values) != name:
                    yield name, template.of(values)


def _shifted(map_: Map, known: dict[str, int], config: Mapping[str, object]) -> Map:
    """Return `map_` with numbers for the sizes that names add to indices.

    Sizes that are not `known` come from the configuration, and become known. A size that it lacks stays a name.
    """
    opened = {shift.by for rule in map_.rules for shift in rule.shifts.values() if shift.is_open}
    for by in opened - known.keys():
        known |= resolve({by: (by,)}, config)
    return replace(map_, rules=tuple(rule.shifted(known) for rule in map_.rules))


def _check_shifts(rule: Rule) -> None:
    """Raise UsageError for a rule whose names add an unknown size."""
    for index, shift in rule.shifts.items():
        if shift.is_open:
            rule.fail(
                f"the size of {shift.by} in {shift.written(index)} is not known.", f"Give --size {shift.by}=NUMBER."
            )


# ------------------------------------------------------------------------------------------------- the use of a rule


@dataclass
class _Use:
    """A rule, the values of its free indices, and the names of its tensors: {(tensor, indices of stacks): name}.

    `counts` are the sizes of stacks whose indices are in names.
    """

    rule: Rule
    values: dict[str, str]
    names: dict[tuple[int, tuple[int, ...]], str]
    counts: dict[str, int]

    @property
    def where(self) -> str:
        indices = ", ".join(f"{index} = {value}" for index, value in self.values.items())
        return f"{self.rule.where} ({indices})" if indices else self.rule.where


def _stacks(rule: Rule, tensor: MapTensor) -> tuple[str, ...]:
    """Return the indices in the name of `tensor` that count a stack, each once."""
    return tuple(dict.fromkeys(index for index in tensor.name.indices if index in rule.stacks))


def _uses(map_: Map, side: int, claims: Claims, tensors: Mapping[str, LazyTensor]) -> dict[Use, _Use]:
    """Return each use of a rule. Raise UsageError for one that lacks a tensor, CorruptError for a gap in a stack."""
    uses: dict[Use, _Use] = {}
    for name, claim in claims.found.items():
        rule = map_.rules[claim.rule]
        use = uses.get(claim.use)
        if use is None:
            _check_shifts(rule)
            use = uses[claim.use] = _Use(rule, {index: claim.values[index] for index in rule.free}, {}, {})
        at = tuple(int(claim.values[index]) for index in _stacks(rule, rule.sides[side][claim.tensor]))
        use.names[claim.tensor, at] = name
    for use in uses.values():
        _check_complete(use, side)
        for (index, _), name in use.names.items():
            tensor = use.rule.sides[side][index]
            if tensor.dims is not None and len(tensor.dims) != len(tensors[name].shape):
                raise UsageError(
                    f"{use.where}: {quoted(name)} has the shape {list(tensors[name].shape)}, but the rule expects "
                    f"{count_of(len(tensor.dims), 'dimension')}: {written(tensor.dims)}."
                )
    return uses


def _check_complete(use: _Use, side: int) -> None:
    rule = use.rule
    if not rule.stacks and len(use.names) == len(rule.sides[side]):
        return
    for index, tensor in enumerate(rule.sides[side]):
        stacks = _stacks(rule, tensor)
        for number, at in use.names:
            if number == index:
                for stack, value in zip(stacks, at, strict=True):
                    use.counts[stack] = max(use.counts.get(stack, 0), value + 1)
    for index, tensor in enumerate(rule.sides[side]):
        stacks = _stacks(rule, tensor)
        if any(stack not in use.counts for stack in stacks) or not any(number == index for number, _ in use.names):
            lacking = tensor.name.of({**dict.fromkeys(stacks, 0), **use.values})
            raise UsageError(
                f"{use.where}: {quoted(next(iter(use.names.values())))} exists, but the rule also needs "
                f"{quoted(lacking)}, which is missing."
            )
        counts = [use.counts[stack] for stack in stacks]
        present = sum(number == index for number, _ in use.names)
        if math.prod(counts) != present:
            # An early one is missing, because fewer exist; a name may hold any number.
            combinations = itertools.product(*(range(min(count, present + 1)) for count in counts))
            gap = next(at for at in combinations if (index, at) not in use.names)
            lacking = tensor.name.of({**use.values, **dict(zip(stacks, gap, strict=True))})
            raise CorruptError(
                f"{use.where}: {quoted(lacking)} is missing, but the stack goes up to "
                f"{', '.join(f'{stack} = {count - 1}' for stack, count in zip(stacks, counts, strict=True))}."
            )


def _equations(
    use: _Use, side: int, tensors: Mapping[str, LazyTensor], shapes: Mapping[str, Sequence[int]]
) -> Iterator[Equation]:
    """Yield the equations from the shapes of a use: each distinct shape of each tensor once."""
    seen = set()
    for (index, _), name in use.names.items():
        shape = tensors[name].shape
        if (index, shape) not in seen:
            seen.add((index, shape))
            yield from _dims(use.rule.sides[side][index], name, shape)
    for tensor in use.rule.sides[1 - side] if shapes else ():
        first = _first_of(use, tensor)
        shape = tuple(shapes.get(first, ()))
        if tensor.dims is not None and len(shape) == len(tensor.dims):
            yield from _dims(tensor, first, shape)


def _first_of(use: _Use, tensor: MapTensor) -> str:
    """Return the name of the first tensor of `tensor`, on the side to make."""
    return tensor.name.of({**dict.fromkeys(use.rule.stacks, 0), **use.values})


def _dims(tensor: MapTensor, name: str, shape: Sequence[int]) -> Iterator[Equation]:
    if tensor.dims is None:  # the rule only renames
        return
    for dim, (product, extent) in enumerate(zip(tensor.dims, shape, strict=True)):
        yield Equation(product, extent, name, dim)


def _solved(
    use: _Use,
    side: int,
    tensors: Mapping[str, LazyTensor],
    known: Mapping[str, int],
    shapes: Mapping[str, Sequence[int]],
) -> KnownSizes:
    """Return the sizes of one use of a rule, as far as they are decided."""
    sizes = KnownSizes(known)
    number = use.rule.number
    sizes.sizes.update((axis.partition(".")[2], size) for axis, size in known.items() if axis.startswith(f"{number}."))
    for stack, count in use.counts.items():
        if sizes.sizes.setdefault(stack, count) != count:
            raise UsageError(
                f"{use.where}: the checkpoint has names with {count_of(count, 'value')} of {{{stack}}}, but "
                f"{stack} = {sizes.sizes[stack]} was expected."
            )
    solve(_equations(use, side, tensors, shapes), sizes, use.where)
    return sizes


def _solve_globals(
    map_: Map,
    side: int,
    uses: Mapping[Use, _Use],
    tensors: Mapping[str, LazyTensor],
    known: dict[str, int],
    shapes: Mapping[str, Sequence[int]],
) -> None:
    """Add to `known` the sizes of the map that the shapes of some use decide: they hold for all rules."""
    missing = [name for name in map_.sizes if name not in known]
    distinct: dict[object, _Use] = {}
    for use in uses.values() if missing else ():
        key = id(use.rule), frozenset((index, tensors[name].shape) for (index, _), name in use.names.items())
        distinct.setdefault(key, use)
    while missing:
        solved_now: dict[str, tuple[int, _Use]] = {}
        for use in distinct.values():
            sizes = _solved(use, side, tensors, known, shapes).sizes
            for name in missing:
                if name not in sizes:
                    continue
                size, first = solved_now.setdefault(name, (sizes[name], use))
                if sizes[name] != size:
                    before, now = (quoted(next(iter(found_use.names.values()))) for found_use in (first, use))
                    raise UsageError(
                        f"{use.where}: the shape of {now} implies {name} = {sizes[name]}, but that of {before} "
                        f"({first.rule.where}) implies {size}.",
                        "Is this the right map for the model?",
                    )
        if not solved_now:
            return
        known.update((name, size) for name, (size, _) in solved_now.items())
        missing = [name for name in missing if name not in solved_now]


@dataclass
class _Told:
    """The sizes in a map and a configuration, compared with those from shapes.

    `given` are the sizes that need no check. `unchecked` has a sentence for each size that only shapes decide.
    """

    sizes: Mapping[str, Alternatives]
    config: Mapping[str, object]
    given: frozenset[str]
    unchecked: dict[str, str] = field(default_factory=dict)

    def check(self, use: _Use, solved: KnownSizes) -> None:
        """Raise UsageError for a size of a use that differs from the map's."""
        axes = {name for side in use.rule.sides for tensor in side for axis in _axes(tensor) for name in axis.names}
        for name in self.sizes.keys() & axes & solved.sizes.keys() - self.given:
            alternatives, size, tensor = self.sizes[name], solved.sizes[name], next(iter(use.names.values()))
            others = {word: value for word, value in solved.sizes.items() if word != name}
            try:
                expected = resolve({name: alternatives}, self.config, others).get(name)
            except UsageError as error:
                raise UsageError(
                    f"{use.where}: the shape of {quoted(tensor)} implies {name} = {size}. {error.message}"
                ) from None
            if expected is not None and expected != size:
                raise UsageError(
                    f"{use.where}: the shape of {quoted(tensor)} implies {name} = {size}, but [sizes] expects "
                    f"{expected} ({some(alternatives, form=str)}).",
                    f"Is this the right map for the model? If it is, give --size {name}={size}.",
                )
            needed = {word for text in alternatives if isinstance(text, str) for word in Expression(text).names}
            if expected is None and needed & (self.sizes.keys() | use.rule.stacks):
                self.unchecked[name] = (
                    f"{name} = {size} follows from the shape of {quoted(tensor)} alone and was not checked: the size "
                    f"of {some(sorted(needed - others.keys()), form=str)} is not known"
                )


class _Piece(NamedTuple):
    """A piece of a tensor: its start along each dimension, and {axis: (dimension, step)}."""

    tensor: int
    starts: tuple[int, ...]
    steps: dict[str, tuple[int, int]]


def _pieces_of(rule: Rule, side: int, sizes: KnownSizes) -> Iterator[_Piece]:
    """Yield the pieces of a side, in order, without padding."""
    for index, tensor in enumerate(rule.sides[side]):
        for boxes in itertools.product(*(list(_boxes(dim, sizes)) for dim in tensor.dims or ())):
            steps = {axis: (dim, step) for dim, (_, along) in enumerate(boxes) for axis, step in along.items()}
            if not any(axis.startswith("_") for axis in steps):
                yield _Piece(index, tuple(start for start, _ in boxes), steps)


def _boxes(product: Product, sizes: KnownSizes) -> Iterator[tuple[int, dict[str, int]]]:
    """Yield the pieces of a composed axis: the start of each, and the step of each of its axes."""
    steps = list(itertools.accumulate((sizes.node(node) for node in reversed(product[1:])), operator.mul, initial=1))
    choices: list[list[tuple[int, dict[str, int]]]] = []
    for node, step in zip(product, reversed(steps), strict=False):
        if isinstance(node, MapAxis):
            choices.append([(0, {} if node.number == 1 else {node.name: step})])
            continue
        terms, start = [], 0
        for term in node.terms:
            for begin, inner in _boxes(term, sizes):
                terms.append(((start + begin) * step, {axis: inner_step * step for axis, inner_step in inner.items()}))
            start += sizes.product(term)
        choices.append(terms)
    for combination in itertools.product(*choices):
        along = {axis: step for _, steps in combination for axis, step in steps.items()}
        yield sum(start for start, _ in combination), along


class _Layout(NamedTuple):
    """The way to read a piece of tensors of one shape: the axes of the result, and whether they are all of it, in
    order."""

    steps: tuple[Steps, ...]
    shape: tuple[int, ...]
    numel: int
    is_whole: bool


def _layout(piece: _Piece, order: Sequence[MapAxis], source: Sequence[int], sizes: KnownSizes) -> _Layout:
    """Return the way to read `piece` of tensors of the shape `source`, with its axes in the order of `order`."""
    steps = tuple(Steps(sizes.node(axis), *piece.steps[axis.name]) for axis in order)
    shape = tuple(axis_steps.length for axis_steps in steps)
    within = contiguous_strides(source)
    flat = tuple(axis_steps.step * within[axis_steps.dim] for axis_steps in steps)
    is_whole = math.prod(shape) == math.prod(source) and all(
        stride == wanted or length == 1
        for length, stride, wanted in zip(shape, flat, contiguous_strides(shape), strict=True)
    )
    return _Layout(steps, shape, math.prod(shape), is_whole)


# ----------------------------------------------------------------------------------------------------- the new tensors


class _Made:
    """Collects the tensors of the target side."""

    def __init__(
        self,
        map_: Map,
        side: int,
        tensors: Mapping[str, LazyTensor],
        known: Mapping[str, int],
        shapes: Mapping[str, Sequence[int]],
        cast: Cast,
        check: _Told,
        uses: Mapping[Use, _Use],
    ) -> None:
        self._cast, self._told, self._uses = cast, check, uses
        self.tensors: dict[str, LazyTensor] = {}
        self.sources: dict[str, tuple[str, ...]] = {}
        # The rule that made each tensor, and the values of its indices; kept names have no rule.
        self.made_by: _MadeBy = {}
        self.padding: dict[str, int] = {}
        self.equal: list[Equal] = []
        self._map, self._side, self._given, self._known, self._shapes = map_, side, tensors, known, shapes
        self._joined = 0
        self._found: dict[str, set[int]] = collections.defaultdict(set)
        # Equal expressions share one object, so that tied tensors stay tied.
        self._same: dict[LazyTensor, LazyTensor] = {}
        # Layers with the same shapes have the same sizes and pieces.
        self._solved: dict[object, tuple[KnownSizes, list[_Piece]]] = {}
        self._layouts: _Layouts = {}

    def keep(self, name: str) -> None:
        self._add(name, self._given[name], (name,))

    def sizes(self) -> dict[str, int]:
        """Return the sizes that are the same wherever they are used."""
        return dict(self._known) | {name: min(sizes) for name, sizes in self._found.items() if len(sizes) == 1}

    def make(self, use: _Use) -> None:
        """Add the tensors of one use of a rule. Raise UsageError if the sizes do not fit or are unknown."""
        rule, side = use.rule, self._side
        if rule.copied:
            self._copy(use)
            return
        if rule.renames:
            (name,) = use.names.values()
            renamed = computed(rule, 1 - side, self._given[name], KnownSizes(self._known))
            self._add(rule.sides[1 - side][0].name.of(use.values), renamed, (name,), use)
            return
        sizes, pieces = self._sizes_and_pieces(use)
        following = iter(pieces)
        elements = 0
        for tensor in rule.sides[1 - side]:
            count = sum(
                not any(axis.is_padding for axis in itertools.chain.from_iterable(piece)) for piece in _expanded(tensor)
            )
            taken = list(itertools.islice(following, count))
            stacks = _stacks(rule, tensor)
            counts = [sizes.node(MapAxis((stack,))) for stack in stacks]
            most = math.prod(max(count, 1) for count in counts)
            if most + len(self.tensors) > MAX_TARGETS:
                raise LimitError(
                    f"{use.where} yields {most} tensors, so the map yields more than the limit of {MAX_TARGETS}."
                )
            for at in itertools.product(*map(range, counts)):
                fixed = dict(zip(stacks, at, strict=True))
                name = tensor.name.of({**use.values, **fixed})
                assembly = _Assembly(use, side, self._given, sizes, taken, self._layouts, fixed, name, self._cast)
                self._add(name, assembly.tensor(tensor), assembly.sources, use, fixed)
                elements += assembly.elements
                self._joined += assembly.parts
                if self._joined > MAX_JOINED:
                    raise LimitError(
                        f"{use.where} joins more parts of tensors than the limit of {MAX_JOINED} for a map."
                    )
        self._check_all_used(use, elements)

    def _copy(self, use: _Use) -> None:
        """Add each tensor of the other side, as the first one of this side, to which the others have to be equal."""
        first, *others = sources = tuple(name for _, name in sorted(use.names.items()))
        kept = self._given[first]
        targets = [tensor.name.of(use.values) for tensor in use.rule.sides[1 - self._side]]
        for other in others:
            tensor = self._given[other]
            if (tensor.dtype, tensor.shape) != (kept.dtype, kept.shape):
                raise CorruptError(
                    f"{use.where}: {quoted(targets[0])} needs {quoted(first)} and {quoted(other)} to be equal, but the "
                    f"first is {kept.dtype.name} {list(kept.shape)}, the second {tensor.dtype.name} "
                    f"{list(tensor.shape)}."
                )
            if tensor is not kept:
                self.equal.append((targets[0], kept, tensor))
        for target in targets:
            self._add(target, kept, sources, use)

    def _sizes_and_pieces(self, use: _Use) -> tuple[KnownSizes, list[_Piece]]:
        side, rule = self._side, use.rule
        shapes = frozenset((index, self._given[name].shape) for (index, _), name in use.names.items())
        targets = rule.sides[1 - side] if self._shapes else ()
        wanted = tuple(tuple(self._shapes.get(_first_of(use, tensor), ())) for tensor in targets)
        key = (id(rule), shapes, wanted, tuple(use.counts.items()))
        cached = self._solved.get(key)
        if cached is None:
            sizes = _solved(use, side, self._given, self._known, self._shapes)
            self._check_decided(use, sizes)
            _check_elements(use, sizes)
            self._told.check(use, sizes)
            cached = self._solved[key] = sizes, list(_pieces_of(rule, side, sizes))
        for tensor in (*rule.sides[0], *rule.sides[1]):
            for axis in _axes(tensor):
                size = cached[0].of(axis)
                if size is not None and axis.number is None and axis.name not in self._known:
                    self._found[f"{rule.number}.{axis.name}"].add(size)
        return cached

    def _check_decided(self, use: _Use, sizes: KnownSizes) -> None:
        """Raise UsageError for undecided sizes of a use: it names those of the uses that come later too."""
        names = dict.fromkeys(_undecided(use, sizes, self._map.sizes))
        if not names:
            return
        for later in self._uses.values():
            if not later.rule.renames and not later.rule.copied:
                with contextlib.suppress(UsageError):  # it is an error of its own, for which this one comes first
                    solved = _solved(later, self._side, self._given, self._known, self._shapes)
                    names |= dict.fromkeys(_undecided(later, solved, self._map.sizes))
        raise UsageError(
            f"The shapes do not determine the {'size' if len(names) == 1 else 'sizes'} of {' and '.join(names)} for "
            f"{quoted(next(iter(use.names.values())))} ({use.where}).",
            _advice(names, self._map.sizes),
        )

    def _check_all_used(self, use: _Use, elements: int) -> None:
        """Raise UsageError unless the results have each element of a use once, except padding."""
        expected = 0
        for (index, _), name in use.names.items():
            size = self._given[name].numel
            expected += size
            tensor = use.rule.sides[self._side][index]
            if any(axis.is_padding for axis in _axes(tensor)):
                sizes, _ = self._sizes_and_pieces(use)
                used = sum(
                    math.prod(sizes.node(axis) for axis in itertools.chain.from_iterable(piece))
                    for piece in _expanded(tensor)
                    if not any(axis.is_padding for axis in itertools.chain.from_iterable(piece))
                )
                if size > used:
                    self.padding[name] = size - used
                expected -= size - used
        if expected != elements:
            use.rule.fail(f"{expected} elements would become {elements}: the two sides differ in size.")

    def _add(
        self,
        name: str,
        tensor: LazyTensor,
        sources: tuple[str, ...],
        use: _Use | None = None,
        fixed: Mapping[str, int] | None = None,
    ) -> None:
        """Add a tensor that `use` made from `sources`, with `fixed` as the indices of stacks; or a kept one."""
        if name in self.tensors:
            first = self.made_by[name][0]
            raise UsageError(
                f"{use.where if use else self._kept}: {some(sources)} would become {quoted(name)}, but so would "
                f"{some(self.sources[name])} ({first.where if first else self._kept})."
            )
        self.tensors[name] = self._same.setdefault(tensor, tensor)
        self.sources[name] = sources
        self.made_by[name] = (use.rule, {**use.values, **(fixed or {})}) if use else (None, {})

    @property
    def _kept(self) -> str:
        return f"[keep] of {self._map.name}"


def _axes(tensor: MapTensor) -> Iterator[MapAxis]:
    for dim in tensor.dims or ():
        yield from axes_in(dim)


def _expanded(tensor: MapTensor) -> Iterator[tuple[tuple[MapAxis, ...], ...]]:
    """Yield the pieces of a tensor, as the axes in each dimension."""
    yield from itertools.product(*(list(expand(dim)) for dim in tensor.dims or ()))


def _advice(names: Iterable[str], named: Mapping[str, Alternatives]) -> str:
    """Return the ways to give the sizes `names`; `named` are the sizes that the map lists."""
    texts = {name: [text for text in named.get(name, ()) if isinstance(text, str)] for name in names}
    sizes = [
        f"--size {name}=NUMBER"
        + (" (rows of padding to add, for example to a vocabulary; 0 for none)" if name == PADDING else "")
        + (f" ({' or '.join(of_config)} in config.json)" if of_config else "")
        for name, of_config in texts.items()
    ]
    configured = [name for name, of_config in texts.items() if of_config]
    if not configured:
        return f"Give {' '.join(sizes)}."
    reason = f" for {' and '.join(configured)}" if len(configured) < len(sizes) else ""
    return (
        f"Give convert's option --config config.json{reason}, put a config.json next to the checkpoint, give --like "
        f"REF, or give {' '.join(sizes)}."
    )


def _undecided(use: _Use, sizes: KnownSizes, named: Mapping[str, Alternatives]) -> list[str]:
    """Return the sizes that a use of a rule needs and `sizes` does not have. `named` are those that the map lists."""
    tensors = (*use.rule.sides[0], *use.rule.sides[1])
    unknown = dict.fromkeys(axis.name for tensor in tensors for axis in _axes(tensor) if sizes.of(axis) is None)
    unknown |= dict.fromkeys(name for name in use.rule.stacks if name not in sizes.sizes)
    names = [word for name in unknown for word in name.split(" ")]
    # The sizes that the map lists under [sizes] suffice; the others follow from them.
    return [name for name in names if name in named] or names


def _check_elements(use: _Use, sizes: KnownSizes) -> None:
    """Raise LimitError for sizes that give too many elements."""
    tensors = (*use.rule.sides[0], *use.rule.sides[1])
    for tensor in tensors:
        if math.prod(max(sizes.product(dim), 1) for dim in tensor.dims or ()) >= MAX_ELEMENTS:
            raise LimitError(f"{use.where}: {quoted(tensor.text)} has more elements than can be counted.")


# By the piece's identity: equal uses share their pieces.
_Layouts: TypeAlias = "dict[tuple[int, tuple[MapAxis, ...], tuple[int, ...]], _Layout]"


class _Assembly:
    """Puts one tensor together from the pieces of a use of a rule. `elements` counts the elements taken from sources,
    in `parts` parts."""

    def __init__(
        self,
        use: _Use,
        side: int,
        inputs: Mapping[str, LazyTensor],
        sizes: KnownSizes,
        pieces: Sequence[_Piece],
        layouts: _Layouts,
        fixed: Mapping[str, int],
        name: str,
        cast: Cast,
    ) -> None:
        self._cast = cast
        self._use, self._side, self._given, self._sizes, self._fixed, self._name = use, side, inputs, sizes, fixed, name
        self._all, self._layouts = pieces, layouts
        self._pieces = iter(pieces)
        self._sources: dict[str, None] = {}
        self.elements = self.parts = 0

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(self._sources)

    def tensor(self, tensor: MapTensor) -> LazyTensor:
        dims = tensor.dims or ()
        nodes = [node for dim in dims for node in dim]
        shape = tuple(self._sizes.product(dim) for dim in dims)
        return viewed(self._joined(nodes), shape)

    def _joined(self, nodes: Sequence[Node]) -> LazyTensor:
        """Return the tensor with one dimension for each of `nodes`."""
        at, terms = next(((at, node.terms) for at, node in enumerate(nodes) if isinstance(node, Sum)), (0, ()))
        shape = tuple(map(self._sizes.node, nodes))
        if not terms:
            axes = [node for node in nodes if isinstance(node, MapAxis)]
            if any(axis.is_padding for axis in axes):
                return Zeros(self._dtype, shape)
            piece = self._taken(next(self._pieces), axes)
            # Padding is not computed: it is zero.
            return viewed(computed(self._use.rule, 1 - self._side, piece, self._sizes), shape)
        parts = []
        for term in terms:
            inner = self._joined([*nodes[:at], *term, *nodes[at + 1 :]])
            part = viewed(inner, (*shape[:at], self._sizes.product(term), *shape[at + 1 :]))
            if part.shape[at]:
                parts.append(part)
        if not parts:
            return Zeros(self._dtype, shape)
        return self._concatenated(parts, at)

    @property
    def _dtype(self) -> DType:
        """The dtype of the first source."""
        used = {piece.tensor for piece in self._all}
        return next(self._given[name].dtype for (index, _), name in self._use.names.items() if index in used)

    def _taken(self, piece: _Piece, axes: Sequence[MapAxis]) -> LazyTensor:
        """Return a piece of the source, with its axes in the order of `axes`."""
        tensor = self._use.rule.sides[self._side][piece.tensor]
        stacks = _stacks(self._use.rule, tensor)
        starts = list(piece.starts)
        for axis, value in self._fixed.items():
            if axis in piece.steps:
                dim, step = piece.steps[axis]
                starts[dim] += step * value

        def at(fixed: dict[str, int], order: tuple[MapAxis, ...]) -> LazyTensor:
            number = next((number for number, axis in enumerate(order) if axis.name in stacks), None)
            if number is None:
                return self._read(piece, starts, [fixed[stack] for stack in stacks], order)
            stack, others, parts = order[number].name, order[:number] + order[number + 1 :], []
            for value in range(self._sizes.node(order[number])):
                part = at({**fixed, stack: value}, others)
                parts.append(viewed(part, (*part.shape[:number], 1, *part.shape[number:])))
            return self._concatenated(parts, number)

        return at(dict(self._fixed), tuple([axis for axis in axes if axis.number != 1]))

    def _read(self, piece: _Piece, starts: Sequence[int], at: Sequence[int], order: tuple[MapAxis, ...]) -> LazyTensor:
        name = self._use.names[piece.tensor, tuple(at)]
        self._sources[name] = None
        source = self._given[name]
        key = id(piece), order, source.shape
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = _layout(piece, order, source.shape, self._sizes)
        self.elements += layout.numel
        self.parts += 1
        return viewed(source, layout.shape) if layout.is_whole else strided(source, starts, layout.steps)

    def _concatenated(self, parts: Sequence[LazyTensor], dim: int) -> LazyTensor:
        if len(parts) == 1:
            return parts[0]
        if len({part.dtype for part in parts}) > 1:
            parts = [self._cast(part, self.sources) for part in parts]
        dtypes = dict.fromkeys(part.dtype.name for part in parts)
        if len(dtypes) > 1:
            raise UsageError(
                f"{self._use.where}: {quoted(self._name)} is joined from {some(self._sources)}, which have different "
                f"dtypes: {', '.join(dtypes)}.",
                "Convert them to one dtype, for example with --dtype float32.",
            )
        return Concat(tuple(parts), dim)
