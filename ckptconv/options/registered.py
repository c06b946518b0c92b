"""The options of conversions that features add."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ckptconv.process import of_feature

if TYPE_CHECKING:
    from ckptconv.errors import CkptconvError

# The options of each feature that adds some to conversions: `options.py` in its folder has them as `GIVEN`, a subclass
# of `Given`, which imports nothing of the table. The lines stay where a feature is not: its options are refused by name
# then.
FEATURES: Mapping[str, str] = {
    "quantized": "dequantize quantize requantize keep",
    "provenance": "attest",
    "maps": "map size",
    "dcp": "chunks model_key optimizer_key flat_optimizer fill_states",
    "like": "like partial fill",
    "universal": "universal zero_stage fresh_optimizer",
    "parts": "part",
    "steps": "last_good",
    "model_parts": "layers experts component vocab graft config",
}
# Of these, those that change what is opened, or a source when it is opened, in this order, and what asks for that:
# options, or `recorded`, what the record of an output says of how its source was changed. `opening.py` in the folder
# has some of these functions. The options `asked` have the dtype among them; `reaching` is how checkpoints are reached.
# - `placed(path, asked, reaching)` returns the path of what is opened in the place of `path`;
# - `wanted(wanted, asked, reaching)` returns what is to be read;
# - `orders(asked, reaching)` returns the orders of parameters that it knows;
# - `opened(source, asked, reaching)` returns the source as the options say;
# - `advise(error, path, options)` adds to the error of a conversion of `path` which option helps, asked for or not.
OPENED: Mapping[str, str] = {
    "steps": "last_good",
    "like": "like",
    "model_parts": "layers experts component vocab graft config",
    "quantized": "dequantize requantize",
    "maps": "map size recorded",
}
# Of these, those that do so for an output of weights alone: what it is to be like.
FITTED = ("like",)


@functools.cache
def options_of(feature: str) -> Mapping[str, Any]:
    """Return the options of a feature by name; none if it is not here."""
    module = of_feature(feature, "options")
    return MappingProxyType(module.GIVEN.table if module else {})


def missing(name: str) -> str:
    """Return the feature, which is not here, of the option `name`; "" if it is no such option."""
    every = (feature for feature, names in FEATURES.items() if name in names.split())
    return next((feature for feature in every if name not in options_of(feature)), "")


def opening(asked: Mapping[str, Any], hook: str) -> list[Callable[..., Any]]:
    """Return the functions `hook` of the features that change what is opened as is `asked`."""
    return [function for feature in _chosen(asked) for function in _hooks(feature, hook)]


def placed(path: str, asked: Mapping[str, Any], reaching: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the path of what is opened in the place of `path`, as is `asked`, and what is asked of that."""
    left = dict(asked)
    for feature in _chosen(asked):
        for place in _hooks(feature, "placed"):
            path = place(path, asked, reaching)
            left = {name: value for name, value in left.items() if name not in OPENED[feature].split()}
    return path, left


def advise(error: CkptconvError, path: str, options: Mapping[str, Any]) -> None:
    """Add to the error of converting `path` which option of a feature helps."""
    for feature in OPENED:
        for hook in _hooks(feature, "advise"):
            hook(error, path, options)


def _chosen(asked: Mapping[str, Any]) -> list[str]:
    return [feature for feature, names in OPENED.items() if any(asked.get(name) for name in names.split())]


def _hooks(feature: str, hook: str) -> list[Callable[..., Any]]:
    """Return the function `hook` of the module `opening` of a feature, if it has one."""
    module = of_feature(feature, "opening")
    return [getattr(module, hook)] if hasattr(module, hook) else []
