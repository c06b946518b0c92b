"""Conversions in parts: each of several processes makes some files of an output, and `finish` publishes all.

In: a planned output, and which part of how many. Out: the files of that part, staged with a description of the whole.
`making` divides outputs, `staged` finds staged parts, `description` checks the descriptions of other processes, and
`finish` publishes. The processes do not communicate.
"""

from __future__ import annotations

PAGES = ("many-machines.md",)
FILES = ("examples/kubernetes.yaml",)
