"""The steps of a run: which there are, and which of them are whole.

In: the directory of a run. `run` finds its steps by `names`; `whole` opens them, `torn` looks at the ends of files,
`marks` at what trainers leave, and `registered` names what single formats know. `reading` reads the data of a step for
digests and statistics, if one of `options` asks for it. Out: the steps, and what is known of
each. `places` has what differs between a directory here and one on a store. The features about runs build on this one.
"""

from __future__ import annotations

PAGES = ()
# Features that this one builds on: without them, it is gone too.
NEEDS = ("joining", "reporting")
