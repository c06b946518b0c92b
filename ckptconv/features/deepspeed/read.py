"""Open DeepSpeed ZeRO checkpoints: a directory of pickles, one for each rank, that hold partitions of parameters.

Only the description in each file is read. The tensors, including the optimizer states, stay in the files. Sources:
DeepSpeed's engine.py (save_checkpoint), and the optimizers named in `partitions`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ckptconv.errors import CorruptError, UnsupportedError, UsageError
from ckptconv.features.deepspeed import locate as zero_files
from ckptconv.features.deepspeed.assemble import assemble, is_whole, whole
from ckptconv.features.deepspeed.locate import FAMILY, TagFiles
from ckptconv.features.deepspeed.records import MAX_RANKS, ModelFile, OptimFile, Reading
from ckptconv.features.deepspeed.weights import Weights
from ckptconv.formats.source import NOT_CONVERTED, STATES_ARE_CONVERTED, Defaults, Source, StateFacts, Training, Wanted
from ckptconv.storage.location import Location
from ckptconv.storage.paths import basename, dirname, is_remote
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.tensors.moves import File
from ckptconv.text import count_of, format_size, some

# Partitions with fewer elements may be equal by chance.
_FEW_ELEMENTS = 16
# Bytes of partitions that are compared if there are no checksums.
_COMPARED = 1 << 16
# Ranks that a message names.
SHOWN = 8

_T = TypeVar("_T")
_Saved = TypeVar("_Saved", ModelFile, OptimFile)


@dataclass
class _Part:
    """The weights of one model-parallel rank, and its files."""

    model: ModelFile
    optims: list[OptimFile]
    weights: Weights


@dataclass(frozen=True)
class _Grid:
    """The number of pipeline stages, and of tensor-parallel ranks in each: model-parallel rank = stage × tensor +
    rank."""

    pipeline: int
    tensor: int

    def stages(self, rank: int) -> list[int]:
        """Return the model-parallel ranks that hold the stages of one tensor-parallel rank."""
        return [stage * self.tensor + rank for stage in range(self.pipeline)]


@dataclass
class _Opened:
    """A tag's files; model files and layer files are read once and cached."""

    files: TagFiles
    reading: Reading
    models: dict[File, ModelFile] = field(default_factory=dict)
    layer_files: dict[File, dict[str, LazyTensor]] = field(default_factory=dict)

    def layers(self, tensor_rank: int, grid: _Grid) -> dict[int, dict[str, LazyTensor]]:
        """Return the contents of the layer files of one tensor-parallel rank, by layer."""
        by_layer = {}
        for (layer, rank), file in self.files.layers.items():
            if rank == tensor_rank or grid.tensor == 1:
                if file not in self.layer_files:
                    self.layer_files[file] = self.reading.tensors(file)
                by_layer[layer] = self.layer_files[file]
        return by_layer

    def model(self, file: File) -> ModelFile:
        if file not in self.models:
            self.models[file] = self._read(self.reading.model, file, list(self.files.model.values()))
        return self.models[file]

    def optim(self, file: File) -> OptimFile:
        return self._read(self.reading.optim, file, list(self.files.optim.values()))

    def glance(self, file: File) -> None:
        """Raise CorruptError if a model file is truncated, as far as its ends show. Remote files are not read."""
        if file not in self.models and not is_remote(file.path):
            self._read(self.reading.glance, file, list(self.files.model.values()))

    def _read(self, read: Callable[[File], _T], file: File, others: Sequence[File]) -> _T:
        try:
            return read(file)
        except CorruptError as error:
            # The sizes of the other ranks' files best show that a file was cut short.
            sizes = sorted({other.size for other in others if other != file})
            if not sizes or file.size >= sizes[0]:
                raise
            least, most = format_size(sizes[0]), format_size(sizes[-1])
            like = least if least == most else f"{least} to {most}"
            raise CorruptError(
                f"{error.message} Its size is {format_size(file.size)}, but the files of the other ranks have {like}.",
                error.hint,
            ) from error


def read(location: Location, wanted: Wanted) -> Source:
    """Open the checkpoint that `location` names, universal or ordinary."""
    if (tagged := zero_files.locate_universal(location, wanted.tag)) is None:
        return _read(location, wanted)
    from ckptconv.features.deepspeed import universal

    return universal.read(location, tagged, wanted)


def _read(location: Location, wanted: Wanted) -> Source:
    """Open the ordinary checkpoint that `location` names: a run's directory, a checkpoint's, a tag's, or one of its
    files.

    The weights are a flat state dict in the order of DeepSpeed's own tool: buffers, frozen parameters, trainable ones,
    then tied names. With `model_rank`, only that tensor-parallel rank is opened.
    """
    place = zero_files.locate(location, wanted.tag)
    model_rank = wanted.model_rank
    opened = _Opened(zero_files.files_of(place.directory), Reading(location))
    grid = _grid(opened)
    if model_rank is not None and not 0 <= model_rank < grid.tensor:
        raise UsageError(
            f"{place.directory} has no tensor-parallel rank {model_rank}, only {_ranks_text(range(grid.tensor))}."
        )
    tensor_ranks = range(grid.tensor) if model_rank is None else [model_rank]
    parts = {mp: _read_rank(opened, grid, mp) for rank in tensor_ranks for mp in grid.stages(rank)}
    _share_ties(opened, list(parts.values()))
    first = parts[tensor_ranks[0]]
    weights = _unite(opened, grid, tensor_ranks, parts)
    if wanted.exclude_frozen:
        weights.without_frozen()
    state = weights.state_dict()
    return Source(
        format="DeepSpeed " + ("ZeRO-1 (BF16_Optimizer)" if weights.stage is None else f"ZeRO-{weights.stage}"),
        family=FAMILY,
        path=place.directory.path,
        weights=state,
        optimizer=weights.optimizer(),
        of_states=StateFacts(weights.states_error, weights.equal_states, weights.alike),
        training=_training(opened.files, first.optims, weights),
        left=functools.partial(_left, first.model.values),
        structured=False,
        owners=weights.aliases,
        counts=weights.counts(),
        facts=_facts(opened.files, grid, first.model, weights),
        notes=_notes(location, place, weights, wanted),
        pointers=[place.pointer] if place.pointer else [],
        warnings=weights.warnings,
        unaccounted=weights.unaccounted,
        equal=weights.equal,
        part=model_rank,
        defaults=Defaults("float32", 5 * 10**9),
        **opened.reading.log.fields(),
    )


def _left(values: Mapping[str, Any]) -> dict[str, list[Any]]:
    from ckptconv.features.deepspeed.left import left_of  # conversions do not ask

    return left_of(values)


def ranks_to_convert(location: Location, tag: str) -> list[int]:
    """Return the tensor-parallel ranks of the checkpoint that `location` names; each can be converted by itself."""
    files = zero_files.files_of(zero_files.locate(location, tag).directory)
    grid = _grid(_Opened(files, Reading(location)))
    if grid.tensor == 1 and grid.pipeline > 1:
        raise UsageError(
            f"{files.directory} is a pipeline-parallel checkpoint: its stages form one model.", "Leave out --per-rank."
        )
    return list(range(grid.tensor))


# --------------------------------------------------------------------------------------------------- which ranks are


def _grid(opened: _Opened) -> _Grid:
    """Return how the model is spread over model-parallel ranks. Raise CorruptError if files of some ranks are missing,
    or if there are files of too many."""
    files = opened.files
    if not files.model:
        raise CorruptError(
            f"{files.directory} contains optimizer files, but no *_model_states.pt with the names and shapes of the "
            "parameters.",
            "Copy the model files to the same directory.",
        )
    ranks = sorted({mp for _, mp in (*files.optim, *files.model)})
    model = opened.model(files.model[min(files.model)])
    said = model.values.get("checkpoint_parallel_dimensions")
    said = said if isinstance(said, dict) else {}
    entries = [said.get(key) for key in ("pp_degree", "tp_degree")]
    degrees = [degree for degree in entries if type(degree) is int and 0 < degree < MAX_RANKS]
    known = len(degrees) == 2
    # A client's entries may replace mp_world_size, but not the degrees.
    count = math.prod(degrees) if known else model.number("mp_world_size") or 0
    if missing := _missing(ranks, max(count, ranks[-1] + 1)):
        raise CorruptError(
            f"{files.directory} lacks the files of model-parallel {_ranks_text(missing)}: only those of "
            f"{_ranks_text(ranks)} are present.",
            "Copy the missing files to the same directory.",
        )
    if 0 < count < len(ranks) and (known or not files.layers):
        raise CorruptError(
            f"{model.file.path} records {count_of(count, 'model-parallel rank')}, but files of {len(ranks)} ranks are "
            f"present. The files of {_ranks_text(range(count, len(ranks)))} belong to another save.",
            "Move these files to another directory.",
        )
    if known:
        return _Grid(degrees[0], degrees[1])
    tensor = len({rank for _, rank in files.layers}) if files.layers else len(ranks)
    if len(ranks) % tensor:
        raise CorruptError(
            f"{files.directory} has files of {len(ranks)} model-parallel ranks, but layer files of {tensor} "
            f"tensor-parallel ranks, and {len(ranks)} is not divisible by {tensor}."
        )
    return _Grid(len(ranks) // tensor, tensor)


def _read_rank(opened: _Opened, grid: _Grid, mp: int) -> _Part:
    """Read the files of one model-parallel rank."""
    files = opened.files
    own = {dp: file for (dp, rank), file in files.model.items() if rank == mp}
    if not own:
        raise CorruptError(
            f"{files.directory} lacks the model file of model-parallel rank {mp}.", "Copy it to the same directory."
        )
    if 0 not in own:
        raise CorruptError(
            f"{files.directory} lacks the model file of rank 0, the only file with valid buffers and ties: only those "
            f"of {_ranks_text(sorted(own))} are present.",
            "Copy it to the same directory.",
        )
    model = opened.model(own[0])
    opened.reading.check_name(own[0])
    if model.module is None and not files.layers:
        raise CorruptError(
            f"{model.file.path} contains no module, and the layer files of a pipeline (layer_*-model_states.pt) "
            "are missing.",
            "Copy them to the same directory.",
        )
    experts = [file for (_, _, rank), file in sorted(files.experts.items()) if rank == mp]
    saved = {
        name.removeprefix("."): tensor for file in experts for name, tensor in opened.reading.tensors(file).items()
    }
    partitions = {dp: file for (dp, rank), file in files.optim.items() if rank == mp}
    if not partitions:
        states = [opened.reading.read(file).value for (_, rank), file in files.expert_optims.items() if rank == mp]
        # With experts, the optimizer states are in files of their own; these are empty if ZeRO holds the states.
        elsewhere = any(isinstance(state, dict) and state.get("optimizer", state) is None for state in states)
        if not is_whole(model) or elsewhere:
            raise CorruptError(
                f"{files.directory} lacks the *_optim_states.pt files of model-parallel rank {mp}, which contain "
                "the master weights.",
                "If the save wrote any, copy them to the same directory. " + _without_masters(model),
            )
        return _Part(model, [], whole(model, files.directory, saved))
    optims = _agree([opened.optim(file) for file in _in_order(files.directory, partitions)], model, opened.reading)

    def read_model(dp: int) -> ModelFile:
        if dp not in own:
            missing = [rank for rank in range(len(optims)) if rank not in own]
            raise CorruptError(
                f"{files.directory} lacks the model {_files_of_ranks(missing)}, which contain parts of the "
                "frozen parameters.",
                "Copy them to the same directory, or leave out the frozen parameters with --exclude-frozen-parameters.",
            )
        other = opened.model(own[dp])
        opened.reading.check_name(own[dp])
        _check_same(other, model, _OF_MODELS)
        return other

    def layers() -> dict[int, dict[str, LazyTensor]]:
        return opened.layers(mp % grid.tensor, grid)

    part = _Part(model, optims, assemble(model, optims, files.directory, read_model, saved, layers))
    if part.weights.stage == 3:
        # No weight depends on the other model files now. But a save that left one incomplete may have left older ones.
        for dp in range(len(optims)):
            if dp in own:
                opened.glance(own[dp])
        if missing := _missing(own, len(optims)):
            part.weights.warnings.append(
                f"{files.directory} lacks the model {_files_of_ranks(missing)}. The output does not depend on "
                f"{'them' if len(missing) > 1 else 'it'}."
            )
    return part


def _without_masters(model: ModelFile) -> str:
    """Return advice on the files that a checkpoint without optimizer files has."""
    if model.module is not None:
        return "To convert a single model file, use pt2safetensors --key module."
    return (
        "Some releases write no optimizer files for a pipeline in half precision without ZeRO: their master "
        "weights are lost. Convert each layer file (layer_*-model_states.pt) with pt2safetensors to get the weights "
        "in half precision."
    )


def _in_order(directory: str, partitions: Mapping[int, File]) -> list[File]:
    """Return the optimizer files by data-parallel rank. Raise CorruptError if a rank is missing."""
    if missing := _missing(partitions, max(partitions) + 1):
        sizes = sorted({file.size for file in partitions.values()})
        raise CorruptError(
            f"{directory} lacks the optimizer {_files_of_ranks(missing)}. The {_files_of_ranks(sorted(partitions))} "
            f"{'are' if len(partitions) > 1 else 'is'} present, with sizes up to {format_size(sizes[-1])}.",
            "Copy the missing files to the same directory: each rank has a part of the weights.",
        )
    return [partitions[rank] for rank in sorted(partitions)]


def _missing(ranks: Collection[int], count: int) -> list[int]:
    """Return which of `count` ranks are not in `ranks`; at most SHOWN + 1 of them."""
    there = set(ranks)
    return list(itertools.islice((rank for rank in range(count) if rank not in there), SHOWN + 1))


def _ranks_text(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:SHOWN])) + (", …" if len(ranks) > SHOWN else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _files_of_ranks(ranks: Sequence[int]) -> str:
    return f"file{'s' * (len(ranks) > 1)} of {_ranks_text(ranks)}"


def _agree(optims: list[OptimFile], model: ModelFile, reading: Reading) -> list[OptimFile]:
    """Return the files that hold the partitions. Raise CorruptError if they, or their counts, contradict each other."""
    first, world = optims[0], len(optims)
    count = max(first.counts, default=0) or model.number("dp_world_size") or world
    if count < world:
        if first.zero.get("mics_shard_size") == count:
            optims = optims[:count]  # MiCS: the other ranks hold replicas of these
        else:
            stale = optims[count:]
            sizes = ", ".join(f"{basename(o.file.path)}, {format_size(o.file.size)}" for o in stale[:3])
            raise CorruptError(
                f"{first.file.path} ({format_size(first.file.size)}) records that {count_of(count, 'rank')} share the "
                f"weights, but files of {world} ranks are present. The files of {_ranks_text(range(count, world))} "
                f"belong to another save ({sizes}{', …' if len(stale) > 3 else ''}).",
                "Move these files to another directory.",
            )
    if len(first.alignments) not in (0, len(first.masters)):
        raise CorruptError(
            f"{first.file.path} has param_alignment_paddings of {count_of(len(first.alignments), 'group')}, but "
            f"partitions of {count_of(len(first.masters), 'group')}."
        )
    for optim in optims:
        _check_same(optim, first, _OF_OPTIMS)
    if count > world:
        missing = range(world, count)
        raise CorruptError(
            f"{first.file.path} records that {count} ranks share the weights, but files of {count_of(world, 'rank')} "
            f"are present. The {_files_of_ranks(missing)} {'are' if len(missing) > 1 else 'is'} missing.",
            "Copy them to the same directory.",
        )
    for optim in optims:
        reading.check_name(optim.file)
    _check_distinct(optims, reading)
    _check_steps(optims, model, reading)
    return optims


# The facts on which the files of all ranks of one save agree.
_OF_OPTIMS: dict[str, Callable[[OptimFile], Any]] = {
    "ZeRO stage": lambda optim: optim.stage,
    "number of groups": lambda optim: len(optim.masters),
    "partition count": lambda optim: optim.counts,
    "alignment paddings": lambda optim: optim.alignments,
    "dtypes": lambda optim: [master.dtype.name for master in optim.masters],
}
_OF_MODELS: dict[str, Callable[[ModelFile], Any]] = {
    "shapes of parameters": lambda model: model.shapes,
    "shapes of frozen parameters": lambda model: model.frozen,
}


def _check_same(one: _Saved, first: _Saved, facts: Mapping[str, Callable[[_Saved], Any]]) -> None:
    """Raise CorruptError if two files of one kind do not agree on all `facts`."""
    for what, fact in facts.items():
        if fact(one) != fact(first):
            raise CorruptError(
                f"{one.file.path} has the {what} {fact(one)!s:.60}, but {basename(first.file.path)} has "
                f"{fact(first)!s:.60}: the files come from different saves."
            )


def _check_distinct(optims: Sequence[OptimFile], reading: Reading) -> None:
    """Raise CorruptError if one rank's file is a copy of another's that does not give its original name.

    Partitions that have few elements, or begin with one value repeated, may legitimately be equal.
    """
    seen: dict[tuple[int, Hashable], OptimFile] = {}
    for optim in optims:
        largest = max(optim.masters, key=lambda master: master.numel, default=None)
        if largest is None or largest.numel < _FEW_ELEMENTS:
            continue
        digest = reading.log.records[optim.file.path].digest()
        content = (largest.numel, reading.head(largest, _COMPARED)) if digest is None else digest
        other = seen.setdefault((optim.file.size, content), optim)
        if other is not optim and not _is_uniform(largest, reading):
            raise CorruptError(
                f"{optim.file.path} and {basename(other.file.path)} contain identical partitions, but each rank has a "
                "different partition: one file is a copy of the other.",
                "Replace the wrong file with the right one.",
            )


def _is_uniform(master: LazyTensor, reading: Reading) -> bool:
    """Return whether a partition begins with one value repeated."""
    item = master.dtype.itemsize
    beginning = reading.head(master, _FEW_ELEMENTS * item)
    return beginning == beginning[:item] * (len(beginning) // item)


def _check_steps(optims: Sequence[OptimFile], model: ModelFile, reading: Reading) -> None:
    """Raise CorruptError if the optimizers of two ranks took different numbers of steps, or if the model's number
    differs from theirs and the tag is named after theirs."""
    group = next((number for number, state in enumerate(optims[0].states) if "step" in state), None)
    if group is None:
        return
    taken = [reading.steps(optim.states[group] if group < len(optim.states) else {}) for optim in optims]
    known = [(optim.file.path, steps) for optim, steps in zip(optims, taken, strict=True)]
    if taken[0] is not None and basename(dirname(model.file.path)) == f"global_step{taken[0]:g}":
        known.append((model.file.path, model.number("global_steps")))
    for path, steps in known:
        if None not in (steps, taken[0]) and steps != taken[0]:
            raise CorruptError(
                f"{path} was saved after {steps:g} steps, but {basename(optims[0].file.path)} after {taken[0]:g}: the "
                "files come from different saves.",
                "Find the file of the same save, or use another tag.",
            )


# -------------------------------------------------------------------------------------------------------- one model


def _share_ties(opened: _Opened, parts: Sequence[_Part]) -> None:
    """Apply the first rank's ties to the other tensor-parallel ranks: only its file lists them."""
    first = opened.model(opened.files.model[min(opened.files.model)])
    for part in parts:
        weights = part.weights
        for alias, owner in first.shared.items():
            if alias in weights.unaccounted and owner in weights.state_dict():
                weights.unaccounted.remove(alias)
                weights.aliases[alias] = weights.aliases.get(owner, owner)


def _unite(opened: _Opened, grid: _Grid, ranks: Sequence[int], parts: Mapping[int, _Part]) -> Weights:
    """Merge model-parallel ranks: the stages of a pipeline, then tensor-parallel slices if the checkpoint says how they
    were cut."""
    where = opened.files.directory
    if grid.pipeline == 1 and len(ranks) == 1 and not opened.files.layers:
        return parts[ranks[0]].weights
    from ckptconv.features.deepspeed import model_parallel

    united = []
    for rank in ranks:
        stages = [parts[mp] for mp in grid.stages(rank)]
        if grid.pipeline == 1 and not opened.files.layers:
            united.append(stages[0].weights)
            continue
        layers = opened.layers(rank, grid)
        buffers = {name for part in stages if part.model.module is None for name in part.model.buffers or ()}
        united.append(
            model_parallel.unite_stages([part.weights for part in stages], layers, buffers, opened.reading.head)
        )
    if len(united) == 1:
        return united[0]
    first = parts[ranks[0]]
    info = next((optim.universal for optim in first.optims if optim.universal), None) or first.model.universal
    if not info:
        times = f"{grid.pipeline} pipeline stages × " if grid.pipeline > 1 else ""
        raise UnsupportedError(
            f"{where} is tensor-parallel: {times}{grid.tensor} tensor-parallel ranks × {united[0].world} data-parallel "
            "ranks. It does not record how parameters were split (universal_checkpoint_info is missing).",
            "Convert each rank separately with --per-rank, or save with universal_checkpoint_info.",
        )
    names = list(dict.fromkeys(name for weights in united for name in weights.names()))
    return model_parallel.merge_ranks(united, model_parallel.read_patterns(info, names, where))


# ---------------------------------------------------------------------------------------------------------- to be told


def _training(files: TagFiles, optims: Sequence[OptimFile], weights: Weights) -> Training | None:
    return weights.training(optims[0].common(), files.model.values()) if optims else None


def _facts(files: TagFiles, grid: _Grid, model: ModelFile, weights: Weights) -> dict[str, Any]:
    facts: dict[str, Any] = {"tag": basename(files.directory), "world size": weights.world}
    if grid.pipeline > 1:
        facts["pipeline"] = f"{grid.pipeline} stages"
    if grid.tensor > 1:
        facts["tensor parallel"] = f"{grid.tensor} ranks × {weights.world} data-parallel"
    if files.experts:
        facts["experts"] = f"{len({expert for _, expert, _ in files.experts})} in each layer with experts"
    if model.version:
        facts["DeepSpeed"] = model.version
    states = dict.fromkeys(name for own in weights.states.values() for name in own)
    training = {"steps": model.number("global_steps"), "optimizer": some(states, form=str)}
    return facts | {name: fact for name, fact in training.items() if fact}


def _notes(location: Location, place: zero_files.TagDirectory, weights: Weights, wanted: Wanted) -> list[str]:
    is_other = place.reason and place.directory.path != location.path
    is_left = (weights.optimizer() or weights.states_error) and not wanted.states
    left = [f"{NOT_CONVERTED}the optimizer{'' if weights.states_error else STATES_ARE_CONVERTED}."] if is_left else []
    return [*([f"Took {place.directory}: {place.reason}."] if is_other else []), *left]
