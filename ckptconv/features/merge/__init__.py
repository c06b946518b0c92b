"""LoRA adapters of PEFT, merged into their base.

In: a source, and paths of adapters with their configurations. Out: the source with the adapters, as `COMPUTED` has it.
Its tensors are the base's plus products of factors (`factors`).
"""

from __future__ import annotations

PAGES = ("merge.md",)
# Features that it builds on: without them, it is gone too.
NEEDS = ("companions", "configs", "factors", "regexes", "sums")
SCRIPTS = ("memory_names.py",)
