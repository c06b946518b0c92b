"""Outputs whose files are written by the workers of an executor: threads, processes, or other machines.

In: files to write, each into staging that this process has locked, and an executor of `concurrent.futures`. Out: their
records. `EXECUTING` in `publish/jobs.py` names the feature; without it, `convert(executor=…)` is refused.
"""

from __future__ import annotations

PAGES = ("executors.md",)
FILES = ("examples/convert_on_ray.py",)
