"""Steps of Megatron-Bridge that hold adapters alone, as adapters of PEFT.

In: a step of Megatron-core whose tensors are adapters, a built-in map of its model, and a directory of PEFT, which says
alpha. Out: the map of the adapters, and the directory of PEFT that it makes. `deriving` makes the map of the adapters
from that of the model, `names` finds adapters that have no map, `training` reads what the training says of them, and
`opening` compares the directory of PEFT with all that.

Source: Megatron-Bridge 067f987d, peft/ and models/conversion/peft_bridge.py; PEFT 0.21, tuners/lora.
"""

from __future__ import annotations

PAGES = ("megatron-adapters.md",)
# What it adds to, and builds on.
NEEDS = ("dcp", "megatron_core", "maps", "like", "merge")
