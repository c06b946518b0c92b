"""What tests of the trunk ask of the rows of a vocabulary too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from safetensors.torch import save_file

import ckptconv

ACCEPTED_VALUES: dict[str, tuple[Any, Any, list[Any]]] = {"vocab": (None, 8, [8, "8"])}
REFUSED_VALUES: dict[str, list[Any]] = {"vocab": [0, -1, True, 1.5, "", "all"]}
DECIDING = {"vocab": st.integers(1, 1 << 31)}


def SOURCES(here: Path) -> None:  # noqa: N802
    """Put a model with embeddings into a directory."""
    from computed import NAMES, ROWS, random

    (here / "words").mkdir()
    tensors = {name: random(ROWS, 4, seed=at) for at, name in enumerate((*NAMES[1:], "embed_tokens.weight"))}
    save_file(tensors, here / "words" / "model.safetensors")


def _cut(here: Path, source: str, out: Path) -> None:
    ckptconv.convert(here / source, out, vocab=2, copy_config=False)


COMPUTING: dict[str, tuple[Callable[..., object], str]] = {"vocab": (_cut, "words")}
# What becomes of the option in each kind of output; others that it needs, and the source.
ROWS_OF_KINDS: dict[str, tuple[Any, ...]] = {"vocab": ("hhrr", {"vocab": 2}, (), "layered")}

# What people call it, and how it is written.
MEANT = {"resize": "convert --vocab N"}
# Options of other programs, and the advice.
OTHER_OPTIONS = {"--resize-token-embeddings": "--vocab N keeps the first N rows"}
