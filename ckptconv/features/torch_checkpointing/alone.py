"""Lone files of a step of torch_checkpointing, and the path to give in their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptconv.errors import CkptconvError
from ckptconv.formats.alone import LoneKind, listed, matching
from ckptconv.formats.lone_file import LoneFile
from ckptconv.formats.run_names import STEP_METADATA
from ckptconv.storage.location import Location

# The items of a step.
_ITEM = r".+_\d{1,6}\.(?:pt|safetensors)"
# A lone item. Files of torch.save say that they are parts, and a higher number is that of a step.
_LIKE_ITEM = r"model_\d{1,2}\.safetensors"
_MOST = 1 << 26


def _of_step(file: LoneFile) -> bool:
    place = file.place
    names = listed(place.parent) if matching(_ITEM, place.name) else {}
    return STEP_METADATA in names and _world_size(place.parent.at(names[STEP_METADATA].file)) != 1


def _world_size(place: Location) -> Any:
    """Return the number of ranks in the metadata of a step; None if it has none."""
    from ckptconv.pickles.machine import load

    with place.open_reader() as reader:
        try:
            metadata = load(reader.read_at(0, min(reader.file.size, _MOST)), where=place.path).value
        except CkptconvError:
            return None
    return metadata.get("world_size") if isinstance(metadata, Mapping) else None


LONE = (
    LoneKind(
        "belongs to one of the ranks of a torch_checkpointing step.",
        "Give the directory of the step: {}.",
        _of_step,
        is_written=True,
    ),
    LoneKind(
        "has a name like a rank's file of torch_checkpointing, but no description is next to it.",
        "If it belongs to a step, give the directory of the step.",
        lambda file: matching(_LIKE_ITEM, file.place.name) is not None,
        refused=False,
    ),
)
