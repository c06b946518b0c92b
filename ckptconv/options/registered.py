"""The options of conversions that features add."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ckptconv.process import of_feature

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
}
# Of these, those that change a source when it is opened, in this order, and what asks for that: options, or `recorded`,
# what the record of an output says of how its source was changed. `opening.py` in the folder has `opened(source, asked,
# reaching)`, which returns the source as the options `asked` say, the dtype among them; `reaching` says how checkpoints
# are reached. It may have `wanted(wanted, asked, reaching)`, which returns what is to be read then, and
# `orders(asked, reaching)`, which returns the orders of parameters that it knows.
OPENED: Mapping[str, str] = {
    "like": "like",
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


def opening(asked: Mapping[str, Any]) -> list[Any]:
    """Return the modules `opening` of the features that change a source as is `asked`."""
    chosen = (feature for feature, names in OPENED.items() if any(asked.get(name) for name in names.split()))
    return [module for feature in chosen if (module := of_feature(feature, "opening"))]
