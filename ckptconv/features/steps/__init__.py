"""`ckptconv steps`: which steps of a run are whole, what is in them, and which is the last good one.

In: the directory of a run. `run` finds its steps by names; `whole` opens them, `torn` looks at the ends of files,
`marks` at what trainers leave, and `registered` has what single formats know. Out: a line for each step (`survey`,
`reading`); or the path of the last good one, for a conversion with `--last-good` (`opening`).
"""

from __future__ import annotations

PAGES = ("steps.md",)
# Features that this one builds on: without them, it is gone too.
NEEDS = ("joining", "reporting")
SCRIPTS = ("test_kills.py", "kills/")
# Why it is larger than other features of a command.
EXCEEDS = (
    "it knows how trainers name and mark steps, and how each kind of file ends, of formats that are read and others"
)
