"""Megatron-LM's older checkpoints (`--ckpt-format torch`): a file of torch.save for each model-parallel rank.

Source: megatron/training/checkpointing.py of Megatron-LM. A run's directory holds `iter_0000020` or `release`, this
`mp_rank_<tensor rank>[_<pipeline rank>[_<expert rank>]]`, and this `model_optim_rng.pt`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from ckptconv.errors import UnsupportedError
from ckptconv.formats.format import CERTAIN, Guess, Probe
from ckptconv.formats.runs import pointed
from ckptconv.formats.source import Source, Wanted
from ckptconv.formats.torch import file as torch_file
from ckptconv.storage.location import Location
from ckptconv.text import some

FAMILY = torch_file.FAMILY
_RANK = re.compile(r"mp_rank_\d+(?:_\d+){0,2}")
# The names of the file, of old releases too.
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_GUESS = Guess(CERTAIN, "a checkpoint of Megatron-LM", "pt2safetensors {} OUTPUT")


def sniff(probe: Probe) -> Guess | None:
    """Recognize the directory of a step, or of a run, in which a file says which step is the last."""
    if not probe.is_directory:
        return None
    step, _ = pointed(probe.place) or (probe.place, None)
    return _GUESS if any(_files(step)) else None


def read(place: Location, wanted: Wanted) -> Source:
    """Open the only rank's file. Raise UnsupportedError if there are several ranks: each holds a part of the model."""
    step, pointer = pointed(place) or (place, None)
    files = list(_files(step))
    if len(files) > 1:
        raise UnsupportedError(
            f"{step} holds {len(files)} ranks of Megatron-LM: {some([file.parent.name for file in files], form=str)}. "
            "Each has a part of every tensor, and nothing in them says how the parts are joined; maps will do it.",
            "Save it with --ckpt-format torch_dist, which says how, or convert the file of a rank by itself.",
        )
    source = torch_file.read(files[0], wanted)
    return replace(source, path=place.path, pointers=[pointer.path] if pointer else [], notes=[f"Took {files[0]}."])


def _files(step: Location) -> Iterable[Location]:
    for name, entry in step.names.items():
        if entry.kind == "directory" and _RANK.fullmatch(name):
            rank = step.join(name)
            yield from (rank.join(file) for file in _FILES if file in rank.names)
