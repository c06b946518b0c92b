"""Plan the outputs of a source. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from operator import is_
from typing import Any, NamedTuple, TypeAlias

from ckptconv.errors import LimitError, UsageError
from ckptconv.formats.model_files import SUFFIX
from ckptconv.formats.registered import copying
from ckptconv.formats.source import ADAPTER, OPEN_CLIP, Source
from ckptconv.options.table import Options
from ckptconv.outputs import computed, kinds, safetensors, selection
from ckptconv.outputs.notices import Notices
from ckptconv.outputs.pipeline import selected
from ckptconv.outputs.targets import Target
from ckptconv.plan import MAX_GROWTH, ROOM_TO_GROW, Data, FilePlan, Plan, identify, identity
from ckptconv.storage.paths import basename
from ckptconv.structure.record import METADATA_KEY, Flattened, plain_record
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.text import some
from ckptconv.version import __version__

# The files of an output, its aliases {removed: kept}, and the notices about it.
_Files: TypeAlias = tuple[tuple[FilePlan, ...], dict[str, str], Notices]
_OF_ONE_FILE = {ADAPTER: "PEFT reads an adapter", OPEN_CLIP: "open_clip reads a model"}
# Keys of the configurations of transformers and of diffusers, which read shards.
_OF_SHARDS = frozenset({"model_type", "architectures", "_class_name"})


class Restored(NamedTuple):
    """Further facts of a `.pt` file: the number of its tensors, the objects that were left out {name: class}, and pairs
    of tensors that are equal unless tensors that shared memory have changed since."""

    tensors: int
    left_out: dict[str, str]
    overlaps: Callable[[], Iterator[tuple[LazyTensor, LazyTensor]]]


class Output(NamedTuple):
    """An output of a conversion: its target, its plan, and its aliases {removed: kept}.

    `heading` is its manifest without the files, and `inputs` are the entries of `Source.inputs` that it names.
    `restored` holds further facts of a `.pt` file. `by` names the command, where several make outputs of
    one kind. `described` is the number of tensors of a file that describes others, or of a checkpoint whose tensors
    are in several chunks.
    """

    target: Target
    plan: Plan
    aliases: dict[str, str]
    heading: dict[str, Any]
    restored: Restored | None = None
    notices: Notices = Notices()
    described: int | None = None
    inputs: Mapping[str, Hashable] = {}
    by: str = ""

    @property
    def made_as(self) -> str:
        """Its kind, and the command that computes it from several inputs, as in "weights/average"."""
        return f"{self.heading['kind']}/{self.by}" if self.by else computed.made_as(self.heading)

    @property
    def has_manifest(self) -> bool:
        """Whether a manifest is among the output's files."""
        return not self.target.is_file and not self.heading["options"].get("for_hub")

    @property
    def tensors(self) -> int:
        return self.described if self.described is not None else sum(map(self.tensors_of, self.plan.files))

    def tensors_of(self, file: FilePlan) -> int:
        """Return the number of tensors in one of the files."""
        if self.described is not None and self.target.is_file:
            return self.described
        return self.restored.tensors if self.restored else file.tensors


def plan(source: Source, target: Target, options: Options) -> Output:
    """Plan safetensors: of the weights, or of the optimizer's states."""
    of_states = target.holds == "optimizer"
    inputs = source.inputs_of_all if of_states else source.all_inputs()
    source = source._replace(inputs=inputs, companions={} if of_states else source.companions)
    files, aliases, notices = safetensors_files(source, target, options) if source.is_model else ((), {}, Notices())
    copied: tuple[FilePlan, ...] = ()
    for module in copying("plan") if source.companions or notices.change.quantization else ():
        copied, notices = module.planned(source, notices)
    return output_of(target.holds, [source], target, options, (*copied, *files), aliases, notices)


def planned(source: Source, target: Target, options: Options) -> Output:
    """Plan the output of `source` at `target`."""
    if target.kind == "directory":
        target = target._replace(stem=source.stem)
    output: Output = import_module(kinds.entry_of(target.kind).plan).plan(source, target, options)
    return output


def output_of(
    kind: str,
    sources: Sequence[Source],
    target: Target,
    options: Options,
    files: tuple[FilePlan, ...],
    aliases: dict[str, str],
    notices: Notices | None = None,
    restored: Restored | None = None,
) -> Output:
    """Return the output that consists of `files`, with its plan id. `kind` is the manifest's word for it."""
    inputs = {name: content for source in sources for name, content in source.inputs.items()}
    notices = notices or Notices()
    first = sources[0]._replace(inputs=inputs)
    head = heading(first, target, options.recorded(), kind, files, aliases, notices.record)
    if options.digest:
        head["digest"] = options.digest
    notices = notices._replace(idle={**kinds.idle(target.kind, options), **notices.idle})
    return Output(target, Plan(files, head["plan"]), aliases, head, restored, notices, inputs=inputs)


def check_size(output: Output, options: Options) -> None:
    """Raise UsageError if an output of one file has more bytes of tensors than `max_shard_size`."""
    most = options.max_shard_size
    if not (most and output.target.is_file and output.described is None):
        return
    size = sum(part.nbytes for file in output.plan.files for part in file.parts if isinstance(part, Data))
    if size > most:
        raise UsageError(
            f"{output.target.path} would have {size} bytes of tensors, more than --max-shard-size allows ({most}).",
            "Give a directory of safetensors, which can be split, as OUTPUT. A file for torch.load is always one file.",
        )


def check_growth(output: Output, available: int) -> None:
    """Raise LimitError if an output is out of proportion to the `available` bytes of its inputs."""
    most = MAX_GROWTH * available + ROOM_TO_GROW
    if output.plan.nbytes <= most:
        return
    parts = [part for file in output.plan.files for part in file.parts if isinstance(part, Data)]
    if sum(part.nbytes for part in parts) > most:
        largest = max(parts, key=lambda part: part.nbytes)
        raise LimitError(
            f"{output.target.path} would have {output.plan.nbytes} bytes from {available} of input: tensors such as "
            f"{largest.name!r} of {largest.nbytes} bytes repeat the same elements. The limit for this input is {most} "
            "bytes.",
            f"Leave it out with --exclude {largest.name!r}, or save a contiguous copy of it.",
        )


def safetensors_files(source: Source, target: Target, options: Options) -> _Files:
    """Plan the files of the weights, or of the optimizer's states. Pure.

    Aliases lead from a tied parameter's states to those of the parameter it is tied to. The states of an alias that is
    no weight are kept as they are.
    """
    chosen = selected(source, options, holds=target.holds)
    described, tensors, of_states = chosen.described, chosen.tensors, chosen.of_states
    names = {} if of_states else chosen.names
    ties = chosen.recorded_aliases()
    aliases = ties if options.tied == "alias" else {}
    structure, kept = chosen.structure(aliases), chosen.stored(aliases)
    # Mostly they are the same, one by one.
    is_cast = len(kept) != len(tensors) or not all(map(is_, kept.values(), tensors.values()))
    new_dtypes = ((old, kept[new].dtype, tensors[new].dtype) for old, new in names.items() if is_cast and new in kept)
    cast = [old for old, stored, dtype in new_dtypes if stored != dtype]
    goal = kept[names[cast[0]]].dtype.name if cast else chosen.dtype
    apart = [name for name in cast if names[name] not in chosen.uncastable]
    coded = selection.check_unscaled(apart, chosen.first.known, goal) if cast or options.dtype else ()
    still = chosen.uncastable - chosen.settled
    left = selection.left_alone({name: kept[name] for name in (kept if still else ()) if name in still}, chosen.dtype)
    if chosen.widen_only and chosen.dtype != "keep":
        left += selection.left_wider({name: kept[name] for name in kept if name not in chosen.uncastable}, chosen.dtype)
    warnings = (*chosen.warnings, *(left or coded))
    config = None if of_states else source.config
    for module in copying("plan") if config is not None else ():
        config = module.configuration(source, chosen.change(source))
    stem = ADAPTER if basename(target.path).startswith(ADAPTER) else target.stem
    if config is not None or (not of_states and (options.for_hub or stem == ADAPTER or target.form == "directory")):
        from ckptconv.outputs.truths import Weights, untrue

        before, after = [*chosen.first.known, *chosen.missing], chosen.first.names
        warnings += (*untrue(config, Weights(before, after, kept, options.for_hub, stem, options.key)),)
    idle, is_structured = chosen.idle(options, source.weights), chosen.structured
    if of_states and options.dtype not in (None, "keep", source.defaults.dtype):
        idle["--dtype"] = "has no effect: optimizer states are not cast to it"
    uncastable = described.uncastable if of_states else [names[name] for name in described.uncastable if name in names]
    if options.tied == "duplicate" and not (ties or of_states):
        idle["--tied"] = "has no effect: no two names of the input are recorded as those of one tensor"
    grouping = {names[old]: group for old, group in source.defaults.grouping.items() if old in names}
    notices = _notices(source, described, structure, options, idle, uncastable, warnings)
    notices = notices._replace(
        notes=(*notices.notes, *chosen.notes), change=chosen.change(source), record=chosen.record, equal=chosen.equal
    )
    reporter, metadata, homes = chosen.reporter(kept), chosen.stated(aliases), chosen.files
    # With a million tensors, each of these takes as much memory as all buffers.
    del chosen, tensors, names, described
    limit = options.max_shard_size or source.defaults.shard_size
    groups: Mapping[str, list[str]] = {}
    if not target.is_file:
        from ckptconv.outputs import shards

        if homes and options.max_shard_size is None:
            groups = shards.grouped(kept, homes)
        elif (source.shards or grouping) and limit is None and not of_states:
            groups = shards.as_in(source, kept, grouping, target.stem)

    def planned_with(record: str | None) -> tuple[FilePlan, ...]:
        if not target.is_file:
            return shards.file_plans(kept, aliases, record, limit, metadata, groups, target.stem)
        recorded = {} if record is None else {METADATA_KEY: record}
        return (safetensors.file_plan(basename(target.path), kept, {**metadata, **aliases, **recorded}),)

    files = planned_with(structure)
    if structure is None and is_structured and _names(files) != list(kept):
        # A plain dict needs a record if casts or several files change the order of its names.
        files = planned_with(plain_record(kept))
    count = sum(file.name.endswith(SUFFIX) for file in files)
    if count > 1 and not of_states and (reader := _reader_of_one(source)):
        raise UsageError(
            f"{target.path} would have {count} files, but {reader} from one file.", "Leave --max-shard-size out."
        )
    return files, aliases, notices._replace(reported=reporter(files))


def _notices(
    source: Source,
    described: Flattened,
    structure: str | None,
    options: Options,
    idle: Mapping[str, str],
    uncastable: Iterable[str],
    warnings: tuple[str, ...] = (),
) -> Notices:
    """Return the notices about an output with this `structure` record; `uncastable` are names in the output."""
    bits = () if options.structure or not source.structured else tuple(sorted(uncastable))
    is_part = options.key or options.include or options.exclude or not options.structure
    kept = None
    if source.files.opaque and is_part:
        from ckptconv.structure.reading import classes

        kept = classes(structure)
    values = described.values if structure is not None else ()
    is_left = options.for_hub and described.values
    left = (f"left out, because they are not tensors: {some(described.values)}",) if is_left else ()
    return Notices(idle, values, described.inert, bits, kept, warnings, left)


def _reader_of_one(source: Source) -> str:
    """Return the program that reads an output of `source` from one file only, and its word; "" if shards are read."""
    config = source.config or {}
    if source.stem in _OF_ONE_FILE:
        return _OF_ONE_FILE[source.stem]
    if source.config is None or config.keys() & _OF_SHARDS:
        return ""
    if "pretrained_cfg" in config:
        return "timm reads a model"
    return "sentence-transformers reads this module" if source.component else ""


def _names(files: Iterable[FilePlan]) -> list[str]:
    """Return the names of an output's tensors in the order in which its files hold them."""
    return [part.name for file in files for part in file.parts if isinstance(part, Data)]


def heading(
    source: Source,
    target: Target,
    options: Mapping[str, Any],
    kind: str,
    files: Iterable[FilePlan],
    aliases: Mapping[str, str],
    record: Mapping[str, Any],
    version: str = __version__,
) -> dict[str, Any]:
    """Return the manifest, without its files, of an output that consists of `files`, as that `version` writes it.

    `options` are those that decide their content, and `record` is the record of their selection.
    """
    plan_id = identify(files, source.inputs, (version, kind, source.model_rank, options))
    for way in computed.ways_of(source):
        plan_id = way.identified(files, source, plan_id)
    described: dict[str, Any] = {"format": source.format, "family": source.family}
    if source.model_rank is not None:
        described["model_rank"] = source.model_rank
    described["inputs"] = {name: identity(content) for name, content in sorted(source.inputs.items())}
    head = {
        "ckptconv": version,
        "plan": plan_id,
        "kind": kind,
        "source": described,
        "options": options,
        "aliases": dict(sorted(aliases.items())),
    }
    return head | computed.recorded(source, record, target)
