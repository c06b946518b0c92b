"""What tests of the trunk ask of S3 too."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stores import Place


def _place() -> Place:
    from features.s3.server import OnS3, shared

    return OnS3(shared())


PLACES: dict[str, Callable[[], Place]] = {"s3": _place}


def _golden() -> dict[str, Any]:
    from features.s3.asked import of_s3

    return of_s3()


# Inputs, whether they are directories, templates, and what outputs are called.
CALLED = [("s3://bucket/dir/x.pt", False, "{parent}-{name}.safetensors", "out/dir-x.pt.safetensors")]
# What the golden set records beside cases, by name.
GOLDEN: dict[str, Callable[[], Any]] = {"s3": _golden}
