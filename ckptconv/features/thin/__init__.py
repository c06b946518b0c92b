"""`ckptconv thin`: remove the steps of a run that a policy does not keep, or reduce them.

In: the directory of a run, and a policy. Out: the steps that stay and those that go; with --yes, a run that is thinner.
`policy` and `planning` decide, and touch nothing; `carrying` carries out the plan, by the feature `removal`.
"""

from __future__ import annotations

PAGES = ("thin.md",)
# Features that this one builds on: without them, it is gone too.
NEEDS = ("companions", "removal", "reporting", "runs", "verify")
