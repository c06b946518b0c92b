"""Open directories of torch.distributed.checkpoint (DCP): those of FSDP, torchtitan, OLMo-core, accelerate, Lightning.

A directory holds `.metadata`, or a `__R.metadata` of each rank, and `__R_N.distcp` files; or `shard-*.safetensors`,
which describe themselves. The metadata describes each tensor's chunks and their places. The model is converted; other
tensors are read on request.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

from ckptconv.errors import CkptconvError
from ckptconv.features.dcp import dialects
from ckptconv.features.dcp.described import Described
from ckptconv.features.dcp.locate import FAMILY, located
from ckptconv.features.joining import names as dcp_names
from ckptconv.features.joining.names import VALUE, Left
from ckptconv.features.joining.run_layout import Located
from ckptconv.formats.source import (
    NOT_CONVERTED,
    STATES_ARE_CONVERTED,
    Defaults,
    FileFacts,
    Source,
    StateFacts,
    Wanted,
)
from ckptconv.options.registered import missing
from ckptconv.storage.location import Location
from ckptconv.storage.paths import basename

_CUT_SHORT = (
    "lacks bytes of entries that were not converted, such as optimizer states: the save was cut short, or the file "
    "belongs to another save."
)
_LAST_GOOD = "convert --last-good selects the last complete step of a run."


# ---------------------------------------------------------------------------------------------------------- reading


def read(place: Location, wanted: Wanted) -> Source:
    """Open a checkpoint by its directory, or by a directory above it.

    Read descriptions only: the metadata, and the beginning and end of each entry of the tensors that are `wanted` and
    of all other values. Raise CorruptError if something is missing or contradicts itself, UnsafeError for an attack.
    """
    return _read(place.path, located(place), wanted)


def _read(path: str, place: Located, wanted: Wanted) -> Source:
    checkpoint = Described.open(place.directory)
    optimizer = Described.open(place.optimizer) if place.optimizer else None
    described, roles = checkpoint.described, checkpoint.roles
    chosen = [name for name, way in described.paths.items() if roles.is_model(way)]
    is_states = not any(name in described.tensors for name in chosen) and not roles.models
    if is_states:
        chosen = list(described.paths)  # the checkpoint is an optimizer's
    # A model saved as one value with tensors in it is left out: then `below` finds nothing.
    model = dcp_names.subtree(checkpoint.tree(chosen), roles.model)
    weights = {} if model is None else model
    # A user who names a key, or asks for the optimizer, needs no notes about the rest.
    left = Left() if wanted.key else _beside(set(chosen), checkpoint)
    trees = {wanted.key: checkpoint.under(wanted.key)} if wanted.key else {}
    inputs = checkpoint.identified()
    states, state_inputs = None, dict[str, Hashable]()
    state_notes: list[str] = []
    states_error: CkptconvError | None = None
    read = [checkpoint]
    if wanted.states or wanted.master:
        left = left.without(left.optimizers)
        from ckptconv.features.dcp.numbered import read_states  # few conversions ask for states

        states, states_error, state_notes, named_by = read_states(
            optimizer or checkpoint, checkpoint.parameters(), wanted.orders, is_model=optimizer is None
        )
        read = [checkpoint, optimizer] if optimizer else read
        identified = optimizer.identified(f"{basename(optimizer.directory)}/") if optimizer else checkpoint.identified()
        state_inputs = {**identified, **named_by}
    values = {**checkpoint.values, **checkpoint.hidden}
    extra = dialects.read_extra(place.directory, described, values, checkpoint.digests)
    left = left.without(extra.common) if extra and described.nested else left
    notes, warnings = left.messages()
    notes += state_notes
    if is_states and roles.optimizers and not (wanted.states or wanted.key):
        states_alone = f"{place.directory} has optimizer states, but no weights."
        notes.append(f"{states_alone} To convert weights, give the checkpoint of the model.")
    if extra:
        described.mentioned.update(extra.log.mentioned)
        weights, states, unnamed = extra.arranged(weights, states, described, checkpoint.values, wanted)
        states_error = states_error or unnamed
        inputs = {**(state_inputs if wanted.master else inputs), **extra.log.inputs}
        notes += [*extra.notes(), *checkpoint.warnings]
        checkpoint.warnings.clear()
    if optimizer and not wanted.states:
        notes.append(f"{NOT_CONVERTED}{optimizer.directory}{STATES_ARE_CONVERTED}.")
    cut = [f"{path} {_CUT_SHORT}" for opened in read for path in sorted(opened.entries.cut_short())]
    if cut and ", the last of " in place.note and not missing("last_good"):
        cut[-1] = f"{cut[-1]} {_LAST_GOOD}"
    return Source(
        format=extra.format if extra else checkpoint.format,
        family=FAMILY,
        path=path,
        weights=weights,
        weights_error=checkpoint.pickled_error(trees.get(".", weights)) if wanted.key in ("", ".") else None,
        optimizer=states,
        of_states=StateFacts(states_error, inputs=state_inputs),
        trees=trees,
        left=functools.partial(_left, checkpoint, {*chosen}, extra),
        notes=[*([place.note] if place.note else []), *notes],
        warnings=[*checkpoint.warnings, *warnings, *(text for further in read[1:] for text in further.warnings), *cut],
        facts={**_facts(path, checkpoint), **dialects.facts(extra.common if extra else checkpoint.values)},
        files=FileFacts.of_all(opened.files for opened in read),
        inputs=inputs,
        bytes_read=sum(opened.entries.bytes_read for opened in read) + (extra.log.bytes_read if extra else 0),
        defaults=Defaults(shard_size=5 * 10**9),
        structured=described.nested or bool(described.values) or extra is not None,
        pieces=dcp_names.FLAT_PARAMETER,
        wanted=wanted,
        pointers=place.pointers,
        reread=functools.partial(_read, path, place),
    )


def _left(*opened: Any) -> dict[str, list[Any]]:
    from ckptconv.features.dcp.left import left_of  # conversions do not ask

    return left_of(*opened)


def _facts(path: str, checkpoint: Described) -> dict[str, Any]:
    described = checkpoint.described
    chunks = sum(len(tensor.chunks) for tensor in described.tensors.values())
    facts: dict[str, Any] = {
        **({} if checkpoint.directory == path else {"directory": checkpoint.directory}),
        "tensors": len(described.tensors),
        "chunks": chunks,
        "size": sum(tensor.nbytes for tensor in described.tensors.values()),
    }
    if described.values:
        facts["other values"] = len(described.values)
    if described.version:
        facts["version"] = described.version
    return facts


def _beside(chosen: set[str], checkpoint: Described) -> Left:
    """Return the rest next to the `chosen` tensors and values."""
    left, roles = Left(), checkpoint.roles
    for name, way in checkpoint.described.paths.items():
        if name not in chosen:
            noun = "tensor" if name in checkpoint.described.tensors else VALUE
            left.add(dcp_names.dotted(roles.part_of(way)), noun, is_state=roles.optimizer_of(way) is not None)
    return left
