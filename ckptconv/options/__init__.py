"""The options: one table of their names, kinds of value, defaults and effects.

In: what a caller gave, from Python, the command line, the environment or a manifest. Out: `Options`.
"""

from __future__ import annotations

# The groups of the help, in order.
GROUPS = (TAKE, NAMING, OUTPUT, RUNNING, REPORTING) = ("Input", "Names and types", "Output", "Running", "Reporting")
