"""Names in the directories of runs and of their steps that identify them. Only names are read.

Source: the file names of every release of DeepSpeed; Megatron-LM's, verl's, SkyRL's and EasyR1's checkpointing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckptconv.storage.location import Location

# Files that say which step is the last: Megatron's and verl's, SkyRL's, EasyR1's; of a JSON file, under which key.
TRACKERS = {
    "latest_checkpointed_iteration.txt": None,
    "latest_ckpt_global_step.txt": None,
    "checkpoint_tracker.json": "last_global_step",
}
# DeepSpeed's, of a training checkpoint and of a universal one; and the longest text of these, in bytes.
LATEST, LATEST_UNIVERSAL, MAX_TAG = "latest", "latest_universal", 4096
# The names of all files that only say where a checkpoint is.
POINTERS = (*TRACKERS, LATEST, LATEST_UNIVERSAL)
# Forms of directories that are replaced as a whole: the name of the file next to each, which names it and comes last.
TREES = {"tree": LATEST_UNIVERSAL, "step": next(iter(TRACKERS))}
# The end of the names of DeepSpeed's files of states; the names of those of a rank, of its optimizer and of its model.
STATES = "_states.pt"
OPTIMIZER_STATES = r"(?:bf16_)?(?:zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_?optim_states\.pt"
MODEL_STATES = r"(?:zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt"
# The directory of the parameters in a universal checkpoint; in it, the file of what all share; in the directory of a
# parameter, that of its weights.
ZERO, COMMON, WEIGHTS = "zero", "optimizer_state.pt", "fp32.pt"
# The name of a parameter of one of DeepSpeed's experts: their layer, the number of the expert, and the rest.
EXPERT = r"(.*\bdeepspeed_experts\.)(\d+)(\..*)"
# Names that frameworks give the directory of a model; of an optimizer next to it; of a training step.
# These and other patterns are compiled at first use: most paths are files, whose formats need none of them.
_MODELS = r"pytorch_model_fsdp_\d+|model_and_optim|model|checkpoint|dcp|sharded|dist_ckpt|(?:model_)?weights"
_OPTIMIZERS = r"optimizer_\d+|optimizer|optim"
STEP = r"(?:step|global_step|checkpoint|iter|epoch)?[-_=]?(\d+)"
# The directory of a rank of Megatron-LM: its tensor rank, pipeline rank, expert rank.
MEGATRON_RANK = r"mp_rank_(\d{1,6})(?:_(\d{1,6}))?(?:_(\d{1,6}))?"
# The file that describes a step of torch_checkpointing, and its manifest.
STEP_METADATA, STEP_MANIFEST = "metadata.pkl", "_integrity_manifest.json"
# Megatron's word for weights without a training; it stands in the place of a step.
RELEASE = "release"
# Names that NeMo, verl, SkyRL and prime-rl give the directory of a model's files, in the order of preference. A critic
# is another model: it is meant only if it is alone.
CRITIC = "critic"
HOLDERS = ("actor", "policy", "trainer", "weights", "model", "dist_ckpt", RELEASE, CRITIC)


def is_tag_directory(names: Iterable[str]) -> bool:
    """Return whether a directory with these names itself holds the files of a DeepSpeed tag."""
    patterns = OPTIMIZER_STATES, MODEL_STATES
    return any(re.fullmatch(pattern, name) for name in names if name.endswith(STATES) for pattern in patterns)


def tags_in(place: Location) -> list[str]:
    """Return the directories in `place` that hold the files of a tag of DeepSpeed."""
    return [
        name
        for name, entry in place.names.items()
        if entry.kind == "directory" and is_tag_directory(place.child(name).names)
    ]


def is_numbered(name: str) -> bool:
    """Return whether frameworks give this name to a step's directory."""
    return re.fullmatch(STEP, name) is not None


def is_of_optimizer(name: str) -> bool:
    """Return whether a directory of this name holds an optimizer's states."""
    return re.fullmatch(_OPTIMIZERS, name) is not None


def is_of_step(name: str) -> bool:
    """Return whether frameworks give this name to a step's directory, or to one in it."""
    return is_known(name) or is_numbered(name) or name in HOLDERS


def is_known(name: str) -> bool:
    """Return whether frameworks give this name to the directory of a model or an optimizer."""
    return bool(re.fullmatch(_MODELS, name)) or is_of_optimizer(name)
