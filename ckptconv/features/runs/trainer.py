"""The steps of transformers' Trainer, which has no format of its own: the files that it puts next to a model."""

from __future__ import annotations

import re
from collections.abc import Collection

_LAST = "trainer_state.json"
MARKERS = (_LAST,)
_STEP = re.compile(r"checkpoint-\d+")
# The files that the trainer writes before its last one, and needs to resume.
_BEFORE = re.compile(r"training_args\.bin|scheduler\.(?:pt|bin)|rng_state(?:_\d+)?\.pth|optimizer\.(?:pt|bin)")


def unfinished(step: str, names: Collection[str]) -> str:
    """Say why the step of that name, with files of these `names`, is one that the Trainer did not finish; "" if it is
    none."""
    if _STEP.fullmatch(step) and _LAST not in names and any(map(_BEFORE.fullmatch, names)):
        return f"it lacks {_LAST}, which the Trainer writes last"
    return ""
