"""Names of files in a run of DeepSpeed, and in a universal checkpoint: what tells a tag's directory from others.

Source: the file names of every release of DeepSpeed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckptconv.storage.location import Location

# The longest text of a file that names a tag, in bytes.
MAX_TAG = 4096
# The end of the names of all files of states; the names of those of a rank, of its optimizer and of its model.
SUFFIX = "_states.pt"
OPTIMIZER = r"(?:bf16_)?(?:zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_?optim_states\.pt"
MODEL = r"(?:zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt"
# The directory of the parameters in a universal checkpoint; in it, the file of what all share; in the directory of a
# parameter, that of its weights.
ZERO, COMMON, WEIGHTS = "zero", "optimizer_state.pt", "fp32.pt"


def is_tag_directory(names: Iterable[str]) -> bool:
    """Whether a directory with these names itself holds the files of a tag."""
    return any(re.fullmatch(pattern, name) for name in names if name.endswith(SUFFIX) for pattern in (OPTIMIZER, MODEL))


def tags_in(place: Location) -> list[str]:
    """Return the directories in `place` that hold the files of a tag."""
    return [
        name
        for name, entry in place.names.items()
        if entry.kind == "directory" and is_tag_directory(place.child(name).names)
    ]
