"""From a source and options to what an output holds, for planning and verifying alike. Pure.

The steps are the same for the weights, the optimizer's states and the tree of a `.pt` file: choose tensors and name
them, apply the map, take over what the reference says, and write down in the metadata what readers should know.
"""

from __future__ import annotations

import functools
import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ckptconv.errors import CorruptError, UnsupportedError, UsageError
from ckptconv.formats.optimizers import optimizers_in
from ckptconv.formats.source import Source, StoredTensors
from ckptconv.options.table import Options
from ckptconv.outputs import selection
from ckptconv.outputs.mapped import map_back, mapped, mapped_states
from ckptconv.outputs.selected import METADATA, Selected
from ckptconv.outputs.selection import Rename
from ckptconv.pickles import nodes
from ckptconv.structure import keymap, torchao
from ckptconv.structure.choice import Choice
from ckptconv.structure.record import MAP_KEY
from ckptconv.tensors.lazy import Equal, LazyTensor, same_bytes, untagged
from ckptconv.text import some


def selected(source: Source, options: Options, rename: Rename = selection.renamed, holds: str = "weights") -> Selected:
    """Select what an output `holds`, as the options say: "weights", "optimizer" states, or the "tree" of a `.pt`
    file."""
    return _SELECTIONS[holds](source, options, rename)


def _weights(source: Source, options: Options, rename: Rename) -> Selected:
    """Select the weights by the options: a subtree, names to keep and rename, dtypes.

    If the source has a reference, its tensors are those of the output. Raise UsageError if nothing is left,
    CorruptError or UnsupportedError for tensors that cannot be converted, DifferenceError if the source does not give
    the tensors of its reference.
    """
    source.check_weights()
    chosen = _chosen(source, options, rename)
    reference = selected(source.reference, Options()) if source.reference else None
    chosen = mapped(chosen, source.map, reference)
    _check_like(source, options)
    if reference:
        chosen = _like_reference(chosen, reference, source, options)
    if options.quantize or options.requantize or options.keep:
        from ckptconv.outputs.quantizing import quantized

        chosen = quantized(chosen, source.path, options)
    return _with_metadata(chosen, source.remarks, source.path)


def _states(source: Source, options: Options, rename: Rename) -> Selected:
    """Select the optimizer states by the options: named <parameter>.<state>, and nested as torch nests them.

    Parameters have the names of the weights. Half-precision states are widened by default, as the weights are, and
    never narrowed. `owners` are states shared with another parameter: {alias: owner}.
    """
    optimizer = source.states()
    if optimizer is None:
        raise UsageError(f"{source.path} holds no optimizer states that can be named by parameter, for --optimizer.")
    choice = Choice(options.include, options.exclude)
    listed = (name for group in optimizer["param_groups"] for name in group["params"])
    known = dict.fromkeys([*_flattened(source, source.weights, choice).tensors, *optimizer["state"], *listed])
    names = _names(source, known, options, choice, rename)
    states = {names[name]: state for name, state in optimizer["state"].items() if name in names}
    groups = [
        {**group, "params": [names[name] for name in group["params"] if name in names]}
        for group in optimizer["param_groups"]
    ]
    ties = _owners(source.owners, names)
    applied = None
    equal: list[Equal] = []
    if source.map:
        states.update({alias: states[owner] for alias, owner in ties.items() if owner in states})
        states, groups, applied, equal = mapped_states(source.map, states, groups)
    described = keymap.flatten_states(states, groups)
    owners = {}
    for alias, owner in ties.items() if options.tied == "alias" and not applied else ():
        for key in states.get(owner, {}):
            kept, removed = f"{owner}.{key}", f"{alias}.{key}"
            if kept in described.tensors and removed not in described.tensors:
                owners[removed] = kept
    dtype = "keep" if options.dtype == "keep" else source.default_dtype
    chosen = Selected(
        names,
        known,
        described.tensors,
        described,
        options.structure,
        owners,
        choice,
        dtype,
        widen_only=True,
        applied=applied,
        equal=tuple(equal),
        of_states=True,
    )
    return _with_metadata(chosen, {}, source.path)


def tree_of(source: Source, options: Options) -> Any:
    """Return the source's tree, or what `options.key` names in it."""
    if not options.key:
        return source.weights
    return selection.subtree(source.tree(options.key), options.key, source.path)


def torch_tree_of(source: Source, options: Options) -> Any:
    """Return the tree of which a `.pt` file of the source is made: `tree_of`, with torchao's tensors of their parts."""
    source.check_weights()
    tree = tree_of(source, options)
    is_stored = not source.structured and options.structure and not options.key
    return torchao.assembled(tree, source.remarks) if is_stored else tree


def _tree(source: Source, options: Options, rename: Rename) -> Selected:
    """Select what a `.pt` file of the source holds by the options.

    The tensors of `known` are tagged with their facts. Raise UsageError for other names where a structure record says
    under which keys tensors are.
    """
    from ckptconv.outputs import writable

    tree = torch_tree_of(source, options)
    choice = Choice(options.include, options.exclude)
    map_ = map_back(source, options)
    applied = None
    equal: list[Equal] = []
    if map_ and isinstance(tree, Mapping) and tree.keys() == {"state", "param_groups"}:
        states, groups, applied, equal = mapped_states(map_, tree["state"], tree["param_groups"])
        tree, map_ = {"state": states, "param_groups": groups}, None
    described = keymap.describe(tree, leave_out=writable.leaving_out(options), tagged=True, choice=choice)
    known = described.tensors
    names = _names(source, known, options, choice, rename)
    fixed = described.fixed | selection.scales(known)
    notes: tuple[str, ...] = ()
    if options.structure and not map_ and any(old != new for old, new in names.items()):
        if type(tree) not in (dict, OrderedDict) or tree.keys() != known.keys():
            raise UsageError(
                f"{source.path} is nested, and a .pt file of it keeps its structure: --strip-prefix and --rename "
                "cannot change the keys.",
                "--no-structure writes a dict of the tensors by name; --key takes one dict of them.",
            )
        if vars(tree) if type(tree) is OrderedDict else ():
            notes = (f"left out: {some(vars(tree), form=str)} of the state dict, which has the old names.",)
        tree = type(tree)((new, tree[old]) for old, new in names.items())
        described = keymap.describe(tree, leave_out=writable.leaving_out(options), tagged=True)
    bare = {new: untagged(known[old]) for old, new in names.items()}
    dtype = options.dtype or source.default_dtype
    chosen = Selected(
        names,
        known,
        bare,
        described,
        options.structure,
        {},
        choice,
        dtype,
        widen_only=options.dtype is None,
        fixed=frozenset(names[name] for name in fixed if name in names),
        notes=notes,
        applied=applied,
        equal=tuple(equal),
    )
    try:
        return mapped(chosen, map_)
    except UsageError as error:
        if source.map:
            raise
        raise UsageError(
            f"{source.path} was made by a map, and its reverse does not fit. {error.message}",
            "--map none writes the tensors as they are.",
        ) from error


_SELECTIONS = {"weights": _weights, "optimizer": _states, "tree": _tree}


# ------------------------------------------------------------------------------------------------------------- choosing


class _Named(NamedTuple):
    """The tensors of a source by the names that options are about, and the source's ties {alias: owner} of these.

    `optimizers` are the names under which it has optimizers among them; `settings` what a configuration has to say of
    the tensors.
    """

    described: keymap.Flattened
    ties: Mapping[str, str]
    structured: bool
    choice: Choice
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()
    settings: Mapping[str, Any] = {}


def _chosen(source: Source, options: Options, rename: Rename) -> Selected:
    """Return the weights that the options choose, with the names that they give."""
    named = _averaged(source, options) if source.average else _named(source, options)
    named = _merged(source, options, named) if source.adapters else named
    described, ties, structured, choice, warnings, notes, _, settings = named
    flat = described.tensors
    names = _names(source, flat, options, choice, rename)
    quantized = described.quantized or torchao.read(source.remarks, flat)
    # A whole state without tensors is kept by its record alone; if the user asked for a part, it is a mistake.
    if not flat and options.key != "." and (options.key or not source.structured):
        where = f"under {options.key!r} of {source.path}" if options.key else f"in {source.path}"
        raise UsageError(f"There is no tensor {where}: nothing to convert.")
    if flat and not names:
        raise UsageError(f"Nothing is left to convert: all {len(flat)} tensors are excluded.")
    dtype = options.dtype or source.default_dtype
    fixed = described.fixed | selection.scales(flat) | torchao.parts_of(quantized)
    return Selected(
        names,
        flat,
        {new: flat[old] for old, new in names.items()},
        described,
        structured,
        _owners(ties, names),
        choice,
        dtype,
        widen_only=options.dtype is None,
        fixed=frozenset(names[name] for name in fixed if name in names),
        warnings=warnings,
        notes=notes,
        quantized=quantized,
        settings=settings,
    )


def _named(source: Source, options: Options) -> _Named:
    """Return what a key leads to, by the names of the structure record, or those of the file if it has others."""
    choice = Choice(options.include, options.exclude)
    tree = tree_of(source, options)
    described = _flattened(source, tree, choice)
    optimizers = tuple(name for name, _ in optimizers_in(tree)) if isinstance(tree, Mapping) else ()
    structured, stored = source.structured and options.structure, source.stored
    if not stored or options.key or stored.tensors.keys() == described.tensors.keys():
        return _Named(described, source.owners, structured, choice, optimizers=optimizers)
    # The record gives other names than the file does, as the output of a conversion that renamed. The file's count.
    choice = Choice(options.include, options.exclude)
    warnings: tuple[str, ...] = ()
    if structured and (choice or (options.tied != "alias" and stored.aliases)):
        structured = False
        why = "--include or --exclude" if choice else "--tied duplicate"
        told = f"the names of its tensors have been changed, and it cannot be kept with {why}"
        warnings = (f"{source.path}: its structure record was left out: {told}.",)
    described = _as_stored(stored, described, structured)
    return _Named(described, stored.aliases, structured, choice, warnings, optimizers=optimizers)


def _averaged(source: Source, options: Options) -> _Named:
    """Return the tensors of `source`, those that can be averaged with others' as averages."""
    from ckptconv.outputs import averages

    assert source.average is not None
    mine = _named(source, options)
    terms = []
    for each in source.average.terms:
        if each is not None:
            each.check_weights()
        named = mine if each is None else _named(each, options)
        flat = named.described.tensors
        chosen = {name: flat[name] for name in selection.matching(flat, Choice(options.include, options.exclude))}
        fixed = named.described.fixed | torchao.parts_of(named.described.quantized)
        terms.append(averages.Term((each or source).path, chosen, fixed, named.ties, named.optimizers))
    dtype = options.dtype or source.default_dtype
    stored_as = functools.partial(selection.goal, dtype=dtype, widen_only=source.default_dtype == dtype == "float32")
    own = terms[source.average.terms.index(None)]
    found = averages.averaged(terms, own, source.average, stored_as)
    described = mine.described._replace(tensors={**mine.described.tensors, **found.tensors}, apart=False)
    named = mine._replace(described=described, ties=found.ties, notes=found.notes)
    if not found.untied or described.structure is None:
        return named
    told = f"its structure record was left out: in it {some(found.untied, 3)} are tied, and not in all checkpoints."
    return named._replace(
        described=described._replace(structure=None),
        structured=False,
        warnings=(*mine.warnings, f"{source.path}: {told}"),
    )


def _merged(source: Source, options: Options, named: _Named) -> _Named:
    """Return `named`, the tensors of `source`, with its adapters merged, rounded once to the dtype that is stored."""
    from ckptconv.outputs import adapters, tied
    from ckptconv.tensors import casting
    from ckptconv.tensors.dtypes import SUMMED

    base = tied.Base(source.path, named.described.tensors, named.ties, source.model)
    found = adapters.merged(
        base, [(each, _named(each.source, Options()).described.tensors) for each in source.adapters]
    )
    dtype = options.dtype or source.default_dtype
    widen_only = source.default_dtype == dtype == "float32"
    known: dict[tuple[int, str], LazyTensor] = {}
    made = {}
    for name, tensor in found.tensors.items():
        stored = found.dtypes[name] if name in found.dtypes else base.tensors[name].dtype
        goal = selection.goal(stored, dtype, widen_only)
        is_number = tensor.dtype.name in SUMMED and goal.name in SUMMED
        cast = casting.rounded(tensor, goal) if is_number else selection.converted(name, tensor, goal.name)
        # Tied names have one object.
        made[name] = known.setdefault((id(tensor), goal.name), cast)
    described = named.described._replace(tensors={**base.tensors, **made}, apart=False)
    ties = {alias: owner for alias, owner in named.ties.items() if not {alias, owner} & found.untied}
    named = named._replace(described=described, ties=ties, notes=(*named.notes, *found.notes), settings=found.settings)
    is_same = all(name in base.tensors and base.tensors[name].shape == made[name].shape for name in made)
    if (is_same and not found.untied) or described.structure is None:
        return named
    told = f"{source.path}: its structure record was left out: the adapter adds tensors, or changes which are tied."
    return named._replace(
        described=described._replace(structure=None), structured=False, warnings=(*named.warnings, told)
    )


def _as_stored(stored: StoredTensors, described: keymap.Flattened, structured: bool) -> keymap.Flattened:
    """Return `described` with the tensors under the names that the file has for them, and the file's own record."""
    fixed = {same_bytes(described.tensors[name]) for name in described.fixed}
    names = frozenset(name for name, tensor in stored.tensors.items() if same_bytes(tensor) in fixed)
    record = stored.record if structured else None
    return described._replace(tensors=dict(stored.tensors), structure=record, fixed=names, apart=False, quantized={})


def _flattened(source: Source, tree: Any, choice: Choice) -> keymap.Flattened:
    """Flatten `tree` to tensors, with a record of those that are chosen. Raise UnsupportedError for tensors without
    data, unless they are excluded by name."""
    if not source.structured:
        return keymap.Flattened(dict(tree), None, frozenset())
    without: list[str] = []

    def leave_out(name: str, node: Any) -> bool:
        reason = nodes.lacks_data(node)
        without.extend([name] if reason else [])
        return bool(reason)

    flattened = keymap.describe(tree, leave_out=leave_out, choice=choice)
    if flattened.found:
        lacking = {name: nodes.lacks_data(node) for name, node in flattened.found.items()}
        raise nodes.without_data(source.path, lacking)
    if without and not flattened.tensors:
        raise UsageError(f"Nothing is left to convert: all {len(without)} tensors are excluded.")
    return flattened


def _names(source: Source, flat: Mapping[str, Any], options: Options, choice: Choice, rename: Rename) -> dict[str, str]:
    """Return what is converted, and under which names: {old: new}."""
    names = selection.matching(flat, choice)
    check_pieces(source, flat)
    lost = [name for name in source.unaccounted if not options.include and not choice.excludes(name)]
    if lost:
        raise CorruptError(
            f"{source.path} names {len(lost)} parameters whose data is nowhere in it: {', '.join(lost[:5])}"
            f"{', …' if len(lost) > 5 else ''}.",
            "They are tied or frozen parameters of a release that did not save them; leave them out with --exclude.",
        )
    return rename(names, options.strip_prefix, options.rename)


def check_pieces(source: Source, names: Iterable[str]) -> None:
    """Raise UnsupportedError if some of `names` are pieces of parameters."""
    found = [name for name in names if source.pieces.search(name)] if source.pieces else []
    if found:
        raise UnsupportedError(
            f"{source.path} was saved with FSDP's LOCAL_STATE_DICT: {some(found, 1, repr)} are flat parameters, each "
            "of them several parameters in one, whose shapes are not in the checkpoint.",
            "Load it in the training run, and save it with SHARDED_STATE_DICT or FULL_STATE_DICT.",
        )


def _owners(ties: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    """Return a source's own ties by new name: {alias: owner}."""
    return {names[a]: names[o] for a, o in ties.items() if a in names and o in names}


# ------------------------------------------------------------------------------------------------------- the reference


def _check_like(source: Source, options: Options) -> None:
    """Raise UsageError for options about a reference without one, or that exclude each other."""
    given = " and ".join(name for name in ("--partial", "--fill") if getattr(options, name[2:]))
    if given and source.reference is None:
        raise UsageError(f"{given} is for tensors of a reference, and there is none.", "Name it: --like REF.")
    if options.partial and options.fill:
        raise UsageError("--partial leaves tensors out that --fill takes from the reference.", "Give one of them.")


def _like_reference(chosen: Selected, theirs: Selected, source: Source, options: Options) -> Selected:
    """Return `chosen` with what the output takes over from `theirs`, which is all of the source's reference.

    No structure record then belongs to the output: the reference has none.
    """
    from ckptconv.outputs import likeness  # few outputs are like another

    reference = source.reference
    assert reference is not None
    removed = theirs.aliases()
    wanted = {name: theirs.cast(name) for name in theirs.tensors if name not in removed}
    casts = options.dtype is None
    ties, their_ties = (
        ({}, {}) if options.tied == "duplicate" else (chosen.recorded_aliases(), theirs.recorded_aliases())
    )
    found = likeness.compare(chosen.tensors, wanted, ties, their_ties, fixed=chosen.fixed, casts=casts)
    others = {name: chosen.tensors[before] for name, before in found.others.items()}
    likeness.check(found, {**chosen.tensors, **others}, wanted, source, options)
    filled = found.missing if options.fill else ()
    dtypes = {name: wanted[name].dtype.name for name in wanted} if casts else {}
    dtypes.update({alias: dtypes[kept] for alias, kept in found.aliases.items() if casts})
    taken = likeness.Likeness(
        reference.path,
        dtypes,
        likeness.files_of(reference, wanted),
        found.missing if options.partial else (),
        filled,
        found.others,
    )
    fixed = {name for name, before in found.others.items() if before in chosen.fixed}
    return chosen._replace(
        tensors={**chosen.tensors, **others, **{name: wanted[name] for name in filled}},
        structured=False,
        owners=dict(found.aliases),
        dtype="keep" if casts else chosen.dtype,
        widen_only=chosen.widen_only and not casts,
        fixed=chosen.fixed | fixed | theirs.fixed.intersection(filled),
        like=taken,
    )


# -------------------------------------------------------------------------------------------------------- the metadata


def _with_metadata(chosen: Selected, remarks: Mapping[str, str], path: str) -> Selected:
    """Return `chosen` with the metadata of the output: the `remarks` of the source at `path`, and the map's record.

    A remark that a reader would take for an alias {removed: kept} is left out, with a warning.
    """
    if (chosen.unmapped or chosen).quantized:
        remarks = torchao.without(remarks)
    if chosen.map_record:
        remarks = {**remarks, MAP_KEY: json.dumps(chosen.map_record, ensure_ascii=False, separators=(",", ":"))}
    taken = chosen.tensors.keys()
    lost = sorted(key for key, text in remarks.items() if key not in METADATA and (key in taken or text in taken))
    warnings = chosen.warnings
    if lost:
        told = f"left out of the metadata: {some(lost)}. Readers would take it for the name of a tied tensor"
        warnings = (*warnings, f"{path}: {told} in the output.")
    kept = {key: text for key, text in remarks.items() if key not in lost}
    return chosen._replace(metadata={**METADATA, **kept}, warnings=warnings)
