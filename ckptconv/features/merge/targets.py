"""The modules that PEFT adapts by its configuration. When it loads an adapter, it leaves out the factors of others.

Source: PEFT 0.21, `check_target_module_exists` of tuners/tuners_utils.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ckptconv.errors import UnsupportedError
from ckptconv.features.regexes.regexes import ExpressionError, LimitsError, first_matches
from ckptconv.formats.source import ADAPTER_CONFIG
from ckptconv.text import some

_INCLUDED, _EXCLUDED, _LAYERS, _STACKS = "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"
# All modules except the head, whatever their names are.
_ALL = "all-linear"
# The name of a stack of layers, if the configuration does not give one.
_ANY_STACK = "[^.]*"
_PLAIN = re.compile(r"[\w.]+")


class Targets(NamedTuple):
    """The adapted modules of a configuration: an expression, the ends of names, or None for all; the same for the
    excluded modules; the numbers of `layers`, None for all, and the names of their `stacks`."""

    included: str | tuple[str, ...] | None = None
    excluded: str | tuple[str, ...] | None = None
    layers: frozenset[int] | None = None
    stacks: tuple[str, ...] = ()

    def left_out(self, modules: Sequence[str]) -> list[str]:
        """Return the `modules` that are not adapted. Raise UnsupportedError for invalid expressions."""
        if self.included is None:
            return []
        included = [*_matched(_INCLUDED, self.included, modules)]
        excluded = [*_matched(_EXCLUDED, self.excluded or (), modules)]
        every = zip(modules, included, excluded, strict=True)
        return [name for name, is_in, is_out in every if is_out or not (is_in and self._is_in_layer(name))]

    def _is_in_layer(self, module: str) -> bool:
        if self.layers is None or isinstance(self.included, str) or module in (self.included or ()):
            return True
        matches = (re.match(rf".*\.{stack}\.(\d+)\.", module) for stack in self.stacks or (_ANY_STACK,))
        number = next((match[1] for match in matches if match), "")
        return bool(number) and int(number) in self.layers


def read_targets(config: Mapping[str, Any], file: object) -> Targets:
    """Return the targets of a configuration; `file` has it. Raise UnsupportedError for unknown values."""
    layers = config.get(_LAYERS)
    numbers = [layers] if type(layers) is int else layers or []
    stacks = _names(config, _STACKS, file) or ()
    stacks = (stacks,) if isinstance(stacks, str) else stacks
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
        raise _unknown(_LAYERS, file)
    if not all(map(_PLAIN.fullmatch, stacks)):
        raise _unknown(_STACKS, file)
    included = _names(config, _INCLUDED, file)
    return Targets(
        None if included == _ALL else included,
        _names(config, _EXCLUDED, file),
        frozenset(numbers) if numbers else None,
        stacks,
    )


def _names(config: Mapping[str, Any], key: str, file: object) -> str | tuple[str, ...] | None:
    value = config.get(key)
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return tuple(value)
    if value is not None and not isinstance(value, str):
        raise _unknown(key, file)
    return value


def _matched(key: str, named: str | tuple[str, ...], modules: Sequence[str]) -> Iterator[bool]:
    if not isinstance(named, str):
        ends = tuple(f".{name}" for name in named)
        yield from (name in named or name.endswith(ends) for name in modules)
        return
    try:
        (numbers,) = first_matches([[rf"(?:{named})\Z"]], modules)
    except (ExpressionError, LimitsError) as error:
        why = "is not a regular expression" if isinstance(error, ExpressionError) else "takes too long to match"
        raise UnsupportedError(f"{key} in {ADAPTER_CONFIG} {why}: {some([named])}.") from error
    yield from (number is not None for number in numbers)


def _unknown(key: str, file: object) -> UnsupportedError:
    return UnsupportedError(f"{file}: the value of its {key} is not supported.")
