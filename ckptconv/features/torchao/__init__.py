"""torchao's quantized tensors: stored as the parts of which torchao makes them again.

In: what pickles say of such tensors, or torchao's metadata in safetensors files. Out: that metadata, and the nodes of
which a pickle is made. What their numbers mean is not known here.
"""

from __future__ import annotations
