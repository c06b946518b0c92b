"""What tests of the trunk ask of `inspect` too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ckptconv
from ckptconv.features.inspect.options import OF_INSPECT
from ckptconv.features.inspect.summary import summarize
from ckptconv.formats.detect import open_source

# Options of the command that no other has.
FLAGS = {"inspect": (OF_INSPECT,)}
# The command, which shows what is at a path, and writes nothing.
LOOKING = ["inspect"]
# Functions of the library that are given a path, and those that open it.
PATHS: dict[str, Callable[[Any], object]] = {"inspect": ckptconv.inspect}
OPENING = [ckptconv.inspect]


def look_at(path: Path) -> object:
    """Look at a file that was changed, as `fuzz` does."""
    return summarize(open_source(path))


# ---------------------------------------------------------------------------------------------------- what is printed

# The command, and what it is called with, one after another.
WAYS: dict[str, list[list[Any]]] = {
    "inspect": [
        ["model.pt"],
        ["model.safetensors", "--html", "page.html"],
        ["model.pt", "--stats"],
    ]
}
# A command that reads any input, whether it has an OUTPUT, and whether it says of a bad one what `pt2safetensors` says.
READERS = {"inspect": (False, True)}
COMMANDS = ["inspect"]
# Words that people use for it.
MEANT = {"ls": "inspect", "inspct": "inspect"}
# Words of a command, and a path that it writes.
WHOLE = ["inspect model.pt --html"]
SAID = [
    ("inspect none --html gone/page.html", 2, "the directory gone does not exist"),
    ("inspect ''", 2, "The path of the input is empty.;not set?"),
    ("inspect none.pt", 2, "none.pt does not exist"),
    ("model.pt", 2, "model.pt is not a command;ckptconv inspect model.pt shows its contents"),
    ("inspect none.pt --all", 2, "Use --key PATH to show a part. ckptconv inspect -v shows all tensor names."),
]


# --------------------------------------------------------------------------------------------------- what is replaced

# Words of a command that writes a page; what is made of what comes next.
PAGES = [("inspect", "--html")]
MAKING = [("inspect --html new.html a.pt", "new.html")]
REFUSED = """\
inspect --html a.pt b.pt
inspect --html b.pt b.pt
inspect --html notes.md a.pt
inspect --html page.html a.pt
inspect --html linked.safetensors a.pt
inspect --html b.pt b.pt --overwrite
inspect --html hf/config.json hf
"""
DONE: dict[str, set[str]] = {
    "inspect --html notes.md a.pt --overwrite": {"notes.md"},
    "inspect --html new.html a.pt": set(),
}
AGAIN = """\
inspect --html new.html a.pt
"""
WRITING: list[Callable[[], object]] = [lambda: ckptconv.inspect("a.pt", html="b.pt")]
# What a command writes to a directory that others write to: the name, and its words.
WRITTEN: dict[str, tuple[str, tuple[object, ...]]] = {"page": ("x.html", ("inspect", "WEIGHTS", "--html", "PATH"))}
