"""Completion of command lines for shells, with the options that a command has left, their values, and their help.

In: what a shell says of the line that is typed. Out: the text that it reads. Without this, typer completes lines.
"""

from __future__ import annotations

PAGES = ()
