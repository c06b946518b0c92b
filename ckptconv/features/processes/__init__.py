"""Processes, rather than threads, for files that are mostly computed, and for large comparisons.

In: tasks that do not depend on each other, and a worker for each process. Out: the workers' results. `PROCESSES` in
`engine/execute.py` names the module; without it, threads carry the tasks out.
"""

from __future__ import annotations
