"""The steps of a conversion, in order: open, flatten, select, plan, move, commit."""

from __future__ import annotations

import functools
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from . import foreign, keymap, select
from .checksums import Checksums
from .errors import CorruptError, FailedError, LimitError, UsageError
from .formats import open_source, ranks_to_convert
from .formats import safetensors as safetensors_input
from .formats.source import Source
from .move import Progress, Tally, carry_out, same
from .outputs import safetensors, universal
from .plan import Data, FilePlan, Literal, Plan, identify, pack, shard_names
from .restore import SUFFIXES, Restored, plan_restored
from .spool import SpoolingReaders, is_pipe
from .staging import DirectoryStaging, FileStaging, Staging, TreeStaging
from .storage import (
    Syncing,
    basename,
    check_unchanged,
    dirname,
    is_remote,
    join,
    listing,
    look,
    normalize,
    peak_rss,
)
from .structure import FILE_NAME, METADATA_KEY
from .tensors import File, LazyTensor
from .unpickle import no_garbage

# What an output of ours consists of; of these, a new output replaces what an earlier one left.
OUTPUT_NAMES = re.compile(
    r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|ckptconv\.structure\.json|\.ckptconv-manifest\.json"
)
# One file of a sharded set is called as it would be among the others.
_SHARD_STEM = re.compile(r"^pytorch_model(?=-\d{5}-of-\d{5}$)")
CHECKPOINT_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".json", ".distcp", ".pkl")
DEFAULT_MEMORY = 8 << 20
# An output larger than so many times the input and this many bytes is not worth its space: a tensor of a few bytes can
# be as large as it likes, by repeating an element.
MAX_GROWTH, ROOM_TO_GROW = 64, 256 << 20


@dataclass(frozen=True)
class Options:
    """What is asked of a conversion; see the command line's contract for each. None: the source's default."""

    dtype: str | None = None
    max_shard_size: int | None = None
    key: str = ""
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    strip_prefix: str = ""
    rename: Sequence[str] = ()
    tied: str = "alias"
    jobs: int | None = None
    memory: int = DEFAULT_MEMORY
    fsync: bool = True
    clobber: bool = True
    dry_run: bool = False
    family: str = ""
    tag: str = ""
    optimizer: str = ""
    universal: str = ""
    per_rank: bool = False
    exclude_frozen_parameters: bool = False
    drop_opaque: bool = False
    inert: bool = False
    checksum: bool = False
    spool_dir: str = ""
    storage_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class OutputFile:
    """A file of the output: its path, its size, and how many tensors it holds."""

    path: str
    bytes: int
    tensors: int


@dataclass
class Report:
    """What a conversion did, or would do with `dry_run`. Sizes are in bytes.

    `checksums` counts the storages whose checksum was checked; `extra_bytes`, part of `bytes_read`, were read for that.
    `dropped` names entries that were left out as their class is known by name only: {entry: class}.
    """

    input: str
    outputs: list[OutputFile]
    format: str
    tensors: int
    aliases: dict[str, str]
    counts: dict[str, int]
    opaque: list[str]
    warnings: list[str]
    input_bytes: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    checksums: int = 0
    extra_bytes: int = 0
    seconds: float = 0.0
    peak_rss_bytes: int = 0
    dry_run: bool = False
    dropped: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """Where an output goes: one file, a directory, or a directory that is replaced as a whole (`is_tree`).

    `is_torch`: the file is one for torch.load, and else all are safetensors.
    """

    path: str
    is_file: bool
    is_tree: bool = False
    is_torch: bool = False


@dataclass(frozen=True)
class Output:
    """One output of a conversion: where it goes, its plan, and the names it stores under another: {removed: kept}.

    `restored` is what else is known of a `.pt` file.
    """

    target: Target
    plan: Plan
    aliases: dict[str, str]
    restored: Restored | None = None

    @property
    def tensors(self) -> int:
        return self.restored.tensors if self.restored else sum(file.tensors for file in self.plan.files)


def convert(
    source: str | os.PathLike[str] | Source,
    output: str | os.PathLike[str] | None = None,
    *,
    progress: Progress | None = None,
    announce: Callable[[int], None] | None = None,
    publishing: Callable[[], None] | None = None,
    **options: Any,
) -> Report:
    """Convert `source`, a path or an opened `Source`, to safetensors at `output`, or from safetensors to a `.pt` file.

    `output` ends in ".safetensors" for one file, else it is a directory; by default it stands beside the input. The
    name of a file for torch.load ends in .pt, .pth, .bin or .ckpt.
    `options` are the fields of `Options`. `progress` is called with the bytes written since the last call, from any
    thread; `announce` once with how many there will be, before the first; `publishing` when all is staged, before the
    first output gets its name. Raises a `CkptconvError`; then nothing new stands under a final name.
    """
    started = time.monotonic()
    chosen = Options(**options)
    # What can be said of the outputs is said before a large input is read.
    asked = {_weights: output, _optimizer: chosen.optimizer, _universal: chosen.universal}
    targets = {
        plan: Target(normalize(path), is_file=False, is_tree=True)
        if plan is _universal
        else resolve_output(normalize(path), chosen)
        for plan, path in asked.items()
        if path or (path is not None and plan is _weights)
    }
    chosen = replace(chosen, spool_dir=chosen.spool_dir or _beside(targets.values()))
    # A million small objects live until the end: to look for garbage among them takes longer than to make them.
    with no_garbage():
        sources = [source] if isinstance(source, Source) else _open(normalize(source), chosen, bool(targets))
        if not targets:
            targets = {_weights: resolve_output(default_output(sources[0]), chosen)}
            chosen = replace(chosen, spool_dir=chosen.spool_dir or _beside(targets.values()))
        outputs = [plan(one, _of_rank(target, one), chosen) for one in sources for plan, target in targets.items()]
    if announce:
        announce(sum(each.plan.nbytes for each in outputs))
    read = list(dict.fromkeys(file for each in outputs for file in each.plan.inputs()))
    inputs = list(dict.fromkeys(file.stored for file in read))
    for each in outputs:
        _check_growth(each, sum(file.size for file in each.plan.inputs()))
        _check_output(each, [one.path for one in sources if not one.shards] + [file.path for file in inputs], chosen)
    equal = [pair for one in sources for pair in one.equal]
    checksums = Checksums({path: each for one in sources for path, each in one.records.items()})
    watched = checksums if chosen.checksum else None
    tally = Tally() if chosen.dry_run else _publish(outputs, read, equal, chosen, progress, publishing, watched)
    warnings = [warning for one in sources for warning in one.warnings]
    if checksums.unrecorded:
        paths = list(checksums.unrecorded)
        more = f" and {len(paths) - 1} more files" if len(paths) > 1 else ""
        warnings.append(f"{paths[0]}{more} cannot be checked: no checksums are recorded for what was read.")
    if tally.overflows:
        values = "1 value was" if tally.overflows == 1 else f"{tally.overflows:,} values were"
        warnings.append(f"{values} too large for {chosen.dtype} and became infinite.")
    warnings.extend(text for each in outputs if each.restored for text in each.restored.warnings())
    if not any(each.tensors for each in outputs):
        warnings.append(f"{sources[0].path} holds no tensor: only its structure is kept.")
    counts: Counter[str] = Counter()
    for one in sources:
        counts.update(one.counts)
    return Report(
        input=sources[0].path,
        outputs=[
            OutputFile(_final(each.target, file), file.size, each.tensors if each.restored else file.tensors)
            for each in outputs
            for file in each.plan.files
        ],
        format=sources[0].format,
        tensors=sum(each.tensors for each in outputs),
        aliases={alias: kept for each in outputs for alias, kept in each.aliases.items()},
        counts=dict(counts),
        # None of these is kept in a .pt file.
        opaque=list(dict.fromkeys(name for one in sources for name in one.opaque)) if not outputs[0].restored else [],
        warnings=warnings,
        input_bytes=sum(file.size for file in inputs),
        bytes_read=sum(one.bytes_read for one in sources) + tally.bytes_read + checksums.extra_bytes,
        bytes_written=sum(each.plan.nbytes for each in outputs),
        checksums=checksums.checked,
        extra_bytes=checksums.extra_bytes,
        seconds=time.monotonic() - started,
        peak_rss_bytes=peak_rss(),
        dry_run=chosen.dry_run,
        dropped={name: cls for each in outputs if each.restored for name, cls in each.restored.left_out.items()},
    )


def _beside(targets: Iterable[Target]) -> str:
    """A directory that is there, where or above where an output is to be; "" if none was named."""
    for target in targets:
        directory = os.path.realpath(target.path)
        while not os.path.isdir(directory):
            directory = os.path.dirname(directory)
        return directory
    return ""


def _open(path: str, options: Options, has_target: bool) -> list[Source]:
    """The sources that `path` means: one, or with `per_rank` one for every tensor-parallel rank.

    What comes through a pipe is read now, if it is known where the output goes.
    """
    if is_pipe(path) and not has_target:
        raise UsageError("What comes through a pipe needs an OUTPUT: a directory, or a name that ends in .safetensors.")
    settings: dict[str, Any] = {
        "family": options.family,
        "tag": options.tag,
        "exclude_frozen": options.exclude_frozen_parameters,
        "inert": options.inert,
        "spool_dir": options.spool_dir,
        "storage_options": options.storage_options,
    }
    if not options.per_rank:
        return [open_source(path, **settings)]
    ranks = ranks_to_convert(path, options.tag, dict(options.storage_options), inert=options.inert)
    return [open_source(path, model_rank=rank, **settings) for rank in ranks]


def _of_rank(target: Target, source: Source) -> Target:
    """Where one tensor-parallel rank's output goes: OUTPUT/mp_rank_NN."""
    if source.model_rank is None:
        return target
    if target.is_file or target.is_tree:
        kind = "one file" if target.is_file else "one checkpoint"
        raise UsageError(f"{target.path} is {kind}, and --per-rank writes a directory for every rank.")
    return Target(join(target.path, f"mp_rank_{source.model_rank:02d}"), is_file=False)


# What can be made of a source, each where it is asked for.


def _weights(source: Source, target: Target, options: Options) -> Output:
    if target.is_torch:
        if source.family != safetensors_input.FAMILY:
            raise _not_a_directory(target.path)
        chosen = {name: getattr(options, name) for name in ("key", "include", "exclude", "drop_opaque")}
        restored = plan_restored(source, target.path, dtype=options.dtype or "keep", **chosen)
        return Output(target, restored.plan, {}, restored)
    return Output(target, *make_plan(source, target, options))


def _optimizer(source: Source, target: Target, options: Options) -> Output:
    if source.optimizer is None:
        raise UsageError(f"{source.path} holds no optimizer states that can be told by parameter, for --optimizer.")
    return Output(target, *plan_optimizer(source, target, options))


def _universal(source: Source, target: Target, options: Options) -> Output:
    if source.training is None:
        raise UsageError(f"{source.path} holds no ZeRO optimizer, of which a universal checkpoint could be made.")
    if is_remote(target.path):
        raise UsageError(f"{target.path}: a universal checkpoint is written to a local directory.")
    states = (source.optimizer or {}).get("state", {})
    files = (*universal.file_plans(source.training, source.weights, states), universal.latest(target.path))
    return Output(target, Plan(files, identify(files, source.inputs)), {})


def resolve_output(path: str, options: Options) -> Target:
    """Whether `path` is to be a file or a directory. Raises UsageError where it can be neither."""
    if not path:
        raise UsageError("OUTPUT is empty.", "Give a directory, or a name that ends in .safetensors.")
    if is_remote(path):
        raise UsageError(f"{path}: writing to a URL is not supported; give a local path.")
    entry = look(path)
    is_torch = path.endswith(SUFFIXES) and options.family in ("", safetensors_input.FAMILY)
    is_file = is_torch or path.endswith(safetensors.SUFFIX)
    if options.family == safetensors_input.FAMILY and not is_torch:
        raise UsageError(f"{path} is no name for a file of torch.", "Give one that ends in .pt, .pth, .bin or .ckpt.")
    if entry.kind == "other":
        raise UsageError(
            f"{path} is a pipe or a device, and an output is put under its name by a rename.",
            "Give the name of a file or a directory.",
        )
    if is_file and entry.kind == "directory":
        raise UsageError(
            f"{path} is a directory, and a name that ends in {os.path.splitext(path)[1]} is one file.",
            "Remove it, or choose another name.",
        )
    # A directory of such a name is meant only where a slash says so.
    if not is_file and (entry.kind == "file" or path.endswith(CHECKPOINT_SUFFIXES)):
        raise _not_a_directory(path)
    if is_file and look(dirname(path)).kind != "directory":
        raise UsageError(f"{path} cannot be written: there is no directory {dirname(path)}.", "Make it first.")
    if not options.clobber:
        present = path if is_file and entry.kind == "file" else ""
        if entry.kind == "directory":
            present = next((join(path, name) for name in listing(path) if OUTPUT_NAMES.fullmatch(name)), "")
        if present:
            raise FailedError(f"{present} exists, and --no-clobber forbids replacing it. Nothing was written.")
    return Target(path, is_file, is_torch=is_torch)


def _not_a_directory(path: str) -> UsageError:
    return UsageError(
        f"{path} is the name of a file, and an output that does not end in .safetensors is a directory.",
        f"Did you mean {os.path.splitext(path)[0]}.safetensors?",
    )


def default_output(source: Source) -> str:
    """Where an output goes that was given no name: beside the input."""
    is_directory = not is_remote(source.path) and look(source.path).kind == "directory"
    if is_remote(source.path) or (is_directory and not source.shards):
        raise UsageError("An output is needed: a directory, or a name that ends in .safetensors.")
    if source.shards:
        return source.path if is_directory else dirname(source.path)
    stem, _ = os.path.splitext(source.path)
    directory, name = os.path.split(stem)
    return os.path.join(directory, _SHARD_STEM.sub("model", name)) + safetensors.SUFFIX


def _check_output(output: Output, inputs: Iterable[str], options: Options) -> None:
    """Raise UsageError for an output that would replace an input, or a file larger than was asked for."""
    target = os.path.realpath(output.target.path)
    for path in map(os.path.realpath, inputs):
        directory, name = os.path.split(path)
        if path == target or (directory == target and OUTPUT_NAMES.fullmatch(name)):
            raise UsageError(f"The output would replace {path}, the input itself.", "Write it to another place.")
    size, most = output.plan.nbytes, options.max_shard_size
    if output.target.is_file and most and size > most:
        raise UsageError(
            f"{output.target.path} would have {size} bytes, more than --max-shard-size allows ({most}).",
            "Give a directory as OUTPUT: it may hold several files.",
        )


def _check_growth(output: Output, available: int) -> None:
    """Raise LimitError for an output out of all proportion to the `available` bytes that it is made of."""
    most = MAX_GROWTH * available + ROOM_TO_GROW
    parts = [part for file in output.plan.files for part in file.parts if isinstance(part, Data)]
    if sum(part.nbytes for part in parts) > most:
        largest = max(parts, key=lambda part: part.nbytes)
        raise LimitError(
            f"{output.target.path} would have {output.plan.nbytes} bytes, made of {available}: tensors such as "
            f"{largest.name!r} of {largest.nbytes} bytes repeat the same elements. At most {most} bytes are written of "
            "so little. Nothing was written.",
            f"Leave it out with --exclude {largest.name!r}, or save a contiguous copy of it.",
        )


def make_plan(source: Source, target: Target, options: Options) -> tuple[Plan, dict[str, str]]:
    """The plan for the weights, and the names that are stored under another: {removed: kept}. Pure."""
    tree = select.subtree(source.weights, options.key, source.path) if options.key else source.weights
    flat, structure, fixed = _flattened(source, tree, options)
    new_names = _new_names(source, flat, options)
    tensors = {new: flat[old] for old, new in new_names.items()}
    # A whole state without a tensor is kept by its record alone; a part that was asked for is a slip.
    if not flat and (options.key or not source.structured):
        where = f"under {options.key!r} of {source.path}" if options.key else f"in {source.path}"
        raise UsageError(f"There is no tensor {where}: nothing to convert.")
    if flat and not tensors:
        raise UsageError(f"Nothing is left to convert: all {len(flat)} tensors are excluded.")
    owners = {new_names[a]: new_names[o] for a, o in source.owners.items() if a in new_names and o in new_names}
    aliases = {} if options.tied == "duplicate" else select.untie(tensors, owners)
    aliases = {alias: kept for alias, kept in aliases.items() if alias not in safetensors_input.RESERVED}
    if structure is None and source.structured and any(old != new for old, new in new_names.items()):
        structure = keymap.plain_record(flat)
    structure = keymap.remap(structure, {old: new_names.get(old) for old in flat}, aliases)
    dtype = options.dtype or source.default_dtype
    widen_only = source.default_dtype == dtype == "float32"
    fixed = frozenset(new_names[name] for name in fixed if name in new_names)
    kept = {
        name: tensor if name in fixed else select.converted(name, tensor, dtype, widen_only)
        for name, tensor in tensors.items()
        if name not in aliases
    }
    limit = options.max_shard_size or source.default_shard_size
    groups = _as_in(kept, source.shards) if source.shards and limit is None else None
    files = _file_plans(kept, aliases, structure, target, limit, groups)
    if structure is None and source.structured and _names(files) != list(kept):
        # A plain dict, whose order is lost where tensors were cast, or are spread over several files.
        files = _file_plans(kept, aliases, keymap.plain_record(kept), target, limit, groups)
    return Plan(files, identify(files, source.inputs)), aliases


def _as_in(tensors: Mapping[str, LazyTensor], shards: Sequence[str]) -> list[list[str]]:
    """Names in groups: those of each input file."""
    groups: dict[str, list[str]] = {path: [] for path in shards}
    for name, tensor in tensors.items():
        path = next((file.stored.path for file in tensor.inputs()), shards[0])
        groups[path].append(name)
    return [group for group in groups.values() if group] or [[]]


def _flattened(source: Source, tree: Any, options: Options) -> keymap.Flattened:
    """The tensors of `tree`. Raises UnsupportedError for those without data, unless they are left out by name."""
    if not source.structured:
        return keymap.Flattened(dict(tree), None, frozenset())
    lacking: dict[str, str] = {}
    left_out: list[str] = []

    def leave_out(name: str, node: Any) -> bool:
        reason = foreign.lacks_data(node)
        if reason and select.is_chosen(name, options.include, options.exclude):
            lacking[name] = reason
        elif reason:
            left_out.append(name)
        return bool(reason)

    flattened = keymap.describe(tree, leave_out=leave_out)
    if lacking:
        raise foreign.without_data(source.path, lacking)
    if left_out and not flattened.tensors:
        raise UsageError(f"Nothing is left to convert: all {len(left_out)} tensors are excluded.")
    return flattened


def _names(files: Iterable[FilePlan]) -> list[str]:
    """The tensors of an output, as one finds them who reads its files one after the other."""
    return [part.name for file in files for part in file.parts if isinstance(part, Data)]


def plan_optimizer(source: Source, target: Target, options: Options) -> tuple[Plan, dict[str, str]]:
    """The plan for the optimizer states: nested as torch has them, with the weights' names for parameters. Pure.

    A name that is tied to a parameter leads to the parameter's states in the alias record. Half-precision states are
    widened as the weights are by default, and never narrowed.
    """
    new_names = _new_names(source, source.weights, options)
    states = {new_names[name]: state for name, state in source.optimizer["state"].items() if name in new_names}
    groups = [
        {**group, "params": [new_names[name] for name in group["params"] if name in new_names]}
        for group in source.optimizer["param_groups"]
    ]
    flat, structure = keymap.flatten({"state": states, "param_groups": groups})
    dtype = "keep" if options.dtype == "keep" else source.default_dtype
    flat = {name: select.converted(name, tensor, dtype, widen_only=True) for name, tensor in flat.items()}
    aliases = {}
    for alias, owner in source.owners.items() if options.tied == "alias" else ():
        for key in states.get(new_names.get(owner, ""), {}) if alias in new_names else ():
            kept, removed = f"state.{new_names[owner]}.{key}", f"state.{new_names[alias]}.{key}"
            if kept in flat and removed not in flat:
                aliases[removed] = kept
    files = _file_plans(flat, aliases, structure, target, options.max_shard_size or source.default_shard_size)
    return Plan(files, identify(files, source.inputs)), aliases


def _new_names(source: Source, flat: Mapping[str, Any], options: Options) -> dict[str, str]:
    """What is converted, and under which names: {old: new}."""
    names = select.matching(flat, options.include, options.exclude)
    lost = select.matching(source.unaccounted, (), options.exclude) if not options.include else []
    if lost:
        raise CorruptError(
            f"{source.path} names {len(lost)} parameters whose data is nowhere in it: {', '.join(lost[:5])}"
            f"{', …' if len(lost) > 5 else ''}. Nothing was written.",
            "They are tied or frozen parameters of a release that did not save them; leave them out with --exclude.",
        )
    return select.renamed(names, options.strip_prefix, options.rename)


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


def _final(target: Target, file: FilePlan) -> str:
    if target.is_tree and file.name == universal.LATEST:
        return join(dirname(target.path), file.name)
    return target.path if target.is_file else join(target.path, file.name)


def _staging(output: Output, options: Options) -> Staging:
    path, plan_id = output.target.path, output.plan.plan_id
    if output.target.is_file:
        return FileStaging(path, plan_id, options.fsync)
    if output.target.is_tree:
        return TreeStaging(path, plan_id, marker=universal.ZERO, after=universal.LATEST, durable=options.fsync)
    return DirectoryStaging(
        path,
        plan_id,
        is_ours=lambda name: OUTPUT_NAMES.fullmatch(name) is not None,
        index=safetensors.INDEX,
        durable=options.fsync,
    )


def _publish(
    outputs: Sequence[Output],
    inputs: Sequence[File],
    equal: Sequence[tuple[str, LazyTensor, LazyTensor]],
    options: Options,
    progress: Progress | None,
    publishing: Callable[[], None] | None,
    checksums: Checksums | None = None,
) -> Tally:
    """Carry out the plans in staging, and commit them when all are whole."""
    jobs = options.jobs or min(os.cpu_count() or 1, 4)
    storage_options = dict(options.storage_options)
    total = Tally()
    with ExitStack() as stack:
        readers = stack.enter_context(SpoolingReaders(storage_options, options.spool_dir))
        if any(file.packed for file in inputs):
            readers.expect(_packed(output.plan for output in outputs))
        for name, one, other in equal:
            if not same(one, other, readers):
                raise CorruptError(f"{name!r} is stored twice, in {_places(one, other)}, and the two differ.")
        for output in outputs:
            for one, other in output.restored.overlaps() if output.restored else ():
                if not same(one, other, readers):
                    raise CorruptError(
                        f"{_places(one)}: tensors that share memory, as the structure record says, differ in what they "
                        "share: one of them was changed since.",
                        "Change them alike, or convert them one without the other (--exclude).",
                    )
        stagings = [stack.enter_context(_staging(output, options)) for output in outputs]
        syncing = stack.enter_context(Syncing())
        for output, staging in zip(outputs, stagings, strict=True):
            for file in output.plan.files:
                writer = staging.create(file.name, file.size)
                total.add(
                    carry_out(
                        file,
                        writer,
                        readers,
                        jobs=jobs,
                        memory=options.memory,
                        progress=progress,
                        seen=checksums.seen if checksums else None,
                    )
                )
                seal = functools.partial(staging.seal, writer)
                if options.fsync:
                    syncing.add(seal)
                else:
                    seal()
        if checksums:
            checksums.check(readers, [output.plan for output in outputs])
        syncing.finish()
        check_unchanged(dict.fromkeys(file.stored for file in inputs), storage_options)
        total.bytes_read += readers.bytes_unpacked
        if publishing:
            publishing()
        for output, staging in zip(outputs, stagings, strict=True):
            staging.commit([file.name for file in output.plan.files])
    return total


def _packed(plans: Iterable[Plan]) -> Counter[File]:
    """The packed files that the plans read, and how many bytes of tensors come from each."""
    found: Counter[File] = Counter()
    for plan in plans:
        for part in (part for file in plan.files for part in file.parts if isinstance(part, Data)):
            found.update({file: part.nbytes for file in part.tensor.inputs() if file.packed})
    return found


def _places(*tensors: LazyTensor) -> str:
    return " and ".join(next((file.path for file in tensor.inputs()), "the description") for tensor in tensors)
