"""torchao's quantized tensors, stored in parts from which torchao makes them again.

In: such tensors as pickles describe them, or torchao's metadata in safetensors files. Out: that metadata, and the nodes
for a pickle. The meaning of their numbers is not known here.
"""

from __future__ import annotations
