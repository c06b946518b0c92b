"""The whole corpus, by name: what is here, and what features add to it as `ATTACKS` in their cells."""

from __future__ import annotations

from cells import of_features

from .corpus import CASES, Case
from .directories import DIRECTORIES, Directory
from .headers import FILES, SETS
from .readers import READERS

_ADDED = [case for added in of_features("ATTACKS") for case in added]
ALL: list[Case] = [
    *CASES.values(), *READERS.values(), *FILES.values(), *(case for case in _ADDED if isinstance(case, Case)),
]  # fmt: skip
ALL_DIRECTORIES: list[Directory] = [
    *DIRECTORIES.values(), *SETS.values(), *(case for case in _ADDED if isinstance(case, Directory)),
]  # fmt: skip
