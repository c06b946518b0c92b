"""`ckptconv steps`: which steps of a run are whole, what is in them, and which is the last good one.

In: what is known of the steps of a run, which the feature `runs` tells. Out: a line for each step
(`survey`); or the path of the last good one, for a conversion with `--last-good` (`opening`).
"""

from __future__ import annotations

PAGES = ("steps.md",)
# Features that this one builds on: without them, it is gone too.
NEEDS = ("reporting", "runs")
SCRIPTS = ("test_kills.py", "kills/")
