"""The statements of a configuration that are not true of an output's weights. Features know them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple

from ckptconv.formats.adapter_names import is_adapter
from ckptconv.tensors.lazy import LazyTensor

# Modules with `untrue`, which yields a warning for each such statement.
TRUTHS: tuple[str, ...] = (
    "ckptconv.features.model_checks.truth",
    "ckptconv.features.maps.publishing",
    "ckptconv.features.merge.publishing",
)  # fmt: skip


class Weights(NamedTuple):
    """Weights of an output: the names of the source's tensors, and those of them that the output has; its tensors by
    their new names; whether they are to be published; the stem of their files, such as "model"; and the key in the
    source under which they were asked for."""

    before: Collection[str]
    after: Collection[str]
    tensors: Mapping[str, LazyTensor]
    publishing: bool
    stem: str
    key: str = ""

    @property
    def are_odd(self) -> bool:
        """Whether the names fit no model: some are those of an adapter's factors, or all are those of states."""
        return is_adapter(self.tensors) or (not self.key and all("state." in name for name in self.tensors))


def untrue(config: Mapping[str, Any] | None, weights: Weights) -> Iterator[str]:
    """Yield warnings about a `config` that is to describe `weights`, or about `weights` to publish, maybe without one.
    Of other weights without one, only odd names are worth a warning."""
    for module in TRUTHS if config is not None or weights.publishing or weights.are_odd else ():
        yield from import_module(module).untrue(config, weights)
