"""Select the names and tensors of an output from a source and options, for planning and verifying. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from ckptconv.errors import CorruptError, UnsupportedError, UsageError
from ckptconv.formats.safetensors import RESERVED
from ckptconv.formats.source import Source, StoredTensors
from ckptconv.options.table import NO_MAP, Options
from ckptconv.outputs import likeness, selection, writable
from ckptconv.pickles import nodes
from ckptconv.structure import keymap, torchao
from ckptconv.structure.choice import Choice
from ckptconv.structure.record import MAP_KEY
from ckptconv.tensors.lazy import LazyTensor, same_bytes, untagged
from ckptconv.text import some

if TYPE_CHECKING:
    from ckptconv.structure.maps.chosen import ChosenMap
    from ckptconv.structure.maps.compile import Applied

# The metadata of every safetensors file: loaders ask which library's tensors it holds.
METADATA = {"format": "pt"}
# Maps old names to new ones, {old: new}, by --strip-prefix and --rename.
Rename: TypeAlias = "Callable[[Iterable[str], str, Sequence[str]], dict[str, str]]"


@dataclass(frozen=True)
class Selected:
    """What is selected of a source.

    `names` are the selected names, {old: new}; `known` are all there are, by old name. `tensors` are by new name, as
    the source has them; `cast` returns them as they are stored. `described` is the flattened tree they come from, under
    its old names. `structured`: its structure record belongs to the output. `owners` are the source's own ties, {alias:
    owner}, by new name. `fixed` are new names of tensors that are never cast. `quantized` are torchao's tensors, by old
    name. `like` is what the output takes over from the source's reference: then `tensors` has those that are filled in
    too, and `owners` are all aliases. `metadata` is what every file of the output says beside these, aliases and
    record, and `stated` has these too. `warnings` say what of the source's metadata is left out.

    If a map was applied, the tensors and names are those of its other side; `unmapped` is what was selected before,
    `applied` tells which tensor is made of which, and `map_record` is the record of the map. `equal` are then tensors
    by name that have to be equal.
    """

    names: dict[str, str]
    known: Mapping[str, Any]
    tensors: dict[str, LazyTensor]
    described: keymap.Flattened
    structured: bool
    owners: dict[str, str]
    choice: Choice
    dtype: str
    widen_only: bool
    fixed: frozenset[str] = frozenset()
    metadata: Mapping[str, str] = field(default_factory=lambda: dict(METADATA))
    warnings: tuple[str, ...] = ()
    quantized: Mapping[str, torchao.Quantized] = field(default_factory=dict)
    like: likeness.Likeness | None = None
    unmapped: Selected | None = None
    applied: Applied | None = None
    map_record: Mapping[str, Any] | None = None
    equal: tuple[tuple[str, LazyTensor, LazyTensor], ...] = ()

    def cast(self, name: str) -> LazyTensor:
        """Return the tensor of this new name, cast as it is stored."""
        tensor = self.tensors[name]
        dtype = self.like.dtypes.get(name, self.dtype) if self.like else self.dtype
        return tensor if name in self.fixed else selection.converted(name, tensor, dtype, self.widen_only)

    def aliases(self) -> dict[str, str]:
        """Return the names whose bytes another name already holds: {removed: kept}."""
        if self.like or (self.described.apart and not self.owners):
            return dict(self.owners)
        return selection.untie(self.tensors, self.owners)

    def stated(self, aliases: Mapping[str, str]) -> dict[str, str]:
        """Return the metadata of an output where `aliases` {removed: kept} are stored under other names."""
        if not self.quantized:
            return dict(self.metadata)
        names = {old: new for old, new in self.names.items() if new not in aliases}
        return {**self.metadata, **torchao.metadata_of(self.quantized, names)}

    @property
    def made_of(self) -> Mapping[str, tuple[str, ...]]:
        """The names of which the map made each tensor."""
        return self.applied.sources if self.applied else {}

    def idle(self, options: Options) -> dict[str, str]:
        """Return the given options that select or rename nothing: {option: reason}."""
        chosen = self.unmapped or self
        idle = selection.idle_globs(list(chosen.known), chosen.choice)
        return idle | selection.idle(chosen.names, options.strip_prefix, options.rename)

    def structure(self, aliases: Mapping[str, str]) -> str | None:
        """Return the structure record of an output where `aliases` {removed: kept} are stored under other names; None
        if it needs none."""
        record = self.described.structure
        if record is None and self.structured and any(old != new for old, new in self.names.items()):
            record = keymap.plain_record(self.names)
        return keymap.remap(record, self.names, aliases) if self.structured else None


def selected(source: Source, options: Options, rename: Rename = selection.renamed) -> Selected:
    """Select the weights by the options: a subtree, names to keep and rename, dtypes.

    If the source has a reference, its tensors are those of the output. Raise UsageError if nothing is left,
    CorruptError or UnsupportedError for tensors that cannot be converted, DifferenceError if the source does not give
    the tensors of its reference.
    """
    tree = tree_of(source, options)
    choice = Choice(options.include, options.exclude)
    described = _flattened(source, tree, choice)
    structured, ties, warnings = source.structured and options.structure, source.owners, []
    stored = source.stored
    if stored and not options.key and stored.tensors.keys() != described.tensors.keys():
        # The record gives other names than the file does, as the output of a conversion that renamed. The file's count.
        ties, choice = stored.aliases, Choice(options.include, options.exclude)
        fits = not choice and (options.tied == "alias" or not ties)
        if structured and not fits:
            structured = False
            warnings.append(
                f"{source.path}: its structure record was left out: the names of its tensors have been changed, and "
                f"it cannot be kept with {'--include or --exclude' if choice else '--tied duplicate'}."
            )
        described = _as_stored(stored, described, structured)
    flat = described.tensors
    names = _names(source, flat, options, choice, rename)
    quantized = described.quantized or torchao.read(source.remarks, flat)
    # A whole state without tensors is kept by its record alone; if the user asked for a part, it is a mistake.
    if not flat and (options.key or not source.structured):
        where = f"under {options.key!r} of {source.path}" if options.key else f"in {source.path}"
        raise UsageError(f"There is no tensor {where}: nothing to convert.")
    if flat and not names:
        raise UsageError(f"Nothing is left to convert: all {len(flat)} tensors are excluded.")
    dtype = options.dtype or source.default_dtype
    fixed = described.fixed | selection.scales(flat) | torchao.parts_of(quantized)
    chosen = Selected(
        names,
        flat,
        {new: flat[old] for old, new in names.items()},
        described,
        structured,
        _owners(ties, names),
        choice,
        dtype,
        widen_only=source.default_dtype == dtype == "float32",
        fixed=frozenset(names[name] for name in fixed if name in names),
        quantized=quantized,
    )
    theirs = selected(source.reference, Options()) if source.reference else None
    if source.map:
        shapes = {name: each.shape for name, each in theirs.tensors.items()} if theirs else {}
        chosen = mapped(chosen, source.map, shapes)
    chosen = _like_reference(chosen, theirs, source, options)
    remarks = torchao.without(source.remarks) if quantized else source.remarks
    if chosen.map_record:
        remarks = {**remarks, MAP_KEY: _written(chosen.map_record)}
    metadata, lost = _metadata(remarks, chosen.tensors)
    if lost:
        warnings.append(
            f"{source.path}: left out of the metadata: {some(lost)}. Readers would take it for the name of a tied "
            "tensor in the output."
        )
    return replace(chosen, metadata=metadata, warnings=(*warnings, *chosen.warnings))


def _like_reference(chosen: Selected, theirs: Selected | None, source: Source, options: Options) -> Selected:
    """Return `chosen` with what the output takes over from `theirs`, which is all of the source's reference; as it is
    if there is none.

    No structure record then belongs to the output: the reference has none.
    """
    reference = source.reference
    if options.partial or options.fill:
        given = " and ".join(name for name in ("--partial", "--fill") if getattr(options, name[2:]))
        if reference is None:
            raise UsageError(f"{given} is for tensors of a reference, and there is none.", "Name it: --like REF.")
        if options.partial and options.fill:
            raise UsageError("--partial leaves tensors out that --fill takes from the reference.", "Give one of them.")
    if reference is None or theirs is None:
        return chosen
    removed = theirs.aliases()
    wanted = {name: theirs.cast(name) for name in theirs.tensors if name not in removed}
    casts = options.dtype is None
    ties, their_ties = ({}, {}) if options.tied == "duplicate" else (_ties(chosen), _ties(theirs))
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
    return replace(
        chosen,
        tensors={**chosen.tensors, **others, **{name: wanted[name] for name in filled}},
        structured=False,
        owners=dict(found.aliases),
        dtype="keep" if casts else chosen.dtype,
        widen_only=chosen.widen_only and not casts,
        fixed=chosen.fixed | fixed | theirs.fixed.intersection(filled),
        like=taken,
    )


def _ties(chosen: Selected) -> dict[str, str]:
    """Return the aliases {removed: kept} that metadata can record."""
    return {alias: kept for alias, kept in chosen.aliases().items() if alias not in RESERVED}


def mapped(chosen: Selected, map_: ChosenMap, shapes: Mapping[str, Sequence[int]] | None = None) -> Selected:
    """Return `chosen` with the names and layouts that `map_` gives. The structure record is not kept.

    `shapes` are known shapes of the tensors to make: sizes may follow from them.
    """
    # Names that the source ties are tied to what their owners become.
    tensors = {name: chosen.tensors[chosen.owners.get(name, name)] for name in chosen.tensors}

    def cast(tensor: LazyTensor, sources: Sequence[str]) -> LazyTensor:
        if not chosen.fixed.isdisjoint(sources):
            return tensor
        return selection.converted(sources[-1], tensor, chosen.dtype, chosen.widen_only)

    applied = map_.apply(tensors, shapes, cast)
    made = applied.tensors
    fixed = frozenset(name for name, sources in applied.sources.items() if not chosen.fixed.isdisjoint(sources))
    return replace(
        chosen,
        names={name: name for name in made},
        known=made,
        tensors=made,
        described=keymap.Flattened(made, None, fixed),
        structured=False,
        owners={},
        fixed=fixed,
        warnings=(*chosen.warnings, *_of_map(chosen, map_, applied)),
        quantized={},
        unmapped=chosen,
        applied=applied,
        map_record=map_.record(applied),
    )


def _written(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":"))


def _of_map(chosen: Selected, map_: ChosenMap, applied: Applied) -> Iterator[str]:
    """Yield what a user should know of what a map left out."""
    if applied.dropped:
        yield f"left out, as the map {map_.map.name} says: {some(applied.dropped)}"
    if applied.padding:
        told = some(applied.padding.items(), form=lambda each: f"{each[1]} elements of {each[0][:100]!r}")
        yield f"left out as padding: {told}"
    if chosen.structured and (chosen.described.values or chosen.described.inert):
        values = some(chosen.described.values, form=str) or "objects of other classes"
        yield f"with --map, tensors alone are written; what was left out beside them: {values}"
    if idle := map_.idle_sizes():
        yield f"--size {idle[0]} is of no use: the map {map_.map.name} has no such axis."


def _as_stored(stored: StoredTensors, described: keymap.Flattened, structured: bool) -> keymap.Flattened:
    """Return `described` with the tensors under the names that the file has for them, and the file's own record."""
    fixed = {same_bytes(described.tensors[name]) for name in described.fixed}
    names = frozenset(name for name, tensor in stored.tensors.items() if same_bytes(tensor) in fixed)
    record = stored.record if structured else None
    return described._replace(tensors=dict(stored.tensors), structure=record, fixed=names, apart=False, quantized={})


def _metadata(remarks: Mapping[str, str], names: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Return the metadata of an output with tensors of these `names`, aliases included, and which of the source's
    `remarks` cannot be in it, because a reader would take them for an alias {removed: kept}."""
    every = set(names)
    lost = sorted(key for key, text in remarks.items() if key not in METADATA and (key in every or text in every))
    return {**METADATA, **{key: text for key, text in remarks.items() if key not in lost}}, lost


def selected_states(source: Source, options: Options, rename: Rename = selection.renamed) -> Selected:
    """Select the optimizer states by the options: named <parameter>.<state>, and nested as torch nests them.

    Parameters have the names of the weights. Half-precision states are widened by default, as the weights are, and
    never narrowed. `owners` are states shared with another parameter: {alias: owner}.
    """
    optimizer = source.states()
    if optimizer is None:
        raise UsageError(f"{source.path} holds no optimizer states that can be named by parameter, for --optimizer.")
    choice = Choice(options.include, options.exclude)
    known = dict.fromkeys([*_flattened(source, source.weights, choice).tensors, *optimizer["state"]])
    names = _names(source, known, options, choice, rename)
    states = {names[name]: state for name, state in optimizer["state"].items() if name in names}
    groups = [
        {**group, "params": [names[name] for name in group["params"] if name in names]}
        for group in optimizer["param_groups"]
    ]
    metadata, applied, record = dict(METADATA), None, None
    equal: list[tuple[str, LazyTensor, LazyTensor]] = []
    if source.map:
        from ckptconv.structure.maps.states import apply_to_states

        ties = _owners(source.owners, names)
        states.update({alias: states[owner] for alias, owner in ties.items() if owner in states})
        states, groups, applied, equal = apply_to_states(source.map, states, groups)
        record = source.map.record(applied)
        metadata[MAP_KEY] = _written(record)
    described = keymap.flatten_states(states, groups)
    owners = {}
    for alias, owner in _owners(source.owners, names).items() if options.tied == "alias" and not applied else ():
        for key in states.get(owner, {}):
            kept, removed = f"{owner}.{key}", f"{alias}.{key}"
            if kept in described.tensors and removed not in described.tensors:
                owners[removed] = kept
    dtype = "keep" if options.dtype == "keep" else source.default_dtype
    tensors = described.tensors
    return Selected(
        names,
        known,
        tensors,
        described,
        options.structure,
        owners,
        choice,
        dtype,
        widen_only=True,
        metadata=metadata,
        applied=applied,
        map_record=record,
        equal=tuple(equal),
    )


def tree_of(source: Source, options: Options) -> Any:
    """Return the source's tree, or what `options.key` names in it."""
    if not options.key:
        return source.weights
    return selection.subtree(source.tree(options.key), options.key, source.path)


def torch_tree_of(source: Source, options: Options) -> Any:
    """Return the tree of which a `.pt` file of the source is made: `tree_of`, with torchao's tensors of their parts."""
    tree = tree_of(source, options)
    is_stored = not source.structured and options.structure and not options.key
    return torchao.assembled(tree, source.remarks) if is_stored else tree


def map_back(source: Source, options: Options) -> ChosenMap | None:
    """Return the map that the user chose for `source`, or else the reverse of the one by which it was made."""
    if source.map or options.map == NO_MAP or MAP_KEY not in source.remarks:
        return source.map
    from ckptconv.structure.maps.chosen import of_record

    return of_record(source.remarks[MAP_KEY], source.path, back=True)


def selected_tree(source: Source, tree: Any, options: Options) -> Selected:
    """Select what a `.pt` file of `tree`, which is of `source`, holds by the options; tensors known by `known` are
    tagged with their facts."""
    choice = Choice(options.include, options.exclude)
    map_ = map_back(source, options)
    applied = None
    equal: list[tuple[str, LazyTensor, LazyTensor]] = []
    if map_ and isinstance(tree, Mapping) and tree.keys() == {"state", "param_groups"}:
        from ckptconv.structure.maps.states import apply_to_states

        states, groups, applied, equal = apply_to_states(map_, tree["state"], tree["param_groups"])
        tree = {"state": states, "param_groups": groups}
    described = keymap.describe(tree, leave_out=writable.leaving_out(options), tagged=True, choice=choice)
    known = described.tensors
    names = {name: name for name in selection.matching(known, choice)}
    bare = {name: untagged(known[name]) for name in names}
    dtype, fixed = options.dtype or "keep", described.fixed | selection.scales(known)
    chosen = Selected(
        names, known, bare, described, options.structure, {}, choice, dtype, widen_only=False, fixed=fixed
    )
    if applied and map_:
        return replace(chosen, applied=applied, map_record=map_.record(applied), equal=tuple(equal))
    if map_ is None:
        return chosen
    try:
        return mapped(chosen, map_)
    except UsageError as error:
        if source.map:
            raise
        raise UsageError(
            f"{source.path} was made by a map, and its reverse does not fit. {error.message}",
            "--map none writes the tensors as they are.",
        ) from error


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
    _check_pieces(source, flat)
    lost = [name for name in source.unaccounted if not options.include and not choice.excludes(name)]
    if lost:
        raise CorruptError(
            f"{source.path} names {len(lost)} parameters whose data is nowhere in it: {', '.join(lost[:5])}"
            f"{', …' if len(lost) > 5 else ''}. Nothing was written.",
            "They are tied or frozen parameters of a release that did not save them; leave them out with --exclude.",
        )
    return rename(names, options.strip_prefix, options.rename)


def _check_pieces(source: Source, names: Iterable[str]) -> None:
    """Raise UnsupportedError if some of `names` are pieces of parameters."""
    found = [name for name in names if source.pieces and source.pieces.search(name)]
    if found:
        raise UnsupportedError(
            f"{source.path} was saved with FSDP's LOCAL_STATE_DICT: {some(found, 1, repr)} are flat parameters, each "
            "of them several parameters in one, whose shapes are not in the checkpoint. Nothing was written.",
            "Load it in the training run, and save it with SHARDED_STATE_DICT or FULL_STATE_DICT.",
        )


def _owners(ties: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    """Return a source's own ties by new name: {alias: owner}."""
    return {names[a]: names[o] for a, o in ties.items() if a in names and o in names}
