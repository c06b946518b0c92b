"""The choice to refuse attacks or to read them as inert data; and the registry of the feature that recognizes them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from ckptconv.pickles.nodes import Global
from ckptconv.process import has_feature, of_feature

# The feature that recognizes attacks. In `tables`, `of_name` and `of_call` yield suspects: of a name that the
# vocabulary lacks, and of a call that is not known to be data. In `refused`, `refuse_pickle`, `refuse_pickles` and
# `refuse_file` raise UnsafeError for an attack: as the machine reads it, in bytes, and in a refused file of torch.save.
ATTACKS = "attacks"
_refusing: ContextVar[bool] = ContextVar("refusing", default=False)


@contextlib.contextmanager
def refusing_attacks(wanted: bool = True) -> Iterator[None]:
    """While active and `wanted`, reading an attack raises UnsafeError. Otherwise it is read as inert data."""
    token = _refusing.set(wanted)
    try:
        yield
    finally:
        _refusing.reset(token)


def suspects(rule: str, *facts: Any) -> Iterator[Global]:
    """Yield the suspects that `rule` finds: `of_name` or `of_call`."""
    if has_feature(ATTACKS):
        yield from getattr(of_feature(ATTACKS, "tables"), rule)(*facts)


def refuse_attack(check: str, *facts: Any) -> None:
    """Have a `check` raise UnsafeError for an attack, if attacks are refused (`refusing_attacks`)."""
    if _refusing.get() and has_feature(ATTACKS):
        getattr(of_feature(ATTACKS, "refused"), check)(*facts)
