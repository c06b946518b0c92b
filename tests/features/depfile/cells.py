"""What tests of the trunk ask of rules for make too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckptconv.cli import registered

# Of the option: its default, a value, and how that may be written; values that it has not; and what becomes of it in
# each kind of output.
ACCEPTED_VALUES: dict[str, tuple[Any, Any, list[Any]]] = {"depfile": ("", "m.d", [Path("m.d"), "m.d"])}
REFUSED_VALUES: dict[str, list[Any]] = {"depfile": [3, True]}
ROWS_OF_KINDS: dict[str, tuple[Any, ...]] = {"depfile": ("hhhh", {"depfile": "x.d"})}
# A file beside the output.
BESIDE = ("--depfile",)
OF_ONE = ("--depfile=d",)
WHOLE = ("pt2safetensors model.pt out.safetensors --depfile",)
SAID = [
    ("pt2safetensors model.pt --manifest x --depfile x", 2, "both specify x"),
    ("convert model.pt x --skip-existing", 2, "Use --no-clobber, which replaces nothing, or --depfile with make."),
]
# What others make, by command.
_MAKING = {
    "average": "average g1.safetensors g2.safetensors -o new.safetensors",
    "dcp2safetensors": "dcp2safetensors dcp new",
    "merge": "merge base ad1 -o new.safetensors",
    "safetensors2dcp": "safetensors2dcp g1.safetensors new",
    "safetensors2pt": "safetensors2pt g1.safetensors new.pt",
    "virtual": "virtual a.pt x.virtual.json",
    "zero-to-fp32": "zero-to-fp32 zero new",
}
REFUSED = """\
convert a.pt new.safetensors --depfile Makefile
convert a.pt new.safetensors --depfile empty-rule.d
pt2safetensors a.pt new.safetensors --depfile g1.safetensors
""" + "".join(f"{words} --depfile Makefile\n" for command, words in _MAKING.items() if command in registered.COMMANDS)
AGAIN = """\
convert a.pt ruled.safetensors --manifest r.json --depfile r.d
"""
BY_BYTES = {*AGAIN.splitlines()}
# What a command writes to a directory that others write to: the name, and its words.
WRITTEN: dict[str, tuple[str, tuple[object, ...]]] = {
    "depfile": ("x.d", ("convert", "MODEL", "OWN", "--depfile", "PATH"))
}
