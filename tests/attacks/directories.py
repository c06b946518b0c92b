"""Hostile, broken and odd directories: DeepSpeed checkpoints and sharded sets."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .assemble import (
    Member,
    archive,
    called,
    many_numbers,
    mapped,
    members,
    name,
    number,
    pickled,
    tensor,
    text,
    zipped,
)
from .corpus import CORRUPT, DONE, UNSAFE, UNSUPPORTED
from .live import PAYLOADS, SYSTEM, touch

ZERO = Path(__file__).parents[1] / "data" / "zero" / "z2_bf16_w2" / "checkpoint"
DCP = Path(__file__).parents[1] / "data" / "dcp" / "dtensor_noncontig_w2" / "checkpoint"
MODEL = "mp_rank_00_model_states.pt"
OPTIM = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"


@dataclass(frozen=True)
class Directory:
    """`make` fills a directory, knowing where the canary is to be made, and gives the input of the conversion.

    `live` is the file in it with which torch.load makes the canary.
    """

    file: str
    family: str
    exit: int
    why: str
    make: Callable[[Path, str], Path]
    live: str = ""

    @property
    def command(self) -> str:
        return COMMANDS.get(self.family, "pt2safetensors")


COMMANDS = {"DeepSpeed": "zero-to-fp32", "safetensors set": "safetensors2pt", "DCP": "dcp2safetensors"}
DIRECTORIES: dict[str, Directory] = {}


def _add(family: str, exit_code: int, file: str, why: str, make: Callable[[Path, str], Path], live: str = "") -> None:
    assert file not in DIRECTORIES, file
    DIRECTORIES[file] = Directory(file, family, exit_code, why, make, live)


# -------------------------------------------------------------------------------------------------------- DeepSpeed


def _zero(exit_code: int, file: str, why: str, change: Callable[[Path, Path, str], object], live: str = "") -> None:
    """A sound checkpoint with something changed; `change` is given its directory, its tag's, and the canary."""

    def make(place: Path, canary: str) -> Path:
        checkpoint = Path(shutil.copytree(ZERO, place / "checkpoint"))
        change(checkpoint, checkpoint / "global_step3", canary)
        return checkpoint

    _add("DeepSpeed", exit_code, f"zero_{file}", why, make, live)


def repickled(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Change the pickle in a file of torch.save."""
    with zipfile.ZipFile(path) as opened:
        parts = [Member(info.filename, opened.read(info)) for info in opened.infolist()]
    path.write_bytes(
        zipped([part.changed(data=change(part.data)) if "data.pkl" in str(part.name) else part for part in parts])
    )


def _with_entry(path: Path, key: str, value: bytes) -> None:
    """Put another entry into the dict that a file holds; one that is there already is shadowed."""
    repickled(path, lambda data: data[:-1] + text(key) + value + b"s.")


def with_prelude(path: Path, value: bytes) -> None:
    """Make a value, and drop it, before anything else: what comes after may need classes that are not installed."""
    repickled(path, lambda data: data[:2] + value + b"0" + data[2:])


def _latest(data: bytes) -> Callable[[Path, Path, str], object]:
    return lambda checkpoint, tag, canary: (checkpoint / "latest").write_bytes(data)


_zero(DONE, "sound", "a sound checkpoint", lambda checkpoint, tag, canary: None)
_zero(
    UNSAFE, "live_client_state", "os.system in client_state",
    lambda checkpoint, tag, canary: _with_entry(tag / MODEL, "extra", called(SYSTEM, touch(canary))),
    live=f"checkpoint/global_step3/{MODEL}",
)  # fmt: skip
for _rank in (0, 1):
    _zero(
        UNSAFE, f"live_rank_{_rank}", f"os.system in the optimizer file of rank {_rank}",
        lambda checkpoint, tag, canary, rank=_rank: with_prelude(
            tag / OPTIM.format(rank), called(SYSTEM, touch(canary))
        ),
        live=f"checkpoint/global_step3/{OPTIM.format(_rank)}",
    )  # fmt: skip
_zero(
    DONE, "client_state", "client_state with objects of the user's",
    lambda checkpoint, tag, canary: _with_entry(tag / MODEL, "args", called(name("my.config", "Config"), number(1))),
)  # fmt: skip
for _key in ("param_shapes", "module", "buffer_names", "shared_params", "frozen_param_shapes"):
    _zero(
        CORRUPT, f"shadowed_{_key}", f"client_state that shadows {_key}",
        lambda checkpoint, tag, canary, key=_key: _with_entry(tag / MODEL, key, number(7)),
    )  # fmt: skip
for _name, _data in {
    "parent": b"..", "sibling": b"../other", "absolute": b"/etc", "inside_and_out": b"a/../../b", "dot": b".",
    "drive": b"..\\..\\other", "nul": b"a\0b",
}.items():  # fmt: skip
    _zero(UNSAFE, f"latest_{_name}", f"latest says {_data!r}", _latest(_data))
_zero(CORRUPT, "latest_not_utf8", "latest is not UTF-8", _latest(b"\xff\xfe"))
_zero(CORRUPT, "latest_huge", "latest has 10 MB", _latest(b"x" * 10_000_000))
_zero(CORRUPT, "latest_empty", "latest is empty", _latest(b""))
_zero(CORRUPT, "latest_missing", "latest names a tag that is not there", _latest(b"global_step9"))
_zero(DONE, "latest_newline", "latest ends with a newline", _latest(b"global_step3\n"))
_zero(CORRUPT, "rank_missing", "rank 1 is missing", lambda checkpoint, tag, canary: (tag / OPTIM.format(1)).unlink())
_zero(CORRUPT, "model_missing", "the model file is missing", lambda checkpoint, tag, canary: (tag / MODEL).unlink())
_zero(
    CORRUPT, "rank_empty", "rank 1 is empty",
    lambda checkpoint, tag, canary: (tag / OPTIM.format(1)).write_bytes(b""),
)  # fmt: skip
_zero(
    CORRUPT, "rank_cut", "rank 1 is cut",
    lambda checkpoint, tag, canary: (tag / OPTIM.format(1)).write_bytes((tag / OPTIM.format(1)).read_bytes()[:-999]),
)  # fmt: skip
_zero(
    CORRUPT, "rank_copied", "rank 1 is a copy of rank 0",
    lambda checkpoint, tag, canary: shutil.copy(tag / OPTIM.format(0), tag / OPTIM.format(1)),
)  # fmt: skip
_zero(
    CORRUPT, "rank_other", "rank 1 is another checkpoint",
    lambda checkpoint, tag, canary: (tag / OPTIM.format(1)).write_bytes(archive(number(1))),
)  # fmt: skip
_zero(
    DONE, "symlinks", "files and tag are symbolic links, as in a cache",
    lambda checkpoint, tag, canary: (
        tag.rename(checkpoint.parent / "blobs"), tag.symlink_to(checkpoint.parent / "blobs")
    ),
)  # fmt: skip

# -------------------------------------------------------------------------------------- torch.distributed.checkpoint


def _dcp(exit_code: int, file: str, why: str, change: Callable[[Path, str], object], live: str = "") -> None:
    """A sound checkpoint with something changed; `change` is given its directory and the canary."""

    def make(place: Path, canary: str) -> Path:
        checkpoint = Path(shutil.copytree(DCP, place / "checkpoint"))
        change(checkpoint, canary)
        return checkpoint

    _add("DCP", exit_code, f"dcp_{file}", why, make, live)


def _metadata(change: Callable[[bytes, str], bytes]) -> Callable[[Path, str], object]:
    def make(checkpoint: Path, canary: str) -> None:
        path = checkpoint / ".metadata"
        path.write_bytes(change(path.read_bytes(), canary))

    return make


def _prelude(payload: Callable[[str], bytes]) -> Callable[[Path, str], object]:
    return _metadata(lambda data, canary: data[:2] + payload(canary) + b"0" + data[2:])


PART = "__0_0.distcp"
_dcp(DONE, "sound", "a sound checkpoint", lambda checkpoint, canary: None)
for _name in ("os_system", "eval", "partial", "inst", "rebuild_from_type", "setstate_of_an_ordered_dict"):
    _dcp(
        UNSAFE, f"live_{_name}", f".metadata that is an attack: {PAYLOADS[_name][0]}", _prelude(PAYLOADS[_name][1]),
        live="checkpoint/.metadata",
    )  # fmt: skip
_dcp(
    UNSAFE, "live_alone", ".metadata that is nothing but an attack",
    _metadata(lambda data, canary: pickled(called(SYSTEM, touch(canary)), 4)), live="checkpoint/.metadata",
)  # fmt: skip
for _name, _path in {"parent": "../x0.distcp", "absolute": "/tmp/_.distcp", "url": "http://a.b/c"}.items():
    _dcp(
        UNSAFE, f"path_{_name}", f"a part at {_path}",
        _metadata(lambda data, canary, path=_path: _renamed(data, PART, path)),
    )  # fmt: skip
_dcp(
    CORRUPT,
    "path_other",
    "a part that is not there",
    _metadata(lambda data, canary: _renamed(data, PART, "__9_0.distcp")),
)
_dcp(CORRUPT, "part_missing", "a part is missing", lambda checkpoint, canary: (checkpoint / PART).unlink())
_dcp(CORRUPT, "part_empty", "a part is empty", lambda checkpoint, canary: (checkpoint / PART).write_bytes(b""))
_dcp(
    CORRUPT, "part_cut", "a part is cut",
    lambda checkpoint, canary: (checkpoint / PART).write_bytes((checkpoint / PART).read_bytes()[:-500]),
)  # fmt: skip
_dcp(CORRUPT, "metadata_empty", ".metadata is empty", _metadata(lambda data, canary: b""))
_dcp(CORRUPT, "metadata_cut", ".metadata is cut", _metadata(lambda data, canary: data[:-100]))
_dcp(CORRUPT, "metadata_zeros", ".metadata is zeros", _metadata(lambda data, canary: bytes(len(data))))
_dcp(
    CORRUPT, "metadata_missing", "there is no .metadata", lambda checkpoint, canary: (checkpoint / ".metadata").unlink()
)


_dcp(
    CORRUPT, "metadata_deep", ".metadata nested 100,000 levels deep",
    _metadata(lambda data, canary: b"\x80\4" + b"]" * 100_000 + b"a" * 99_999 + b"."),
)  # fmt: skip


def _renamed(data: bytes, old: str, new: str) -> bytes:
    """A pickle of protocol 2 or 4 with a short text replaced, and the lengths of frames ignored."""
    out = data
    for head in (lambda text: b"X" + len(text).to_bytes(4, "little"), lambda text: b"\x8c" + bytes([len(text)])):
        out = out.replace(head(old) + old.encode(), head(new) + new.encode())
    assert out != data
    return out


# ------------------------------------------------------------------------------------------------------ sharded sets

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

    _add("index", exit_code, f"index_{file}", why, make, live)


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
