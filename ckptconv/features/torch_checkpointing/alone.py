"""Files of a step of torch_checkpointing, by themselves, and what to name in their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptconv.errors import CkptconvError
from ckptconv.formats.alone import LoneFile, LoneKind, listed, matching
from ckptconv.formats.runs import STEP_METADATA
from ckptconv.storage.location import Location

# The items of a step.
_ITEM = r".+_\d{1,6}\.(?:pt|safetensors)"
# Such an item by itself. Files of torch.save say that they are parts, and higher numbers are those of steps.
_LIKE_ITEM = r"model_\d{1,2}\.safetensors"
_MOST = 1 << 26


def _of_step(file: LoneFile) -> bool:
    place = file.place
    names = listed(place.parent) if matching(_ITEM, place.name) else {}
    return STEP_METADATA in names and _world_size(place.parent.at(names[STEP_METADATA].file)) != 1


def _world_size(place: Location) -> Any:
    """Return how many ranks the metadata of a step names; None if it does not tell."""
    from ckptconv.pickles.machine import load

    with place.open_reader() as reader:
        try:
            told = load(reader.read_at(0, min(reader.file.size, _MOST)), where=place.path).value
        except CkptconvError:
            return None
    return told.get("world_size") if isinstance(told, Mapping) else None


LONE = (
    LoneKind(
        "is of one of several ranks of a step of torch_checkpointing.",
        "Name the step's directory: {}.",
        _of_step,
        is_written=True,
    ),
    LoneKind(
        "is called what torch_checkpointing calls the part of a rank, and no description is beside it.",
        "If it is one, give the step's directory.",
        lambda file: matching(_LIKE_ITEM, file.place.name) is not None,
        refused=False,
    ),
)
