"""Files of a rank, by themselves, and what to name in their place."""

from __future__ import annotations

from ckptconv.formats.alone import LoneFile, LoneKind
from ckptconv.formats.joining.sets import parsed

_JOINED = "Give the directory with the files of all ranks, under the names that they were saved with."


def _of_flat_parameters(file: LoneFile) -> bool:
    from ckptconv.formats.joining.names import FLAT_PARAMETER  # few files have such a key

    return any(FLAT_PARAMETER.search(key) for key in file.keys("flat_param"))


def _of_a_rank(file: LoneFile) -> bool:
    told = parsed(file.place.name)
    return told is not None and "rank" in told[0] and told[1] > 0 and not file.is_joined


def _of_first_rank(file: LoneFile) -> bool:
    told = parsed(file.place.name)
    return told is not None and "rank" in told[0] and told[2] is None and not file.is_joined


LONE = (
    LoneKind(
        "holds flat parameters of FSDP, of which each rank has a part.",
        _JOINED + " Or save a full state dict.",
        _of_flat_parameters,
    ),
    LoneKind("is of a rank other than the first, and no others are beside it.", _JOINED, _of_a_rank),
    LoneKind(
        "is called that of the first rank, no others are beside it, and nothing in it says that it is a part.",
        "If it is one, give the files of all ranks.",
        _of_first_rank,
        refused=False,
    ),
)
