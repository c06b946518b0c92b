"""What tests of the trunk ask of virtual checkpoints too."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

# ------------------------------------------------------------------------------------------------------ kind of output

# The options by what becomes of them: heeded, refused, or said to have no effect.
_OUTCOMES = {
    "h": "max_shard_size dtype dequantize quantize requantize keep key include exclude strip_prefix rename map tied "
    "layers experts component vocab graft like partial fill structure exclude_frozen_parameters clobber manifest "
    "digest attest depfile dry_run",
    "r": "chunks states model_key optimizer_key flat_optimizer fill_states zero_stage fresh_optimizer for_hub verify "
    "checksum part",
    "s": "size order opaque copy_config config",
}
# What asks for it, and what becomes of each option.
KINDS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "virtual": (
        {"output": "x.virtual.json"},
        {option: outcome for outcome, options in _OUTCOMES.items() for option in options.split()},
    )
}


# ---------------------------------------------------------------------------------------------------- what is printed

# The command, and what it is called with.
WAYS = {"virtual": [["model.pt", "model.virtual.json"]]}
# Commands that name their output by an option, last; those that lack one.
NAMED = [
    (None, "virtual a.safetensors -o a.virtual.json"),
    (None, "convert a.safetensors -o a.virtual.json"),
]
LACKING = [
    ("virtual a", "OUTPUT is missing"),
    ("virtual runs/m.pt", "as the second argument, or with -o, such as m.virtual.json."),
]
# Commands that convert a checkpoint of any format.
CONVERTING = ["virtual"]


def refused_alone(path: Path, here: Path) -> list[tuple[object, ...]]:
    """The words that take a file, which is one of many, for a model."""
    return [("virtual", path, here / "x.virtual.json")]


# --------------------------------------------------------------------------------------------------- what is replaced

REFUSED = """\
virtual a.pt x.virtual.json --manifest a.pt
virtual a.pt x.virtual.json --manifest notes.md
virtual g1.safetensors x.virtual.json --manifest a.pt
"""
DONE: dict[str, set[str]] = {"virtual a.pt new.virtual.json": set()}
AGAIN = """\
virtual a.pt new.virtual.json
"""
# What a command writes to a directory that others write to: the name, and its words.
WRITTEN: dict[str, tuple[str, tuple[object, ...]]] = {"virtual": ("x.virtual.json", ("virtual", "WEIGHTS", "PATH"))}


# ------------------------------------------------------------------------------------------------------ what is scanned

# What `scan` says of a file, and why.
SCANNED: dict[str, tuple[str, bytes]] = {
    "a description of others": (
        "reads-elsewhere",
        b'{"ckptconv.virtual":1,"format":"x","plan":"0","roots":["s3://a"],"sources":[],"lists":[],"files":[]}',
    ),
}
# The name of a description, and its text where it reads from `elsewhere`.
ELSEWHERE = {
    "model.virtual.json": '{{"ckptconv.virtual": 1, "format": "safetensors", "plan": "0", "roots": ["{elsewhere}"], '
    '"sources": [{{"root": 0, "name": "a.safetensors", "size": 9, "stamp": "0"}}], "lists": [], "files": []}}'
}


def _fuzz(chance: random.Random, place: Path) -> str:
    from features.virtual.fuzzing import fuzz_description

    return fuzz_description(chance, place)


# A changed checkpoint, converted: how that ended.
FUZZED = {"virtual": _fuzz}
