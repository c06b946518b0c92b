"""What is made of a source: the plans of its outputs. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ckptconv.errors import CorruptError, LimitError, UnsupportedError, UsageError
from ckptconv.formats import safetensors as safetensors_input
from ckptconv.formats.source import Source
from ckptconv.options import OPTIONS, Options
from ckptconv.outputs import safetensors, selection, universal
from ckptconv.outputs.restore import Restored, plan_restored
from ckptconv.outputs.targets import Spared, Target, check_file, not_a_directory, resolved_name
from ckptconv.pickles import nodes
from ckptconv.plan import Data, FilePlan, Literal, Plan, identify, pack, shard_names
from ckptconv.storage.paths import basename, is_remote, normalize
from ckptconv.structure import keymap
from ckptconv.structure.record import FILE_NAME, METADATA_KEY
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.version import __version__

# An output larger than so many times the input and this many bytes is not worth its space: a tensor of a few bytes can
# be as large as it likes, by repeating an element.
MAX_GROWTH, ROOM_TO_GROW = 64, 256 << 20


# The files of an output, the names in it that are stored under another, {removed: kept}, and what it has to say.
_Files: TypeAlias = tuple[tuple[FilePlan, ...], dict[str, str], "Told"]


@dataclass(frozen=True)
class Told:
    """What a user should know of an output.

    `idle` are options that were given and change nothing in it: {option: reason}. `recorded` are the keys at the top
    of the structure record that lead to values. `inert`: it holds objects of classes that are known by name only, and
    no tensor that is not part of one. `bits` are tensors that mean nothing without the record, which was not written.
    `kept` are the classes known by name only that the record names, if these are not all there are. `warnings` are all
    else that is worth knowing of what was made.
    """

    idle: Mapping[str, str] = field(default_factory=dict)
    recorded: tuple[str, ...] = ()
    inert: bool = False
    bits: tuple[str, ...] = ()
    kept: frozenset[str] | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Output:
    """One output of a conversion: where it goes, its plan, and the names it stores under another: {removed: kept}.

    `heading` is what its manifest says before the files, and `restored` what else is known of a `.pt` file.
    """

    target: Target
    plan: Plan
    aliases: dict[str, str]
    heading: dict[str, Any]
    restored: Restored | None = None
    told: Told = field(default_factory=Told)

    @property
    def tensors(self) -> int:
        return self.restored.tensors if self.restored else sum(file.tensors for file in self.plan.files)


# What can be made of a source, each where it is asked for.


def weights_output(source: Source, target: Target, options: Options) -> Output:
    if target.is_torch:
        if source.family != safetensors_input.FAMILY:
            raise not_a_directory(target.path)
        restored = plan_restored(source, target.path, options)
        told = Told(idle=restored.idle)
        return output_of("weights", [source], target, options, (restored.file,), {}, told, restored)
    return output_of("weights", [source], target, options, *weights_files(source, target, options))


def optimizer_output(source: Source, target: Target, options: Options) -> Output:
    if source.states() is None:
        raise UsageError(f"{source.path} holds no optimizer states that can be told by parameter, for --optimizer.")
    return output_of("optimizer", [source], target, options, *optimizer_files(source, target, options))


def universal_output(source: Source, target: Target, options: Options) -> Output:
    if source.training is None:
        raise UsageError(f"{source.path} holds no ZeRO optimizer, of which a universal checkpoint could be made.")
    if is_remote(target.path):
        raise UsageError(f"{target.path}: a universal checkpoint is written to a local directory.")
    states = (source.states() or {}).get("state", {})
    files = (*universal.file_plans(source.training, source.weights, states), universal.latest(target.path))
    return output_of("universal", [source], target, options, files, {}, Told(idle=_choosing(options)))


def _choosing(options: Options) -> dict[str, str]:
    """The options that choose and change tensors, of those that were given, and why none of them is of use here."""
    others = [
        each for each in OPTIONS.values() if each.group == "tensors" and each.name not in ("strip_prefix", "rename")
    ]
    given = [option.flags[0] for option in others if getattr(options, option.name) != option.default]
    renaming = [option for option, _ in selection.renaming(options.strip_prefix, options.rename)]
    return dict.fromkeys([*given, *renaming], "changes nothing in a universal checkpoint, which holds all as it is")


def output_of(
    kind: str,
    sources: Sequence[Source],
    target: Target,
    options: Options,
    files: tuple[FilePlan, ...],
    aliases: dict[str, str],
    told: Told | None = None,
    restored: Restored | None = None,
) -> Output:
    """The output that consists of `files`, with its plan id; a manifest calls what it is made of `sources` `kind`."""
    inputs = {name: found for source in sources for name, found in source.inputs.items()}
    plan_id = identify(files, inputs, (__version__, kind, sources[0].model_rank, options.recorded()))
    head = heading(sources, options, kind, plan_id, aliases)
    return Output(target, Plan(files, plan_id), aliases, head, restored, told or Told())


def check_output(output: Output, spared: Spared, options: Options) -> None:
    """Raise UsageError for an output that would replace a file that is `spared`, or one larger than was asked for."""
    target = output.target
    asked = {option: normalize(path) for option, path in _written_too(options) if path}
    for option, path in asked.items():
        spared.check(path, f"What {option} asks for")
        check_file(path, option)
        if resolved_name(path) == resolved_name(target.path):
            raise UsageError(f"What {option} asks for would replace {path}, the output.", "Write it to another place.")
    if len({resolved_name(path) for path in asked.values()}) < len(asked):
        raise UsageError(f"{' and '.join(asked)} both name {options.manifest}.", "Write one to another place.")
    if target.is_file:
        spared.check(target.path, "The output")
    else:
        spared.check_directory(target, (file.name for file in output.plan.files), "The output")
    size, most = output.plan.nbytes, options.max_shard_size
    if output.target.is_file and most and size > most:
        raise UsageError(
            f"{output.target.path} would have {size} bytes, more than --max-shard-size allows ({most}).",
            "Give a directory as OUTPUT: it may hold several files.",
        )


def _written_too(options: Options) -> tuple[tuple[str, str], ...]:
    """The files that are written beside the outputs, by option."""
    return ("--manifest", options.manifest), ("--depfile", options.depfile)


def check_growth(output: Output, available: int) -> None:
    """Raise LimitError for an output out of all proportion to the `available` bytes that it is made of."""
    most = MAX_GROWTH * available + ROOM_TO_GROW
    if output.plan.nbytes <= most:
        return
    parts = [part for file in output.plan.files for part in file.parts if isinstance(part, Data)]
    if sum(part.nbytes for part in parts) > most:
        largest = max(parts, key=lambda part: part.nbytes)
        raise LimitError(
            f"{output.target.path} would have {output.plan.nbytes} bytes, made of {available}: tensors such as "
            f"{largest.name!r} of {largest.nbytes} bytes repeat the same elements. At most {most} bytes are written of "
            "so little. Nothing was written.",
            f"Leave it out with --exclude {largest.name!r}, or save a contiguous copy of it.",
        )


def weights_files(source: Source, target: Target, options: Options) -> _Files:
    """The files of the weights. Pure."""
    tree = selection.subtree(source.tree(options.key), options.key, source.path) if options.key else source.weights
    choice = selection.Choice(options.include, options.exclude)
    described = _flattened(source, tree, choice)
    flat, structure, fixed = described.tensors, described.structure, described.fixed
    new_names = _new_names(source, flat, options, choice)
    tensors = {new: flat[old] for old, new in new_names.items()}
    # A whole state without a tensor is kept by its record alone; a part that was asked for is a slip.
    if not flat and (options.key or not source.structured):
        where = f"under {options.key!r} of {source.path}" if options.key else f"in {source.path}"
        raise UsageError(f"There is no tensor {where}: nothing to convert.")
    if flat and not tensors:
        raise UsageError(f"Nothing is left to convert: all {len(flat)} tensors are excluded.")
    idle = selection.idle_globs(list(flat), choice) | selection.idle(new_names, options.strip_prefix, options.rename)
    owners = {new_names[a]: new_names[o] for a, o in source.owners.items() if a in new_names and o in new_names}
    all_apart = options.tied == "duplicate" or (described.apart and not owners)
    aliases = {} if all_apart else selection.untie(tensors, owners)
    aliases = {alias: kept for alias, kept in aliases.items() if alias not in safetensors_input.RESERVED}
    structured = source.structured and options.structure
    if structure is None and structured and any(old != new for old, new in new_names.items()):
        structure = keymap.plain_record(new_names)
    structure = keymap.remap(structure, new_names, aliases) if structured else None
    dtype = options.dtype or source.default_dtype
    widen_only = source.default_dtype == dtype == "float32"
    fixed = frozenset(new_names[name] for name in fixed if name in new_names)
    kept = {name: tensor for name, tensor in tensors.items() if name not in aliases}
    warnings: tuple[str, ...] = ()
    if dtype != "keep":
        for name, tensor in kept.items():
            if name not in fixed:
                kept[name] = selection.converted(name, tensor, dtype, widen_only)
        cast = [old for old, new in new_names.items() if kept.get(new, flat[old]).dtype != flat[old].dtype]
        warnings = selection.unscaled({name: flat[name] for name in cast}, flat, dtype)
    # Of a million tensors, each of these takes as much memory as all buffers.
    del flat, tensors, new_names
    limit = options.max_shard_size or source.default_shard_size
    groups = _as_in(kept, source.shards) if source.shards and limit is None else None
    files = _file_plans(kept, aliases, structure, target, limit, groups)
    if structure is None and structured and _names(files) != list(kept):
        # A plain dict, whose order is lost where tensors were cast, or are spread over several files.
        files = _file_plans(kept, aliases, keymap.plain_record(kept), target, limit, groups)
    return files, aliases, _told(source, described, structure, options, idle, fixed, warnings)


def _told(
    source: Source,
    described: keymap.Flattened,
    structure: str | None,
    options: Options,
    idle: Mapping[str, str],
    fixed: Iterable[str],
    warnings: tuple[str, ...] = (),
) -> Told:
    """What a user should know of an output with this `structure` record, where `fixed` are names in the output."""
    bits = () if options.structure or not source.structured else tuple(sorted(fixed))
    is_part = options.key or options.include or options.exclude or not options.structure
    kept = keymap.classes(structure) if source.opaque and is_part else None
    values = described.values if structure is not None else ()
    return Told(idle, values, described.inert, bits, kept, warnings)


def _as_in(tensors: Mapping[str, LazyTensor], shards: Sequence[str]) -> list[list[str]]:
    """Names in groups: those of each input file."""
    groups: dict[str, list[str]] = {path: [] for path in shards}
    for name, tensor in tensors.items():
        path = next((file.stored.path for file in tensor.inputs()), shards[0])
        groups[path].append(name)
    return [group for group in groups.values() if group] or [[]]


def _flattened(source: Source, tree: Any, choice: selection.Choice) -> keymap.Flattened:
    """The tensors of `tree`, and a record of those that are chosen. Raises UnsupportedError for those without data,
    unless they are left out by name."""
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


def _names(files: Iterable[FilePlan]) -> list[str]:
    """The tensors of an output, as one finds them who reads its files one after the other."""
    return [part.name for file in files for part in file.parts if isinstance(part, Data)]


def optimizer_files(source: Source, target: Target, options: Options) -> _Files:
    """The files of the optimizer states: named <parameter>.<state>, and nested as torch has them. Pure.

    Parameters are called as the weights are. A name that is tied to a parameter leads to the parameter's states in the
    alias record; one that is no weight's stays. Half-precision states are widened as the weights are by default, and
    never narrowed.
    """
    optimizer = source.states()
    choice = selection.Choice(options.include, options.exclude)
    names = dict.fromkeys([*_flattened(source, source.weights, choice).tensors, *optimizer["state"]])
    new_names = _new_names(source, names, options, choice)
    states = {new_names[name]: state for name, state in optimizer["state"].items() if name in new_names}
    groups = [
        {**group, "params": [new_names[name] for name in group["params"] if name in new_names]}
        for group in optimizer["param_groups"]
    ]
    described = keymap.flatten_states(states, groups)
    flat, structure = described.tensors, described.structure if options.structure else None
    dtype = "keep" if options.dtype == "keep" else source.default_dtype
    flat = {name: selection.converted(name, tensor, dtype, widen_only=True) for name, tensor in flat.items()}
    aliases = {}
    for alias, owner in source.owners.items() if options.tied == "alias" else ():
        for key in states.get(new_names.get(owner, ""), {}) if alias in new_names else ():
            kept, removed = f"{new_names[owner]}.{key}", f"{new_names[alias]}.{key}"
            if kept in flat and removed not in flat:
                aliases[removed] = kept
    files = _file_plans(flat, aliases, structure, target, options.max_shard_size or source.default_shard_size)
    idle = selection.idle_globs(list(names), choice) | selection.idle(new_names, options.strip_prefix, options.rename)
    return files, aliases, _told(source, described, structure, options, idle, described.fixed)


def _new_names(source: Source, flat: Mapping[str, Any], options: Options, choice: selection.Choice) -> dict[str, str]:
    """What is converted, and under which names: {old: new}."""
    names = selection.matching(flat, choice)
    _check_pieces(source, flat)
    lost = [name for name in source.unaccounted if not options.include and not choice.excludes(name)]
    if lost:
        raise CorruptError(
            f"{source.path} names {len(lost)} parameters whose data is nowhere in it: {', '.join(lost[:5])}"
            f"{', …' if len(lost) > 5 else ''}. Nothing was written.",
            "They are tied or frozen parameters of a release that did not save them; leave them out with --exclude.",
        )
    return selection.renamed(names, options.strip_prefix, options.rename)


def _check_pieces(source: Source, names: Iterable[str]) -> None:
    """Raise UnsupportedError where `names` are those of pieces of parameters."""
    found = [name for name in names if source.pieces and source.pieces.search(name)]
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise UnsupportedError(
            f"{source.path} was saved with FSDP's LOCAL_STATE_DICT: {found[0]!r}{more} are flat parameters, each of "
            "them several parameters in one, whose shapes are not in the checkpoint. Nothing was written.",
            "Load it in the training run, and save it with SHARDED_STATE_DICT or FULL_STATE_DICT.",
        )


def _file_plans(
    tensors: dict[str, LazyTensor],
    aliases: dict[str, str],
    structure: str | None,
    target: Target,
    limit: int | None,
    groups: list[list[str]] | None = None,
) -> tuple[FilePlan, ...]:
    """One file, or files of at most `limit` bytes of tensors, or one for each of `groups` of names."""
    record = {} if structure is None else {METADATA_KEY: structure}
    if target.is_file:
        return (safetensors.file_plan(basename(target.path), tensors, {"format": "pt", **aliases, **record}),)
    if groups is None:
        groups = pack({name: tensor.nbytes for name, tensor in tensors.items()}, {}, limit)
    names = shard_names("model", safetensors.SUFFIX, groups)
    contents = {name: {key: tensors[key] for key in group} for name, group in zip(names, groups, strict=True)}
    extra = aliases if len(groups) == 1 else {}
    files = [safetensors.file_plan(name, content, {"format": "pt", **extra}) for name, content in contents.items()]
    if structure is not None:
        data = structure.encode()
        files.append(FilePlan(FILE_NAME, len(data), (Literal(0, data),)))
    if len(groups) > 1:
        files.append(safetensors.index_plan(contents, aliases))
    return tuple(files)


def identity(found: Hashable) -> dict[str, Any]:
    """An entry of `Source.inputs` as a manifest has it: the size, and a hash of all that tells the content apart."""
    size = found[0] if isinstance(found, tuple) and found and isinstance(found[0], int) else None
    return {"size": size, "identity": hashlib.sha256(repr(found).encode()).hexdigest()[:16]}


def heading(
    sources: Sequence[Source], options: Options, kind: str, plan_id: str, aliases: Mapping[str, str]
) -> dict[str, Any]:
    """A manifest, but for the files."""
    first = sources[0]
    described: dict[str, Any] = {"format": first.format, "family": first.family}
    if first.model_rank is not None:
        described["model_rank"] = first.model_rank
    inputs = {name: identity(found) for source in sources for name, found in source.inputs.items()}
    described["inputs"] = dict(sorted(inputs.items()))
    return {
        "ckptconv": __version__,
        "plan": plan_id,
        "kind": kind,
        "source": described,
        "options": options.recorded(),
        "aliases": dict(sorted(aliases.items())),
    }
