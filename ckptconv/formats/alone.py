"""Files that are one of many, each with a part of a model: the table of them, and what to name in their place.

What a file holds decides where it can: placeholders for parameters, numbers of ranks, the shape of a matrix. Its name
decides the rest, and the names beside it.

Source: DeepSpeed's runtime/engine.py and checkpoint/ds_to_universal.py; Megatron-LM's training/checkpointing.py; Meta's
llama/model.py; torch's distributed/checkpoint/hf_storage.py; vLLM's sharded_state_loader.py; TensorRT-LLM's
convert_checkpoint.py; DeepSeek-V3's inference/convert.py; torch_xla's xla_fully_sharded_data_parallel.py; OLMo's
checkpoint.py; fairseq's checkpoint_utils.py; nanotron's serialize/utils.py.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ckptconv.errors import CkptconvError, CorruptError, UnsupportedError
from ckptconv.formats.dcp.locate import METADATA, SHARD, SHARDING
from ckptconv.formats.deepspeed.locate import COMMON, WEIGHTS, ZERO, identity
from ckptconv.formats.model_files import SAFETENSORS, SUFFIX
from ckptconv.formats.ranks.locate import parsed
from ckptconv.formats.runs import MEGATRON_RANK, STEP_METADATA
from ckptconv.formats.source import Source
from ckptconv.formats.torch import SUFFIXES as TORCH_SUFFIXES
from ckptconv.pickles.children import walk
from ckptconv.plan import NUMBERED
from ckptconv.storage.location import Location
from ckptconv.storage.paths import basename
from ckptconv.storage.reading import Entry
from ckptconv.structure.record import ALONE_KEY
from ckptconv.tensors.lazy import LazyTensor

_HOW = "Or convert what is in it with --alone."
# Keys of a DeepSpeed optimizer under which a rank's part of the master weights is, and keys of its model files.
_PARTITIONS = frozenset({"single_partition_of_fp32_groups", "fp32_flat_groups"})
_OF_DEEPSPEED = frozenset({"ds_version", "dp_world_size", "mp_world_size"})
_UNIVERSAL = (WEIGHTS, "exp_avg.pt", "exp_avg_sq.pt")
# Names with numbers, as patterns that are compiled when a name with a number comes.
# A file of a set with an index; diffusers puts the variant, as in fp16, before the numbers or behind.
_OF_INDEX = rf".*{NUMBERED}(?:\.[\w-]+)?(?:{'|'.join(map(re.escape, (*TORCH_SUFFIXES, SUFFIX)))})"
_META = r"consolidated\.(\d{2,3})\.(?:pth|pt|safetensors)"
# Megatron's directory of a rank, and that of NeMo.
_RANKS = (MEGATRON_RANK, r"tp_rank_(\d{1,6})(?:_pp_rank_(\d{1,6}))?")
# Files with numbers of ranks: of vLLM and SGLang, TensorRT-LLM, fairseq, DeepSeek.
_NUMBERED = (
    r"model-rank-(\d{1,6})-part-(\d{1,6})\.safetensors",
    r"(?:.*[-_.])?rank[-_]?(\d{1,6})\.safetensors",
    r".*-model_part-(\d{1,6})(?:-shard(\d{1,6}))?\.pt",
    r"model\d{1,6}-mp(?P<of>\d{1,6})\.safetensors",
)
# The items of a step of torch_checkpointing.
_ITEM = r".+_\d{1,6}\.(?:pt|safetensors)"
# Such an item by itself. Files of torch.save say that they are parts, and higher numbers are those of steps.
_LIKE_ITEM = r"model_\d{1,2}\.safetensors"
_MOST = 1 << 26
# How deep a tree is searched for names.
_LEVELS = 6


class _File(NamedTuple):
    """A file: where it is, the tree and the metadata in it, and whether its parameters are joined from ranks' parts."""

    place: Location
    tree: Any
    metadata: Mapping[str, str]
    is_joined: bool

    def get(self, key: str) -> Any:
        return self.tree.get(key) if isinstance(self.tree, Mapping) else None


class OfSetError(UnsupportedError):
    """A file is one of a sharded set."""


class _Kind(NamedTuple):
    """A kind of file: what one is, as the end of a sentence; what to name in its place, with {} for the directory `up`
    levels above it; whether a file is one; and the class of the error for it. Those that are not `refused` may be a
    whole model. `lies`: whether a file is where its program puts it. `is_written`: this program writes such files."""

    called: str
    instead: str
    is_one: Callable[[_File], bool]
    up: int = 1
    refused: bool = True
    error: type[UnsupportedError] = UnsupportedError
    lies: Callable[[Location], bool] = lambda place: True
    is_written: bool = False


def marked(place: Location, source: Source, alone: bool) -> Source:
    """Return `source`, which was read from `place`. If it is one file of many, it has the error for whoever takes it
    for a model; if it is taken `alone`, a note."""
    file = _only_file(place, source)
    kind = next((each for each in KINDS if each.is_one(file)), None) if file else None
    if file is None or kind is None:
        idle = f"--alone is of no use: {place} is not one file of many."
        return source._replace(warnings=[*source.warnings, idle]) if alone else source
    what = f"{file.place} {kind.called}"
    if alone:
        remarks = {**source.remarks, ALONE_KEY: "true"}
        return source._replace(notes=[*source.notes, f"{what} It was taken alone."], remarks=remarks)
    if ALONE_KEY in source.remarks:
        return source._replace(notes=[*source.notes, f"{file.place} was made with --alone of one file of many."])
    above = file.place
    for _ in range(kind.up):
        above = above.parent
    # Only outputs of this program have a structure record. What such a one was made of lies elsewhere.
    is_elsewhere = source.family == SAFETENSORS and source.structured and not kind.is_written
    is_known = kind.lies(file.place) and not is_elsewhere
    instead = kind.instead.format(shlex.quote(above.path or ".") if is_known else "DIRECTORY")
    if not kind.refused:
        return source._replace(warnings=[*source.warnings, f"{what} {instead}"])
    error: CkptconvError = kind.error(what, f"{instead} {_HOW}")
    if place.kind == "directory" and not is_elsewhere:
        error = CorruptError(f"{what} {place} lacks the others.", f"Copy or download them too. {_HOW}")
    return source._replace(weights_error=error, warnings=[*source.warnings, str(error)])


def kept_apart(source: Source, output: str) -> Source:
    """Return `source` for an output of that name. What is made of one file of a sharded set is taken for no model if
    its name says that it is one."""
    if not isinstance(source.weights_error, OfSetError) or not _matches(_OF_INDEX, basename(output)):
        return source
    return source._replace(weights_error=None)


def by_name(source: Source) -> Source:
    """Return `source` for whoever takes tensors by name: those of one safetensors file of a sharded set are whole."""
    error = source.weights_error
    if not isinstance(error, OfSetError) or source.family != SAFETENSORS:
        return source
    return source._replace(weights_error=None, warnings=[each for each in source.warnings if each != str(error)])


def _only_file(place: Location, source: Source) -> _File | None:
    """Return the file that was read; None if there are several, or a set that is complete, or no weights anyway."""
    is_alone = source.family in ("torch", "safetensors") and len(source.inputs) == 1 and not source.shards
    if not is_alone or source.weights_error:
        return None
    if place.kind == "directory":
        path = next(iter(source.files.records), "")
        place = place.at(path) if path else place.join(next(iter(source.inputs)))
    return _File(place, source.weights, source.metadata, source.pieces is not None)


def _names(place: Location) -> Mapping[str, Entry]:
    """Return the entries of a directory; none in a store that lists no names."""
    try:
        return place.names
    except CkptconvError:
        return {}


def _matches(pattern: str, name: str) -> re.Match[str] | None:
    return re.fullmatch(pattern, name) if any(map(str.isdigit, name)) else None


def _is_numbered(place: Location, *patterns: str) -> bool:
    """Whether the name of `place` is one of many: it says so; its number is not the first; or one beside it differs
    only in numbers."""
    match = next((found for each in patterns if (found := _matches(each, place.name))), None)
    if match is None:
        return False
    if "of" in match.re.groupindex:
        return int(match["of"]) > 1
    others = (name for name in _names(place.parent) if name != place.name)
    return any(int(number or 0) for number in match.groups()) or any(map(match.re.fullmatch, others))


# ---------------------------------------------------------------------------------------------------------- DeepSpeed


def _of_deepspeed(file: _File) -> bool:
    kind, numbers = identity(file.place.name) or ("", ())
    states = file.get("optimizer_state_dict")
    if kind not in ("", "model") or (isinstance(states, Mapping) and not _PARTITIONS.isdisjoint(states)):
        return True
    if not _is_model_file(file):
        return any(numbers) or (kind == "model" and file.place.name.startswith("zero"))
    ranks, module = file.get("mp_world_size"), file.get("module")
    if not isinstance(module, Mapping) or file.get("num_experts") or (type(ranks) is int and ranks > 1):
        return True  # a stage of a pipeline; without its experts; of a tensor-parallel rank
    return _has_placeholders(file, module)


def _has_placeholders(file: _File, module: Mapping[Any, Any]) -> bool:
    """Whether parameters are empty in the model's state dict that have elements: ZeRO-3 shares these out."""
    shapes = dict(_shapes(file))
    if shapes:
        return any(_is_empty(module.get(name)) and math.prod(shape) for name, shape in shapes.items())
    # Of releases before 0.6.0, the optimizer's file has the shapes.
    buffers = file.get("buffer_names") or ()
    parameters = [value for name, value in module.items() if name not in buffers]
    return bool(parameters) and all(map(_is_empty, parameters))


def _is_model_file(file: _File) -> bool:
    return isinstance(file.tree, Mapping) and "module" in file.tree and not _OF_DEEPSPEED.isdisjoint(file.tree)


def _shapes(file: _File) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the shapes of parameters that the optimizer has."""
    groups = file.get("param_shapes")
    for group in groups if isinstance(groups, list) else [groups]:
        for name, shape in group.items() if isinstance(group, Mapping) else ():
            if isinstance(shape, tuple) and all(type(extent) is int for extent in shape):
                yield name, shape


def _is_empty(value: Any) -> bool:
    return isinstance(value, LazyTensor) and value.numel == 0


def _of_zero_1(file: _File) -> bool:
    return _is_model_file(file) and file.get("optimizer") is None and any(_shapes(file))


def _of_universal(file: _File) -> bool:
    place = file.place
    is_parameter = place.parent.parent.name == ZERO and (place.name in _UNIVERSAL or WEIGHTS in _names(place.parent))
    return is_parameter or (place.name in _UNIVERSAL and isinstance(file.get("param"), LazyTensor))


def _of_universal_optimizer(file: _File) -> bool:
    return file.place.name == COMMON and file.place.parent.name == ZERO


# ---------------------------------------------------------------------------------------------- files of other ranks


def _of_megatron_core(file: _File) -> bool:
    # What is beside the tensors is the training's arguments and counters, whatever became of the rest.
    return file.place.name == "common.pt" and (
        METADATA in _names(file.place.parent) or not any(isinstance(each, LazyTensor) for each in walk(file.tree))
    )


def _of_megatron(file: _File) -> bool:
    if file.get("args") is not None:
        from ckptconv.formats.torch.megatron import parallel_sizes

        sizes = parallel_sizes(file.tree)
        if sizes:
            return max(sizes.values()) > 1
    is_optimizer = file.place.name.startswith("distrib_optim") and any(
        _matches(pattern, file.place.parent.name) for pattern in _RANKS
    )
    return is_optimizer or _is_numbered(file.place.parent, *_RANKS)


def _of_meta(file: _File) -> bool:
    norm, embeddings = file.get("norm.weight"), file.get("tok_embeddings.weight")
    output = file.get("layers.0.attention.wo.weight")
    if all(isinstance(each, LazyTensor) and each.shape for each in (norm, embeddings, output)):
        # Ranks share out the columns of the output's matrix, in Llama 1 and 2 those of the embeddings too. The heads of
        # some models are together narrower than the model, but no fraction of it.
        width = norm.shape[0]
        if embeddings.shape[-1] < width or (0 < output.shape[-1] < width and width % output.shape[-1] == 0):
            return True
    return _is_numbered(file.place, _META)


def _of_xla(file: _File) -> bool:
    told = file.get("shard_metadata")
    return isinstance(told, Mapping) and "shard_info" in told and told.get("world_size") != 1


def _of_flat_parameters(file: _File) -> bool:
    level = [] if file.is_joined else [file.tree]
    for _ in range(_LEVELS):
        below: dict[int, Any] = {}
        for node in level:
            held = node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else ()
            # There may be a million, of few types.
            kinds = {kind for kind in {*map(type, held)} if issubclass(kind, (Mapping, list))}
            below.update((id(value), value) for value in held if type(value) in kinds)
            keys = [key for key in node if type(key) is str] if isinstance(node, Mapping) else []
            if "flat_param" in "\n".join(keys) and any(map(_is_flat, keys)):
                return True
        level = [*below.values()]
    return False


def _is_flat(key: str) -> bool:
    from ckptconv.formats.dcp.paths import FLAT_PARAMETER  # few files have such a key

    return FLAT_PARAMETER.search(key) is not None


def _of_a_rank(file: _File) -> bool:
    told = parsed(file.place.name)
    return told is not None and "rank" in told[0] and told[1] > 0 and not file.is_joined


def _of_first_rank(file: _File) -> bool:
    told = parsed(file.place.name)
    return told is not None and "rank" in told[0] and told[2] is None and not file.is_joined


def _of_step(file: _File) -> bool:
    place = file.place
    names = _names(place.parent) if _matches(_ITEM, place.name) else {}
    return STEP_METADATA in names and _world_size(place.parent.at(names[STEP_METADATA].file)) != 1


def _world_size(place: Location) -> Any:
    """Return how many ranks the metadata of a step names; None if it does not tell."""
    from ckptconv.pickles.machine import load

    with place.open_reader() as reader:
        try:
            told = load(reader.read_at(0, min(reader.file.size, _MOST)), where=place.path).value
        except CkptconvError:
            return None
    return told.get("world_size") if isinstance(told, Mapping) else None


def _of_nanotron(file: _File) -> bool:
    from ckptconv.formats import nanotron  # few files are called so

    is_named = file.place.name.startswith("model_") and nanotron.FILE.fullmatch(file.place.name) is not None
    return is_named and isinstance(file.tree, Mapping) and nanotron.DATA in file.tree


def _of_delta(file: _File) -> bool:
    tensors = file.tree if isinstance(file.tree, Mapping) else {}
    return bool(tensors) and all(
        name in file.metadata and isinstance(each, LazyTensor) and each.dtype.name == "uint8" and len(each.shape) == 1
        for name, each in tensors.items()
    )


_JOINED = "Give the directory with the files of all ranks, under the names that they were saved with."
# The table, in the order in which it is asked.
KINDS = (
    _Kind(
        "is of one rank, stage, layer or expert of a DeepSpeed run.",
        "Name the directory of the run, or of its tag: ckptconv zero-to-fp32 {} OUTPUT",
        _of_deepspeed,
    ),
    _Kind(
        "is the model file of a DeepSpeed run: its weights have the training's dtype, and the optimizer's, which go on "
        "with the training, are in other files.",
        "Those come with: ckptconv zero-to-fp32 {} OUTPUT",
        _of_zero_1,
        refused=False,
    ),
    _Kind(
        "is of one parameter of a universal checkpoint.",
        "Name the directory of all: ckptconv zero-to-fp32 {} OUTPUT",
        _of_universal,
        up=3,
        lies=lambda place: place.parent.parent.name == ZERO,
    ),
    _Kind(
        "is of the optimizer of a universal checkpoint, without its parameters.",
        "Name the directory of all: ckptconv zero-to-fp32 {} OUTPUT",
        _of_universal_optimizer,
        up=2,
        lies=lambda place: place.parent.name == ZERO,
    ),
    _Kind(
        "is the part of a checkpoint of Megatron-core that is no tensors.",
        "Name the directory: ckptconv dcp2safetensors {} OUTPUT",
        _of_megatron_core,
    ),
    _Kind(
        "is of one of several model-parallel ranks of Megatron-LM.",
        "Name the directory of the step, and a map that joins the ranks: ckptconv convert {} OUTPUT --map "
        "megatron-llama, for one.",
        _of_megatron,
        up=2,
        lies=lambda place: any(_matches(pattern, place.parent.name) for pattern in _RANKS),
    ),
    _Kind(
        "is of one of Meta's tensor-parallel ranks.",
        "Name the directory, and a map that joins them: ckptconv convert {} OUTPUT --map meta-llama3, or meta-llama2.",
        _of_meta,
    ),
    _Kind(
        "is a rank's shard of torch.distributed.checkpoint's HuggingFaceStorageWriter: pieces of tensors.",
        "Name the directory: ckptconv dcp2safetensors {} OUTPUT",
        lambda file: SHARDING in file.metadata or _matches(SHARD, file.place.name) is not None,
        is_written=True,
    ),
    _Kind(
        "is one file of a sharded set: its tensors are whole, and the model has more, in other files.",
        "Name the directory of all, {}, or the index.",
        lambda file: _is_numbered(file.place, _OF_INDEX),
        error=OfSetError,
        lies=lambda place: any(
            name != place.name and _matches(_OF_INDEX, name) is not None for name in _names(place.parent)
        ),
        is_written=True,
    ),
    _Kind(
        "is one file of a delta: compressed differences, and no weights.",
        "Apply it to the checkpoint that it changes: ckptconv patch BASE {} OUTPUT",
        _of_delta,
        is_written=True,
    ),
    _Kind(
        "is one parameter of a step of nanotron, or a rank's part of one.",
        "Name the directory of the step, which has model_config.json: ckptconv convert STEP OUTPUT",
        _of_nanotron,
    ),
    _Kind("is of one of several ranks of torch_xla's FSDP.", "Join them with its consolidate_sharded_ckpts.", _of_xla),
    _Kind(
        "holds flat parameters of FSDP, of which each rank has a part.",
        _JOINED + " Or save a full state dict.",
        _of_flat_parameters,
    ),
    _Kind(
        "is of one of several ranks of a step of torch_checkpointing.",
        "Name the step's directory: {}.",
        _of_step,
        is_written=True,
    ),
    _Kind(
        "is of one of several ranks.",
        "Nothing in them says how they are joined; the program that wrote them does it.",
        lambda file: _is_numbered(file.place, *_NUMBERED),
    ),
    _Kind("is of a rank other than the first, and no others are beside it.", _JOINED, _of_a_rank),
    _Kind(
        "is called that of the first rank, no others are beside it, and nothing in it says that it is a part.",
        "If it is one, give the files of all ranks.",
        _of_first_rank,
        refused=False,
    ),
    _Kind(
        "is called what torch_checkpointing calls the part of a rank, and no description is beside it.",
        "If it is one, give the step's directory.",
        lambda file: _matches(_LIKE_ITEM, file.place.name) is not None,
        refused=False,
    ),
)
