"""What may be asked of a conversion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

DEFAULT_MEMORY = 8 << 20
# What the default becomes where something is far away: requests are large, and several under way.
FAR_MEMORY = 24 << 20


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
    drop_opaque: bool = False
    inert: bool = False
    checksum: bool = False
    verify: bool = False
    depfile: str = ""
    spool_dir: str = ""
    manifest: str = ""
    part: tuple[int, int] | None = None
    storage_options: Mapping[str, Any] = field(default_factory=dict)

    def buffers(self, far: bool) -> int:
        """The bound on all buffers together, in bytes, where something is `far` away or where nothing is."""
        return FAR_MEMORY if far and self.memory == DEFAULT_MEMORY else self.memory
