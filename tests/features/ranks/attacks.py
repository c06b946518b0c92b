"""Hostile, broken and odd checkpoints with a file for each rank, and runs that point to one."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from attacks.assemble import called
from attacks.corpus import CORRUPT, DONE, UNSAFE, UNSUPPORTED
from attacks.directories import Directory, repickled, with_prelude
from attacks.live import PAYLOADS, SYSTEM, touch
from features.ranks.rank_files import RANKS

FILES: list[Directory] = []


def _changed(
    exit_code: int, file: str, why: str, change: Callable[[Path, str], object], live: str = "", case: str = "fsdp2_tp"
) -> None:
    """A sound checkpoint with something changed; `change` is given its directory and the canary."""

    def make(place: Path, canary: str) -> Path:
        checkpoint = Path(shutil.copytree(RANKS / case / "checkpoint", place / "checkpoint"))
        change(checkpoint, canary)
        return checkpoint

    FILES.append(Directory(f"ranks_{file}", "ranks", exit_code, why, make, live))


def _said(pattern: bytes, instead: bytes, files: str = "model_*") -> Callable[[Path, str], object]:
    """Let the pickles of these files say something else, wherever they say what `pattern` matches."""

    def change(data: bytes) -> bytes:
        changed = re.sub(pattern, instead, data, flags=re.DOTALL)
        assert changed != data
        return changed

    def make(checkpoint: Path, canary: str) -> None:
        for path in sorted(checkpoint.glob(files)):
            repickled(path, change)

    return make


# A number to come, after a key and what the memo calls it.
_KEY = rb"(%s(?:q.|r....))"
# How many ranks a dimension of a mesh has, and how far they are from each other, follows these.
_AXIS, _STRIDE = _KEY % rb"\x05\0\0\0shape", _KEY % rb"\x06\0\0\0stride"
# Where a rank is in its mesh follows the rank.
_PLACE = rb"(K\x01h.)"
_SECOND = "model_world_size_4_rank_1.pt"
_changed(DONE, "sound", "a sound checkpoint", lambda checkpoint, canary: None)
for _name in ("os_system", "eval", "setstate_of_an_ordered_dict"):
    _changed(
        UNSAFE, f"live_{_name}", f"a rank's file that is an attack: {PAYLOADS[_name][0]}",
        lambda checkpoint, canary, payload=PAYLOADS[_name][1]: with_prelude(checkpoint / _SECOND, payload(canary)),
        live=f"checkpoint/{_SECOND}",
    )  # fmt: skip
_changed(
    UNSAFE, "live_extra_state", "an attack in a file beside the weights",
    lambda checkpoint, canary: with_prelude(
        checkpoint / "extra_state_world_size_4_rank_0.pt", called(SYSTEM, touch(canary))
    ),
    live="checkpoint/extra_state_world_size_4_rank_0.pt",
)  # fmt: skip
_changed(CORRUPT, "missing", "a rank is missing", lambda checkpoint, canary: (checkpoint / _SECOND).unlink())
_changed(
    CORRUPT, "doubled", "a rank's file is that of another",
    lambda checkpoint, canary: shutil.copy(checkpoint / "model_world_size_4_rank_0.pt", checkpoint / _SECOND),
)  # fmt: skip
for _file, _why, _pattern, _instead, _files in (
    ("dim", "shards along a dimension that is none", _KEY % b"\x03\0\0\0dim" + b"K\0", b"\\1K\x07", "model_*"),
    ("factor_zero", "a split factor of 0", _KEY % b"split_factor" + rb"K\x02", b"\\1K\0", "model_*"),
    ("factor_huge", "a split factor of a billion", _KEY % b"split_factor" + rb"K\x02", b"\\1J\0\0\0\x40", "model_*"),
    ("factor_other", "strides that no rank's part has", _KEY % b"split_factor" + rb"K\x02", b"\\1K\x03", "model_*"),
    ("mesh_rank_twice", "a mesh with a rank twice", rb"K\0K\x01K\x02K\x03t", b"K\0K\x01K\x01K\x03t", "model_*"),
    ("mesh_rank_negative", "a mesh with a rank below 0", rb"K\x02K\x03t", b"K\x02J\xff\xff\xff\xfft", "model_*"),
    ("mesh_extent_huge", "a mesh of a billion ranks", _AXIS + rb"K\x02", b"\\1J\0\0\0\x40", "model_*"),
    ("mesh_extent_zero", "a mesh without ranks", _AXIS + rb"K\x02", b"\\1K\0", "model_*"),
    ("mesh_stride_zero", "a mesh that has a rank twice by its strides", _STRIDE + rb"K.", b"\\1K\0", "model_*"),
    ("mesh_stride_beyond", "a mesh that reaches beyond its ranks", _STRIDE + rb"K.", b"\\1K\x64", "model_*"),
    ("mesh_order", "another order of ranks", rb"K\0K\x01K\x02K\x03t", b"K\x01K\0K\x02K\x03t", _SECOND),
    ("place_beyond", "a rank beyond its mesh", _PLACE + rb"K\0K\x01", b"\\1K\0K\x05", _SECOND),
    ("place_of_another", "a rank in the place of another", _PLACE + rb"K\0K\x01", b"\\1K\x01K\x01", _SECOND),
    ("shape", "a spec of another shape", rb"(TensorMeta.{1,40}?)K\nK\x06", b"\\1K\x0bK\x06", "model_*"),
    ("kind", "a rank with another placement", rb"placement_types\nShard\n", rb"placement_types\nReplicate\n", _SECOND),
):  # fmt: skip
    _changed(CORRUPT, _file, _why, _said(_pattern, _instead, _files))
_changed(
    UNSUPPORTED, "partial", "tensors of which each rank has a summand",
    _said(rb"placement_types\nShard\n", rb"placement_types\nPartial\n"),
)  # fmt: skip
for _file, _why, _pattern, _instead in (
    ("overlapping", "shards that overlap", rb"\(K\x05K\0e", b"(K\x04K\0e"),
    ("beyond", "shards beyond the shape", _KEY % b"shard_sizes" + rb"(\]q.)\(K\x05K\x06", b"\\1\\2(K\x09K\x06"),
):
    _changed(CORRUPT, f"shards_{_file}", _why, _said(_pattern, _instead), case="fsdp1_sharded")
_changed(
    CORRUPT, "flat_moved", "a rank's part of a flat parameter elsewhere",
    _said(_KEY % b"shard_offsets" + rb"(\]q.)K#a", b"\\1\\2K\x21a", "model_rank1.pt"), case="fsdp1_local",
)  # fmt: skip


def _pointer(
    exit_code: int, file: str, why: str, said: bytes, pointer: str = "latest_checkpointed_iteration.txt"
) -> None:
    """A run with a sound checkpoint of a step, and a file that says which step is the last."""

    def make(place: Path, canary: str) -> Path:
        shutil.copytree(RANKS / "fsdp2_tp" / "checkpoint", place / "run" / "global_step_3" / "actor")
        (place / "run" / pointer).write_bytes(said)
        return place / "run"

    FILES.append(Directory(f"pointer_{file}", "pointers", exit_code, why, make, ""))


_pointer(DONE, "sound", "a sound run", b"3\n")
_pointer(CORRUPT, "parent", "a pointer to the directory above", b"../run/global_step_3")
_pointer(CORRUPT, "absolute", "a pointer to an absolute path", b"/etc")
_pointer(CORRUPT, "by_name", "a pointer to the name of a directory", b"global_step_3")
_pointer(CORRUPT, "missing", "a pointer to a step that is not there", b"9")
_pointer(CORRUPT, "digits", "a pointer of 4,000 digits", b"3" * 4000)
_pointer(CORRUPT, "other_digits", "a pointer in digits of another script", "٣".encode())
_pointer(CORRUPT, "empty", "an empty pointer", b"")
_pointer(CORRUPT, "not_utf8", "a pointer that is not UTF-8", b"\xff\xfe3")
_pointer(CORRUPT, "huge", "a pointer of 10 MB", b"3" * 10_000_000)
for _file, _why, _said_by in (
    ("deep", "JSON nested 2,000 levels deep", b"[" * 2000),
    ("list", "a list", b"[3]"),
    ("object", "an object in the place of a number", b'{"last_global_step": {"3": 3}}'),
    ("path", "a path", b'{"last_global_step": "../global_step_3"}'),
):
    _pointer(CORRUPT, f"json_{_file}", f"a pointer in JSON that is {_why}", _said_by, "checkpoint_tracker.json")
