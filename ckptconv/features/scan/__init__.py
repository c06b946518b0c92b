"""Verdicts on files, by what loading them would run. Nothing is run.

In: paths of files and directories. Out: a `ScanReport`, and the same as SARIF for code hosts. `grammar` judges the
names and calls of a pickle, also for `--opaque keep` of conversions.
"""

from __future__ import annotations

PAGES = ("scan.md", "internals/scan.md")
NEEDS = ("attacks", "consecutive", "reporting")
SCRIPTS = ("scan/",)
# Files of the checkout that only this feature needs, besides its folders.
FILES = ("action.yml", "requirements-grammar.txt")
