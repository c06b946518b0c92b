"""The optimizer that a program saves in a file next to a model's weights, with its parameters by number.

Source: transformers' trainer.py (optimizer.pt, with scheduler.pt and trainer_state.json); accelerate's checkpointing.py
(optimizer.bin, of one process or of data parallel ones).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

from ckptconv.errors import CkptconvError, UsageError
from ckptconv.features.optimizer_states.states import is_by_number, optimizers_alone
from ckptconv.features.optimizer_states.training import with_named, with_optimizer
from ckptconv.formats.alone import listed
from ckptconv.formats.model_files import OPTIMIZERS, SAFETENSORS, TORCH
from ckptconv.formats.optimizers import is_optimizer
from ckptconv.formats.source import NOT_CONVERTED, STATES_ARE_CONVERTED, FileFacts, Source, Wanted
from ckptconv.formats.torch.file import read as read_torch
from ckptconv.storage.location import Location

# The model next to the optimizer, if it is one file, or an adapter of PEFT.
_MODELS = ("model.safetensors", "adapter_model.safetensors", "pytorch_model.bin", "adapter_model.bin")


def with_file(source: Source, place: Location, wanted: Wanted) -> Source:
    """Return `source`, which was read from `place` and has no optimizer, with the states of one in a file next to it,
    or the reason why they have no names. If states are not wanted, return a source that can be reread for them.
    """
    files = lying(source, place)
    if not files:
        return source
    if not wanted.states:
        again = functools.partial(_again, source, place)
        note = f"{NOT_CONVERTED}{files[0].path}{STATES_ARE_CONVERTED}."
        source = source._replace(notes=[*source.notes, note])
        return source._replace(wanted=wanted, reread=again) if source.reread is None else source
    return _with_states_of(source, place, files, wanted.key)


def marked(source: Source) -> Source:
    """Return `source`, which has no optimizer next to its weights; if it is one itself, with the reason why its states
    are not those of a model."""
    tree = source.weights
    if not isinstance(tree, Mapping) or not is_optimizer({"param_groups": [], **tree}) or not tree["state"]:
        return source
    if is_by_number(tree):
        error = UsageError(
            f"{source.path} contains numbered optimizer states, but no model to name them by.",
            "Specify the directory of the step, which also contains the model. Without --optimizer, the file is "
            "converted unchanged.",
        )
    else:
        error = UsageError(
            f"{source.path} contains only an optimizer's states by parameter, without a model.",
            "Its tensors, <parameter>.<state>, already have names: convert them without --optimizer.",
        )
    return source._replace(of_states=source.of_states._replace(error=error))


def lying(source: Source, place: Location) -> list[Location]:
    """Return the files with the optimizers of a model that was read from `place`, in the model's directory."""
    if source.family not in (SAFETENSORS, TORCH):
        return []
    if place.kind != "directory" and place.name not in _MODELS:
        return []
    directory = place if place.kind == "directory" else place.parent
    names = listed(directory)
    first = next((name for name in OPTIMIZERS if name in names and names[name].kind == "file"), "")
    stem, _, suffix = first.rpartition(".")
    numbered = re.compile(rf"{stem}_\d{{1,6}}\.{suffix}")
    more = [name for name, entry in names.items() if numbered.fullmatch(name) and entry.kind == "file"]
    return [directory.at(names[name].file) for name in (first, *more)] if first else []


def _again(source: Source, place: Location, wanted: Wanted) -> Source:
    """Return `source` with the states next to it, if they are `wanted`."""
    return with_optimizer(source._replace(reread=None, wanted=wanted), place, wanted)


def _with_states_of(source: Source, place: Location, files: list[Location], key: str) -> Source:
    holders: list[Source] = []
    try:
        holders += (read_torch(file, Wanted(key=".")) for file in files)
        trees = [(holder.path, optimizers_alone(holder.weights)) for holder in holders]
        if not all(inner for _, inner in trees):
            return source
        optimizers = [(path if len(trees) > 1 else label, tree) for path, inner in trees for label, tree in inner]
        source = with_named(source, optimizers, files[0].path, key, place)
    except CkptconvError as error:
        message = f"{NOT_CONVERTED}the states in {files[0].path}. {error.message}"
        return source._replace(of_states=source.of_states._replace(error=type(error)(message, error.hint)))
    read = {name: identity for holder in holders for name, identity in holder.inputs.items()}
    return source._replace(
        files=FileFacts.of_all(holder.files for holder in (source, *holders)),
        warnings=[text for holder in (source, *holders) for text in holder.warnings],
        of_states=source.of_states._replace(inputs={**source.of_states.inputs, **read}),
        bytes_read=sum(holder.bytes_read for holder in (source, *holders)),
    )
