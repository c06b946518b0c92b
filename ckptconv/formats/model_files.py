"""Whole models of safetensors or torch.save: recognized by the names of their files and their first bytes.

Every path is checked here, so this module imports none that reads one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

from ckptconv.formats.format import CERTAIN, LIKELY, POSSIBLE, Guess, Probe
from ckptconv.formats.torch import SUFFIXES as TORCH_SUFFIXES
from ckptconv.plan import NUMBERED
from ckptconv.storage import LOCAL_SIGNATURE

SAFETENSORS, TORCH = "safetensors", "torch"
# A model saved by one process with torch.distributed.checkpoint's HuggingFaceStorageWriter is an ordinary set.
_SAFETENSORS = Guess(CERTAIN, "in safetensors already", "convert {} OUTPUT", also=("dcp",))
_TORCH = Guess(LIKELY, "written by torch.save", "pt2safetensors {}")

SUFFIX = ".safetensors"
INDEX = ".index.json"
INDEX_SUFFIX = f"{SUFFIX}{INDEX}"
# Indexes of other programs' files, which stand next to those of torch in repositories of the hub.
_FOREIGN = tuple(f"{suffix}{INDEX}" for suffix in (SUFFIX, ".h5", ".msgpack"))
# Models of torch in one file: those of transformers, of diffusers, and of open_clip; and PEFT's adapters.
TORCH_MODELS = ("pytorch_model.bin", "diffusion_pytorch_model.bin", "open_clip_pytorch_model.bin", "adapter_model.bin")
# The optimizer next to a model of one file or set, as transformers' Trainer and accelerate save it.
OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
# The longest header of a safetensors file, in bytes; and the key of the metadata in it.
MAX_HEADER, METADATA = 100_000_000, "__metadata__"


def sniff_safetensors(probe: Probe) -> Guess | None:
    """Recognize a file of safetensors by its beginning, or by its name unless it begins like a zip archive."""
    if probe.is_file:
        name = probe.place.name
        if name.endswith(INDEX_SUFFIX):
            return _SAFETENSORS
        head, size = probe.head
        named = name.endswith(SUFFIX) and not head.startswith(LOCAL_SIGNATURE)
        return _SAFETENSORS if named or looks_like_safetensors(head, size) else None
    # Trainers put weights next to DeepSpeed's files: a caller that expects DeepSpeed gets DeepSpeed's error instead.
    is_meant = probe.is_directory and probe.expected != "deepspeed" and _holds_safetensors(probe.place.names)
    return _SAFETENSORS if is_meant and (probe.expected or not unlisted(probe.place.names)) else None


def looks_like_safetensors(head: bytes, size: int) -> bool:
    """Return whether a file of `size` bytes that begins with `head` is a safetensors file."""
    return head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= min(size - 8, MAX_HEADER)


def sniff_torch_set(probe: Probe) -> Guess | None:
    """Recognize an index of torch.save's files, or a directory with a set, unless another family is expected in it."""
    if probe.is_file:
        return _TORCH if probe.place.name.endswith(".json") else None
    return _TORCH._replace(sure=CERTAIN) if _may_hold_torch(probe) and _holds_set(probe.place.names) else None


def sniff_torch(probe: Probe) -> Guess | None:
    """Recognize most files of torch.save by name or beginning, and a directory with a model in one file. Any other file
    is POSSIBLE: it is read if no other format knows it."""
    if not probe.is_file:
        is_model = _may_hold_torch(probe) and torch_model(probe.place.names) and not _holds_set(probe.place.names)
        return _TORCH._replace(sure=CERTAIN) if is_model else None
    head, _ = probe.head
    known = probe.place.name.endswith(TORCH_SUFFIXES) or head.startswith(b"\x80") or b"/data.pkl" in head
    return _TORCH if known else _TORCH._replace(sure=POSSIBLE, called="a single file")


def _may_hold_torch(probe: Probe) -> bool:
    """Return whether the input is a directory, and no family other than torch is expected in it."""
    return probe.is_directory and probe.expected in ("", TORCH)


def may_lie_below(probe: Probe, expected: str = "", beside: str = "") -> bool:
    """Return whether a run or a step may be meant: a directory whose checkpoint is in it or below it, without a sign at
    the top, maybe of the `expected` family. A directory with a whole model means that model, unless the model was made
    of the shards in `beside`."""
    if probe.expected not in ("", expected) or not probe.is_directory:
        return False
    names = probe.place.names
    return beside in names or not holds_whole(names)


def holds_whole(names: Iterable[str]) -> bool:
    """Return whether a directory with these names holds a whole model."""
    return _holds_safetensors(names) or _holds_set(names) or bool(torch_model(names))


def _holds_safetensors(names: Iterable[str]) -> bool:
    return any(name.endswith((SUFFIX, INDEX_SUFFIX)) for name in names)


def unlisted(names: Iterable[str]) -> list[str]:
    """Return the shards of safetensors, if there is no index of them, but one of a set of torch: that set is read."""
    files = [name for name in names if name.endswith((SUFFIX, INDEX_SUFFIX))] if any(map(is_torch_index, names)) else []
    return files if all(re.search(rf"{NUMBERED}{re.escape(SUFFIX)}$", name) for name in files) else []


def _holds_set(names: Iterable[str]) -> bool:
    """Return whether a directory with these names holds a set of files of torch.save."""
    return any(is_torch_index(name) or torch_shard().fullmatch(name) for name in names)


def is_torch_index(name: str) -> bool:
    """Return whether an index of this name lists files of torch.save."""
    return name.endswith(INDEX) and not name.endswith(_FOREIGN)


def torch_model(names: Iterable[str]) -> str:
    """Return the file of a directory that is a model of torch in one file; "" if there is none. A variant, such as
    fp16, counts if it is the only one."""
    every = set(names)
    variants = [name for name in every if _variant().fullmatch(name)]
    return next((name for name in TORCH_MODELS if name in every), variants[0] if len(variants) == 1 else "")


@functools.cache  # these patterns are for directories: most paths are files
def torch_shard() -> re.Pattern[str]:
    """Return the pattern of names of the files of torch's sets: stem, number, count, suffix."""
    return re.compile(rf"(.+){NUMBERED}({'|'.join(map(re.escape, TORCH_SUFFIXES))})")


@functools.cache
def _variant() -> re.Pattern[str]:
    return re.compile(r"(?:diffusion_)?pytorch_model\.[\w-]+\.bin")
