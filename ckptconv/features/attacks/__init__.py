"""Attacks: files that call functions which no checkpoint has a reason to call. They are named as such, and refused.

In: the names and calls of a pickle, and files that the trunk refuses, of whose archives `zip_entries` reads what torch
reads. Out: an error for an attack. Without this feature such a file is read like any other: nothing that it names is
ever called either.
"""

from __future__ import annotations
