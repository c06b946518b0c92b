"""What others leave in directories to which they can write, and what of the user's nothing there may touch."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Run, ckptconv_here, contents

NOBODY = 65534
# Options with which a model of a few kilobytes becomes several files.
SHARDED = ("--max-shard-size", "100kB")

IS_ROOT = os.geteuid() == 0

as_root = pytest.mark.skipif(not IS_ROOT, reason="only root can make files of others")


def convert_sharded(model: Path, output: Path, *options: object) -> Run:
    return ckptconv_here("pt2safetensors", model, output, *SHARDED, *options)


def is_untouched(home: Path) -> bool:
    return contents(home) == {"precious": b"precious", "sub/precious": b"precious"}


def a_link(place: Path, home: Path) -> None:
    place.symlink_to(home)


def a_link_to_a_file(place: Path, home: Path) -> None:
    place.symlink_to(home / "precious")


def a_hard_link(place: Path, home: Path) -> None:
    os.link(home / "precious", place)


def a_pipe(place: Path, home: Path) -> None:
    os.mkfifo(place)


def a_directory_of_a_stranger(place: Path, home: Path) -> None:
    place.mkdir()
    (place / "theirs").write_bytes(b"theirs")
    os.chown(place, NOBODY, NOBODY)


def a_directory_that_others_can_write_to(place: Path, home: Path) -> None:
    place.mkdir()
    place.chmod(0o777)
    (place / "theirs").write_bytes(b"theirs")


def a_directory_that_was_moved_there(place: Path, home: Path) -> None:
    place.mkdir(mode=0o700)
    (place / "important").write_bytes(b"important")


ANY = [
    a_link,
    a_link_to_a_file,
    a_hard_link,
    a_pipe,
    a_directory_that_others_can_write_to,
    a_directory_that_was_moved_there,
]

if IS_ROOT:
    ANY.append(a_directory_of_a_stranger)


def seen(place: Path) -> Any:
    found = place.lstat()
    inside = sorted(os.listdir(place)) if stat.S_ISDIR(found.st_mode) else None
    return stat.S_IFMT(found.st_mode), found.st_ino, found.st_uid, found.st_nlink, inside


def precious(place: Path) -> Path:
    """A directory of the user's that nothing may touch."""
    (place / "sub").mkdir(parents=True)
    (place / "sub" / "precious").write_bytes(b"precious")
    (place / "precious").write_bytes(b"precious")
    return place
