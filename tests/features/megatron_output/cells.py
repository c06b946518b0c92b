"""What tests of the trunk ask of steps of Megatron-core as outputs too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ckptconv

# The options by what becomes of them in such an output: heeded, refused, or said to have no effect.
_OUTCOMES = {
    "h": "like max_shard_size dtype key include exclude strip_prefix rename structure chunks opaque map attest "
    "exclude_frozen_parameters clobber verify checksum part manifest digest depfile dry_run dequantize layers experts "
    "component vocab graft",
    "r": "partial fill states model_key optimizer_key flat_optimizer fill_states zero_stage fresh_optimizer "
    "for_hub quantize requantize keep",
    "s": "tied order copy_config size config",
}
# What asks for each kind, and what becomes of each option.
KINDS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    kind: (
        {"output": "x", "to": kind},
        {option: outcome for outcome, options in _OUTCOMES.items() for option in options.split()},
    )
    for kind in ("megatron", "megatron-te")
}


def make_like(here: Path) -> None:
    """Make what such an output can be like."""
    ckptconv.convert(here / "model", here / "like.megatron", to="megatron")
    (here / "like.megatron/release/run_config.yaml").write_text("model: {}")
