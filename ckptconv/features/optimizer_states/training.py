"""The optimizer's states next to the weights of a training checkpoint, in its file or in one next to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptconv.errors import CkptconvError, UnsupportedError, UsageError
from ckptconv.features.optimizer_states.numbering import part
from ckptconv.features.optimizer_states.states import model_of, named
from ckptconv.formats import registered
from ckptconv.formats.model_files import OPTIMIZERS, SAFETENSORS, TORCH
from ckptconv.formats.optimizers import entries, optimizers_in, subtree, weights_key
from ckptconv.formats.source import NOT_CONVERTED, Source, Wanted
from ckptconv.process import lacking
from ckptconv.storage.location import Location
from ckptconv.storage.paths import is_remote
from ckptconv.structure import keymap
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.text import some


def with_optimizer(source: Source, place: Location, wanted: Wanted) -> Source:
    """Return `source`, which was read from `place`, with the states of its optimizer, or of one in a file next to it,
    or the reason why they have no names. If states are not wanted, return a source that can be reread for them.
    """
    if wanted.orders:
        source = source._replace(wanted=source.wanted._replace(orders=wanted.orders))
    if wanted.states:
        source = with_states_beside(source, wanted.key)
    if source.optimizer is not None or source.of_states.error is not None or source.training is not None:
        return source
    beside = part("beside")
    return beside.with_file(source, place, wanted) if beside else _without_file(source, place)


def _without_file(source: Source, place: Location) -> Source:
    """Return `source` with the reason why the states in a file next to it are not read, if there is one."""
    names = (
        (place if place.kind == "directory" else place.parent).names if source.family in (SAFETENSORS, TORCH) else ()
    )
    files = [name for name in OPTIMIZERS if name in names]
    if not files:
        return source
    message = f"{NOT_CONVERTED}the states in {files[0]}, next to the weights: finding their names"
    error = lacking(message, registered.NUMBERS, error=UnsupportedError)
    of_states = source.of_states._replace(error=error)
    return source._replace(of_states=of_states, notes=[*source.notes, error.message])


def with_states_beside(source: Source, key: str = "") -> Source:
    """Return `source` with the states of the optimizers that are saved next to its weights, which are under `key`, as
    in a file that torch.save wrote; or with the reason why they have no names."""
    if source.optimizer is not None or source.of_states.error is not None or source.training is not None:
        return source
    key = key or weights_key(source.weights)
    around, _, name = key.rpartition(".")
    optimizers = optimizers_in(source.weights, key)
    if not optimizers and around:
        optimizers = optimizers_in(subtree(source.weights, around), name)
    if not optimizers:
        return beside.marked(source) if (beside := part("beside")) else source
    try:
        check_key(source, optimizers[0][0], key)
        return with_named(source, optimizers, source.path, key)
    except CkptconvError as error:
        return source._replace(of_states=source.of_states._replace(error=error))


def with_named(
    source: Source,
    optimizers: Sequence[tuple[str, Mapping[str, Any]]],
    where: str,
    key: str = "",
    place: Location | None = None,
) -> Source:
    """Return `source` with the states of `optimizers`, of the checkpoint `where`, by the names of its weights, which
    are under `key`, and a note on the source of the names of numbers.

    `place`: where it was opened. Raise UnsupportedError if names are unknown, CorruptError for two states of one name.
    """
    place = place or (None if is_remote(source.path) else Location(source.path))
    if place is not None and place.kind != "directory":
        place = place.parent if place.kind == "file" else None
    tree = model_tree(source, key) if source.structured else None
    model = model_of(weights_in(source, key), tree)._replace(orders=source.wanted.orders, place=place)
    optimizer, numbering = named(optimizers, model, where)
    of_states = source.of_states._replace(error=None, inputs={**source.of_states.inputs, **numbering.inputs})
    return source._replace(optimizer=optimizer, of_states=of_states, notes=[*source.notes, *numbering.notes])


def model_tree(source: Source, key: str = "") -> Any:
    """Return the value under `key`, or the weights of a training checkpoint, as it was saved."""
    key = key or weights_key(source.weights)
    return source.weights if key in ("", ".") else subtree(source.tree(key), key)


def weights_in(source: Source, key: str = "") -> dict[str, LazyTensor]:
    """Return the weights under `key`, or those of a training checkpoint, by name."""
    tree = model_tree(source, key)
    return keymap.flatten(tree)[0] if source.structured or tree is not source.weights else tree


def check_key(source: Source, optimizer: str, key: str) -> None:
    """Raise UsageError if the weights next to an optimizer have no key of their own."""
    if optimizer and key in ("", "."):
        others = {name for name, _ in optimizers_in(source.weights)}
        parts = {name: value for name, value in entries(source.weights).items() if name not in others}
        models = [name for name, value in parts.items() if keymap.flatten(value)[0]]
        raise UsageError(
            f"{source.path} contains an optimizer under {optimizer!r}, but its model could not be identified.",
            f"Select the model with --key; the keys are: {some(models)}."
            if models
            else "It has no other tensors; without --optimizer, it is converted as it is.",
        )
