"""`ckptconv steps`: which steps of a run are whole, what is in them, and which is the last good one.

In: the directory of a run. Out: a line for each step. `formats.whole_steps` says which are whole; here their data is
read, if that was asked for, and the report is printed.
"""

from __future__ import annotations

PAGES = ("steps.md",)
