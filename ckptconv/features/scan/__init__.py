"""What loading a file would run, as a verdict for each file, without running it.

In: paths of files and directories. Out: a `ScanReport`, and the same as SARIF for code hosts. `grammar` judges what a
pickle names and calls, also for `--opaque keep` of conversions.
"""

from __future__ import annotations

PAGES = ("scan.md", "internals/scan.md")
SCRIPTS = ("scan/",)
# What of the checkout is only for it, beside its folders.
FILES = ("action.yml", "requirements-grammar.txt")
