"""The optimizer that a program saves in a file beside a model's weights, with its parameters by number.

Source: transformers' trainer.py (optimizer.pt, with scheduler.pt and trainer_state.json); accelerate's checkpointing.py
(optimizer.bin, of one process or of data parallel ones).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from ckptconv.errors import CkptconvError
from ckptconv.formats.model_files import OPTIMIZERS, SAFETENSORS, TORCH
from ckptconv.formats.optimizers import is_optimizer_alone
from ckptconv.formats.source import Source, Wanted
from ckptconv.formats.torch.file import read as read_torch
from ckptconv.formats.training import with_named, with_states_beside
from ckptconv.storage.files import Entry
from ckptconv.storage.location import Location


# What these call the model beside it, if that is one file, or an adapter of PEFT.
_MODELS = ("model.safetensors", "adapter_model.safetensors", "pytorch_model.bin", "adapter_model.bin")


def with_optimizer(source: Source, place: Location, wanted: Wanted) -> Source:
    """Return `source`, which was read from `place`, with the states of its optimizer, or of the one in a file beside
    it, or the reason why they cannot be named; without them, as one that is reread for those, if they are not wanted.
    """
    if wanted.orders:
        source = source._replace(wanted=source.wanted._replace(orders=wanted.orders))
    if wanted.states:
        source = with_states_beside(source, wanted.key)
    found = lying(source, place) if source.optimizer is None and source.states_error is None else None
    if found is None:
        return source
    if not wanted.states:
        again = functools.partial(_again, source, place)
        note = f"Beside the model there is {found.path}; --optimizer PATH converts its states."
        source = source._replace(notes=[*source.notes, note])
        return source._replace(wanted=wanted, reread=again) if source.reread is None else source
    return _with_states_of(source, place, found, wanted.key)


def lying(source: Source, place: Location) -> Location | None:
    """Return the file with the optimizer of a model that was read from `place`, if one lies beside it."""
    if source.family not in (SAFETENSORS, TORCH) or source.training is not None:
        return None
    if place.kind != "directory" and place.name not in _MODELS:
        return None
    directory = place if place.kind == "directory" else place.parent
    names = _names(directory)
    name = next((each for each in OPTIMIZERS if each in names and names[each].kind == "file"), "")
    return directory.at(names[name].file) if name else None


def _names(directory: Location) -> Mapping[str, Entry]:
    """Return the entries of a directory; none in a store that lists no names."""
    try:
        return directory.names if directory.kind == "directory" else {}
    except CkptconvError:
        return {}


def _again(source: Source, place: Location, wanted: Wanted) -> Source:
    """Return `source` with the states beside it, if they are `wanted`."""
    return with_optimizer(source._replace(reread=None, wanted=wanted), place, wanted)


def _with_states_of(source: Source, place: Location, file: Location, key: str) -> Source:
    try:
        other = read_torch(file, Wanted(key="."))
        if not is_optimizer_alone(other.weights):
            return source
        source = with_named(source, [("", other.weights)], file.path, key, place)
    except CkptconvError as error:
        message = f"Beside the model lies {file.path}, whose states are not taken. {error.message}"
        return source._replace(states_error=type(error)(message, error.hint))
    return source._replace(
        opaque=list(dict.fromkeys([*source.opaque, *other.opaque])),
        mentioned=list(dict.fromkeys([*source.mentioned, *other.mentioned])),
        warnings=[*source.warnings, *other.warnings],
        records={**source.records, **other.records},
        state_inputs={**source.state_inputs, **other.inputs},
        bytes_read=source.bytes_read + other.bytes_read,
    )
