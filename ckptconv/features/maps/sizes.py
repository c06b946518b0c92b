"""The sizes of axes: from a config.json, as numbers, and from the shapes of tensors. Pure.

An expression is a sum or product of numbers and names of config.json, such as "hidden_size / num_attention_heads". A
name with dots leads into objects: "text_config.head_dim". If config.json lacks a name, it may be another size of the
map. Division by / is exact, and that by // rounds down.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias

from ckptconv.errors import UsageError
from ckptconv.features.maps.notation import MapAxis, Product, Sum, axes_in, written
from ckptconv.text import quoted

# A map's entry for a size: alternatives, each a number or an expression.
Alternatives: TypeAlias = "tuple[int | str, ...]"
# The largest size, which is the largest number of elements; the most characters and the deepest parentheses of an
# expression.
MAX_SIZE, MAX_LENGTH, MAX_DEPTH = (1 << 63) - 1, 200, 16
_TOKEN = re.compile(r"\s*(?:(//|[-+*/()])|(\d{1,18})(?![\w.])|([A-Za-z_][\w]*(?:\.\w+)*)|(\S))")


# ------------------------------------------------------------------------------------------------------- expressions


class _MissingError(Exception):
    """A name in an expression has no value."""


class Expression:
    """An arithmetic expression. Raise UsageError for an invalid `text`."""

    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) > MAX_LENGTH:
            raise UsageError(f"{quoted(text)} has more than {MAX_LENGTH} characters.")
        self._tokens = [(match[match.lastindex or 0], match.lastindex or 0) for match in _TOKEN.finditer(text.strip())]
        bad = next((word for word, kind in self._tokens if kind == 4), None)
        if bad:
            raise UsageError(f"{quoted(text)}: {bad!r} is not part of an expression of numbers and names.")
        self.names = {word for word, kind in self._tokens if kind == 3}
        self.value(dict.fromkeys(self.names, 1), check=True)

    def value(self, values: Mapping[str, int], check: bool = False) -> int:
        """Return its value. Raise UsageError unless it is a whole number from 0 on; with `check`, check the syntax."""
        self._next = 0
        try:
            result = self._sum(values, 0)
        except ZeroDivisionError:
            if check:
                return 0
            raise UsageError(f"{quoted(self.text)} divides by zero.") from None
        if self._next < len(self._tokens):
            raise UsageError(f"{quoted(self.text)}: {self._tokens[self._next][0]!r} is not expected after a value.")
        if check:
            return 0
        if result.denominator != 1 or not 0 <= result <= MAX_SIZE:
            raise UsageError(
                f"{quoted(self.text)} is {_number(result)}, but a size must be a whole number from 0 to {MAX_SIZE}."
            )
        return int(result)

    def _takes(self, *words: str) -> str:
        word = self._tokens[self._next][0] if self._next < len(self._tokens) else ""
        if word not in words:
            return ""
        self._next += 1
        return word

    def _sum(self, values: Mapping[str, int], depth: int) -> Fraction:
        result = self._product(values, depth)
        while sign := self._takes("+", "-"):
            term = self._product(values, depth)
            result = result + term if sign == "+" else result - term
        return result

    def _product(self, values: Mapping[str, int], depth: int) -> Fraction:
        result = self._atom(values, depth)
        while sign := self._takes("*", "/", "//"):
            factor = self._atom(values, depth)
            result = result * factor if sign == "*" else result / factor
            result = Fraction(math.floor(result)) if sign == "//" else result
        return result

    def _atom(self, values: Mapping[str, int], depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise UsageError(f"{quoted(self.text)} is nested more than {MAX_DEPTH} levels deep.")
        if self._takes("("):
            result = self._sum(values, depth + 1)
            if not self._takes(")"):
                raise UsageError(f"{quoted(self.text)}: a parenthesis is not closed.")
            return result
        word, kind = self._tokens[self._next] if self._next < len(self._tokens) else ("", 0)
        if kind not in (2, 3):
            where = repr(word) if word else "its end"
            raise UsageError(f"{quoted(self.text)}: a number or a name is expected at {where}.")
        self._next += 1
        return Fraction(int(word) if kind == 2 else values[word])


def _number(value: Fraction) -> str:
    return f"{float(value):.6g}" if abs(value) < MAX_SIZE else "too large"


def resolve(
    sizes: Mapping[str, Alternatives], config: Mapping[str, Any] | None = None, chosen: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Return the known sizes: those `chosen` by the user, then those of a map that `config` or numbers decide.

    Raise UsageError for an expression that gives no whole number, and for sizes that refer to each other in a circle.
    """
    known = dict(chosen or {})
    config = config or {}
    lacking: set[str] = set()
    underway: list[str] = []

    def find(name: str) -> int:
        if name in known:
            return known[name]
        if name in lacking or underway[-1:] == [name]:  # the name is one of config.json, which lacks it
            raise _MissingError
        if name in underway:
            circle = [*underway[underway.index(name) :], name]
            raise UsageError(f"[sizes]: {' → '.join(circle)} refer to each other in a circle.")
        underway.append(name)
        try:
            for entry in sizes.get(name, ()):
                try:
                    known[name] = entry if isinstance(entry, int) else _evaluated(entry)
                except _MissingError:
                    continue
                return known[name]
        finally:
            underway.pop()
        lacking.add(name)
        raise _MissingError

    def _evaluated(text: str) -> int:
        expression = Expression(text)
        values: dict[str, int] = {}
        for name in sorted(expression.names):
            value = _of_config(config, name)
            values[name] = find(name) if value is None else value
        return expression.value(values)

    for name in sizes:
        with contextlib.suppress(_MissingError):
            find(name)
    return known


def _of_config(config: Mapping[str, Any], name: str) -> int | None:
    """Return the value in `config` under a dotted name; None if it is missing, null, or -1, which Meta writes for a
    vocabulary whose size only the tokenizer has."""
    value: Any = config
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if value is None or value == -1:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_SIZE:
        raise UsageError(
            f"config.json: {name} is {quoted(str(value))}, but a whole number from 0 to {MAX_SIZE} was expected."
        )
    return value


# ----------------------------------------------------------------------------------------------------- from shapes


class KnownSizes:
    """The known sizes for one use of a rule: those of the map, then those that its shapes decide."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = dict(sizes)

    def of(self, axis: MapAxis) -> int | None:
        """Return the size of `axis`, if it is known."""
        if len(axis.names) == 1:
            return int(axis.names[0]) if axis.names[0].isdecimal() else self.sizes.get(axis.names[0])
        size = self.sizes.get(axis.name)
        if size is None:
            size = 1
            for name in axis.names:
                if name not in self.sizes:
                    return None
                size *= self.sizes[name]
        return size

    def product(self, product: Product) -> int:
        """Return the size of a composed axis. Raise KeyError if it is unknown."""
        size = 1
        for node in product:
            size *= self.node(node)
        return size

    def node(self, node: MapAxis | Sum) -> int:
        """Return the size of an axis or a sum. Raise KeyError if it is unknown."""
        if isinstance(node, Sum):
            return sum(map(self.product, node.terms))
        size = self.of(node)
        if size is None:
            raise KeyError(node.name)
        return size

    def polynomial(self, product: Product) -> dict[tuple[str, ...], int]:
        """Return the size of a composed axis as {unknown axes that are multiplied: coefficient}."""
        result: dict[tuple[str, ...], int] = {(): 1}
        for node in product:
            factor: dict[tuple[str, ...], int] = {}
            if isinstance(node, Sum):
                for term in node.terms:
                    for names, count in self.polynomial(term).items():
                        factor[names] = factor.get(names, 0) + count
            else:
                size = self.of(node)
                factor = {(node.name,): 1} if size is None else {(): size}
            mixed: dict[tuple[str, ...], int] = {}
            for names_so_far, count in result.items():
                for more_names, times in factor.items():
                    names = tuple(sorted((*names_so_far, *more_names)))
                    mixed[names] = mixed.get(names, 0) + count * times
            result = mixed
        return {names: count for names, count in result.items() if count}


class Equation(NamedTuple):
    """A dimension of a tensor: `product` has the size `extent`. `tensor` is its name, `dim` the dimension."""

    product: Product
    extent: int
    tensor: str
    dim: int

    def fail(self, where: str, mistake: str) -> UsageError:
        axes = written([self.product])
        return UsageError(
            f"{where}: {quoted(self.tensor)} has the size {self.extent} in dimension {self.dim}, {axes}: {mistake}",
            "Is this the right map for the model? Sizes come from --size, config.json, and shapes.",
        )


def solve(equations: Iterable[Equation], known: KnownSizes, where: str) -> None:
    """Add to `known` the sizes that the shapes decide: solve equations with one unknown, until there is none.

    Then, divide products of unknowns by one another. Raise UsageError for shapes that do not fit.
    """
    left = list(dict.fromkeys(equations))
    while left:
        solved, products = False, {}
        for equation in list(left):
            terms = known.polynomial(equation.product)
            constant = terms.pop((), 0)
            if not terms:
                left.remove(equation)
                if constant != equation.extent:
                    raise equation.fail(where, f"the sizes imply {constant} ({_sizes_in(equation, known)}).")
                continue
            remainder = equation.extent - constant
            if len(terms) > 1 or (len(next(iter(terms))) == 1 and remainder < 0):
                if remainder < 0:
                    raise equation.fail(where, f"the sizes imply more ({_sizes_in(equation, known)}).")
                continue
            ((names, count),) = terms.items()
            if remainder % count or remainder < 0:
                raise equation.fail(where, f"{remainder} is not a multiple of {count} ({_sizes_in(equation, known)}).")
            if len(names) == 1:
                known.sizes[names[0]] = remainder // count
                solved = True
            else:
                products[names] = remainder // count
        if solved:
            continue
        if not _divided(products, known):
            return


def _divided(products: Mapping[tuple[str, ...], int], known: KnownSizes) -> bool:
    """Find an unknown as the quotient of two known products of unknowns; return whether there was one."""
    for names, size in products.items():
        for others, divisor in products.items():
            unmatched = list(names)
            if len(others) != len(names) - 1 or not divisor:
                continue
            for name in others:
                if name not in unmatched:
                    break
                unmatched.remove(name)
            else:
                if size % divisor == 0:
                    known.sizes[unmatched[0]] = size // divisor
                    return True
    return False


def _sizes_in(equation: Equation, known: KnownSizes) -> str:
    size_of = {axis.name: known.of(axis) for axis in axes_in(equation.product) if axis.number is None}
    return ", ".join(f"{name} = {'?' if size is None else size}" for name, size in size_of.items()) or "numbers alone"
