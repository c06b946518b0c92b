"""Says of an output that is missing that parts of it are staged, and how they are published."""

from __future__ import annotations

import contextlib
import shlex

from ckptconv.errors import CkptconvError
from ckptconv.features.parts.staged import described
from ckptconv.storage.location import Location


def advice(place: Location) -> str:
    """Return advice about an output that is not at `place`: to publish the parts of it that are staged; else ""."""
    with contextlib.suppress(CkptconvError):
        if described(place):
            return f"Its parts are staged, but not published: ckptconv finish {shlex.quote(place.path)}"
    return ""
