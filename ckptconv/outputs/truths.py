"""The statements of a configuration that are not true of an output's weights. Features know them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

# Modules with `untrue`, which yields a warning for each such statement.
TRUTHS: tuple[str, ...] = (
    "ckptconv.features.model_checks.truth",
    "ckptconv.features.maps.publishing",
    "ckptconv.features.merge.publishing",
)  # fmt: skip


def untrue(config: Mapping[str, Any] | None, *about: Any) -> Iterator[str]:
    """Yield warnings about a `config` that is to describe an output, or about one to publish, which may have none.

    `about` it are the names of the source's tensors, and those of them that the output has; its tensors; whether it is
    to publish; and the stem of its files, such as "model".
    """
    for module in TRUTHS:
        yield from import_module(module).untrue(config, *about)
