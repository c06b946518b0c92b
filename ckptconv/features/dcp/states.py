"""Take the optimizer's states of a model from another checkpoint."""

from __future__ import annotations

from typing import Any

from ckptconv.errors import UnsupportedError, UsageError
from ckptconv.formats.detect import asked_orders, complete, open_source
from ckptconv.formats.numbers.matching import NAMED
from ckptconv.formats.numbers.states import optimizers_alone
from ckptconv.formats.optimizers import entries
from ckptconv.formats.source import STATES_ARE_CONVERTED, FileFacts, Source
from ckptconv.formats.training import weights_in, with_named, without_optimizers
from ckptconv.options.table import FITTING, named_in
from ckptconv.storage.paths import basename, is_same, normalize

# What torchtune's recipe_state.pt has beside the optimizer, and what names of its own models have (0.6.1).
_TORCHTUNE = frozenset({"epochs_run", "total_epochs"})
_OF_TORCHTUNE = ".attn.q_proj."


def with_states(source: Source, asked: str, path: str, **settings: Any) -> Source:
    """Return `source`, which was opened as `asked`, with the optimizer's states of the checkpoint at `path`.

    That is what a conversion with --optimizer has written there, or any checkpoint that has them by parameter name, the
    source itself for one. `settings` are those of `open_source`. Raise UsageError if there are no such states.
    """
    if is_same(asked, path) or is_same(source.path, path):
        source = complete(source, states=True, inert=settings.get("inert", False))
        if source.states() is None:
            raise _none(path)
        return without_optimizers(source, source.wanted.key)
    # Which checkpoint to take, and the layout of the output, are said of the source.
    of_source: dict[str, Any] = {"family": "", "tag": "", "alone": False}
    of_source |= {name: option.default for name, option in named_in("map size").items()}
    opening = {name: value for name, value in settings.items() if name not in FITTING}
    other = open_source(normalize(path), **{**opening, **of_source, "states": True})
    alone = optimizers_alone(other.weights)
    found = None if alone else other.states()
    if found is None:
        other.check_weights()
        if not alone:
            raise _none(path)
        is_own = any(_OF_TORCHTUNE in name for name in weights_in(source))
        if entries(other.weights).keys() >= _TORCHTUNE and not is_own:
            raise UnsupportedError(
                f"{path} has states for torchtune's own modules, but {source.path} has the weights under other names "
                "and with rows in another order.",
                "Convert only the weights, or have torchtune save them with FullModelTorchTuneCheckpointer.",
            )
        orders = other.wanted.orders or asked_orders("", settings, settings)
        known = source._replace(wanted=source.wanted._replace(orders=orders))
        source = with_named(known, alone, other.path, source.wanted.key)
        found = source.optimizer
    else:
        source = source._replace(notes=[*source.notes, *(note for note in other.notes if note.startswith(NAMED))])
    # Where the states are is known now.
    notes = [note for note in source.notes if not note.endswith(f"{STATES_ARE_CONVERTED}.")]
    read = {f"{basename(other.path)}/{name}": what for name, what in other.inputs_of_all.items()}
    return source._replace(
        optimizer=found,
        notes=notes,
        of_states=other.of_states._replace(error=None, inputs={**source.of_states.inputs, **read}),
        warnings=[*source.warnings, *other.warnings],
        files=FileFacts.of_all([source.files, other.files]),
        bytes_read=source.bytes_read + other.bytes_read,
    )


def _none(path: str) -> UsageError:
    return UsageError(
        f"{path} holds no optimizer states by parameter.",
        "Give the output of a conversion with --optimizer, or a checkpoint with optimizer states.",
    )
