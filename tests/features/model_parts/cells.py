"""What tests of the trunk ask of parts of models too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

import ckptconv

# Of each option: its default, a value, and how that may be written; values that it has not; and any that it has.
ACCEPTED_VALUES: dict[str, tuple[Any, Any, list[Any]]] = {
    "layers": ("", "0-3,60", ["0-3,60", "0, 1-2,3,60", [0, 1, 2, 3, 60], (0, 1, 2, 3, 60)]),
    "experts": ((), ("0-2",), ["0-2", [0, 1, 2], range(3), ("0-2",), [[0, 1, 2]], [range(3)]]),
    "component": ("", "text", ["text"]),
    "config": ("", "c.json", [Path("c.json"), "c.json"]),
}
REFUSED_VALUES: dict[str, list[Any]] = {
    "layers": [
        "x",
        "1-",
        "-1",
        "3-1",
        "0,0",
        "0-2,1",
        "1.5",
        "9" * 9,
        1.5,
        True,
        [],
        [0.5],
        [True],
        {0: 1},
        b"1",
        "0-9999999",
    ],
    "experts": ["x", "0,0", [[0], ["x"]], [[]], 1.5, {0: 1}, "no-such-file.json"],
    "component": ["audio", 3, "0/2"],
    "config": [3, b"c"],
}
_NUMBERS = st.lists(st.integers(0, 1000), min_size=1, max_size=9, unique=True)
DECIDING = {
    "layers": _NUMBERS,
    "experts": _NUMBERS | st.lists(_NUMBERS, min_size=1, max_size=3),
    "component": st.sampled_from(["text", "vision", "mtp"]),
}


def _turned(here: Path, source: str, out: Path) -> None:
    ckptconv.convert(here / source, out, layers=(1, 0), copy_config=False)


# Ways to compute, and what shows each.
COMPUTING: dict[str, tuple[Callable[..., object], str]] = {"part": (_turned, "a")}
# What becomes of each option in each kind of output; the option, others that it needs, and the source.
ROWS_OF_KINDS: dict[str, tuple[Any, ...]] = {
    "layers": ("hhrr", {"layers": "0"}, (), "layered"),
    "experts": ("hhrr", {"experts": "0"}, (), "layered"),
    "component": ("hhrr", {"component": "text"}, (), "layered"),
    "config": ("shrr", {"config": "../layered/config.json"}),
}

# What people call them, and how they are written.
MEANT = {
    "slice": "convert --layers 0-3",
    "extract": "convert INPUT OUTPUT --include GLOB, --layers 0-3 or --component text",
}
