"""What tests of the trunk ask of the hub too."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stores import Place


def _place() -> Place:
    from features.hub.places import Repository, shared

    return Repository(shared())


REPOSITORIES: dict[str, Callable[[], Place]] = {"hub": _place}
# Inputs, whether they are directories, templates, and what outputs are called.
CALLED = [
    ("hf://org/model@v1/", True, "", "out/model"),
    ("hf://org/model@refs/pr/1", True, "{stem}-{name}", "out/model-1"),
    ("hf://org/model@v%2F1", True, "{name}", "out/model@v%2F1"),
    ("hf://org/model@v1/x@2.pt", False, "", "out/x@2.safetensors"),
    ("hf://org/model@v1/pytorch_model.bin.index.json", False, "", "out/model"),
]
