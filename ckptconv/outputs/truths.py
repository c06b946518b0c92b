"""The statements of a configuration that are not true of an output's weights. Features know them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from typing import Any

from ckptconv.tensors.lazy import LazyTensor

# Modules with `untrue`, which yields a warning for each such statement.
TRUTHS: tuple[str, ...] = (
    "ckptconv.features.model_checks.truth",
    "ckptconv.features.model_parts.truth",
)  # fmt: skip


def untrue(
    config: Mapping[str, Any], before: Collection[str], after: Collection[str], tensors: Mapping[str, LazyTensor]
) -> Iterator[str]:
    """Yield warnings about a `config` that is to describe the `tensors` of an output. `before` are the names of a
    source's tensors, and `after` those of them that the output has."""
    for module in TRUTHS:
        yield from import_module(module).untrue(config, before, after, tensors)
