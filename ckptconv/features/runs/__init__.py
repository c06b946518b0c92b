"""The steps of a run, and those of them that are whole.

In: the directory of a run. `run` finds its steps by `names`; `whole` opens them, `torn` looks at the ends of files,
`marks` at the markers of trainers, and `registered` names the formats' own knowledge. `reading` reads the data of a
step for digests and statistics, if one of `options` asks for it. Out: the steps, and the facts about each. `places` has
the differences between a local directory and one on a store. The features about runs build on this one.
"""

from __future__ import annotations

PAGES = ()
# Features that this one builds on: without them, it is gone too.
NEEDS = ("joining", "reporting")
