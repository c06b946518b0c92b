"""A user's program that makes trees of tensors and their record, which type checkers read."""

from __future__ import annotations

import ckptconv


def program() -> None:
    flat, structure = ckptconv.flatten({"a": 1})
    ckptconv.unflatten(flat, structure)
