"""DeepSpeed ZeRO checkpoints: a directory of pickles, one for every rank, that hold parts of parameters.

Only the description in each file is read; the optimizer states and the half-precision module stay where they are.
Sources: DeepSpeed's engine.py (save_checkpoint), and the optimizers named in `zero_layout`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.storage import basename
from ckptconv.tensors import File, LazyTensor, same_bytes, untagged
from ckptconv.tree import Global, Opaque

from . import zero_files, zero_layout
from .source import Source
from .torch_file import fingerprint, read_torch
from .torch_zip import TorchFile
from .zero_layout import Shape

FAMILY = "deepspeed"


# --------------------------------------------------------------------------------------------------- files, typed


class _Fields:
    """A dict from a pickle, whose values are what the caller expects or a CorruptError."""

    def __init__(self, values: Any, where: str, path: str = "") -> None:
        if not isinstance(values, dict):
            raise CorruptError(f"{where}: {path or 'the object'} is {_kind(values)}, where a dict was expected.")
        self.values, self.where, self.path = values, where, path

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """The value of `key`; `default` where it is absent or None."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            expected = " or ".join(each.__name__ for each in kinds)
            raise CorruptError(f"{self.where}: {self._name(key)} is {_kind(value)}, where {expected} was expected.")
        return value

    def fields(self, key: str) -> _Fields:
        if key not in self.values:
            raise CorruptError(f"{self.where}: {self._name(key)} is missing. It is not a file that DeepSpeed writes.")
        return _Fields(self.values[key], self.where, self._name(key))

    def tensors(self, key: str) -> list[LazyTensor]:
        """A list of 1-D tensors."""
        values = self.get(key, (list, tuple), [])
        for value in values:
            if not isinstance(value, LazyTensor) or len(value.shape) != 1:
                raise CorruptError(
                    f"{self.where}: {self._name(key)} holds {_kind(value)}, where 1-D tensors were expected."
                )
        return [untagged(value) for value in values]

    def named_tensors(self, key: str) -> dict[str, LazyTensor]:
        """A dict from names to tensors; what is neither is left out."""
        values = self.get(key, dict, {})
        return {
            name: untagged(value)
            for name, value in values.items()
            if isinstance(name, str) and isinstance(value, LazyTensor)
        }

    def shapes(self, values: Any, key: str) -> dict[str, Shape]:
        if not isinstance(values, dict):
            raise CorruptError(
                f"{self.where}: {self._name(key)} holds {_kind(values)}, where names and shapes were expected."
            )
        for name, shape in values.items():
            sizes_ok = isinstance(shape, tuple) and all(type(size) is int and 0 <= size < 1 << 63 for size in shape)
            if not isinstance(name, str) or not sizes_ok:
                raise CorruptError(f"{self.where}: {self._name(key)} gives {name!r} the shape {shape!r:.80}.")
        return {name: tuple(shape) for name, shape in values.items()}

    def _name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key


def _kind(value: Any) -> str:
    if isinstance(value, Opaque):
        return f"an object of {value.name}"
    if isinstance(value, LazyTensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"of type {type(value).__name__}"


@dataclass
class _Model:
    """What a model file says. `shapes` is None where it is silent, as old releases were."""

    file: File
    module: dict[str, LazyTensor] | None
    buffers: list[str] | None
    shapes: list[dict[str, Shape]] | None
    frozen: dict[str, Shape] | None
    fragments: dict[str, LazyTensor]
    shared: dict[str, str]
    config: dict[str, Any]
    version: str
    values: dict[str, Any]


@dataclass
class _Optim:
    """What an optimizer file says. `counts` is how many ranks share each group, one number for all under ZeRO-3."""

    file: File
    stage: int | None
    counts: list[int]
    masters: list[LazyTensor]
    paddings: list[list[int]]
    shapes: list[dict[str, Shape]] | None
    values: dict[str, Any]


@dataclass
class _Reading:
    """Files read so far, and what all of them add to the source."""

    options: dict[str, Any] | None
    opaque: dict[str, None] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    bytes_read: int = 0

    def read(self, file: File) -> TorchFile:
        torch_file = read_torch(file, self.options)
        self.opaque.update(dict.fromkeys(map(str, torch_file.opaque)))
        self.inputs[basename(file.path)] = fingerprint(torch_file)
        self.bytes_read += torch_file.bytes_read
        return torch_file

    def model(self, file: File) -> _Model:
        fields = _Fields(self.read(file).value, file.path)
        shapes = fields.get("param_shapes", (list, dict))
        frozen = fields.get("frozen_param_shapes", dict)
        module = fields.get("module", dict)
        return _Model(
            file=file,
            module=None if module is None else fields.named_tensors("module"),
            buffers=_strings(fields, "buffer_names"),
            shapes=_shape_list(fields, shapes),
            frozen=None if frozen is None else fields.shapes(frozen, "frozen_param_shapes"),
            fragments=fields.named_tensors("frozen_param_fragments"),
            shared=_aliases(fields),
            config=fields.get("ds_config", dict, {}),
            version=fields.get("ds_version", str, ""),
            values=fields.values,
        )

    def optim(self, file: File) -> _Optim:
        top = _Fields(self.read(file).value, file.path)
        fields = top.fields("optimizer_state_dict")
        flat = "fp32_flat_groups" in fields.values
        masters = fields.tensors("fp32_flat_groups" if flat else "single_partition_of_fp32_groups")
        if not flat and "single_partition_of_fp32_groups" not in fields.values:
            raise UnsupportedError(
                f"{file.path} holds no fp32 partitions (neither fp32_flat_groups nor single_partition_of_fp32_groups).",
                "It was not written by one of DeepSpeed's ZeRO optimizers.",
            )
        counts = fields.get("partition_count", (int, list), 0)
        counts = counts if isinstance(counts, list) else [counts]
        if not all(type(count) is int and count >= 0 for count in counts):
            raise CorruptError(f"{file.path}: partition_count is {counts!r:.80}, where numbers of ranks were expected.")
        paddings = fields.get("param_alignment_paddings", list, [])
        for group in paddings:
            if not isinstance(group, list) or not all(type(size) is int and size >= 0 for size in group):
                raise CorruptError(
                    f"{file.path}: param_alignment_paddings holds {group!r:.80}, where sizes were expected."
                )
        return _Optim(
            file=file,
            stage=3 if flat else _stage(fields),
            counts=counts,
            masters=masters,
            paddings=paddings,
            shapes=_shape_list(top, top.get("param_shapes", (list, dict))),
            values=fields.values,
        )


def _stage(fields: _Fields) -> int | None:
    """The ZeRO stage: an enum member, a plain int before 0.7.0, and not said at all by BF16_Optimizer."""
    value = fields.values.get("zero_stage")
    if isinstance(value, Opaque) and isinstance(value.cls, Global) and value.cls.name == "ZeroStageEnum" and value.args:
        value = value.args[0]
    if value is None or (type(value) is int and 0 <= value <= 3):
        return value
    raise CorruptError(f"{fields.where}: zero_stage is {_kind(value)}, where a number from 0 to 3 was expected.")


def _shape_list(fields: _Fields, shapes: Any) -> list[dict[str, Shape]] | None:
    if shapes is None:
        return None
    if isinstance(shapes, dict) and not all(isinstance(shape, dict) for shape in shapes.values()):
        shapes = [shapes]
    elif isinstance(shapes, dict):
        shapes = list(shapes.values())
    return [fields.shapes(group, "param_shapes") for group in shapes]


def _strings(fields: _Fields, key: str) -> list[str] | None:
    values = fields.get(key, (list, tuple, set))
    if values is not None and not all(isinstance(value, str) for value in values):
        raise CorruptError(f"{fields.where}: {key} holds something other than names.")
    return None if values is None else list(values)


def _aliases(fields: _Fields) -> dict[str, str]:
    values = fields.get("shared_params", (dict, list), {})
    pairs = values.items() if isinstance(values, dict) else values
    try:
        aliases = dict(pairs)
    except (TypeError, ValueError):
        aliases = {None: None}
    if not all(isinstance(name, str) for pair in aliases.items() for name in pair):
        raise CorruptError(f"{fields.where}: shared_params holds something other than pairs of names.")
    return aliases


# -------------------------------------------------------------------------------------------------------- reading


def read(path: str, *, tag: str = "", exclude_frozen: bool = False, options: dict[str, Any] | None = None) -> Source:
    """Open the checkpoint that `path` means: a run's directory, a tag's, or one of its files.

    The weights are a flat state dict in the order in which DeepSpeed's own tool lists them: buffers, frozen parameters,
    trainable ones, then tied names.
    """
    directory = zero_files.locate(path, tag, options)
    files = zero_files.files_of(directory, options)
    reading = _Reading(options)
    _check_layout(files)
    model = reading.model(files.model[min(files.model)])
    weights = _Weights(directory)
    stage: int | None = 0
    world = 1
    if not files.optim:
        weights.whole(model, exclude_frozen)
    else:
        optims = [reading.optim(file) for file in _ranks(files)]
        stage, world = _agree(optims), len(optims)
        weights.assemble(model, optims, exclude_frozen, files, reading)
    name = "ZeRO-1 (BF16_Optimizer)" if stage is None else f"ZeRO-{stage}"
    return Source(
        format=f"DeepSpeed {name}",
        family=FAMILY,
        path=directory,
        weights=weights.state_dict(),
        structured=False,
        owners=weights.aliases,
        counts=weights.counts(),
        facts={
            "tag": basename(directory),
            "world size": world,
            **({"DeepSpeed": model.version} if model.version else {}),
        },
        opaque=list(reading.opaque),
        warnings=weights.warnings,
        unaccounted=weights.unaccounted,
        inputs=reading.inputs,
        bytes_read=reading.bytes_read,
        default_dtype="float32",
        default_shard_size=5 * 10**9,
    )


def _check_layout(files: zero_files.Checkpoint) -> None:
    """Refuse what is not converted yet, by name."""
    where = files.directory
    model_parallel = {mp for _, mp in (*files.optim, *files.model)}
    if files.layers:
        raise UnsupportedError(
            f"{where} is a pipeline-parallel checkpoint of {len(model_parallel)} stages, which is not supported."
        )
    if len(model_parallel) > 1:
        ranks = len({dp for dp, _ in files.optim}) or 1
        raise UnsupportedError(
            f"{where} is a tensor-parallel checkpoint: {len(model_parallel)} tensor-parallel ranks × {ranks} "
            "data-parallel "
            "ranks, which is not supported."
        )
    if not files.model:
        raise CorruptError(
            f"{where} holds optimizer files and no *_model_states.pt: the names and shapes of the parameters are "
            "missing.",
            "Copy the model files beside them.",
        )


def _ranks(files: zero_files.Checkpoint) -> list[File]:
    """The optimizer files by data-parallel rank. Raises CorruptError where a rank is missing."""
    ranks = sorted(dp for dp, _ in files.optim)
    missing = sorted(set(range(ranks[-1] + 1)) - set(ranks))
    if missing:
        raise CorruptError(
            f"{files.directory} lacks the optimizer {_files_of_ranks(missing)}: there are {len(ranks)} files, for "
            f"{_ranks_text(ranks)}.",
            "Copy the missing files beside them; the weights are spread over all ranks.",
        )
    by_rank = {dp: file for (dp, _), file in files.optim.items()}
    return [by_rank[rank] for rank in ranks]


def _ranks_text(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _files_of_ranks(ranks: Sequence[int]) -> str:
    return f"file{'s' * (len(ranks) > 1)} of {_ranks_text(ranks)}"


def _agree(optims: Sequence[_Optim]) -> int | None:
    """The stage of all ranks. Raises CorruptError where they, or their counts, contradict each other."""
    first, world = optims[0], len(optims)
    for optim in optims:
        for what, mine, other in (
            ("ZeRO stage", optim.stage, first.stage),
            ("number of groups", len(optim.masters), len(first.masters)),
            ("partition count", optim.counts, first.counts),
            ("alignment paddings", optim.paddings, first.paddings),
        ):
            if mine != other:
                raise CorruptError(
                    f"{optim.file.path} has the {what} {mine!s:.60}, and {basename(first.file.path)} has "
                    f"{other!s:.60}: they are "
                    "not of one save."
                )
        for master, other_master in zip(optim.masters, first.masters, strict=True):
            if master.dtype != other_master.dtype:
                raise CorruptError(
                    f"{optim.file.path} holds {master.dtype} partitions, and {basename(first.file.path)} "
                    f"{other_master.dtype}."
                )
    count = max(first.counts, default=world)
    if count and count != world:
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
    return first.stage


@dataclass
class _Weights:
    """The weights of a checkpoint, by kind, as they are found."""

    where: str
    buffers: dict[str, LazyTensor] = field(default_factory=dict)
    frozen: dict[str, LazyTensor] = field(default_factory=dict)
    trainable: dict[str, LazyTensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    unaccounted: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def state_dict(self) -> dict[str, LazyTensor]:
        weights = {**self.buffers, **self.frozen, **self.trainable}
        weights.update((alias, weights[owner]) for alias, owner in self.aliases.items())
        return weights

    def counts(self) -> dict[str, int]:
        counts = {
            "trainable": len(self.trainable),
            "frozen": len(self.frozen),
            "buffers": len(self.buffers),
            "aliases": len(self.aliases),
        }
        return {kind: count for kind, count in counts.items() if count}

    def whole(self, model: _Model, exclude_frozen: bool) -> None:
        """ZeRO-0: every rank has the whole module, and the model file holds it."""
        if model.module is None:
            raise CorruptError(f"{model.file.path} holds no module, and there are no optimizer files beside it.")
        names = set(model.buffers or ())
        self.buffers = {name: tensor for name, tensor in model.module.items() if name in names}
        self.trainable = {name: tensor for name, tensor in model.module.items() if name not in names}
        self._tie(model.shared)

    def assemble(
        self,
        model: _Model,
        optims: Sequence[_Optim],
        exclude_frozen: bool,
        files: zero_files.Checkpoint,
        reading: _Reading,
    ) -> None:
        """ZeRO-1, 2 and 3: parameters from the partitions, the rest from the model files."""
        shapes = model.shapes if model.shapes is not None else optims[0].shapes
        if shapes is None:
            raise CorruptError(
                f"{model.file.path}: param_shapes is missing, so that nothing tells where a parameter begins."
            )
        groups = len(optims[0].masters)
        if len(shapes) != groups:
            raise CorruptError(
                f"{model.file.path} has the shapes of {len(shapes)} groups of parameters, and {optims[0].file.path} "
                "has "
                f"{groups} groups of partitions."
            )
        _check_offload(model, optims, shapes, files)
        join = self._pieces if optims[0].stage == 3 else self._flat
        for group, named in enumerate(shapes):
            join(group, named, optims)
        self._experts(files)
        sharded = optims[0].stage == 3
        frozen = self._frozen(model, optims, files, reading) if sharded else dict(model.fragments)
        module = model.module or {}
        self._buffers(model, module)
        self._tie(model.shared)
        known = {*self.trainable, *frozen, *self.buffers, *self.aliases}
        self._rest(model, {name: tensor for name, tensor in module.items() if name not in known}, frozen, sharded)
        self.frozen = {} if exclude_frozen else frozen
        if exclude_frozen:
            self.aliases = {alias: owner for alias, owner in self.aliases.items() if owner not in frozen}

    def _add(self, tensors: Iterable[tuple[str, LazyTensor]], file: File) -> None:
        for name, tensor in tensors:
            if name in self.trainable:
                raise CorruptError(f"{file.path}: {name!r} occurs in two groups of parameters.")
            self.trainable[name] = tensor

    def _pieces(self, group: int, shapes: Mapping[str, Shape], optims: Sequence[_Optim]) -> None:
        slices, end = zero_layout.walk_pieces(shapes, len(optims))
        partitions = [optim.masters[group] for optim in optims]
        for optim, partition in zip(optims, partitions, strict=True):
            if partition.numel != end:
                raise CorruptError(
                    f"{optim.file.path}: flat group {group} has {partition.numel} elements, and the shapes of its "
                    f"{len(shapes)} parameters, cut for {len(optims)} ranks, give {end}."
                )
        self._add(zero_layout.cut_pieces(slices, partitions), optims[0].file)

    def _flat(self, group: int, shapes: Mapping[str, Shape], optims: Sequence[_Optim]) -> None:
        first, world = optims[0], len(optims)
        paddings = first.paddings[group] if group < len(first.paddings) else []
        if paddings and len(paddings) != len(shapes):
            raise CorruptError(
                f"{first.file.path}: param_alignment_paddings has {len(paddings)} entries for group {group}, which has "
                f"{len(shapes)} parameters."
            )
        slices, end = zero_layout.walk_flat(shapes, paddings)
        count = (first.counts[group] if group < len(first.counts) else 0) or world
        if world % count:
            raise CorruptError(
                f"{first.file.path}: group {group} is shared by {count} ranks, which do not divide {world}."
            )
        copies = zero_layout.ranks_of_group(world, count)
        for ep_rank, ranks in enumerate(copies):
            partitions = [optims[rank].masters[group] for rank in ranks]
            held = sum(partition.numel for partition in partitions)
            needed = slices[-1].offset + math.prod(slices[-1].shape) if slices else 0
            # The flat vector is padded to twice the ranks; some releases strip that again. No more is ever left over.
            if not needed <= held <= max(end, -(-end // (2 * count)) * 2 * count):
                raise CorruptError(
                    f"{self.where}: group {group} has {held} elements on its {count} ranks ({first.file.path} and "
                    "its like), "
                    f"and its {len(shapes)} parameters with their padding take {end}."
                )
            names = (
                zero_layout.expert_names(list(shapes), ep_rank) if len(copies) > 1 else {name: name for name in shapes}
            )
            parameters = [(names[name], tensor) for name, tensor in zero_layout.cut_flat(slices, partitions)]
            self._add(parameters, optims[ranks[0]].file)

    def _experts(self, files: zero_files.Checkpoint) -> None:
        """Check the experts found against the expert files, which are named by global numbers."""
        if not files.experts:
            return
        saved = {expert for _, expert in files.experts}
        for prefix, numbers in zero_layout.expert_numbers(list(self.trainable)).items():
            if not numbers <= saved:
                raise CorruptError(
                    f"{files.directory}: the partitions hold experts {_ranks_text(sorted(numbers))[5:].strip()} of "
                    f"{prefix}, and the "
                    f"expert files are numbered {min(saved)} to {max(saved)}."
                )

    def _frozen(
        self, model: _Model, optims: Sequence[_Optim], files: zero_files.Checkpoint, reading: _Reading
    ) -> dict[str, LazyTensor]:
        """ZeRO-3: frozen parameters are cut like trainable ones, and lie in every rank's model file."""
        if not model.frozen:
            return {}
        world = len(optims)
        missing = [rank for rank in range(world) if (rank, 0) not in files.model]
        if missing:
            raise CorruptError(
                f"{files.directory} lacks the model {_files_of_ranks(missing)}, which hold parts of "
                f"{len(model.frozen)} frozen "
                "parameters.",
                "Copy them beside the others, or leave the frozen parameters out with --exclude-frozen-parameters.",
            )
        models = [
            model if files.model[rank, 0] == model.file else reading.model(files.model[rank, 0])
            for rank in range(world)
        ]
        slices, _ = zero_layout.walk_pieces(model.frozen, world)
        frozen: dict[str, LazyTensor] = {}
        for piece in slices:
            fragments = []
            for each in models:
                fragment = each.fragments.get(piece.name)
                if fragment is None or fragment.numel != piece.piece:
                    found = "is missing" if fragment is None else f"has {fragment.numel} elements"
                    raise CorruptError(
                        f"{each.file.path}: the part of the frozen parameter {piece.name!r} {found}, where "
                        f"{piece.piece} "
                        "elements were expected."
                    )
                fragments.append(fragment)
            frozen.update(zero_layout.cut_pieces([piece._replace(offset=0)], fragments))
        return frozen

    def _buffers(self, model: _Model, module: Mapping[str, LazyTensor]) -> None:
        for name in model.buffers or ():
            if name not in module:
                raise CorruptError(f"{model.file.path}: the buffer {name!r} is named, and is not in module.")
            self.buffers[name] = module[name]

    def _tie(self, shared: Mapping[str, str]) -> None:
        """Tied names, of parameters or of frozen ones; checked when all are known."""
        self.aliases.update(shared)

    def _rest(self, model: _Model, rest: dict[str, LazyTensor], frozen: dict[str, LazyTensor], sharded: bool) -> None:
        """What the module holds and nothing else names.

        ZeRO-1 lists no frozen parameters, and no release lists empty ones: both lie whole in the module. Releases
        before 0.9.2 list no ties. Under ZeRO-3 the module holds placeholders: a name that is listed nowhere is lost.
        """
        module = model.module or {}
        seen = {same_bytes(module[name]): name for name in self.trainable if name in module}
        for name, tensor in rest.items():
            if sharded and tensor.numel == 0 and len(tensor.shape) == 1:
                self.unaccounted.append(name)
                continue
            owner = seen.get(same_bytes(tensor)) if tensor.numel else None
            if owner is not None:
                self.aliases[name] = owner
            elif model.buffers is None and tensor.dtype.kind != "f":
                self.buffers[name] = tensor
            elif tensor.numel == 0:
                self.trainable[name] = tensor
            else:
                frozen[name] = tensor
        named = {*self.trainable, *frozen, *self.buffers}
        for alias, owner in list(self.aliases.items()):
            if alias in named:
                del self.aliases[alias]
            elif owner not in named:
                raise CorruptError(
                    f"{model.file.path}: {alias!r} is tied to {owner!r}, which is nowhere in the checkpoint."
                )


def _check_offload(
    model: _Model, optims: Sequence[_Optim], shapes: Sequence[Mapping[str, Shape]], files: zero_files.Checkpoint
) -> None:
    """Refuse a checkpoint whose weights were left on the NVMe drives they were offloaded to."""
    expected = any(math.prod(shape) for group in shapes for shape in group.values())
    if expected and all(master.numel == 0 for optim in optims for master in optim.masters):
        raise UnsupportedError(
            f"{files.directory} holds no weights: its flat groups are empty, as when they were offloaded to NVMe, in "
            "files that only the "
            "training run can read.",
            "Save with the 16-bit weights gathered (stage3_gather_16bit_weights_on_model_save), or without NVMe "
            "offload.",
        )
