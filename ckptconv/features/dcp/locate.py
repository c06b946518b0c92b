"""Find a torch.distributed.checkpoint directory, by its name, its neighbours and the names in it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ckptconv.errors import UsageError
from ckptconv.features.dcp import MODULE, dialects
from ckptconv.features.dcp.names import METADATA, SHARD, SUFFIX, is_part
from ckptconv.features.joining import run_layout
from ckptconv.formats.format import CERTAIN, POSSIBLE, Guess, Probe
from ckptconv.formats.model_files import may_lie_below
from ckptconv.formats.registered import DCP
from ckptconv.formats.run_names import is_of_optimizer
from ckptconv.storage.location import Location
from ckptconv.storage.paths import dirname
from ckptconv.storage.reading import Entry

FAMILY = DCP
GUESS = Guess(CERTAIN, "a checkpoint of torch.distributed.checkpoint", "dcp2safetensors {} OUTPUT")
# Bytes of a file that tell whether it is metadata.
BEGINNING = 64


def sniff(probe: Probe) -> Guess | None:
    """Recognize a directory, or a file that describes the checkpoint in its directory."""
    place = probe.place
    if probe.is_file:
        if is_part(place.path):
            return GUESS._replace(place=place.at(directory_of(place.path)))
        # An index is JSON: do not read it.
        if not place.name.endswith(".index.json") and is_metadata(probe.head[0]):
            raise UsageError(
                f"{place} is a renamed {METADATA} of a checkpoint of torch.distributed.checkpoint.",
                f"Rename it to {METADATA} in the directory of the {SUFFIX} files, and give that directory.",
            )
        return None
    is_expected = probe.expected == FAMILY
    if probe.is_directory and (
        is_directory(place.names) or dialects.is_of_another_backend(place) or (is_expected and locate(place))
    ):
        return GUESS
    return GUESS._replace(sure=POSSIBLE) if is_expected else None


def is_metadata(head: bytes) -> bool:
    """Return whether a file that begins with `head` is metadata, under any name: its pickle first names torch's class
    for it."""
    return head[:1] == b"\x80" and MODULE.encode() in head[:BEGINNING]


def directory_of(path: str) -> str:
    """Return the directory of the checkpoint that a file is part of, if the file stands for the whole.

    Raise UsageError for a file of one rank's tensors.
    """
    if path.endswith(SUFFIX):
        raise UsageError(
            f"{path} contains only the tensors that one rank saved; the {METADATA} of the checkpoint describes these "
            "tensors.",
            f"Give the directory: ckptconv dcp2safetensors {dirname(path)} OUTPUT",
        )
    return dirname(path)


def is_directory(names: Mapping[str, Entry]) -> bool:
    """Return whether a directory with these names holds a checkpoint, complete or not."""
    return any(
        entry.kind == "file" and (is_part(name) or name == f"{METADATA}.tmp" or re.fullmatch(SHARD, name))
        for name, entry in names.items()
    )


def located(place: Location) -> run_layout.Located:
    """Return the checkpoint in the directory `place`, or below it. Raise UsageError if there is none."""
    checkpoint = locate(place) if place.kind == "directory" else None
    if checkpoint is None:
        raise UsageError(
            f"{place} is not a checkpoint of torch.distributed.checkpoint: it has neither {METADATA} nor {SUFFIX} "
            "files.",
            "Give the directory that contains them.",
        )
    return checkpoint


def locate(place: Location) -> run_layout.Located | None:
    """Return the checkpoint in a directory, or below it; None if there is none. See `run_layout.locate`."""
    return run_layout.locate(
        place, lambda directory: is_directory(directory.names) or dialects.is_of_another_backend(directory)
    )


def sniff_below(probe: Probe) -> Guess | None:
    """Recognize the directory of a run or of a step with a checkpoint in it, or below."""
    return GUESS if may_lie_below(probe, beside=run_layout.SHARDED) and holds_below(probe.place) else None


def holds_below(place: Location) -> bool:
    """Return whether a checkpoint is in a directory, or below it."""
    from ckptconv.features.joining.sets import holds_parts  # few directories have theirs below

    checkpoint = locate(place)
    # The model of an optimizer that was saved so may be in a file for each rank, as accelerate writes it.
    return checkpoint is not None and not (
        is_of_optimizer(checkpoint.directory.name) and holds_parts(checkpoint.directory.parent)
    )
