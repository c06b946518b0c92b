"""The form of each type and of texts in a structure record."""

from __future__ import annotations

import base64
import math
import re
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from ckptconv.pickles.children import ATOMS, in_order
from ckptconv.pickles.nodes import Composite, Global, NumpyArray, NumpyScalar, Opaque, Size, TorchConstant
from ckptconv.structure.record import EXACT, FACTORIES, LONGEST, SHORT
from ckptconv.text import is_unicode

# Integers of this magnitude or more are written once, as long strings are.
BIG = 1 << 256

_FACTORY_NAMES = {kind: name for name, kind in FACTORIES.items()}

# -------------------------------------------------------------------------------------------------- words and texts


def words(key: Any, whole: bool = False) -> str:
    """Return a key as a part of a name; of a long one the end, unless `whole`."""
    kind = type(key)
    if kind is str:
        text = key if whole else cut(key)
        return text if text.isascii() else re.sub("[\ud800-\udfff]", "\ufffd", text)
    if kind in (bool, float, type(None)) or (kind is int and -BIG < key < BIG):
        return str(key)
    if kind is bytes:
        return str(key[:SHORT], "ascii", "backslashreplace")
    if kind in (tuple, Size):
        return cut(".".join(words(part) if type(part) in ATOMS else type(part).__name__ for part in key[:SHORT]))
    return kind.__name__


def cut(text: str) -> str:
    """Return the end of a text that is too long for a name."""
    return text if len(text) <= LONGEST else "…" + text[1 - LONGEST :]


def float_text(value: float) -> str:
    """Return the shortest decimal that gives this number; for a NaN, its bits."""
    return repr(value) if not math.isnan(value) else f"nan:{struct.pack('>d', value).hex()}"


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


# ------------------------------------------------------------------------------------------------------------- forms


class Form(NamedTuple):
    """The form of a type in a record: `tag`, fields by name, then its elements, or its keys and values."""

    tag: str
    children: Callable[[Any], Sequence[Any]]
    fields: tuple[str, ...] = ()
    paired: bool = False


def _pairs(mapping: Mapping[Any, Any]) -> list[Any]:
    return list(chain.from_iterable(mapping.items()))


def _with_attributes(mapping: Mapping[Any, Any]) -> list[Any]:
    return [vars(mapping) or None, *_pairs(mapping)]


def has_known_factory(mapping: defaultdict[Any, Any]) -> bool:
    factory = mapping.default_factory
    return factory is None or (isinstance(factory, type) and factory in _FACTORY_NAMES)


def _opaque_parts(value: Opaque) -> list[Any]:
    parts = [value.cls, value.args, value.call, value.state, value.kwargs, value.appended, value.items]
    while len(parts) > 3 and (parts[-1] is None or parts[-1] == []):
        parts.pop()
    return parts


_BOUNDS = ("start", "stop", "step")
QUANTIZED = "quantized"
FORMS: dict[type, Form] = {
    dict: Form("dict", _pairs, paired=True),
    OrderedDict: Form("odict", _with_attributes, ("attributes",), paired=True),
    Counter: Form("counter", _with_attributes, ("attributes",), paired=True),
    defaultdict: Form(
        "defaultdict",
        lambda d: [d.default_factory and _FACTORY_NAMES[d.default_factory], *_pairs(d)],
        ("factory",),
        paired=True,
    ),
    list: Form("list", lambda v: v),
    tuple: Form("tuple", lambda v: v),
    Size: Form("size", lambda v: v),
    set: Form("set", in_order),
    frozenset: Form("frozenset", in_order),
    deque: Form("deque", lambda d: [d.maxlen, *d], ("maxlen",)),
    bytearray: Form("bytearray", lambda b: (bytes(b),)),
    range: Form("range", lambda r: (r.start, r.stop, r.step), _BOUNDS),
    slice: Form("slice", lambda s: (s.start, s.stop, s.step), _BOUNDS),
    Global: Form("global", lambda g: g),
    TorchConstant: Form("torch", lambda c: c),
    NumpyScalar: Form("numpy.scalar", lambda s: s),
    NumpyArray: Form("numpy.array", lambda a: (a.dtype, a.shape, a.order, a.data)),
    Opaque: Form("opaque", _opaque_parts, ("cls", "args", "call", "state", "kwargs", "appended", "items")),
    Composite: Form("composite", lambda c: [c.kind, *_pairs(c.parts)], ("kind",), paired=True),
}
ROOT = Form("root", lambda v: v)
ATTRIBUTES = Form("attributes", lambda v: v, ("attributes",))
# Nodes that are, or may be, known by name only.
FOREIGN = frozenset({Opaque, Global, Composite})
# Written at each occurrence.
CONSTANTS = frozenset({TorchConstant, NumpyScalar})


def atom(value: Any) -> Any:
    """Return the node of a value without parts."""
    kind = type(value)
    if kind is str:
        return value if is_unicode(value) else ["str", _base64(value.encode("utf-8", "surrogatepass"))]
    if kind is int:
        return value if -EXACT <= value <= EXACT else ["int", hex(value)]
    if kind is float:
        return ["float", float_text(value)]
    if kind is bytes:
        return ["bytes", _base64(value)]
    if kind is complex:
        return ["complex", float_text(value.real), float_text(value.imag)]
    return ["ellipsis"] if value is ... else value
