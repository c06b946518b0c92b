"""Steps of Megatron-Bridge that hold adapters alone, and adapters of PEFT: each as the other.

In: a step of Megatron-core whose tensors are adapters, or an adapter of PEFT, and a built-in map of its model. Out: the
map of the adapters, which makes the other: of LoRA, or of CanonicalLoRA, where each module has factors of its own.
`deriving` makes the map of the adapters from that of the model, and `names` finds adapters that have no map.
`untrained` has the zeros of matrices that PEFT does not adapt. `training` reads the settings in run_config.yaml, and
`settings` has those of PEFT. `opening` gives a step its map, with a configuration of PEFT; `taking` gives an adapter of
PEFT its map, and compares it with the step that the output is to be like.

Source: Megatron-Bridge 067f987d, peft/ and models/conversion/peft_bridge.py; PEFT 0.21, tuners/lora.
"""

from __future__ import annotations

PAGES = ("megatron-adapters.md",)
SCRIPTS = ("test_megatron_adapters.py", "test_megatron_bridge.py")
# The features that it adds to, and builds on.
NEEDS = ("companions", "like", "maps", "megatron_bridge", "megatron_core", "merge")
