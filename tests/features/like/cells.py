"""What tests of the trunk ask of references too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import strategies as st

import ckptconv

# Of each option: its default, a value, and how that may be written; and values that it has not.
ACCEPTED_VALUES: dict[str, tuple[Any, Any, list[Any]]] = {
    "like": ("", "reference", [Path("reference"), "reference"]),
    "partial": (False, True, [True]),
    "fill": (False, True, [True]),
}
REFUSED_VALUES: dict[str, list[Any]] = {"like": [3, b"reference", ["reference"]]}
DECIDING = {"partial": st.booleans(), "fill": st.booleans()}
# What becomes of each option in each kind of output; what an output is like is of its kind.
_MORE = (("like", "../more.safetensors"),)
ROWS_OF_KINDS: dict[str, tuple[Any, ...]] = {
    "like": ("hhss", {"like": "../like"}),
    "partial": ("hhss", {"partial": True}, _MORE),
    "fill": ("hhss", {"fill": True}, _MORE),
}


def _like(here: Path, source: str, out: Path) -> None:
    ckptconv.convert(here / source, out, like=here / "b")


# A way to compute, and what shows it.
COMPUTING = {"like": (_like, "a")}
# Options of other programs, and the advice on them.
OTHER_OPTIONS = {"--keep-dtype": "--like REF casts each tensor", "--hf-assets-path": "--like REF copies config.json"}
