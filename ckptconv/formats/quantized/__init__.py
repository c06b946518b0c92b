"""Quantized weights at rest: which codes, scales and zero points belong together, and the weights that they are.

`table` has the formats, and `configuration` what configurations say of them. `joining` decides by companions, dtypes,
shapes and the configuration together; `weights` gives a source whose tensors are the weights.
"""

from __future__ import annotations
