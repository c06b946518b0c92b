"""Tells whether a local file of a step is cut short, by how files of its kind end.

No file is opened as a checkpoint here: its size, its first bytes and its last ones are looked at.
"""

from __future__ import annotations

import json

from ckptconv.features.runs.names import TORCH
from ckptconv.features.runs.registered import EXTENTS
from ckptconv.features.runs.step import Step
from ckptconv.formats import safetensors
from ckptconv.formats.model_files import MAX_HEADER, SUFFIX
from ckptconv.storage import LOCAL_SIGNATURE
from ckptconv.storage.location import Location
from ckptconv.storage.paths import is_remote
from ckptconv.storage.zip_directory import TAIL, ends_there, find_end

# Suffixes of files that are looked at, beside descriptions; and the most bytes of a JSON file that are parsed.
_TEXT, _MOST_JSON = ".json", 64 << 20
_LOOKED_AT = (*TORCH, ".pkl", ".pickle", SUFFIX, _TEXT)


def torn_file(step: Step, in_full: bool) -> str:
    """Return a sentence on the file of a step that is cut short, by how such files end; "" if none is. With `in_full`,
    headers of safetensors are read whole. On a store, only files that are empty are found."""
    is_near = not is_remote(step.home.path)
    for path, entry in step.files.items():
        if entry.kind == "missing":
            return f"{path} no longer exists"
        name, size = path.rpartition("/")[2], entry.file.size
        if entry.kind != "file" or not (name.endswith(_LOOKED_AT) or name in EXTENTS):
            continue
        why = "is empty" if not size else _torn(step.at(path), name, size) if is_near else ""
        if why:
            return f"{path} {why}"
        if in_full and is_near and name.endswith(SUFFIX):
            safetensors.header_of(step.at(path))
    return ""


def _torn(place: Location, name: str, size: int) -> str:
    with place.open_reader() as reader:
        if name.endswith(_TEXT):
            return _torn_json(reader.read_at(0, size)) if size <= _MOST_JSON else ""
        head = reader.read_at(0, min(size, 8))
        if name.endswith(SUFFIX):
            length = int.from_bytes(head, "little")
            return "" if len(head) == 8 and 2 <= length <= min(size - 8, MAX_HEADER) else "ends within its header"
        if head.startswith(LOCAL_SIGNATURE):
            for most in (22, TAIL):
                tail = reader.read_at(max(size - most, 0), min(size, most))
                if ends_there(tail, find_end(tail)):
                    return ""
            return "is a zip archive without an end record"
        if name in EXTENTS or (head[:1] == b"\x80" and not name.endswith(TORCH)):
            return "" if reader.read_at(size - 1, 1) == b"." else "is a pickle without a STOP instruction"
        return "" if head.strip(b"\0") else "begins with zeros only"


def _torn_json(data: bytes) -> str:
    try:
        json.loads(data)
    except RecursionError:
        return ""
    except ValueError:
        return "is not valid JSON"
    return ""
