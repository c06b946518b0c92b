"""From a source and options to the content of an output, for planning and verifying alike. Pure.

The steps are the same for the weights and the optimizer's states: choose tensors and name them, change them as features
do, by a map or a reference, and write down in the metadata what readers should know.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

from ckptconv.errors import CorruptError, UnsupportedError, UsageError
from ckptconv.formats.registered import NUMBERS
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs import computed, selection
from ckptconv.outputs.naming import named, tree_of
from ckptconv.outputs.selected import METADATA, Selected
from ckptconv.outputs.selection import Rename
from ckptconv.process import of_feature
from ckptconv.structure import parted
from ckptconv.structure.choice import Choice
from ckptconv.text import count_of, some

# The modules that select what outputs hold besides weights.
_OTHERS = {"optimizer": "ckptconv.outputs.states"}


def selected(source: Source, options: Options, rename: Rename = selection.renamed, holds: str = "weights") -> Selected:
    """Select the content of an output, which `holds` "weights" or "optimizer" states, by the options."""
    if holds in _OTHERS:
        chosen: Selected = import_module(_OTHERS[holds]).selected(source, options, rename)
        return chosen
    return _weights(source, options, rename)


def _weights(source: Source, options: Options, rename: Rename) -> Selected:
    """Select the weights by the options: a subtree, names to keep and rename, dtypes.

    If the source has a reference, its tensors are those of the output. Raise UsageError if nothing is left,
    CorruptError or UnsupportedError for tensors that cannot be converted, DifferenceError if the source does not give
    the tensors of its reference.
    """
    source.check_weights()
    chosen = _chosen(source, options, rename)
    reference = selected(source.reference, Options()) if source.reference else None
    for way in computed.ways_of(source, options):
        chosen = way.selected(chosen, source, options, reference)
    if chosen.structured and any(old != new for old, new in chosen.names.items()):
        from ckptconv.outputs import renaming

        described, notes = renaming.recorded(tree_of(source, options), chosen.described, chosen.names)
        chosen = chosen._replace(described=described, notes=(*chosen.notes, *notes))
    return with_metadata(chosen, source.remarks, source.path)


# ------------------------------------------------------------------------------------------------------------- choosing


def _chosen(source: Source, options: Options, rename: Rename) -> Selected:
    """Return the weights that the options choose, with the names that they give."""
    chosen = named(source, options)
    for way in computed.ways_of(source):
        chosen = way.named(chosen, source, options)
    described, ties, structured, choice, warnings, notes, optimizers, edit = chosen
    flat = described.tensors
    names = names_of(source, flat, options, choice, rename)
    quantized = described.quantized or parted.read(source.remarks, flat)
    # A whole state without tensors is kept by its record alone; if the user asked for a part, it is a mistake.
    if not flat and options.key != "." and (options.key or not source.structured):
        where = f"under {options.key!r} of {source.path}" if options.key else f"in {source.path}"
        raise UsageError(f"No tensor to convert is {where}.", options.key and "`ckptconv inspect` shows the values.")
    if flat and not names:
        raise UsageError(f"No tensors are left to convert: all {len(flat)} are excluded.")
    dtype = options.dtype or source.defaults.dtype
    if optimizers and (module := of_feature(NUMBERS, "among")):
        told = module.told(optimizers, names, described, options, source.weights)
        warnings, notes = (*warnings, *told[0]), (*notes, *told[1])
    uncastable = described.uncastable | selection.scales(flat) | parted.parts_of(quantized)
    under = f"{options.key}." if options.key not in ("", ".") else ""
    made_of = {new: [under + old] for old, new in names.items() if options.dry_run and under + old != new}
    return Selected(
        names,
        flat,
        {new: flat[old] for old, new in names.items()},
        described,
        structured,
        owners_of(ties, names),
        choice,
        dtype,
        widen_only=options.dtype is None,
        uncastable=frozenset(names[name] for name in uncastable if name in names),
        warnings=warnings,
        notes=notes,
        quantized=quantized,
        edit=edit,
        reporters=(lambda *_: lambda files: {"made_of": made_of},) if made_of else (),
    )


def names_of(
    source: Source, flat: Mapping[str, Any], options: Options, choice: Choice, rename: Rename
) -> dict[str, str]:
    """Return the names of the tensors to convert: {old: new}."""
    names = selection.matching(flat, choice)
    check_pieces(source, flat)
    lost = [name for name in source.unaccounted if not options.include and not choice.excludes(name)]
    if lost:
        raise CorruptError(
            f"{source.path} lists {count_of(len(lost), 'parameter')} without data: "
            f"{', '.join(lost[:5])}{', …' if len(lost) > 5 else ''}.",
            "Some releases did not save tied or frozen parameters; leave these out with --exclude.",
        )
    return rename(names, options.strip_prefix, options.rename)


def check_pieces(source: Source, names: Iterable[str]) -> None:
    """Raise UnsupportedError if some of `names` are pieces of parameters."""
    pieces = [name for name in names if source.pieces.search(name)] if source.pieces else []
    if pieces:
        raise UnsupportedError(
            f"{source.path} was saved with FSDP's LOCAL_STATE_DICT, with flat parameters: {some(pieces, 1, repr)}. "
            "Each contains several parameters, but the checkpoint does not record their shapes.",
            "Load it in the training run, and save it with SHARDED_STATE_DICT or FULL_STATE_DICT.",
        )


def owners_of(ties: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    """Return a source's own ties by new name: {alias: owner}."""
    return {names[a]: names[o] for a, o in ties.items() if a in names and o in names}


# -------------------------------------------------------------------------------------------------------- the metadata


def with_metadata(chosen: Selected, remarks: Mapping[str, str], path: str) -> Selected:
    """Return `chosen` with the metadata of the output: the `remarks` of the source at `path`, and its own.

    A remark that a reader would take for an alias {removed: kept} is left out, with a warning.
    """
    if chosen.first.quantized:
        remarks = parted.without(remarks)
    remarks = {**remarks, **chosen.remarks}
    taken = chosen.tensors.keys()
    lost = sorted(key for key, text in remarks.items() if key not in METADATA and (key in taken or text in taken))
    warnings = chosen.warnings
    if lost:
        lost_keys = f"left out of the metadata: {some(lost)}. Readers would take these for names of tied tensors"
        warnings = (*warnings, f"{path}: {lost_keys} in the output.")
    kept = {key: text for key, text in remarks.items() if key not in lost}
    return chosen._replace(metadata={**METADATA, **kept}, warnings=warnings)
