"""Holds outputs while they are written: near their final path, hidden, locked, resumable.

In: the files that a plan lists. Out: writers for them, and one step that gives them their final names. `local` is for
local disks, a feature has those for stores; `area` has the names of staged files.
"""
