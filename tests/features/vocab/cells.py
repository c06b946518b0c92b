"""What tests of the trunk ask of the rows of a vocabulary too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

import ckptconv

ACCEPTED_VALUES: dict[str, tuple[Any, Any, list[Any]]] = {"vocab": (None, 8, [8, "8"])}
REFUSED_VALUES: dict[str, list[Any]] = {"vocab": [0, -1, True, 1.5, "", "all"]}
DECIDING = {"vocab": st.integers(1, 1 << 31)}


def _cut(here: Path, source: str, out: Path) -> None:
    ckptconv.convert(here / source, out, vocab=2, copy_config=False)


COMPUTING: dict[str, tuple[Callable[..., object], str]] = {"vocab": (_cut, "a")}
# What becomes of the option in each kind of output; others that it needs, and the source.
ROWS_OF_KINDS: dict[str, tuple[Any, ...]] = {"vocab": ("hhrr", {"vocab": 2}, (), "layered")}
