"""What is made of a source: the plans of its outputs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from ckptconv.errors import LimitError, UsageError
from ckptconv.formats import safetensors as safetensors_input
from ckptconv.formats.source import Source
from ckptconv.options import OPTIONS, Options
from ckptconv.outputs import safetensors, selection, universal
from ckptconv.outputs.restore import Restored, plan_restored
from ckptconv.outputs.selected import Selected, selected, selected_states
from ckptconv.outputs.targets import Spared, Target, check_file, not_a_directory, resolved_name
from ckptconv.plan import Data, FilePlan, Literal, Plan, identify, identity, pack, shard_names
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
    source = replace(source, inputs={**source.inputs, **source.state_inputs})
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
    chosen = selected(source, options)
    described, tensors, names = chosen.described, chosen.tensors, chosen.names
    all_apart = options.tied == "duplicate" or (described.apart and not chosen.owners)
    aliases = {} if all_apart else selection.untie(tensors, chosen.owners)
    aliases = {alias: kept for alias, kept in aliases.items() if alias not in safetensors_input.RESERVED}
    structure = chosen.structure(aliases)
    kept = {name: chosen.cast(name) for name in tensors if name not in aliases}
    cast = [old for old, new in names.items() if new in kept and kept[new].dtype != tensors[new].dtype]
    warnings = selection.unscaled({name: chosen.known[name] for name in cast}, chosen.known, chosen.dtype)
    idle, is_structured, fixed = _idle(chosen, options), chosen.structured, chosen.fixed
    # Of a million tensors, each of these takes as much memory as all buffers.
    del chosen, tensors, names
    limit = options.max_shard_size or source.default_shard_size
    groups = _as_in(kept, source.shards) if source.shards and limit is None else None
    files = _file_plans(kept, aliases, structure, target, limit, groups)
    if structure is None and is_structured and _names(files) != list(kept):
        # A plain dict, whose order is lost where tensors were cast, or are spread over several files.
        files = _file_plans(kept, aliases, keymap.plain_record(kept), target, limit, groups)
    return files, aliases, _told(source, described, structure, options, idle, fixed, warnings)


def _idle(chosen: Selected, options: Options) -> dict[str, str]:
    """The options that were given and choose or rename nothing: {option: reason}."""
    idle = selection.idle_globs(list(chosen.known), chosen.choice)
    return idle | selection.idle(chosen.names, options.strip_prefix, options.rename)


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


def _names(files: Iterable[FilePlan]) -> list[str]:
    """The tensors of an output, as one finds them who reads its files one after the other."""
    return [part.name for file in files for part in file.parts if isinstance(part, Data)]


def optimizer_files(source: Source, target: Target, options: Options) -> _Files:
    """The files of the optimizer states. Pure.

    A name that is tied to a parameter leads to the parameter's states in the alias record; one that is no weight's
    stays.
    """
    chosen = selected_states(source, options)
    described, aliases = chosen.described, chosen.owners
    flat = {name: chosen.cast(name) for name in chosen.tensors}
    structure = described.structure if chosen.structured else None
    files = _file_plans(flat, aliases, structure, target, options.max_shard_size or source.default_shard_size)
    return files, aliases, _told(source, described, structure, options, _idle(chosen, options), described.fixed)


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
