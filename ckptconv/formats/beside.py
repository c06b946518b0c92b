"""The optimizer that a program saves in a file beside a model's weights, with its parameters by number.

Source: transformers' trainer.py (optimizer.pt, with scheduler.pt and trainer_state.json); accelerate's checkpointing.py
(optimizer.bin, of one process or of data parallel ones).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

from ckptconv.errors import CkptconvError
from ckptconv.formats.model_files import OPTIMIZERS, SAFETENSORS, TORCH
from ckptconv.formats.numbers.states import optimizers_alone
from ckptconv.formats.source import FileFacts, Source, Wanted
from ckptconv.formats.torch.file import read as read_torch
from ckptconv.formats.training import with_named, with_states_beside
from ckptconv.storage.location import Location
from ckptconv.storage.reading import Entry

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
    found = lying(source, place) if source.optimizer is None and source.of_states.error is None else []
    if not found:
        return source
    if not wanted.states:
        again = functools.partial(_again, source, place)
        note = f"Beside the model there is {found[0].path}; --optimizer PATH converts its states."
        source = source._replace(notes=[*source.notes, note])
        return source._replace(wanted=wanted, reread=again) if source.reread is None else source
    return _with_states_of(source, place, found, wanted.key)


def lying(source: Source, place: Location) -> list[Location]:
    """Return the files with the optimizers of a model that was read from `place`, which lie beside it."""
    if source.family not in (SAFETENSORS, TORCH) or source.training is not None:
        return []
    if place.kind != "directory" and place.name not in _MODELS:
        return []
    directory = place if place.kind == "directory" else place.parent
    names = _names(directory)
    first = next((each for each in OPTIMIZERS if each in names and names[each].kind == "file"), "")
    stem, _, suffix = first.rpartition(".")
    numbered = re.compile(rf"{stem}_\d{{1,6}}\.{suffix}")
    more = [name for name, entry in names.items() if numbered.fullmatch(name) and entry.kind == "file"]
    return [directory.at(names[name].file) for name in (first, *more)] if first else []


def _names(directory: Location) -> Mapping[str, Entry]:
    """Return the entries of a directory; none in a store that lists no names."""
    try:
        return directory.names if directory.kind == "directory" else {}
    except CkptconvError:
        return {}


def _again(source: Source, place: Location, wanted: Wanted) -> Source:
    """Return `source` with the states beside it, if they are `wanted`."""
    return with_optimizer(source._replace(reread=None, wanted=wanted), place, wanted)


def _with_states_of(source: Source, place: Location, files: list[Location], key: str) -> Source:
    others: list[Source] = []
    try:
        others += (read_torch(file, Wanted(key=".")) for file in files)
        held = [(each.path, optimizers_alone(each.weights)) for each in others]
        if not all(own for _, own in held):
            return source
        optimizers = [(path if len(held) > 1 else label, one) for path, own in held for label, one in own]
        source = with_named(source, optimizers, files[0].path, key, place)
    except CkptconvError as error:
        message = f"Beside the model lies {files[0].path}, whose states are not taken. {error.message}"
        return source._replace(of_states=source.of_states._replace(error=type(error)(message, error.hint)))
    read = {name: what for each in others for name, what in each.inputs.items()}
    return source._replace(
        files=FileFacts.of_all(each.files for each in (source, *others)),
        warnings=[text for each in (source, *others) for text in each.warnings],
        of_states=source.of_states._replace(inputs={**source.of_states.inputs, **read}),
        bytes_read=sum(each.bytes_read for each in (source, *others)),
    )
