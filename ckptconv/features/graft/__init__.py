"""Tensors of another checkpoint, added to those of an output as they are.

In: the tensors of an output, and a checkpoint with a glob. Out: both, and the configuration that counts the layers
which were added. Nothing is cast.
"""

from __future__ import annotations

SCRIPTS = ("test_vllm.py",)
FILES = ("requirements-vllm.txt",)
# Features that this one builds on: without them, it is gone too.
NEEDS = ("model_facts",)
