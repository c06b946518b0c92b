"""Hostile, broken and odd checkpoints of DeepSpeed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from attacks.assemble import archive, called, name, number, text
from attacks.corpus import CORRUPT, DONE, UNSAFE
from attacks.directories import Directory, repickled, with_prelude
from attacks.live import SYSTEM, touch
from checkpoints import ZERO

MODEL = "mp_rank_00_model_states.pt"
OPTIM = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
FILES: list[Directory] = []


def _zero(exit_code: int, file: str, why: str, change: Callable[[Path, Path, str], object], live: str = "") -> None:
    """A sound checkpoint with something changed; `change` is given its directory, its tag's, and the canary."""

    def make(place: Path, canary: str) -> Path:
        checkpoint = Path(shutil.copytree(ZERO / "z2_bf16_w2/checkpoint", place / "checkpoint"))
        change(checkpoint, checkpoint / "global_step3", canary)
        return checkpoint

    FILES.append(Directory(f"zero_{file}", "DeepSpeed", exit_code, why, make, live, "zero-to-fp32"))


def _with_entry(path: Path, key: str, value: bytes) -> None:
    """Put another entry into the dict that a file holds; one that is there already is shadowed."""
    repickled(path, lambda data: data[:-1] + text(key) + value + b"s.")


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
