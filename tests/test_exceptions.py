"""Every exception crosses to another process as it was."""

from __future__ import annotations

import importlib
import pickle
import pkgutil
from typing import Any

import pytest
from cells import of_features

import ckptconv
from ckptconv.storage.writing import writing

# What those are made of that take other arguments than a text.
MADE_OF: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "DifferenceError": (("It differs.", "Look."), {"what": "value", "index": [1]}),
    "ExpressionError": ((0, 1, "a reason"), {}),
    "ForeignError": (("/tmp/place", "a link"), {}),
    "StoppedError": (("It was stopped.",), {"exit_code": 143}),
    "_MisfitError": (("a reason", ckptconv.UnsupportedError), {}),
    "_SyntaxError": (("a bracket", 3), {}),
    **{name: made for table in of_features("EXCEPTIONS") for name, made in table.items()},
}


def all_exceptions() -> list[type[BaseException]]:
    """Every class of an exception that is defined in the package."""
    found = {}
    for info in pkgutil.walk_packages(ckptconv.__path__, "ckptconv."):
        if info.name != "ckptconv.__main__":
            for value in vars(importlib.import_module(info.name)).values():
                is_own = isinstance(value, type) and value.__module__.startswith("ckptconv.")
                if is_own and issubclass(value, BaseException):
                    found[f"{value.__module__}.{value.__qualname__}"] = value
    return [found[name] for name in sorted(found)]


@pytest.mark.parametrize("kind", all_exceptions(), ids=lambda kind: kind.__name__)
def test_it_survives_pickling(kind: type[BaseException]) -> None:
    arguments, named = MADE_OF.get(kind.__name__, (("A text.",), {}))
    error = kind(*arguments, **named)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(error, protocol))
        assert type(again) is kind
        assert str(again) == str(error)
        assert again.args == error.args
        assert vars(again) == vars(error)


def test_an_error_of_ours_that_is_an_error_of_the_system_too_stays_what_it_is() -> None:
    with pytest.raises(ckptconv.MissingError, match=r"^gone does not exist\.$"), writing("out.safetensors"):
        raise ckptconv.MissingError("gone does not exist.")
