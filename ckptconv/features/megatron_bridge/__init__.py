"""The configuration of a training by Megatron-Bridge, which is beside the tensors of a step of Megatron-core.

In: run_config.yaml in a step. `run_config` reads it, and `properties` gives the arguments of Megatron-LM that the
properties of its model say.
"""

from __future__ import annotations

PAGES = ()
# The features that it adds to, and builds on.
NEEDS = ("dcp", "megatron_core")
