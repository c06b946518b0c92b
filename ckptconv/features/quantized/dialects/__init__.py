"""The dialects of quantized weights: those of `table` and `words`, and each in a module of its own here, as `DIALECT`.

A dialect has formats, and the words of configurations that tell of them. Its module is named in `DIALECTS`, and nowhere
else; what others are told to read of it in `words.ELSEWHERE`, and in `table.NOT_READ`, is not said any longer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple

from ckptconv.errors import UnsupportedError
from ckptconv.features.quantized import table, words
from ckptconv.features.quantized.table import Format
from ckptconv.features.quantized.words import ELSEWHERE, UNNAMED, Speaking, Statement
from ckptconv.storage import strict_json

# The modules in this folder.
DIALECTS: tuple[str, ...] = (
    *("autoround", "autoround_floats", "awq", "bitsandbytes8", "hqq", "mlx", "modelopt_low_rank"),
    *("modelopt_smoothed", "quark", "quark_integers"),
)
_HINT = "The program that wrote them can write the original weights."


class Dialect(NamedTuple):
    """A dialect: its formats, {method in a configuration: what else that may say}, and endings of names that only parts
    of its weights have, which are an error without the others."""

    formats: tuple[Format, ...]
    words: Mapping[str, Speaking]
    telling: tuple[str, ...] = ()


@functools.cache
def _every() -> tuple[Dialect, ...]:
    return tuple(import_module(f"{__name__}.{module}").DIALECT for module in DIALECTS)


@functools.cache
def formats() -> tuple[Format, ...]:
    """Return the formats of all dialects."""
    return (*table.FORMATS, *(format_ for dialect in _every() for format_ in dialect.formats))


@functools.cache
def telling() -> tuple[str, ...]:
    """Return endings of names that only parts of quantized weights have. Such a part without a weight is an error."""
    return (*table.TELLING, *(ending for dialect in _every() for ending in dialect.telling))


@functools.cache
def methods() -> Mapping[str, Speaking]:
    """Return the allowed keys and values of configurations, by method."""
    return {**words.DIALECTS, **{method: said for dialect in _every() for method, said in dialect.words.items()}}


@functools.cache
def not_read() -> Mapping[str, tuple[str, str]]:
    """Return the kind of weights with parts that no dialect reads, and a program that reads them, by ending."""
    read = {name[1:] for format_ in formats() for name in _names(format_)}
    return {ending: reason for ending, reason in table.NOT_READ.items() if ending not in read}


def _names(format_: Format) -> Iterator[str]:
    """Yield the patterns of the names of all parts of a format."""
    for part in format_.parts.values():
        yield from part.names.split()
    if format_.scale:
        yield from _names(format_.scale)


@functools.cache
def patterns() -> frozenset[str]:
    """Return the patterns of the names of all parts of all formats."""
    return frozenset(name for format_ in formats() for name in _names(format_))


def check(stated: Iterable[Statement]) -> None:
    """Raise UnsupportedError for a configuration of a method that is not read, with a key that is not known or a value
    that is not, and for two that contradict each other."""
    before: dict[str, tuple[str, Any]] = {}
    for one in stated:
        path, method, told = str(one), one.method, one.told
        if method not in methods():
            how = f" by the unknown method {method}" if method != UNNAMED else ", but does not specify the method"
            if method in ELSEWHERE:
                how = f" by {method}, which --dequantize does not support; {ELSEWHERE[method]} reads it"
            raise UnsupportedError(f"{path} specifies that the weights are quantized{how}.", _HINT)
        speaking = methods()[method]
        known = speaking(told) if callable(speaking) else speaking
        try:
            strict_json.check(told, known, "the quantization")
        except ValueError as error:
            raise UnsupportedError(f"In {path}, {error}, so the meaning of the weights is not known.", _HINT) from None
        for key, value in told.items():
            if value is None:
                continue
            if known.get(key, known.get(f"{key}?")) is not object and before.setdefault(key, (path, value))[1] != value:
                both = " and ".join(dict.fromkeys((before[key][0], path)))
                message = f"{both} contradict each other: {key!r} is {before[key][1]!r:.60} and {value!r:.60}."
                raise UnsupportedError(message, _HINT)
