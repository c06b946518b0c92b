"""What tests of the trunk ask of files for torch.load too."""

from __future__ import annotations

from typing import Any

from . import faults_of_archives

# ------------------------------------------------------------------------------------------------------ kind of output

# The options by what becomes of them: heeded, refused, or said to have no effect.
_OUTCOMES = {
    "h": "dtype dequantize key include exclude strip_prefix rename map layers experts component vocab graft structure "
    "opaque clobber verify checksum part manifest digest attest depfile dry_run",
    "r": "max_shard_size quantize requantize keep like partial fill chunks states model_key optimizer_key "
    "flat_optimizer fill_states zero_stage fresh_optimizer for_hub",
    "s": "size tied order copy_config config exclude_frozen_parameters",
}
FAULTS = faults_of_archives.FAULTS
# What asks for it, and what becomes of each option.
KINDS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "torch": (
        {"output": "x.pt"},
        {option: outcome for outcome, options in _OUTCOMES.items() for option in options.split()},
    )
}
