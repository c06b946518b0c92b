"""A source is opened with its reference, which may know the order of the parameters too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptconv.errors import UsageError
from ckptconv.formats.detect import open_source
from ckptconv.formats.registered import NUMBERS
from ckptconv.formats.source import Source
from ckptconv.process import of_feature
from ckptconv.storage.paths import is_pipe, normalize


def opened(source: Source, asked: Mapping[str, Any], reaching: Mapping[str, Any]) -> Source:
    """Return `source` with the reference that the options `asked` name."""
    like = asked["like"]
    if is_pipe(like):
        raise UsageError(f"--like {like} is a pipe, but a reference must be a file or directory.")
    return source.computing(like=open_source(normalize(like), structure=False, **reaching))


def orders(asked: Mapping[str, Any], reaching: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the order of the reference's weights, if it keeps one, and states are wanted."""
    files = of_feature(NUMBERS, "order_files") if asked["states"] else None
    order = files.order_in(normalize(asked["like"]), reaching) if files else None
    return (order,) if order else ()
