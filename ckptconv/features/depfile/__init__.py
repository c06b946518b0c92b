"""`--depfile`: a rule for make, by which an output is made anew when a file has changed that it was made of.

In: the outputs of a conversion, and the files that it read. Out: a Makefile with one rule, which `include` reads.
"""

from __future__ import annotations

PAGES = ("pipelines.md",)
FILES = ("examples/pipeline/Makefile", "examples/pipeline/batch.txt")
