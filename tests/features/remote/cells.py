"""What tests of the trunk ask of URLs too."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stores import Place


def _place() -> Place:
    from stores import in_memory

    return in_memory()


PLACES: dict[str, Callable[[], Place]] = {"memory": _place}
# Commands that would replace what others made.
REFUSED = """\
convert g1.safetensors local:///{here}/g1.safetensors --overwrite
"""
# Inputs, whether they are directories, templates, and what outputs are called.
CALLED = [("memory://bucket/dir/x.pt", False, "{parent}-{name}.safetensors", "out/dir-x.pt.safetensors")]
