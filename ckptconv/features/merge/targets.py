"""Which modules PEFT adapts, as a configuration says. It leaves out factors of others when it loads an adapter.

Source: PEFT 0.21, `check_target_module_exists` of tuners/tuners_utils.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ckptconv.errors import UnsupportedError
from ckptconv.formats.companions import ADAPTER_CONFIG
from ckptconv.structure.regexes import ExpressionError, LimitsError, first_matches
from ckptconv.text import some

_INCLUDED, _EXCLUDED, _LAYERS, _STACKS = "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"
# All but the head, whatever they are called.
_ALL = "all-linear"
# A stack of layers in a name, where the configuration does not say what it is called.
_ANY_STACK = "[^.]*"
_PLAIN = re.compile(r"[\w.]+")


class Targets(NamedTuple):
    """What a configuration says of the modules that are adapted: an expression, the ends of names, or None for all; the
    same of those that are not; the numbers of `layers`, None for all, and what their `stacks` are called."""

    included: str | tuple[str, ...] | None = None
    excluded: str | tuple[str, ...] | None = None
    layers: frozenset[int] | None = None
    stacks: tuple[str, ...] = ()

    def left_out(self, modules: Sequence[str]) -> list[str]:
        """Return those of `modules` that are not adapted. Raise UnsupportedError for expressions that are none."""
        if self.included is None:
            return []
        included = [*_matched(_INCLUDED, self.included, modules)]
        excluded = [*_matched(_EXCLUDED, self.excluded or (), modules)]
        every = zip(modules, included, excluded, strict=True)
        return [name for name, is_in, is_out in every if is_out or not (is_in and self._is_in_layer(name))]

    def _is_in_layer(self, module: str) -> bool:
        if self.layers is None or isinstance(self.included, str) or module in (self.included or ()):
            return True
        found = (re.match(rf".*\.{stack}\.(\d+)\.", module) for stack in self.stacks or (_ANY_STACK,))
        number = next((match[1] for match in found if match), "")
        return bool(number) and int(number) in self.layers


def read_targets(told: Mapping[str, Any], file: object) -> Targets:
    """Return what a configuration says; `file` has it. Raise UnsupportedError for what is not understood."""
    layers = told.get(_LAYERS)
    numbers = [layers] if type(layers) is int else layers or []
    stacks = _names(told, _STACKS, file) or ()
    stacks = (stacks,) if isinstance(stacks, str) else stacks
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
        raise _unknown(_LAYERS, file)
    if not all(map(_PLAIN.fullmatch, stacks)):
        raise _unknown(_STACKS, file)
    included = _names(told, _INCLUDED, file)
    return Targets(
        None if included == _ALL else included,
        _names(told, _EXCLUDED, file),
        frozenset(numbers) if numbers else None,
        stacks,
    )


def _names(told: Mapping[str, Any], key: str, file: object) -> str | tuple[str, ...] | None:
    value = told.get(key)
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
        (found,) = first_matches([[rf"(?:{named})\Z"]], modules)
    except (ExpressionError, LimitsError) as error:
        why = "is not a regular expression" if isinstance(error, ExpressionError) else "takes too long to match"
        raise UnsupportedError(f"{key} in {ADAPTER_CONFIG} {why}: {some([named])}.") from error
    yield from (number is not None for number in found)


def _unknown(key: str, file: object) -> UnsupportedError:
    return UnsupportedError(f"{file}: its {key} is not understood.")
