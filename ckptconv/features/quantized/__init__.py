"""Quantized weights: weights are made of their codes, scales and zero points, and codes of weights.

In: a source that holds the parts of quantized weights, or weights. Out: a source whose tensors are the weights, or a
selection with codes and scales in the place of these.
"""

from __future__ import annotations

PAGES = ("quantized.md", "internals/quantized.md")
# Features that this one builds on: without them, it is gone too.
NEEDS = ("companions", "configs", "factors", "pairs", "reporting", "sums")
SCRIPTS = (
    "formats/autoround.py",
    "formats/bitsandbytes.py",
    "formats/compressed.py",
    "formats/hqq.py",
    "formats/mlx.py",
    "formats/modelopt.py",
    "formats/quark.py",
    "formats/rotations.py",
)
