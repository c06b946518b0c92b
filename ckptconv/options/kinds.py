"""The kinds of value that options take: how each is parsed and checked, and its types for Python and the shell."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

from ckptconv.errors import UsageError
from ckptconv.options.registered import missing
from ckptconv.process import lacking
from ckptconv.text import brief, count_of, parse_count, parse_path, parse_size

# The default memory for buffers. If a file is remote, requests are large, and several run at once; if tensors are
# transposed, the longer the runs that are read and written, the fewer they are.
USUAL_MEMORY, FAR_MEMORY, SCATTERED_MEMORY = 8 << 20, 24 << 20, 16 << 20
MOST_ITEMS = 100_000_000  # items in a row, or lines of a list
DTYPES = ("float32", "bfloat16", "float16", "keep")
# Short names of dtypes.
SHORT_DTYPES = {
    **dict.fromkeys(("fp32", "f32", "float"), "float32"),
    **dict.fromkeys(("fp16", "f16", "half"), "float16"),
    "bf16": "bfloat16",
}
# Names of formats of fewer bits, which are no dtypes that weights are cast to.
_CODES = re.compile(r"(?:mx|nv)?(?:fp|float|f|int|uint|nf|e\dm|q)[1-8](?![0-9])", re.IGNORECASE)


class Rules(tuple[str, ...]):
    """Renaming rules from a file. Matching them can take exponential time, so they are not compiled here."""


class OptionWarning(UserWarning):
    """A warning about the way in which an option was given."""


class Default(str):
    """Text that applies to every command on a machine: a command that ignores it gives no warning."""

    __slots__ = ()


# ------------------------------------------------------------------------------------------------------ kinds of value


class ValueKind(NamedTuple):
    """The values that an option takes.

    `parse` converts a caller's value; it raises UsageError, which names the option by its second argument. `words` is
    its type on the command line, `stored` its type in JSON, and `unset` the value if none was given. `accepts` is its
    type in Python as type checkers read it, without None; the names that are not Python's are those of `keywords`.
    `values` are those that a shell completes, if they are few; or `registry`, "module:name", has them.
    """

    parse: Callable[[Any, str], Any]
    words: Any = str
    stored: type = str
    unset: Any = None
    accepts: str = "str"
    values: tuple[str, ...] = ()
    registry: str = ""

    @property
    def choices(self) -> tuple[str, ...]:
        """The values, if they are few."""
        module, _, name = self.registry.partition(":")
        return tuple(getattr(import_module(module), name)) if self.registry else self.values


def _text(value: Any, called: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{called} {brief(value)} is not text.")
    return value


def _flag(value: Any, called: str) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{called} {brief(value)} is neither True nor False.")
    return value


def _texts(value: Any, called: str) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, (tuple, list)) or not all(isinstance(text, str) for text in value):
        raise UsageError(f"{called} {brief(value)} is neither text nor a list of texts.")
    return value if isinstance(value, tuple) else tuple(value)


def _rules(value: Any, called: str) -> tuple[str, ...]:
    rules = _texts(value, called)
    for rule in () if isinstance(rules, Rules) else rules:
        parse_rule(rule, called)
    return rules


def parse_rule(text: str, called: str) -> tuple[re.Pattern[str], str]:
    """Return the pattern and the replacement of a renaming rule. Raise UsageError, naming the option, for others."""
    pattern, equals, replacement = text.rpartition("=")
    if not equals:
        raise UsageError(f"{called} {text!r} is not of the form REGEX=REPLACEMENT.", "'a=b' replaces a with b.")
    if re.search(r"\$\d", replacement):
        raise UsageError(f"{called} {text!r} refers to a group by $.", r"Groups are \1, \2, in quotes: '(a)=\1b'.")
    try:
        return re.compile(pattern), replacement
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(f"{called} {text!r}: {pattern!r} is not a regular expression: {error}.") from error


def _number(value: Any, called: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise UsageError(f"{called} is {brief(value)}; expected a number not below 0, such as 1e-5.")
    return number


def _size(value: Any, called: str) -> int:
    """Return a number of bytes. Raise UsageError for a text without a unit if it is less than a megabyte."""
    size = parse_size(value, called)
    if isinstance(value, str) and not value.strip()[-1].isalpha() and size < 10**6:
        hint = f"Write {size}GB or {size}MB, or {size}B if bytes are meant."
        raise UsageError(f"{called} {value} has no unit, so it means {count_of(size, 'byte')}.", hint)
    return size


def _mapping(value: Any, called: str) -> dict[str, Any]:
    kind = "mapping by text"
    if isinstance(value, str):
        import json

        kind = "JSON object"
        try:
            value = json.loads(value or "{}")
        except (ValueError, RecursionError) as error:
            raise UsageError(f'{called} is not JSON, such as \'{{"key": "value"}}\': {error}.') from error
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise UsageError(f"{called} is not a {kind}.")
    return dict(value)


def dtype_name(value: Any, called: str) -> str:
    """Return the full name of a dtype from its text, or from a dtype of torch or numpy, which are not imported."""
    text = value if isinstance(value, str) else str(getattr(value, "name", getattr(value, "__name__", value)))
    if not isinstance(value, str) and not (hasattr(value, "itemsize") or text.startswith("torch.")):
        hint = f"Give the name of a dtype, or a dtype of torch or numpy.{_of_some(called, isinstance(value, Mapping))}"
        raise UsageError(f"{called} {text if isinstance(value, type) else brief(value)} is not a dtype.", hint)
    text = text.removeprefix("torch.").removeprefix("numpy.")
    name = SHORT_DTYPES.get(text.lower(), text.lower())
    return name if name in DTYPES else text


def _of_some(called: str, is_asked: bool) -> str:
    """Return advice on tensors that keep their dtype; "" if it is not asked for, or no feature takes them."""
    way = "--exclude GLOB --graft INPUT:GLOB" if called.startswith("-") else "exclude=GLOB, graft='INPUT:GLOB'"
    return "" if not is_asked or missing("graft") else f" To leave some tensors of a conversion unchanged, use {way}."


def _dtype(value: Any, called: str) -> str:
    name = dtype_name(value, called)
    if name not in DTYPES:
        hint = f"Give fp32, bf16, fp16 or keep.{_of_some(called, bool(re.search('[*=:,]', name)))}"
        if _CODES.match(name) and not missing("quantize"):
            way = "--quantize fp8-block" if called.startswith("-") else "quantize='fp8-block'"
            hint += f" To write codes and scales, use another option, such as {way}."
        raise UsageError(f"{called} {brief(name)} is not a supported output dtype.", hint)
    return name


def choice(*choices: str, unset: Any = None, words: Mapping[str, str] = MappingProxyType({})) -> ValueKind:
    """Return the kind of values that are `choices`; a wrong one that is in `words` is reported as another."""

    def parse(value: Any, called: str) -> str:
        if not isinstance(value, str) or (value not in choices and value != unset):
            from ckptconv.options.words import not_among

            raise not_among(value, called, choices, words)
        return value

    return ValueKind(parse, unset=unset, accepts=f"Literal[{', '.join(map(repr, choices))}]", values=choices)


def name_in(place: str, accepts: str) -> ValueKind:
    """Return the kind of values that are names in the registry at `place`, "module:name", which is imported when there
    is a value to check. Its module may have `OTHER_WORDS` for them, and as `ABSENT` those whose features are missing.
    `accepts` is its type in Python."""

    def parse(value: Any, called: str) -> str:
        value = value.replace("_", "-") if isinstance(value, str) else value
        if isinstance(value, str) and (not value or value in kind.choices):
            return value
        module = import_module(place.partition(":")[0])
        if isinstance(value, str) and value in getattr(module, "ABSENT", {}):
            raise lacking(f"{called} {value}", module.ABSENT[value])
        from ckptconv.options.words import not_among

        raise not_among(value, called, kind.choices, getattr(module, "OTHER_WORDS", {}))

    kind = ValueKind(parse, unset="", accepts=accepts, registry=place)
    return kind


def counted(least: int, most: int) -> ValueKind:
    return ValueKind(lambda value, called: parse_count(value, called, least, most), stored=int, accepts="int | str")


_SEVERAL = "str | list[str] | tuple[str, ...]"
TEXT = ValueKind(_text, unset="")
PATH = ValueKind(parse_path, unset="", accepts="str | os.PathLike[str]")
FLAG = ValueKind(_flag, bool, bool, unset=False, accepts="bool")
SWITCH = ValueKind(_flag, bool, bool, accepts="bool")
TEXTS = ValueKind(_texts, list[str], list, unset=(), accepts=_SEVERAL)
RULES = ValueKind(_rules, list[str], list, unset=(), accepts=_SEVERAL)
MAPPING = ValueKind(_mapping, stored=dict, unset={}, accepts="Mapping[str, Any] | str")
NUMBER = ValueKind(_number, stored=float, accepts="float | str")
SIZE = ValueKind(_size, stored=int, accepts="int | str")
DTYPE = ValueKind(
    _dtype,
    accepts="DTypeName | TorchDType",
    values=(*DTYPES, "fp32", "bf16", "fp16"),
)
TIED = choice("alias", "duplicate")
OPAQUE = choice("keep", "drop", unset="")
ALGORITHMS = ("sha256", "blake3")
DIGEST = choice(*ALGORITHMS, unset="")
# The kinds of output, and those of them that are checkpoints of torch.distributed.checkpoint.
OUTPUT_KIND = name_in("ckptconv.outputs.kinds:NAMED", "OutputName")
CHECKPOINT = name_in("ckptconv.outputs.kinds:CHECKPOINTS", "CheckpointName")
