"""Patterns: expressions that say which inert values a production allows.

A pattern is written as an expression of Python, and never evaluated as one:

    text, int, any …            a kind of value (`_KINDS`), or an alias of the table
    'C', 0, None, True          exactly this value
    numpy.dtype                 what a call of this name made
    type(numpy.ndarray)         this class or function itself
    re('[a-z]+'), upto(100)     text that matches whole, and a count of at most so many
    (int, text), (int, ...)     a tuple of these; of any number of these
    [text], {text}              a list, a set of these
    {'a': int, 'b?': text}      a dict of exactly these keys, of which "b" may be missing
    {text: int}, {**any}        a dict of such keys; of names that are not `__special__`
    a | b                       either
"""

from __future__ import annotations

import ast
import functools
import math
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from ckptconv.features.scan import numpy_elements
from ckptconv.pickles.nodes import Composite, Global, NumpyArray, NumpyScalar, Opaque, Size, TorchConstant, today
from ckptconv.tensors.lazy import LazyTensor

_TEXT, _BITS, _LONG = 1 << 16, 63, 4096
# The most characters of a text that is copied as cheaply as it is judged.
_SHORT = 7
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_SEQUENCES = (list, deque)
_SETS = (set, frozenset)
_SIZED = frozenset({str, bytes, bytearray})
_SCALARS = frozenset(
    {str, bytes, bytearray, bool, int, float, complex, type(None), type(...), range, Size, TorchConstant, NumpyScalar,
     NumpyArray, Composite}
)  # fmt: skip


class Matcher(Protocol):
    """The questions of a pattern while it judges a value of a pickle of `size` bytes."""

    size: int

    def enter(self, container: Any) -> bool:
        """Note that the content of `container` counts. Return whether there is room to judge it."""

    def copy(self, nbytes: int) -> bool:
        """Note that a call may copy so many bytes. Return whether the pickle is large enough for that."""

    def is_value(self, name: Global) -> bool:
        """Return whether a class may be mentioned as a value."""

    def is_held(self, name: Global) -> bool:
        """Return whether a class or function may be an attribute or an item."""

    def is_data(self, built: Opaque) -> bool:
        """Return whether an object is plain data, such as a date."""

    def is_function(self, built: Opaque) -> bool:
        """Return whether the result of a call may be called in turn."""


GETATTR = Global("builtins", "getattr")
# Stands for values that are no longer known.
UNKNOWN_VALUE = Global("some", "value")
Pattern: TypeAlias = Callable[[Matcher, Any], bool]


def current(name: Global) -> Global:
    """Return `name` in the spelling of today's Python and numpy."""
    # Two texts are compared faster than two names.
    return _spelled(*name)


@functools.lru_cache(maxsize=4096)
def _spelled(module: str, name: str) -> Global:
    module, name = today((module, name))
    if module.startswith("numpy.core."):
        module = f"numpy._core.{module.removeprefix('numpy.core.')}"
    return Global(module, name)


@functools.lru_cache(maxsize=4096)
def _path(module: str, name: str) -> str:
    return str(_spelled(module, name))


def resolved(function: Any) -> Global | None:
    """Return the name of a called function: that of a class's attribute if `getattr` fetched it; None for a result."""
    if type(function) is Global:
        return function
    if type(function) is Opaque and type(function.cls) is Global and current(function.cls) == GETATTR:
        args = function.args if type(function.args) is tuple else ()
        if len(args) == 2 and type(args[0]) is Global and type(args[1]) is str and args[1].isidentifier():
            return Global(args[0].module, f"{args[0].name}.{args[1]}")
    return None


def is_name(key: Any) -> bool:
    """Return whether a state may have this key: exact text that is not `__special__`."""
    return type(key) is str and not (key.startswith("__") and key.endswith("__"))


# ------------------------------------------------------------------------------------------------------ kinds of values


def _any(matcher: Matcher, value: Any, is_held: bool = False) -> bool:
    """Return whether a value is not a function. The content of a list, set or dict was judged when it was put there."""
    kind = type(value)
    if kind is not tuple and kind is not Global and kind is not Opaque:
        return True
    allowed = matcher.is_held if is_held else matcher.is_value
    todo = [value]
    while todo:
        value = todo.pop()
        kind = type(value)
        if kind is tuple:
            if not matcher.enter(value):
                return False
            todo += value
        elif (kind is Global and not allowed(value)) or (kind is Opaque and matcher.is_function(value)):
            return False
    return True


def _data(matcher: Matcher, value: Any) -> bool:
    """Return whether a value holds only plain data, at any depth. Shared parts count as often as they occur, because
    calls may copy or compare them."""
    todo = [value]
    while todo:
        value = todo.pop()
        kind = type(value)
        if kind in _SCALARS or isinstance(value, (LazyTensor, bytes)):
            if kind in _SIZED and len(value) > _SHORT and not matcher.copy(len(value)):
                return False
        elif kind is Opaque:
            if not matcher.is_data(value):
                return False
        elif kind is slice:
            todo += (value.start, value.stop, value.step)
        elif kind in _MAPPINGS or kind in _SEQUENCES or kind in _SETS or kind is tuple:
            if not matcher.enter(value):
                return False
            todo += value
            if kind in _MAPPINGS:
                todo += value.values()
        else:
            return False
    return True


def _array_state(matcher: Matcher, value: Any) -> bool:
    """Return whether a value is the state of an array of numpy, with as much data as its shape and dtype require."""
    if type(value) is not tuple or len(value) not in (4, 5) or type(value[0]) not in (int, tuple, Size):
        return False
    shape, dtype, order, data = value[-4:]
    if type(shape) not in (tuple, Size) or not all(type(count) is int and count >= 0 for count in shape):
        return False
    if type(order) not in (bool, int) or not _dtype(matcher, dtype, is_plain=type(data) is not list):
        return False
    count = math.prod(shape)
    if type(data) is not list:
        # numpy compares the length with the shape, unless elements have no bytes.
        is_raw = isinstance(data, (str, bytes, bytearray)) or _made_by(frozenset({"_codecs.encode"}))(matcher, data)
        return is_raw and count <= matcher.size
    # Before it has room for all elements, numpy does not compare their number. A list that was not kept has at most as
    # many as the pickle has bytes.
    is_kept = not data or type(data[-1]) is not Opaque or data[-1].cls != UNKNOWN_VALUE
    return _each(list, _any)(matcher, data) and (count == len(data) if is_kept else count <= matcher.size)


def _masked_state(matcher: Matcher, value: Any) -> bool:
    """Return whether a value is the state of a masked array: its data, the bytes of its mask, and its fill value."""
    return (
        type(value) is tuple
        and len(value) == 7
        and _array_state(matcher, value[:5])
        and isinstance(value[5], (str, bytes, bytearray))
        and _data(matcher, value[6])
    )


def _dtype(matcher: Matcher, value: Any, *, is_plain: bool = False) -> bool:
    try:
        return not (numpy_elements.element(value).has_objects and is_plain)
    except ValueError:
        return False


def _numbers(matcher: Matcher, value: Any) -> bool:
    """Return whether a value is an array without objects."""
    if type(value) is not Opaque:
        return type(value) is NumpyArray
    state = value.state[-1] if value.state else value.args
    dtype = (
        state.get("dtype") if type(state) is dict else state[-3] if type(state) is tuple and len(state) > 3 else None
    )
    return _made_by(_ARRAYS)(matcher, value) and _dtype(matcher, dtype, is_plain=True)


def _arrow_array(matcher: Matcher, value: Any) -> bool:
    """Return whether a value is a valid description of an array of pyarrow: a type, three counts, and as many buffers
    as the type has, the last but one with as many bytes as elements. pyarrow itself does not check them."""
    if type(value) is not tuple or len(value) != 7 or type(value[0]) is not Opaque or type(value[4]) is not list:
        return False
    alias, (length, nulls, offset), buffers = value[0].args[:1], value[1:4], value[4]
    if alias not in _ARROW or not matcher.enter(buffers):
        return False
    count, width = _ARROW[alias]
    sizes = [
        -1 if entry is None else len(entry.args[0])
        for entry in buffers
        if entry is None or (_made_by(_BUFFER)(matcher, entry) and _is_raw(entry.args))
    ]
    are_counts = all(type(entry) is int and 0 <= entry < 1 << 48 for entry in (length, offset)) and type(nulls) is int
    if not are_counts or len(sizes) != len(buffers) or len(sizes) != count or value[5] != [] or value[6] is not None:
        return False
    need = length + offset
    return sizes[1] * 8 >= (need + (count == 3)) * width and sizes[0] * 8 >= (need if sizes[0] >= 0 else sizes[0] * 8)


def _pandas_blocks(matcher: Matcher, value: Any) -> bool:
    """Return whether a value is a tuple of blocks of pandas with each row from 0 on exactly once. pandas writes to each
    row's place in an array of as many rows, without comparing the two."""
    if (
        type(value) is not tuple
        or not matcher.enter(value)
        or not all(_made_by(_BLOCK)(matcher, part) for part in value)
    ):
        return False
    rows = [row for block in value for row in _rows(matcher, block.args[1])]
    return sorted(rows) == [*range(len(rows))]


def _rows(matcher: Matcher, place: Any) -> Sequence[int]:
    """Return the rows of a block, by the slice or array that names them; [-1] for what names none that is known."""
    if _made_by(_PLACEMENT)(matcher, place):
        place = place.args[0]
    if type(place) is slice:
        bounds = (place.start, place.stop, place.step)
        is_known = all(type(bound) is int and 0 <= bound <= matcher.size for bound in bounds) and place.step
        return range(*bounds) if is_known else [-1]
    if type(place) is NumpyArray and place.dtype in ("<i8", "<i4") and matcher.copy(len(place.data)):
        width = int(place.dtype[-1])
        return [int.from_bytes(place.data[at : at + width], "little") for at in range(0, len(place.data), width)]
    return [-1]


def _is_raw(args: Any) -> bool:
    return type(args) is tuple and len(args) == 1 and type(args[0]) in (bytes, bytearray)


# For pyarrow's types, the number of buffers, and the bits of an element, or of an offset into the last buffer.
_ARROW = {
    (alias,): told
    for aliases, told in (
        ("bool", (2, 1)),
        ("int8 uint8", (2, 8)),
        ("int16 uint16 halffloat", (2, 16)),
        ("int32 uint32 float date32[day]", (2, 32)),
        ("int64 uint64 double date64[ms]", (2, 64)),
        ("string binary", (3, 32)),
        ("large_string large_binary", (3, 64)),
    )
    for alias in aliases.split()
}
_BLOCK, _PLACEMENT = (frozenset({f"pandas._libs.internals.{name}"}) for name in ("_unpickle_block", "BlockPlacement"))
_BUFFER = frozenset({"pyarrow.lib.py_buffer"})
_ARRAYS = frozenset({"numpy._core.multiarray._reconstruct", "joblib.numpy_pickle.NumpyArrayWrapper"})


def _is_wkb(data: bytes) -> bool:
    """Return whether bytes describe a geometry that is not nested too deep: GEOS reads parts by recursion."""
    kind = int.from_bytes(data[1:5], "little" if data[:1] == b"\1" else "big")
    return len(data) < 1 << 15 or (kind & 0xFFFFFF) % 1000 in (1, 2, 3)


def _of(*kinds: type) -> Pattern:
    return lambda matcher, value: type(value) in kinds


def _int_of(bits: int) -> Pattern:
    return lambda matcher, value: type(value) is int and value.bit_length() <= bits


# The kinds of values with a name.
_KINDS: dict[str, Pattern] = {
    "any": _any,
    "held": lambda matcher, value: _any(matcher, value, is_held=True),
    "data": _data,
    "text": lambda matcher, value: type(value) is str and len(value) <= _TEXT and matcher.copy(len(value)),
    "bytes": lambda matcher, value: isinstance(value, bytes) and matcher.copy(getattr(value, "length", len(value))),
    "bytearray": _of(bytearray),
    "bool": _of(bool),
    "int": _int_of(_BITS),
    "long": _int_of(_LONG),
    "float": _of(float),
    "complex": _of(complex),
    "dtype": _dtype,
    "array_state": _array_state,
    "masked_state": _masked_state,
    "arrow_array": _arrow_array,
    "pandas_blocks": _pandas_blocks,
    "wkb": lambda matcher, value: type(value) is bytes and _is_wkb(value),
    "plain_dtype": lambda matcher, value: _dtype(matcher, value, is_plain=True),
    "slice": lambda matcher, value: type(value) is slice and _data(matcher, value),
    "size": _of(Size),
    "a_tensor": lambda matcher, value: isinstance(value, LazyTensor) or type(value) is Composite,
    "an_array": lambda matcher, value: type(value) is NumpyArray and matcher.copy(len(value.data)),
    "numbers": _numbers,
    "a_scalar": _of(NumpyScalar),
    # A class by its name. Whether it was reviewed is judged where it is mentioned.
    "some_class": lambda matcher, value: type(value) is Global and is_class(value),
}


def is_class(name: Global) -> bool:
    """Return whether a name is that of a class, by convention."""
    *outer, last = name.name.split(".")
    # A step that is not spelled like a class leads through a module or an object, to any value.
    return all(step.lstrip("_")[:1].isupper() for step in (*outer, last))


# ------------------------------------------------------------------------------------------------------------- notation


class Notation:
    """Makes patterns from expressions. `aliases` maps names to their expressions."""

    def __init__(self, aliases: Mapping[str, str]) -> None:
        self._aliases = aliases
        self._made: dict[str, Pattern] = {}

    def pattern(self, node: ast.expr) -> Pattern:
        """Return the pattern that an expression describes. Raises ValueError for one that describes none."""
        match node:
            case ast.Name(id=name):
                return self._named(name)
            case ast.Attribute():
                return _made_by(frozenset({ast.unparse(node)}))
            case ast.Constant(value=value):
                return lambda matcher, candidate: type(candidate) is type(value) and candidate == value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(number))):
                return lambda matcher, candidate: type(candidate) is int and candidate == -number
            case ast.BinOp(op=ast.BitOr()):
                return self._either(node)
            case ast.Tuple(elts=[each, ast.Constant(value=value)]) if value is ...:
                return _each(tuple, self.pattern(each))
            case ast.Tuple(elts=parts):
                return _in_turn([self.pattern(part) for part in parts])
            case ast.List(elts=[each]):
                return _each(list, self.pattern(each))
            case ast.Set(elts=[each]):
                return _each(set, self.pattern(each))
            case ast.Dict(keys=keys, values=values):
                return self._dict(keys, values)
            case ast.Call(func=ast.Name(id=word), args=[argument], keywords=[]):
                return _word(word, argument)
        raise ValueError(f"no pattern: {ast.unparse(node)}")

    def _named(self, name: str) -> Pattern:
        if name in _KINDS:
            return _KINDS[name]
        if name not in self._made:
            self._made[name] = self.pattern(ast.parse(self._aliases[name], mode="eval").body)
        return self._made[name]

    def _either(self, node: ast.expr) -> Pattern:
        parts: list[ast.expr] = []
        while isinstance(node, ast.BinOp):
            parts.append(node.right)
            node = node.left
        parts.append(node)
        made_names = frozenset(ast.unparse(part) for part in parts if isinstance(part, ast.Attribute))
        patterns = [self.pattern(part) for part in reversed(parts) if not isinstance(part, ast.Attribute)]
        if made_names:
            patterns.append(_made_by(made_names))

        def fits(matcher: Matcher, candidate: Any) -> bool:
            # Here and in other patterns, most of the time goes: a loop is faster than an expression.
            for pattern in patterns:  # noqa: SIM110
                if pattern(matcher, candidate):
                    return True
            return False

        return fits

    def _dict(self, keys: list[ast.expr | None], values: list[ast.expr]) -> Pattern:
        exact: dict[str, Pattern] = {}
        others: list[tuple[Pattern, Pattern]] = []
        for key, value in zip(keys, values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                exact[key.value] = self.pattern(value)
            else:
                of_key: Pattern = self.pattern(key) if key else lambda matcher, candidate: is_name(candidate)
                others.append((of_key, self.pattern(value)))
        needed = {key for key in exact if not key.endswith("?")}
        known = {key.removesuffix("?"): pattern for key, pattern in exact.items()}

        def fits(matcher: Matcher, candidate: Any) -> bool:
            if type(candidate) not in _MAPPINGS or not matcher.enter(candidate) or not needed <= candidate.keys():
                return False
            for key, value in candidate.items():
                pattern = known.get(key) if type(key) is str else None
                if pattern is not None:
                    if not pattern(matcher, value):
                        return False
                else:
                    for of_key, of_value in others:
                        if of_key(matcher, key) and of_value(matcher, value):
                            break
                    else:
                        return False
            return True

        return fits


def _made_by(paths: frozenset[str]) -> Pattern:
    """Return the pattern for results of calls of functions with these names."""

    def fits(matcher: Matcher, candidate: Any) -> bool:
        name = resolved(candidate.cls) if type(candidate) is Opaque else None
        return name is not None and _path(*name) in paths

    return fits


@functools.cache  # when it is first needed: this takes longer than the rest of a production
def _compiled(form: str) -> re.Pattern[str]:
    return re.compile(form)


def _word(word: str, argument: ast.expr) -> Pattern:
    if word == "type":
        path = ast.unparse(argument)
        return lambda matcher, candidate: type(candidate) is Global and _path(*candidate) == path
    value = ast.literal_eval(argument)
    if word == "upto":
        return lambda matcher, candidate: type(candidate) is int and 0 <= candidate <= value
    if word == "re":
        return lambda matcher, candidate: type(candidate) is str and _compiled(value).fullmatch(candidate) is not None
    if word == "constant":
        return lambda matcher, candidate: type(candidate) is TorchConstant and candidate.kind == value
    raise ValueError(f"no pattern: {word}")


def _each(kind: type, pattern: Pattern) -> Pattern:
    kinds: tuple[type, ...] = (tuple, Size) if kind is tuple else _SEQUENCES if kind is list else _SETS

    def fits(matcher: Matcher, candidate: Any) -> bool:
        if type(candidate) not in kinds or not matcher.enter(candidate):
            return False
        for part in candidate:  # noqa: SIM110
            if not pattern(matcher, part):
                return False
        return True

    return fits


def _in_turn(patterns: list[Pattern]) -> Pattern:
    def fits(matcher: Matcher, candidate: Any) -> bool:
        if type(candidate) not in (tuple, Size) or len(candidate) != len(patterns):
            return False
        for pattern, part in zip(patterns, candidate, strict=True):  # noqa: SIM110
            if not pattern(matcher, part):
                return False
        return True

    return fits
