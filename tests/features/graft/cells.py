"""What tests of the trunk ask of grafts too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ckptconv

ACCEPTED_VALUES: dict[str, tuple[Any, Any, list[Any]]] = {"graft": ((), ("r:*",), ["r:*", ("r:*",), ["r:*"]])}
REFUSED_VALUES: dict[str, list[Any]] = {"graft": [3, b"x", [3]]}


def _grafted(here: Path, source: str, out: Path) -> None:
    ckptconv.convert(here / source, out, exclude="*.gate_proj.*", graft=f"{here / 'b'}:*.gate_proj.*")


COMPUTING: dict[str, tuple[Callable[..., object], str]] = {"graft": (_grafted, "a")}
# What becomes of the option in each kind of output; others that it needs, and the source.
ROWS_OF_KINDS: dict[str, tuple[Any, ...]] = {"graft": ("hhrr", {"graft": "../more.safetensors:more"})}

# What people call it, and how it is written.
MEANT = {"graft": "convert INPUT OUTPUT --graft REF:GLOB"}
