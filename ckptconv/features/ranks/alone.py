"""Lone files of a rank, and the path to give in their place."""

from __future__ import annotations

from ckptconv.features.joining.sets import parsed
from ckptconv.formats.alone import LoneKind
from ckptconv.formats.lone_file import LoneFile

_JOINED = "Give the directory with the files of all ranks, under their original names."


def _of_flat_parameters(file: LoneFile) -> bool:
    from ckptconv.features.joining.names import FLAT_PARAMETER  # few files have such a key

    return any(FLAT_PARAMETER.search(key) for key in file.keys("flat_param"))


def _of_a_rank(file: LoneFile) -> bool:
    parts = parsed(file.place.name)
    return parts is not None and "rank" in parts[0] and parts[1] > 0 and not file.is_joined


def _of_first_rank(file: LoneFile) -> bool:
    parts = parsed(file.place.name)
    return parts is not None and "rank" in parts[0] and parts[2] is None and not file.is_joined


LONE = (
    LoneKind(
        "contains one rank's part of flat parameters of FSDP.",
        _JOINED + " Or save a full state dict.",
        _of_flat_parameters,
    ),
    LoneKind(
        "belongs to a rank other than the first, but the files of the other ranks are missing.", _JOINED, _of_a_rank
    ),
    LoneKind(
        "has the name of a first rank's file, but the files of other ranks are missing, and the file does not record "
        "their number.",
        "If there are other ranks, give the files of all ranks.",
        _of_first_rank,
        refused=False,
    ),
)
