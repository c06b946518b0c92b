"""Hostile and odd files that Megatron-core has beside the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from attacks.assemble import listed, mapped, members, number, pickled, text, zipped
from attacks.corpus import CORRUPT, DONE, UNSAFE, UNSUPPORTED
from attacks.directories import Directory
from attacks.live import PAYLOADS
from features.dcp.attacks import changed

FILES: list[Directory] = []


def _changed(exit_code: int, file: str, why: str, change: Callable[[Path, str], object], live: str = "") -> None:
    FILES.append(changed(exit_code, file, why, change, live))


def _file(value: bytes) -> bytes:
    """A file of torch.save without tensors; `value` is the object's opcodes."""
    return zipped(members(pickled(value), {}))


def _common(content: Callable[[str], bytes]) -> Callable[[Path, str], object]:
    """Put Megatron-core's file of common values beside a sound checkpoint."""
    return lambda checkpoint, canary: (checkpoint / "common.pt").write_bytes(content(canary))


_changed(
    DONE,
    "common",
    "Megatron-core's common.pt",
    _common(lambda canary: _file(mapped(text("iteration"), number(3)))),
)
for _name in ("os_system", "eval", "inst"):
    _changed(
        UNSAFE, f"common_{_name}", f"a common.pt that is an attack: {PAYLOADS[_name][0]}",
        _common(lambda canary, payload=PAYLOADS[_name][1]: _file(mapped(text("args"), payload(canary)))),
        live="checkpoint/common.pt",
    )  # fmt: skip
_changed(CORRUPT, "common_list", "a common.pt that is not a dict", _common(lambda canary: _file(listed(number(1)))))
_changed(CORRUPT, "common_empty", "a common.pt that is empty", _common(lambda canary: b""))
_changed(
    UNSUPPORTED, "backend", "metadata.json names another backend",
    lambda checkpoint, canary: (checkpoint / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
)  # fmt: skip
