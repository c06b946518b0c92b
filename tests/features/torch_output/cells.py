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
    "flat_optimizer fill_states zero_stage fresh_optimizer for_hub exclude_frozen_parameters",
    "s": "size tied order copy_config config",
}
FAULTS = faults_of_archives.FAULTS
# What asks for it, and what becomes of each option.
KINDS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "torch": (
        {"output": "x.pt"},
        {option: outcome for outcome, options in _OUTCOMES.items() for option in options.split()},
    )
}

# --------------------------------------------------------------------------------------------------- what is replaced

REFUSED = """\
convert a.pt a.pt
convert a.pt -o ./hf/../a.pt --overwrite
convert a.pt b.pt --no-clobber
convert a.pt b.pt --dtype bf16
safetensors2pt g1.safetensors -o new.pt --manifest a.pt
"""
DONE: dict[str, set[str]] = {
    "convert g1.safetensors -o a.pt": {"a.pt"},
    "convert a.pt -o b.pt --dtype bf16": {"b.pt"},
    "convert nested.pt -o b.pt --key nested": {"b.pt"},
}
AGAIN = """\
safetensors2pt g1.safetensors new.pt
"""
# What a command writes to a directory that others write to: the name, and its words.
WRITTEN: dict[str, tuple[str, tuple[object, ...]]] = {"torch": ("x.pt", ("safetensors2pt", "WEIGHTS", "PATH"))}

# ------------------------------------------------------------------------------------------------------- the commands

# The command for a format, and the name of its output.
FORMATS = {"safetensors2pt": "out.pt"}
COMMANDS = ["safetensors2pt"]
READERS = {"safetensors2pt": (True, False)}
# The command, and what it is called with.
WAYS = {"safetensors2pt": [["model.safetensors", "again.pt"], ["model.safetensors", "again.pt", "--opaque", "drop"]]}
# Commands that name their output by an option, last; those that lack one.
NAMED = [(None, "safetensors2pt a.safetensors -o back.pt")]
LACKING = [("safetensors2pt a.safetensors", "OUTPUT is missing")]
# Words that lead to the command.
MEANT = dict.fromkeys(("st2pt", "hf2pt", "safetensors-to-torch"), "safetensors2pt")
