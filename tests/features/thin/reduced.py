"""The plan for the older one of two steps that `thin` is to reduce, and what is left of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from checkpoints import ckptconv_here, done


def reduced(run: Path, *options: str) -> dict[str, Any]:
    """What `thin --json` says of the older step: the same before and after it is done, but for sizes."""
    words = ("thin", run, "--age", 0, "--keep-last", 1, *(options or ("--drop", "optimizer")), "--json")
    expected, written = (json.loads(done(ckptconv_here(*words, *yes)).out)["steps"][0] for yes in ((), ("--yes",)))
    fields = ("name", "action", "why", "lost")
    assert {field: expected[field] for field in fields} == {field: written[field] for field in fields}
    return {field: written[field] for field in fields[1:]}


def kept(*lacking: str) -> dict[str, Any]:
    """The plan for a step that stays, because it would lack parts."""
    return {"action": "keep", "why": [f"reduced, it would lack {', '.join(map(repr, lacking))}"], "lost": []}
