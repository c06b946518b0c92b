"""DeepSpeed ZeRO checkpoints: a directory of pickles, one for every rank, that hold parts of parameters.

Only the description in each file is read; the tensors, of the optimizer states too, stay where they are.
Sources: DeepSpeed's engine.py (save_checkpoint), and the optimizers named in `zero_layout`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckptconv.errors import CorruptError, UnsupportedError, UsageError
from ckptconv.storage import basename
from ckptconv.tensors import File

from . import zero_files, zero_parallel
from .source import Source, Training
from .zero_assemble import Weights, assemble, whole
from .zero_files import Checkpoint
from .zero_records import ModelFile, OptimFile, Reading

FAMILY = "deepspeed"


def read(
    path: str,
    *,
    tag: str = "",
    exclude_frozen: bool = False,
    model_rank: int | None = None,
    options: dict[str, Any] | None = None,
) -> Source:
    """Open the checkpoint that `path` means: a run's directory, a tag's, or one of its files.

    The weights are a flat state dict in the order in which DeepSpeed's own tool lists them: buffers, frozen parameters,
    trainable ones, then tied names. `model_rank` opens one tensor-parallel rank for itself.
    """
    directory = zero_files.locate(path, tag, options)
    files = zero_files.files_of(directory, options)
    reading = Reading(options)
    if not files.model and not files.layers:
        raise CorruptError(
            f"{directory} holds optimizer files and no *_model_states.pt: the names and shapes of the parameters are "
            "missing.",
            "Copy the model files beside them.",
        )
    ranks = model_ranks(files)
    if model_rank is not None:
        if model_rank not in ranks:
            raise UsageError(f"{directory} has no tensor-parallel rank {model_rank}.")
        files, ranks = _only(files, model_rank), [model_rank]
    models: dict[int, ModelFile] = {}
    optims: dict[int, list[OptimFile]] = {}
    parts = []
    for rank in ranks:
        models[rank], optims[rank], part = _read_rank(files, rank, reading)
        parts.append(part)
    weights = _unite(files, ranks, models, optims, parts, reading) if len(ranks) > 1 or files.layers else parts[0]
    if exclude_frozen:
        weights.without_frozen()
    return Source(
        format="DeepSpeed " + ("ZeRO-1 (BF16_Optimizer)" if weights.stage is None else f"ZeRO-{weights.stage}"),
        family=FAMILY,
        path=directory,
        weights=weights.state_dict(),
        optimizer=weights.optimizer(),
        training=_training(files, optims[ranks[0]], weights),
        structured=False,
        owners=weights.aliases,
        counts=weights.counts(),
        facts=_facts(files, ranks, models[ranks[0]], weights),
        opaque=list(reading.opaque),
        warnings=weights.warnings,
        unaccounted=weights.unaccounted,
        equal=weights.equal,
        inputs=reading.inputs,
        bytes_read=reading.bytes_read,
        model_rank=model_rank,
        default_dtype="float32",
        default_shard_size=5 * 10**9,
    )


def model_ranks(files: Checkpoint) -> list[int]:
    """The model-parallel ranks of a checkpoint. Raises CorruptError where one is missing."""
    ranks = sorted({mp for _, mp in (*files.optim, *files.model)})
    missing = sorted(set(range(ranks[-1] + 1)) - set(ranks))
    if missing:
        raise CorruptError(
            f"{files.directory} lacks the files of model-parallel {_ranks_text(missing)}: there are those of "
            f"{_ranks_text(ranks)}.",
            "Copy the missing files beside them.",
        )
    return ranks


def ranks_to_convert(path: str, tag: str, options: dict[str, Any] | None) -> list[int]:
    """The tensor-parallel ranks of the checkpoint that `path` means, each of which can be converted for itself."""
    files = zero_files.files_of(zero_files.locate(path, tag, options), options)
    if files.layers:
        raise UsageError(f"{files.directory} is a pipeline-parallel checkpoint: its stages are one model.")
    return model_ranks(files)


def _only(files: Checkpoint, rank: int) -> Checkpoint:
    return Checkpoint(
        files.directory,
        {key: file for key, file in files.optim.items() if key[1] == rank},
        {key: file for key, file in files.model.items() if key[1] == rank},
        files.experts,
        files.layers,
        files.others,
    )


def _read_rank(files: Checkpoint, rank: int, reading: Reading) -> tuple[ModelFile, list[OptimFile], Weights]:
    """What one model-parallel rank's files hold."""
    own = {dp: file for (dp, mp), file in files.model.items() if mp == rank}
    if not own:
        raise CorruptError(f"{files.directory} lacks the model file of model-parallel rank {rank}.")
    model = reading.model(own[min(own)])
    partitions = {dp: file for (dp, mp), file in files.optim.items() if mp == rank}
    if not partitions:
        return model, [], whole(model, files.directory)
    optims = _agree([reading.optim(file) for file in _in_order(files.directory, partitions)], model)

    def read_model(dp: int) -> ModelFile:
        if dp not in own:
            missing = [dp for dp in range(len(optims)) if dp not in own]
            raise CorruptError(
                f"{files.directory} lacks the model {_files_of_ranks(missing)}, which hold parts of the frozen "
                "parameters.",
                "Copy them beside the others, or leave the frozen parameters out with --exclude-frozen-parameters.",
            )
        return model if own[dp] == model.file else reading.model(own[dp])

    weights = assemble(model, optims, files.directory, read_model)
    _check_experts(weights, files)
    return model, optims, weights


def _in_order(directory: str, partitions: dict[int, File]) -> list[File]:
    """The optimizer files by data-parallel rank. Raises CorruptError where a rank is missing."""
    missing = sorted(set(range(max(partitions) + 1)) - set(partitions))
    if missing:
        raise CorruptError(
            f"{directory} lacks the optimizer {_files_of_ranks(missing)}: there are {len(partitions)} files, for "
            f"{_ranks_text(sorted(partitions))}.",
            "Copy the missing files beside them; the weights are spread over all ranks.",
        )
    return [partitions[rank] for rank in sorted(partitions)]


def _ranks_text(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _files_of_ranks(ranks: Sequence[int]) -> str:
    return f"file{'s' * (len(ranks) > 1)} of {_ranks_text(ranks)}"


def _agree(optims: list[OptimFile], model: ModelFile) -> list[OptimFile]:
    """The files that share the weights. Raises CorruptError where they, or what they count, contradict each other."""
    first, world = optims[0], len(optims)
    for optim in optims:
        for what, mine, other in (
            ("ZeRO stage", optim.stage, first.stage),
            ("number of groups", len(optim.masters), len(first.masters)),
            ("partition count", optim.counts, first.counts),
            ("alignment paddings", optim.alignments, first.alignments),
            ("dtypes", [m.dtype.name for m in optim.masters], [m.dtype.name for m in first.masters]),
        ):
            if mine != other:
                raise CorruptError(
                    f"{optim.file.path} has the {what} {mine!s:.60}, and {basename(first.file.path)} has "
                    f"{other!s:.60}: they are not of one save."
                )
    count = max(first.counts, default=0) or world
    if count == world:
        return optims
    zero = (model.config or first.config).get("zero_optimization")
    if count < world and isinstance(zero, dict) and zero.get("mics_shard_size") == count:
        return optims[:count]  # MiCS: the other ranks hold copies of what the first hold
    known = f"{first.file.path} says that {count} ranks share the weights, and there are files of {world}."
    if world < count:
        missing = list(range(world, count))
        raise CorruptError(
            f"{known} The {_files_of_ranks(missing)} {'are' if len(missing) > 1 else 'is'} missing.",
            "Copy them beside the others.",
        )
    raise CorruptError(
        f"{known} Those of {_ranks_text(range(count, world))} are left from another save.", "Move them away."
    )


def _check_experts(weights: Weights, files: Checkpoint) -> None:
    """Check the experts found against the expert files, which are named by global numbers."""
    if not files.experts:
        return
    saved = {expert for _, expert in files.experts}
    for prefix, numbers in weights.experts().items():
        if not numbers <= saved:
            odd = ", ".join(map(str, sorted(numbers - saved)[:8]))
            raise CorruptError(
                f"{files.directory}: the partitions hold {len(numbers)} experts of {prefix.rstrip('.')}, and there "
                "is no "
                f"expert file for {odd}."
            )


def _unite(
    files: Checkpoint,
    ranks: Sequence[int],
    models: dict[int, ModelFile],
    optims: dict[int, list[OptimFile]],
    parts: list[Weights],
    reading: Reading,
) -> Weights:
    """Model-parallel ranks as one: pipeline stages, or tensor-parallel slices where it is known how they were cut."""
    where = files.directory
    pipeline, tensor = _degrees(models[ranks[0]], files, len(ranks))
    if pipeline > 1 and tensor > 1:
        raise UnsupportedError(
            f"{where} is {pipeline} pipeline stages × {tensor} tensor-parallel ranks, which is not supported together.",
            "Convert it to one kind of parallelism with the framework that trained it.",
        )
    if files.layers:
        layers: dict[int, Any] = {}
        for (layer, mp), file in files.layers.items():
            if mp:
                raise UnsupportedError(f"{where} has layers cut for tensor parallelism ({basename(file.path)}).")
            layers[layer] = reading.layer(file)
        return zero_parallel.unite_stages(
            parts, layers, {name for model in models.values() for name in model.buffers or ()}
        )
    info = next((o.universal for o in optims[ranks[0]] if o.universal), None) or models[ranks[0]].universal
    if not info:
        raise UnsupportedError(
            f"{where} is tensor parallel: {len(ranks)} ranks × {parts[0].world} data-parallel. Nothing in it tells "
            "how its "
            "parameters were cut (there is no universal_checkpoint_info).",
            "Convert each rank for itself with --per-rank, or save with universal_checkpoint_info.",
        )
    return zero_parallel.merge_ranks(parts, zero_parallel.read_patterns(info, where))


def _degrees(model: ModelFile, files: Checkpoint, ranks: int) -> tuple[int, int]:
    """How many pipeline stages and tensor-parallel ranks there are."""
    said = model.values.get("checkpoint_parallel_dimensions")
    if isinstance(said, dict):
        pipeline, tensor = said.get("pp_degree"), said.get("tp_degree")
        if type(pipeline) is int and type(tensor) is int and pipeline * tensor == ranks:
            return pipeline, tensor
    return (ranks, 1) if files.layers else (1, ranks)


def _training(files: Checkpoint, optims: Sequence[OptimFile], weights: Weights) -> Training | None:
    if not optims:
        return None
    return Training(weights.stage, list(weights.trainable), optims[0].common(), list(files.model.values()))


def _facts(files: Checkpoint, ranks: Sequence[int], model: ModelFile, weights: Weights) -> dict[str, Any]:
    facts: dict[str, Any] = {"tag": basename(files.directory), "world size": weights.world}
    if files.layers:
        facts["pipeline"] = f"{len(ranks)} stages"
    elif len(ranks) > 1:
        facts["tensor parallel"] = f"{len(ranks)} ranks × {weights.world} data-parallel"
    if files.experts:
        facts["experts"] = f"{len({expert for _, expert in files.experts})} in each layer of them"
    if model.version:
        facts["DeepSpeed"] = model.version
    return facts
