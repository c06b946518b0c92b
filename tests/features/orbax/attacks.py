"""Hostile and broken steps of Orbax: databases, arrays and trees that lie."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attacks.corpus import CORRUPT, UNSUPPORTED
from attacks.directories import Directory
from features.ocdbt import attacks as of_databases
from features.ocdbt.writer import database
from features.orbax.writer import entry, metadata, step
from features.zarr import attacks as of_arrays
from features.zarr.attacks import W
from features.zarr.writer import zarray


class StepAttack(Directory):
    """A directory that `convert` is asked for."""

    @property
    def command(self) -> str:
        return "convert"


STEPS: list[Directory] = []


def _add(exit_code: int, file: str, why: str, change: Callable[[Path], object]) -> None:
    """A sound step, which is changed."""

    def make(place: Path, canary: str) -> Path:
        made = step(place / "step", {"w": W}, compressed=False)
        change(made)
        return made

    STEPS.append(StepAttack(f"orbax_{file}", "Orbax", exit_code, why, make))


for _attack in of_databases.HOSTILE:
    _add(_attack.exit, _attack.file, _attack.why, _attack.change)
for _array in of_arrays.HOSTILE:
    _add(_array.exit, _array.file, _array.why, lambda place, values=_array.values: database(place, values))


def _linked(place: Path) -> None:
    shutil.rmtree(place / "d")
    (place / "manifest.ocdbt").unlink()
    (place / "w").mkdir()
    (place / "w" / ".zarray").write_bytes(zarray(W, (3, 4)))
    for name in "ab":
        (place / "w" / name).symlink_to(".")


_add(CORRUPT, "array_linked", "a directory with two links to itself", _linked)
# ------------------------------------------------------------------------------------------------------------ trees


def _tree(exit_code: int, file: str, why: str, text: str | Mapping[str, Any]) -> None:
    told = text if isinstance(text, str) else json.dumps(text)
    _add(exit_code, f"tree_{file}", why, lambda place: (place / "_METADATA").write_text(told))


def _paths(file: str, why: str, *paths: tuple[str | int, ...]) -> None:
    _tree(CORRUPT, file, why, metadata(*(entry(*path, value_type="None", skip_deserialize=True) for path in paths)))


_tree(CORRUPT, "json", "a tree that is not JSON", "{")
_tree(CORRUPT, "deep", "a tree nested 100,000 levels deep", "[" * 100_000)
_tree(CORRUPT, "none", "a description without a tree", {})
_tree(CORRUPT, "list", "a tree that is a list", {"tree_metadata": []})
_tree(
    CORRUPT, "key", "a key of a kind that is not known", metadata(entry("w")).replace('"key_type": 2', '"key_type": 9')
)
_tree(CORRUPT, "number", "a key that is a number", metadata(entry("w")).replace('"key": "w"', '"key": 5'))
_tree(CORRUPT, "text", "a text that is nowhere", metadata(entry("w", value_type="string")))
_tree(
    UNSUPPORTED,
    "skipped",
    "a value that is stored nowhere",
    metadata(entry("w", value_type="X", skip_deserialize=True)),
)
_paths("holes", "a list that lacks an item", ("w", 0), ("w", 2))
_paths("mixed", "keys and indices in one container", ("w", 0), ("w", "1"))
_paths("inside", "a leaf inside a leaf", ("w",), ("w", "v"))
_paths("names", "two paths of one name", ("w", "v"), ("w.v",))
_paths("index", "an index that is not valid", ("w", -1))
_tree(
    CORRUPT, "zeros", "an index that begins with a zero",
    metadata(entry("w", 0, value_type="None", skip_deserialize=True)).replace('"key": "0"', '"key": "00"'),
)  # fmt: skip
_paths("long", "a path of 1,000 keys", ("w",) * 1000)
_paths("root", "a path of no key", ())
_add(
    CORRUPT, "tree_up", "an array whose directory is above the step",
    lambda place: (shutil.rmtree(place / "d"), (place / "manifest.ocdbt").unlink(), (place / "_METADATA").write_text(
        metadata(entry("../../w"))
    )),
)  # fmt: skip
for _file, _why, _text in (
    ("strings", "texts that are not JSON", "{"),
    ("strings_kind", "a text that is a number", '{"w": 5}'),
):
    _add(
        CORRUPT, f"tree_{_file}", _why, lambda place, text=_text: (place / "_strings.json").write_text(text)
    )  # fmt: skip


def _document(place: Path, text: str) -> None:
    """A step of items: what it was becomes one of them, and another is a document of JSON."""
    item, other = place / "params", place / "more"
    for made in (item, other):
        made.mkdir()
    for name in ("_METADATA", "manifest.ocdbt", "d"):
        (place / name).rename(item / name)
    (place / "_CHECKPOINT_METADATA").write_text('{"item_handlers": {"params": "x", "more": "y"}}')
    (other / "more").write_text(text)


_add(CORRUPT, "step_document", "an item of JSON that is cut short", lambda place: _document(place, '{"a": '))
_add(CORRUPT, "step_document_deep", "an item of JSON that is nested 90 levels deep", lambda place: _document(
    place, "[" * 90 + "]" * 90
))  # fmt: skip
_add(
    CORRUPT, "step_above", "a step that names an item above it",
    lambda place: (_document(place, "{}"), (place / "_CHECKPOINT_METADATA").write_text(
        '{"item_handlers": {"params": "x", "../step": "y"}}'
    )),
)  # fmt: skip
_add(
    CORRUPT, "step_processes", "a step whose processes were not merged",
    lambda place: ((place / "manifest.ocdbt").unlink(), (place / "ocdbt.process_0").mkdir()),
)  # fmt: skip
_add(
    CORRUPT, "step_uncommitted", "a step that has no time at which it was committed",
    lambda place: (place / "_CHECKPOINT_METADATA").write_text('{"commit_timestamp_nsecs": null}'),
)  # fmt: skip
_add(
    CORRUPT, "step_unfinished", "an item that is not finished", lambda place: (place / "a.orbax-checkpoint-tmp").mkdir()
)  # fmt: skip
_add(
    UNSUPPORTED, "step_no_tree", "a step without a tree", lambda place: (place / "_METADATA").unlink()
)  # fmt: skip
_add(
    CORRUPT, "step_told", "a step whose own metadata are a list",
    lambda place: (place / "_CHECKPOINT_METADATA").write_text("[]"),
)  # fmt: skip
