"""Hostile, broken and odd directories, which features have; and changes of the files in them."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .assemble import (
    Member,
    zipped,
)
from .corpus import BACK


@dataclass(frozen=True)
class Directory:
    """`make` fills a directory, knowing where the canary is to be made, and gives the input of the conversion.

    `live` is the file in it with which torch.load makes the canary. `strict` is the command of a feature for it.
    """

    file: str
    family: str
    exit: int
    why: str
    make: Callable[[Path, str], Path]
    live: str = ""
    strict: str = ""

    @property
    def command(self) -> str:
        return self.strict or COMMANDS.get(self.family, "pt2safetensors")


COMMANDS = {"safetensors set": BACK}
DIRECTORIES: dict[str, Directory] = {}


def _add(family: str, exit_code: int, file: str, why: str, make: Callable[[Path, str], Path], live: str = "") -> None:
    assert file not in DIRECTORIES, file
    DIRECTORIES[file] = Directory(file, family, exit_code, why, make, live)


def repickled(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Change the pickle in a file of torch.save."""
    with zipfile.ZipFile(path) as opened:
        parts = [Member(info.filename, opened.read(info)) for info in opened.infolist()]
    path.write_bytes(
        zipped([part.changed(data=change(part.data)) if "data.pkl" in str(part.name) else part for part in parts])
    )


def with_prelude(path: Path, value: bytes) -> None:
    """Make a value, and drop it, before anything else: what comes after may need classes that are not installed."""
    repickled(path, lambda data: data[:2] + value + b"0" + data[2:])
