"""Names in the directories of runs and of their steps, by which others tell them. Nothing is read but names.

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
# The names of all that only say where a checkpoint is.
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


def is_tag_directory(names: Iterable[str]) -> bool:
    """Whether a directory with these names itself holds the files of a tag of DeepSpeed."""
    patterns = OPTIMIZER_STATES, MODEL_STATES
    return any(re.fullmatch(pattern, name) for name in names if name.endswith(STATES) for pattern in patterns)


def tags_in(place: Location) -> list[str]:
    """Return the directories in `place` that hold the files of a tag of DeepSpeed."""
    return [
        name
        for name, entry in place.names.items()
        if entry.kind == "directory" and is_tag_directory(place.child(name).names)
    ]
