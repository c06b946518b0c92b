"""What may be asked of a conversion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptconv.errors import UsageError

# What is done with objects of classes that a `.pt` file is not written with unasked: refused, written or left out.
OPAQUE = ("", "keep", "drop")
DEFAULT_MEMORY = 8 << 20
# What the default becomes where something is far away: requests are large, and several under way.
FAR_MEMORY = 24 << 20
# What people call dtypes for short.
SHORT_DTYPES = {
    **dict.fromkeys(("fp32", "f32", "float"), "float32"),
    **dict.fromkeys(("fp16", "f16", "half"), "float16"),
    "bf16": "bfloat16",
}


def full_dtype(name: str | None) -> str | None:
    """The full name of a dtype that may be called by a short one."""
    return SHORT_DTYPES.get(name or "", name)


@dataclass(frozen=True)
class Options:
    """What is asked of a conversion; see the command line's contract for each. None: the source's default."""

    dtype: str | None = None
    max_shard_size: int | None = None
    key: str = ""
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    strip_prefix: str = ""
    rename: Sequence[str] = ()
    tied: str = "alias"
    structure: bool = True
    jobs: int | None = None
    memory: int = DEFAULT_MEMORY
    fsync: bool = True
    clobber: bool = True
    dry_run: bool = False
    family: str = ""
    tag: str = ""
    optimizer: str = ""
    universal: str = ""
    per_rank: bool = False
    exclude_frozen_parameters: bool = False
    opaque: str = ""
    drop_opaque: bool = False
    inert: bool = False
    checksum: bool = False
    verify: bool = False
    depfile: str = ""
    spool_dir: str = ""
    manifest: str = ""
    part: tuple[int, int] | None = None
    storage_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.opaque not in OPAQUE:
            raise UsageError(f"opaque is {self.opaque[:40]!r}; it may be {' or '.join(filter(None, OPAQUE))}.")
        if self.drop_opaque:  # as it was called at first
            if self.opaque == "keep":
                raise UsageError("--drop-opaque and --opaque keep contradict each other.")
            object.__setattr__(self, "opaque", "drop")
            object.__setattr__(self, "drop_opaque", False)
        object.__setattr__(self, "dtype", full_dtype(self.dtype))

    def buffers(self, far: bool) -> int:
        """The bound on all buffers together, in bytes, where something is `far` away or where nothing is."""
        return FAR_MEMORY if far and self.memory == DEFAULT_MEMORY else self.memory
