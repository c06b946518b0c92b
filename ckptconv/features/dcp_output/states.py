"""Takes the optimizer's states of a model from another checkpoint."""

from __future__ import annotations

from typing import Any

from ckptconv.errors import MissingError, UnsupportedError, UsageError
from ckptconv.features.dcp_output.fitting import checked_fit
from ckptconv.features.optimizer_states.numbering import NAMED
from ckptconv.features.optimizer_states.states import check_not_optax, optimizers_alone
from ckptconv.features.optimizer_states.training import weights_in, with_named
from ckptconv.formats.detect import asked_orders, complete, open_source
from ckptconv.formats.optimizers import entries, optimizers_in, subtree, weights_key
from ckptconv.formats.source import STATES_ARE_CONVERTED, FileFacts, Source, without_states
from ckptconv.options.table import FITTING, named_in
from ckptconv.storage.location import Location
from ckptconv.storage.paths import basename, is_same, normalize

# The keys of torchtune's recipe_state.pt besides the optimizer, and a part of the names of its own models (0.6.1).
_TORCHTUNE = frozenset({"epochs_run", "total_epochs"})
_OF_TORCHTUNE = ".attn.q_proj."
_PATHS = "Give the output of a conversion with --optimizer, or a checkpoint with optimizer states."
_WEIGHTS_ALONE = "Leave out --states to write only the weights."


def with_states(source: Source, given_path: str, path: str, **settings: Any) -> Source:
    """Return `source`, which was opened as `given_path`, with the optimizer's states of the checkpoint at `path`.

    That is an output of --optimizer, or any checkpoint that has states by parameter name, such as the source itself.
    `settings` are those of `open_source`. Raise UsageError if there are no such states.
    """
    if is_same(given_path, path) or is_same(source.path, path):
        source = complete(source, states=True, inert=settings.get("inert", False))
        if source.states() is None:
            raise _none(path)
        check_not_optax(source.optimizer, path, _WEIGHTS_ALONE)
        return _without_optimizers(source, source.wanted.key)
    # The choice of the checkpoint, and the layout of the output, belong to the source.
    of_source: dict[str, Any] = {"family": "", "tag": "", "alone": False}
    of_source |= {name: option.default for name, option in named_in("map size").items()}
    opening = {name: value for name, value in settings.items() if name not in FITTING}
    if Location(normalize(path), dict(settings.get("storage_options") or {})).kind == "missing":
        raise MissingError(f"--states {path} does not exist, but the optimizer states should be read from it.", _PATHS)
    donor = open_source(normalize(path), **{**opening, **of_source, "states": True})
    alone = optimizers_alone(donor.weights)
    optimizer = None if alone else donor.states()
    if optimizer is None:
        donor.check_weights()
        if not alone:
            raise _none(path)
        is_own = any(_OF_TORCHTUNE in name for name in weights_in(source))
        if entries(donor.weights).keys() >= _TORCHTUNE and not is_own:
            raise UnsupportedError(
                f"{path} has states for torchtune's own modules, but in {source.path} the weights have other names "
                "and another order of rows.",
                "Convert only the weights, or have torchtune save them with FullModelTorchTuneCheckpointer.",
            )
        orders = donor.wanted.orders or asked_orders({**settings, "states": True}, settings)
        known = source._replace(wanted=source.wanted._replace(orders=orders))
        source = with_named(known, alone, donor.path, source.wanted.key)
        optimizer = source.optimizer
    else:
        source = source._replace(notes=[*source.notes, *(note for note in donor.notes if note.startswith(NAMED))])
        source = checked_fit(source, optimizer, donor.path)
    check_not_optax(optimizer, path, _WEIGHTS_ALONE)
    # The place of the states is known now.
    notes = [without_states(note) for note in source.notes if not note.endswith(f"{STATES_ARE_CONVERTED}.")]
    read = {f"{basename(donor.path)}/{name}": identity for name, identity in donor.inputs_of_all.items()}
    return source._replace(
        optimizer=optimizer,
        notes=notes,
        of_states=donor.of_states._replace(error=None, inputs={**source.of_states.inputs, **read}),
        warnings=[*source.warnings, *donor.warnings],
        files=FileFacts.of_all([source.files, donor.files]),
        bytes_read=source.bytes_read + donor.bytes_read,
    )


def _none(path: str) -> UsageError:
    return UsageError(
        f"{path} contains no optimizer states by parameter.",
        _PATHS,
    )


def _without_optimizers(source: Source, key: str = "") -> Source:
    """Return `source` without the optimizers that are saved next to its weights, whose states are converted by name."""
    around, _, weights_name = (key or weights_key(source.weights)).rpartition(".")
    tree = subtree(source.weights, around)
    names = {name for name, _ in optimizers_in(tree, weights_name)}
    if not names:
        return source
    left: Any = {name: value for name, value in entries(tree).items() if name not in names}
    for step in reversed(around.split(".") if around else []):
        around = around.removesuffix(step).removesuffix(".")
        left = {**subtree(source.weights, around), step: left}
    return source._replace(weights=left)
