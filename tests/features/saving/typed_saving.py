"""A user's program that saves state dicts, which type checkers read: what they accept, and, with an ignore, what they
refuse."""

from __future__ import annotations

import ckptconv


def program(path: str) -> None:
    report: ckptconv.Report = ckptconv.save_state_dict(
        {}, path, metadata={"a": "b"}, max_shard_size="1GB", progress=True
    )
    print(report.bytes_written)
    ckptconv.save_state_dict({}, path, metdata={})  # type: ignore[call-arg]
