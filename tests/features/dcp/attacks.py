"""Hostile, broken and odd directories of torch.distributed.checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from attacks.assemble import called, pickled
from attacks.corpus import CORRUPT, DONE, UNSAFE
from attacks.directories import Directory
from attacks.live import PAYLOADS, SYSTEM, touch

from .cases import checkpoint_of

FILES: list[Directory] = []


def changed(exit_code: int, file: str, why: str, change: Callable[[Path, str], object], live: str = "") -> Directory:
    """A sound checkpoint with something changed; `change` is given its directory and the canary."""

    def make(place: Path, canary: str) -> Path:
        checkpoint = Path(shutil.copytree(checkpoint_of("dtensor_noncontig_w2"), place / "checkpoint"))
        change(checkpoint, canary)
        return checkpoint

    return Directory(f"dcp_{file}", "DCP", exit_code, why, make, live, "dcp2safetensors")


def _dcp(exit_code: int, file: str, why: str, change: Callable[[Path, str], object], live: str = "") -> None:
    FILES.append(changed(exit_code, file, why, change, live))


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
