"""Hostile, broken and odd sharded sets of torch.save."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from attacks.assemble import archive, called, many_numbers, mapped, members, pickled, tensor, text, zipped
from attacks.corpus import CORRUPT, DONE, UNSAFE, UNSUPPORTED
from attacks.directories import Directory
from attacks.live import SYSTEM, touch

DIRECTORIES: list[Directory] = []
SHARDS = ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin")
MAP = {"a": SHARDS[0], "b": SHARDS[1]}


def _shard(key: str) -> bytes:
    return zipped(members(pickled(mapped(text(key), tensor()))))


def _index(
    exit_code: int,
    file: str,
    why: str,
    index: object,
    change: Callable[[Path, str], object] = lambda place, canary: None,
    live: str = "",
) -> None:
    """Two shards and an index, which is text or an object."""

    def make(place: Path, canary: str) -> Path:
        for shard, key in zip(SHARDS, "ab", strict=True):
            (place / shard).write_bytes(_shard(key))
        (place.parent / "outside.bin").write_bytes(_shard("b"))
        change(place, canary)
        path = place / "pytorch_model.bin.index.json"
        made = index() if callable(index) else index
        path.write_text(made if isinstance(made, str) else json.dumps(made))
        return path

    DIRECTORIES.append(Directory(f"index_{file}", "index", exit_code, why, make, live))


def _mapping(**changes: object) -> dict[str, object]:
    return {"metadata": {"total_size": 48}, "weight_map": {**MAP, **changes}}


_index(DONE, "sound", "a sound set", _mapping())
_index(UNSAFE, "parent", "an entry that leads out of the directory", _mapping(b="../outside.bin"))
_index(UNSAFE, "absolute", "an entry that is an absolute path", _mapping(b="/etc/passwd"))
_index(UNSAFE, "inside_and_out", "an entry that leads in and out", _mapping(b="x/../../outside.bin"))
_index(UNSAFE, "dots", "an entry that is the directory above", _mapping(b=".."))
_index(CORRUPT, "missing", "an entry that is not there", _mapping(b="pytorch_model-00009-of-00009.bin"))
_index(UNSUPPORTED, "number", "an entry that is a number", _mapping(b=7))
_index(UNSUPPORTED, "null", "an entry that is null", _mapping(b=None))
_index(UNSAFE, "empty_entry", "an entry that is empty", _mapping(b=""))
_index(UNSAFE, "control", "an entry with a line's end", _mapping(b=SHARDS[1] + "\n"))
_index(UNSAFE, "drive", "an entry on a drive", _mapping(b="C:outside.bin"))
_index(UNSAFE, "chained", "an entry of several file systems", _mapping(b="simplecache::memory://x"))
_index(CORRUPT, "percent", "an entry that is escaped as in a URL", _mapping(b="%2e%2e/outside.bin"))
_index(CORRUPT, "long", "an entry of 5,000 characters", _mapping(b="x" * 5000))
_index(CORRUPT, "huge", "1.5 million tensors", lambda: (
    '{"weight_map":{"' + many_numbers('":"x","') + '":"x"}}'
))  # fmt: skip
_index(CORRUPT, "lists", "three million lists", lambda: '{"metadata":[' + "[]," * 3_000_000 + '0],"weight_map":{}}')
_index(CORRUPT, "number_huge", "a number beyond every float", '{"metadata":{"total_size":1e999},"weight_map":{}}')
_index(
    CORRUPT, "pipe", "a shard that is a pipe", _mapping(),
    lambda place, canary: ((place / SHARDS[1]).unlink(), os.mkfifo(place / SHARDS[1])),
)  # fmt: skip
_index(CORRUPT, "other_shard", "a tensor that is in another shard", _mapping(b=SHARDS[0]))
_index(CORRUPT, "unknown_tensor", "a tensor that is in no shard", _mapping(c=SHARDS[0]))
_index(UNSUPPORTED, "list", "an index that is a list", [1, 2])
_index(UNSUPPORTED, "no_map", "an index without a map", {"metadata": {}})
_index(UNSUPPORTED, "map_list", "a map that is a list", {"weight_map": ["a", "b"]})
_index(CORRUPT, "not_json", "an index that is not JSON", '{"weight_map": {')
_index(CORRUPT, "empty", "an empty index", "")
_index(CORRUPT, "deep", "JSON nested 100,000 levels deep", "[" * 100_000)
_index(CORRUPT, "deep_map", "a map nested 100,000 levels deep", '{"weight_map":' * 100_000)
_index(
    CORRUPT, "twice", "a tensor twice, in two shards",
    json.dumps(_mapping(c=SHARDS[0])).replace('"c"', '"b"'),
)  # fmt: skip
_index(
    CORRUPT, "not_utf8", "a name that is a lone surrogate, and in no shard",
    json.dumps(_mapping(c=SHARDS[0])).replace('"c"', '"\\ud800"'),
)  # fmt: skip
_index(
    CORRUPT, "shard_cut", "a shard that is cut", _mapping(),
    lambda place, canary: (place / SHARDS[1]).write_bytes(_shard("b")[:-100]),
)  # fmt: skip
_index(
    UNSAFE, "live_shard", "os.system in the second shard", _mapping(),
    lambda place, canary: (place / SHARDS[1]).write_bytes(archive(called(SYSTEM, touch(canary)))), live=SHARDS[1],
)  # fmt: skip
