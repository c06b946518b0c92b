"""What tests of the trunk ask of `scan` too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ckptconv
from ckptconv.features.scan.options import COMMAND

# Options of commands that no other command has, by the beginning of the command.
FLAGS = {"scan": (COMMAND,)}
# Functions of the library that are given a path, and those that open it.
PATHS: dict[str, Callable[[Any], object]] = {"scan": ckptconv.scan}
OPENING = [ckptconv.scan]
# Commands that print JSON, which their own tests look at.
PRINTED = {"scan"}
# Words of commands, and a path that they write.
WHOLE = ["scan model.pt --sarif"]
SAID = [("scan none --sarif gone/found.sarif", 2, "the directory gone does not exist")]


# --------------------------------------------------------------------------------------------------- what is replaced

REFUSED = """\
scan --sarif a.pt b.pt
scan --sarif b.pt b.pt --overwrite
scan --sarif x.json .
"""
DONE: dict[str, set[str]] = {"scan --sarif x.json a.pt --overwrite": {"x.json"}}
AGAIN = """\
scan --sarif new.sarif a.pt
"""
WRITTEN = {"sarif": ("x.sarif", ("scan", "MODEL", "--sarif", "PATH"))}
