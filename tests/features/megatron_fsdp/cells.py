"""What tests of the trunk ask of checkpoints of Megatron-FSDP as outputs too."""

from __future__ import annotations

from typing import Any

# The options by what becomes of them in such an output: heeded, refused, or said to have no effect.
_OUTCOMES = {
    "h": "max_shard_size dtype key include exclude strip_prefix rename structure chunks opaque map attest "
    "exclude_frozen_parameters clobber verify checksum part manifest digest depfile dry_run dequantize layers experts "
    "component vocab graft",
    "r": "like partial fill states model_key optimizer_key flat_optimizer fill_states zero_stage fresh_optimizer "
    "for_hub quantize requantize keep",
    "s": "tied order copy_config size config",
}
# What asks for such an output, and what becomes of each option.
KINDS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "megatron-fsdp": (
        {"output": "x", "to": "megatron-fsdp"},
        {option: outcome for outcome, options in _OUTCOMES.items() for option in options.split()},
    )
}
