"""`ckptconv thin`: remove the steps of a run that a policy does not keep, or keep less of them.

In: the directory of a run, and a policy. Out: what stays and what goes; with --yes, a run that is thinner. `policy` and
`planning` decide, and touch nothing; `area` and `carrying` do what was decided, by open directories.
"""

from __future__ import annotations

PAGES = ("thin.md",)
# Features that this one builds on: without them, it is gone too.
NEEDS = ("steps",)
# Why it is larger than other features of a command.
EXCEEDS = "it has a policy, metrics of steps, and a removal that neither kills nor other users lead astray"
