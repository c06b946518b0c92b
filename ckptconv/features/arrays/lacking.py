"""Refuse the options of `convert` that calls of this feature lack, with what to do in Python instead."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ckptconv.errors import UsageError
from ckptconv.options.option import Option
from ckptconv.options.table import OPTIONS

_Function = TypeVar("_Function", bound=Callable[..., Any])


def without(called: str, table: Mapping[str, Option], advice: Mapping[str, str]) -> Callable[[_Function], _Function]:
    """Decorate the function that is `called` so, and has the options of `table`: raise UsageError for other options of
    `convert`. `advice` has {options in one text: what to do instead}."""
    lacking = OPTIONS.keys() - table.keys() - {option.former_name for option in table.values()}

    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            for name in keywords:
                if name in lacking:
                    has = ", ".join(sorted(table))
                    instead = next((text for names, text in advice.items() if name in names.split()), "")
                    raise UsageError(f"{called} has no option {name}, which convert has; {called} has {has}.", instead)
            return function(*args, **keywords)

        return call

    return decorate
