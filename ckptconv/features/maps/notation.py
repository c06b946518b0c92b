"""Reads the rules of a map: name templates, and axes in the notation of einops, with `+` for concatenation. Pure."""

from __future__ import annotations

import collections
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, NoReturn, TypeAlias

from ckptconv.errors import UsageError
from ckptconv.text import count_of, quoted, some

# Limits: the depth of parentheses, the characters and axes of a tensor, its alternatives, the tensors of a side, and
# the pieces of a side. No rule of any model comes near them; sums multiply their pieces.
MAX_DEPTH, MAX_LENGTH, MAX_AXES, MAX_ALTERNATIVES, MAX_TENSORS, MAX_PIECES = 16, 1000, 32, 32, 64, 256
# The most indices in one part of a name between dots: each one makes matching slower.
MAX_IN_PART = 2
PADDING = "_"

_TOKEN = re.compile(r"\s*(?:([()+])|([A-Za-z][A-Za-z0-9_]*|\d{1,18}|_)(?![A-Za-z0-9_])|(\S))")
# The separator between a name and its axes: a colon with a space before or after it, or at the end.
_COLON = re.compile(r"\s+:(?=\s|$)|:(?=\s|$)|\s+:")
_INDEX = re.compile(r"\{([^{}]*)\}")
# The content of braces: a number that multiplies the index, the index, and a number or size that a name adds.
_SHIFTED = re.compile(r"\s*(?:([1-9]\d{0,3})\s+)?([A-Za-z][A-Za-z0-9_]*)\s*(?:\+\s*([A-Za-z]\w*|\d{1,9})\s*)?")
# The separator of the alternatives of a tensor.
_OR = re.compile(r"\s\|\s")


# -------------------------------------------------------------------------------------------------------------- axes


class MapAxis(NamedTuple):
    """An axis, or several that are always next to each other in the rule.

    `names` are letters, a number, or padding: "_", "_2", … in the order of the rule.
    """

    names: tuple[str, ...]

    @property
    def name(self) -> str:
        return " ".join(self.names)

    @property
    def is_padding(self) -> bool:
        return self.names[0].startswith(PADDING)

    @property
    def number(self) -> int | None:
        """Its size, if it is written as a number."""
        return int(self.names[0]) if self.names[0].isdecimal() else None


class Sum(NamedTuple):
    """Axes one after the other, each composed of others."""

    terms: tuple[Product, ...]


Node: TypeAlias = "MapAxis | Sum"
Product: TypeAlias = "tuple[Node, ...]"


class _SyntaxError(Exception):
    """A mistake in a tensor's text, and the character at which it is."""

    def __init__(self, mistake: str, at: int) -> None:
        super().__init__(mistake, at)
        self.what, self.at = mistake, at


class _Parser:
    """Reads the axes of one tensor, which begin at character `start` of `text`."""

    def __init__(self, text: str, start: int) -> None:
        self._tokens: list[tuple[str, int]] = []
        at = start
        while match := _TOKEN.match(text, at):
            word, at = match[match.lastindex or 0], match.end()
            if match.lastindex == 3:
                raise _SyntaxError(f"{word!r} is not part of an axis", match.start(3))
            self._tokens.append((word, match.start(match.lastindex or 0)))
        self._tokens.append(("", len(text)))
        self._next = 0

    def dims(self) -> tuple[Product, ...]:
        products: list[Product] = []
        while self._word:
            if self._word == "+":
                raise _SyntaxError("a sum must be in parentheses, such as (q + k)", self._at)
            products.append(self._factor(0))
        return tuple(products)

    @property
    def _word(self) -> str:
        return self._tokens[self._next][0]

    @property
    def _at(self) -> int:
        return self._tokens[self._next][1]

    def _factor(self, depth: int) -> Product:
        """Read an axis, or the content of parentheses."""
        word, at = self._tokens[self._next]
        self._next += 1
        if word == ")":
            raise _SyntaxError("this parenthesis has no opening parenthesis", at)
        if word != "(":
            return (MapAxis((word,)),)
        if depth == MAX_DEPTH:
            raise _SyntaxError(f"parentheses are nested more than {MAX_DEPTH} levels deep", at)
        terms = [self._product(depth + 1)]
        while self._word == "+":
            self._next += 1
            terms.append(self._product(depth + 1))
        if not self._word:
            raise _SyntaxError("this parenthesis is not closed", at)
        self._next += 1
        if len(terms) == 1:
            return terms[0]
        if () in terms:
            raise _SyntaxError("a term of this sum is missing", at)
        return (Sum(tuple(terms)),)

    def _product(self, depth: int) -> Product:
        factors: list[Node] = []
        while self._word not in ("", ")", "+"):
            factors.extend(self._factor(depth))
        return tuple(factors)


def expand(product: Product) -> Iterator[tuple[MapAxis, ...]]:
    """Yield the pieces of a composed axis, in order: each as its axes."""
    choices = [
        [(node,)] if isinstance(node, MapAxis) else [piece for term in node.terms for piece in expand(term)]
        for node in product
    ]
    for combination in itertools.product(*choices):
        yield tuple(itertools.chain.from_iterable(combination))


def count_pieces(product: Product) -> int:
    """Return the number of pieces of a composed axis."""
    count = 1
    for node in product:
        count *= sum(map(count_pieces, node.terms)) if isinstance(node, Sum) else 1
    return count


def axes_in(product: Product) -> Iterator[MapAxis]:
    """Yield each occurrence of an axis."""
    for node in product:
        if isinstance(node, MapAxis):
            yield node
        else:
            for term in node.terms:
                yield from axes_in(term)


def written(dims: Sequence[Product]) -> str:
    """Return axes in the notation of rules."""
    return " ".join(_written(dim) if len(dim) == 1 else f"({' '.join(map(_node, dim))})" for dim in dims)


def _written(product: Product) -> str:
    return " ".join(map(_node, product))


def _node(node: Node) -> str:
    if isinstance(node, Sum):
        return f"({' + '.join(map(_written, node.terms))})"
    return PADDING if node.is_padding else node.name


# ------------------------------------------------------------------------------------------------------------- names


class Shift(NamedTuple):
    """The number that a name has for an index: `times` the index, plus `by`: a number, a size that is still unknown, or
    ""."""

    times: int = 1
    by: str = ""

    @property
    def is_open(self) -> bool:
        """Whether the shift adds a size that is still unknown."""
        return bool(self.by) and not self.by.isdecimal()

    def of(self, index: str | int) -> str:
        """Return the number for an index. The shift adds a number, or nothing."""
        return str(self.times * int(index) + int(self.by or 0)) if self != PLAIN else str(index)

    def index_of(self, number: int) -> int | None:
        """Return the index of a number, None if there is none. An unknown size counts as 0."""
        index, rest = divmod(number - (int(self.by) if self.by.isdecimal() else 0), self.times)
        return index if index >= 0 and not rest else None

    def written(self, index: str) -> str:
        times = f"{self.times} " if self.times > 1 else ""
        return f"{{{times}{index} + {self.by}}}" if self.by else f"{{{times}{index}}}"


PLAIN = Shift()


class Name(NamedTuple):
    """A name template. `literals` and `indices` alternate: literal, index, literal, …, literal. `shifts` are those of
    the indices."""

    literals: tuple[str, ...]
    indices: tuple[str, ...]
    shifts: tuple[Shift, ...]

    def of(self, values: Mapping[str, str | int]) -> str:
        """Return the name with these indices. The shifts are numbers."""
        pairs = zip(self.indices, self.shifts, strict=True)
        return self._with(shift.of(values[index]) for index, shift in pairs)

    def __str__(self) -> str:
        pairs = zip(self.indices, self.shifts, strict=True)
        return self._with(shift.written(index) for index, shift in pairs)

    def _with(self, words: Iterable[str]) -> str:
        return self.literals[0] + "".join(itertools.chain.from_iterable(zip(words, self.literals[1:], strict=True)))


@dataclass(frozen=True)
class MapTensor:
    """A tensor of a rule: its text in the map, its name, and its dimensions, composed of axes (None if the rule
    renames)."""

    text: str
    name: Name
    dims: tuple[Product, ...] | None

    @property
    def axes(self) -> set[str]:
        """The names of its axes."""
        return {axis.name for dim in self.dims or () for axis in axes_in(dim)}


def _parse_name(text: str) -> Name:
    for match in re.finditer(r"[{}]", _INDEX.sub(lambda brace: "." * len(brace[0]), text)):
        raise _SyntaxError("this brace has no matching brace", match.start())
    pieces = _INDEX.split(text)
    literals = tuple(pieces[::2])
    indices: list[tuple[str, Shift]] = []
    for match in _INDEX.finditer(text):
        index = _SHIFTED.fullmatch(match[1])
        if not index:
            mistake = "an index is a letter or word in braces, such as {l}, {l + 1} or {2 l + 1}"
            raise _SyntaxError(mistake, match.start())
        indices.append((index[2], Shift(int(index[1] or 1), index[3] or "")))
    if "" in literals[1:-1]:
        raise _SyntaxError("two adjacent indices need a separator", text.index("}{"))
    if any(len(_INDEX.findall(part)) > MAX_IN_PART for part in text.split(".")):
        raise _SyntaxError(f"one part of the name has more than {MAX_IN_PART} indices", 0)
    if not text or re.search(r"\s", "".join(literals)):
        raise _SyntaxError("the name is missing" if not text else "a name must not contain spaces", 0)
    return Name(literals, tuple(index for index, _ in indices), tuple(shift for _, shift in indices))


def parse_tensor(text: str) -> MapTensor:
    """Return the tensor that `text` describes: a name, or a name, a colon and axes. Raise UsageError, which shows the
    place of the error in the text."""
    try:
        if len(text) > MAX_LENGTH:
            raise _SyntaxError(f"it has more than {MAX_LENGTH} characters", 0)
        colons = list(_COLON.finditer(text))
        if not colons:
            return MapTensor(text, _parse_name(text.strip()), None)
        colon = colons[-1]
        name = _parse_name(text[: colon.start()].strip())
        dims = _Parser(text, colon.end()).dims()
        if sum(1 for dim in dims for _ in axes_in(dim)) > MAX_AXES:
            raise _SyntaxError(f"it has more than {MAX_AXES} axes", colon.end())
        return MapTensor(text, name, dims)
    except _SyntaxError as problem:
        raise UsageError(f"{quoted(text, MAX_LENGTH)}, character {problem.at + 1}: {problem.what}.") from None


# ------------------------------------------------------------------------------------------------------------- rules


@dataclass(frozen=True)
class Rule:
    """A rule: the tensors of both sides, which hold the same pieces.

    `where` names it in messages. `stacks` are the indices that count the tensors of a stack; `free` are the others,
    which are in all names. `read` are the sides whose names find the rule: both, except for alternatives to another
    rule with the same names on a side. `values` are the texts of the values that it computes for each side, "" for a
    side whose elements it only moves. `required`: every model that the map is for has its tensors. `copied`: the one
    tensor of a side is each of those of the other, whole.
    """

    where: str
    number: int
    sides: tuple[tuple[MapTensor, ...], tuple[MapTensor, ...]]
    free: tuple[str, ...] = ()
    stacks: frozenset[str] = frozenset()
    # The axes of each piece that is not padding, by side.
    pieces: tuple[tuple[frozenset[MapAxis], ...], ...] = field(default=(), repr=False)
    read: tuple[bool, bool] = (True, True)
    values: tuple[str, str] = ("", "")
    required: bool = False
    copied: bool = False

    @property
    def renames(self) -> bool:
        return self.sides[0][0].dims is None

    @functools.cached_property
    def shifts(self) -> dict[str, Shift]:
        """The shifts of indices that names change, by index. The size that one adds is added by all."""
        names = [tensor.name for side in self.sides for tensor in side]
        pairs = (pair for name in names for pair in zip(name.indices, name.shifts, strict=True))
        return {index: shift for index, shift in pairs if shift != PLAIN}

    @functools.cached_property
    def counted(self) -> frozenset[str]:
        """The indices that are numbers."""
        return self.stacks | {*self.shifts}

    def adds(self, side: int) -> bool:
        """Return whether names of a side add a value to an index."""
        return any(shift.by for tensor in self.sides[side] for shift in tensor.name.shifts)

    def shifted(self, sizes: Mapping[str, int]) -> Rule:
        """Return the rule with numbers in place of the sizes that its names add, as far as these are known."""

        def told(name: Name) -> Name:
            return name._replace(
                shifts=tuple(shift._replace(by=str(sizes.get(shift.by, shift.by))) for shift in name.shifts)
            )

        left, right = (tuple(replace(tensor, name=told(tensor.name)) for tensor in side) for side in self.sides)
        return replace(self, sides=(left, right)) if self.shifts else self

    def fail(self, mistake: str, hint: str = "") -> NoReturn:
        raise UsageError(f"{self.where}: {mistake}", hint)


def make_rules(
    where: str, number: int, names: tuple[str, str], sides: Sequence[Sequence[str]], copied: bool = False
) -> list[Rule]:
    """Return the rule in these texts; for a rule that renames several tensors, one rule for each, unless one is
    `copied`; for a rule with alternatives, the rules of each alternative, beginning with those that are written.

    `names` are those of its sides. Raise UsageError, which points into the rule, if the rule is invalid.
    """
    split = [[_alternatives(text) for text in side] for side in sides]
    counts = {len(alternatives) for side in split for alternatives in side} - {1}
    if max(counts, default=1) > MAX_ALTERNATIVES:
        raise UsageError(f"{where}: a tensor has {max(counts)} alternatives; at most {MAX_ALTERNATIVES} are allowed.")
    if len(counts) > 1:
        raise UsageError(
            f"{where}: tensors have {some(sorted(counts), form=str)} alternatives; each tensor must have one, or all "
            "the same number."
        )
    rules: list[Rule] = []
    for at in range(max(counts, default=1)):
        texts = [[alternatives[at if len(alternatives) > 1 else 0] for alternatives in side] for side in split]
        for rule in _make_rules(where, number, names, texts, copied):
            first, second = (
                not any(_covers(earlier.sides[side], rule.sides[side]) for earlier in rules) for side in (0, 1)
            )
            if first or second:
                rules.append(replace(rule, read=(first, second)))
    return rules


def _covers(earlier: Sequence[MapTensor], later: Sequence[MapTensor]) -> bool:
    """Return whether an alternative has only names of an earlier one: {2 l} of {l}."""
    pairs = [(one.name, other.name) for one, other in zip(earlier, later, strict=False)]
    return len(earlier) == len(later) and all(
        one == other or one == other._replace(shifts=(PLAIN,) * len(other.shifts)) for one, other in pairs
    )


def _alternatives(text: str) -> list[str]:
    """Return the alternatives in `text`, between bars; those without axes get the axes of the last."""
    *others, last = (option.strip() for option in _OR.split(text))
    colons = list(_COLON.finditer(last))
    axes = last[colons[-1].start() :] if colons else ""
    return [option if not axes or _COLON.search(option) else option + axes for option in (*others, last)]


def _make_rules(
    where: str, number: int, names: tuple[str, str], sides: Sequence[Sequence[str]], copied: bool
) -> list[Rule]:
    parsed: list[tuple[MapTensor, ...]] = []
    for name, texts in zip(names, sides, strict=True):
        if not texts or len(texts) > MAX_TENSORS:
            raise UsageError(f"{where}, {name}: it has {len(texts)} tensors; 1 to {MAX_TENSORS} are allowed.")
        try:
            parsed.append(tuple(map(parse_tensor, texts)))
        except UsageError as error:
            raise UsageError(f"{where}, {name}: {error.message}", error.hint) from None
    left, right = parsed
    tensors = (*left, *right)
    if copied:
        if any(tensor.dims is not None for tensor in tensors) or min(len(left), len(right)) > 1:
            raise UsageError(
                f"{where} has copied = true, so at least one side must have exactly one name, and no name has axes."
            )
        return [_checked(Rule(where, number, (left, right), copied=True))]
    if all(tensor.dims is None for tensor in tensors):
        if len(left) != len(right):
            raise UsageError(f"{where}: {count_of(len(left), 'name')} cannot become {len(right)} without axes.")
        return [_checked(Rule(where, number, ((a,), (b,)))) for a, b in zip(left, right, strict=True)]
    bare = next((tensor for tensor in tensors if tensor.dims is None), None)
    if bare:
        raise UsageError(f"{where}: {quoted(bare.text)} has no axes, but other tensors of the rule do.")
    return [_checked(_fused(_padded(Rule(where, number, (left, right)))))]


def _padded(rule: Rule) -> Rule:
    """Return `rule` with a name of its own for each padding. Raise UsageError for padding that is not a term of a
    sum."""
    numbers = itertools.count(1)

    def named(product: Product, tensor: MapTensor, in_sum: bool) -> Product:
        nodes: list[Node] = []
        for node in product:
            if isinstance(node, Sum):
                node = Sum(tuple(named(term, tensor, in_sum=True) for term in node.terms))
            elif node.is_padding:
                if not in_sum or len(product) > 1:
                    rule.fail(f"{quoted(tensor.text)}: padding must be a separate term of a sum, such as (v + _).")
                number = next(numbers)
                node = MapAxis((PADDING if number == 1 else f"{PADDING}{number}",))
            nodes.append(node)
        return tuple(nodes)

    return _changed(rule, lambda tensor: tuple(named(dim, tensor, in_sum=False) for dim in tensor.dims or ()))


def _changed(rule: Rule, dims: Callable[[MapTensor], tuple[Product, ...]]) -> Rule:
    left, right = (tuple(replace(tensor, dims=dims(tensor)) for tensor in side) for side in rule.sides)
    return replace(rule, sides=(left, right))


def _fused(rule: Rule) -> Rule:
    """Return `rule` with axes that are always next to each other as one axis: only their product matters."""
    while pair := _inseparable(rule):
        rule = _changed(rule, functools.partial(_joined, pair))
    return rule


def _inseparable(rule: Rule) -> tuple[MapAxis, MapAxis] | None:
    """Return two axes that occur only side by side, in this order; None if there are none."""
    after: dict[MapAxis, set[MapAxis | None]] = {}
    before: dict[MapAxis, set[MapAxis | None]] = {}
    for product in _products(rule):
        axes = [node if isinstance(node, MapAxis) else None for node in product]
        for axis, following, previous in zip(axes, [*axes[1:], None], [None, *axes[:-1]], strict=True):
            if axis:
                after.setdefault(axis, set()).add(following)
                before.setdefault(axis, set()).add(previous)
    indices = {index for side in rule.sides for tensor in side for index in tensor.name.indices}
    for axis, [following, *others] in after.items():
        if following and not others and before[following] == {axis}:
            names = {*axis.names, *following.names}
            if not names & indices and axis.number is None and following.number is None:
                return axis, following
    return None


def _joined(pair: tuple[MapAxis, MapAxis], tensor: MapTensor) -> tuple[Product, ...]:
    first, second = pair

    def joined(product: Product) -> Product:
        nodes: list[Node] = []
        for node in product:
            if isinstance(node, Sum):
                nodes.append(Sum(tuple(map(joined, node.terms))))
            elif node != second:
                nodes.append(MapAxis((*first.names, *second.names)) if node == first else node)
        return tuple(nodes)

    return tuple(map(joined, tensor.dims or ()))


def _products(rule: Rule) -> Iterator[Product]:
    def within(product: Product) -> Iterator[Product]:
        yield product
        for node in product:
            if isinstance(node, Sum):
                for term in node.terms:
                    yield from within(term)

    for side in rule.sides:
        for tensor in side:
            for dim in tensor.dims or ():
                yield from within(dim)


def _checked(rule: Rule) -> Rule:
    """Return `rule` with its indices and pieces. Raise UsageError if its sides do not hold the same elements."""
    tensors = [tensor for side in rule.sides for tensor in side]
    every = list(dict.fromkeys(index for tensor in tensors for index in tensor.name.indices))
    free = tuple(index for index in every if all(index in tensor.name.indices for tensor in tensors))
    stacks = frozenset(every) - frozenset(free)
    for tensor in tensors:
        both = sorted(tensor.axes & {*tensor.name.indices})
        if both:
            rule.fail(f"{quoted(tensor.text)}: {both[0]!r} is both an index of the name and an axis.")
        without = sorted(stacks - tensor.axes - {*tensor.name.indices})
        if without:
            rule.fail(
                f"{{{without[0]}}} is an index of other tensors of the rule, but {quoted(tensor.text)} has it neither "
                "as an index nor as an axis.",
                "An index must be in every name of a rule; a tensor without it in its name must have it as an axis.",
            )
    if rule.renames:
        return replace(rule, free=free, stacks=stacks)
    left, right = (_pieces(rule, side, stacks) for side in rule.sides)
    if len(left) != len(right):
        rule.fail(
            f"one side has {count_of(len(left), 'piece')} ({_named(rule.sides[0])}), but the other has "
            f"{count_of(len(right), 'piece')} ({_named(rule.sides[1])}). Each term of a sum is a piece."
        )
    (ones, of), (others, by) = (tuple(zip(*pieces, strict=True)) for pieces in (left, right))
    ordered = collections.Counter(ones) != collections.Counter(others)
    for number, (ours, theirs) in enumerate(zip(ones, others, strict=True)):
        if ours != theirs:
            only = [_listed(ours - theirs), _listed(theirs - ours)]
            rule.fail(
                f"piece {number + 1} of {len(left)} has different axes on the two sides: {_listed(ours)} in "
                f"{quoted(of[number].text)}, but {_listed(theirs)} in {quoted(by[number].text)}. Axes only of the "
                f"first: {only[0]}; axes only of the second: {only[1]}.",
                "" if ordered else "Write the terms and tensors of both sides in the same order.",
            )
    return replace(rule, free=free, stacks=stacks, pieces=(ones, others))


def _named(side: Sequence[MapTensor]) -> str:
    return some([str(tensor.name) for tensor in side])


def _listed(axes: frozenset[MapAxis]) -> str:
    return some(sorted(axis.name for axis in axes), form=str) if axes else "none"


def _pieces(
    rule: Rule, side: Sequence[MapTensor], stacks: frozenset[str]
) -> list[tuple[frozenset[MapAxis], MapTensor]]:
    """Return the axes of each piece of `side`, without those of size 1 and without padding, and the piece's tensor."""
    pieces_of_side: list[tuple[frozenset[MapAxis], MapTensor]] = []
    for tensor in side:
        before = len(pieces_of_side)
        count = 1
        for dim in tensor.dims or ():
            count *= count_pieces(dim)
        if count + len(pieces_of_side) > MAX_PIECES:
            rule.fail(f"{quoted(tensor.text)} stands for more than {MAX_PIECES} pieces.")
        indices = [MapAxis((index,)) for index in tensor.name.indices if index in stacks]
        for pieces in itertools.product(*(list(expand(dim)) for dim in tensor.dims or ())):
            axes = [axis for axis in (*indices, *itertools.chain.from_iterable(pieces)) if axis.number != 1]
            if any(axis.is_padding for axis in axes):
                continue
            twice = next((axis for number, axis in enumerate(axes) if axis in axes[:number]), None)
            if twice:
                rule.fail(f"{quoted(tensor.text)}: the axis {twice.name} occurs twice in one piece.")
            pieces_of_side.append((frozenset(axes), tensor))
        if len(pieces_of_side) == before:
            rule.fail(f"{quoted(tensor.text)} consists only of padding.")
    return pieces_of_side
