"""Megatron-LM's older checkpoints (`--ckpt-format torch`): a file of torch.save for each model-parallel rank.

Source: megatron/training/checkpointing.py of Megatron-LM, and megatron/core/{tensor_parallel,transformer}. A run's
directory holds `iter_0000020` or `release`, this `mp_rank_<tensor rank>[_<pipeline rank>][_<expert rank>]`, and this
`model_optim_rng.pt`: a dict with the state dict of the rank's layers as `model`, or as `model0`, `model1` … those of
its virtual pipeline stages. Layers, and the experts of a layer, are numbered from 0 in each.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.features.joining.run_layout import pointed
from ckptconv.features.model_parallel.parts import Parts, read_all
from ckptconv.formats.alone import LoneKind, is_numbered, matching
from ckptconv.formats.format import CERTAIN, Guess, Probe
from ckptconv.formats.lone_file import LoneFile
from ckptconv.formats.nesting import tensors_in
from ckptconv.formats.run_names import MEGATRON_RANK
from ckptconv.formats.source import Source, Wanted
from ckptconv.formats.torch import file as torch_file
from ckptconv.formats.torch.container import TorchFile
from ckptconv.pickles.nodes import Global, Opaque
from ckptconv.storage.location import Location
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.text import some

# The directory of a rank, and that of NeMo.
_RANKS = (MEGATRON_RANK, r"tp_rank_(\d{1,6})(?:_pp_rank_(\d{1,6}))?")
# The names of the file, of old releases too.
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_GUESS = Guess(CERTAIN, "a checkpoint of Megatron-LM", "pt2safetensors {} OUTPUT")
# State dicts of a rank: one, or those of its virtual pipeline stages.
_STATE = re.compile(r"model(\d{0,4})")
_LAYER = re.compile(r"(decoder\.layers\.)(\d{1,6})(\..+)", re.DOTALL)
# The number of an expert among those of its rank, as layers of Megatron-core and Transformer Engine have it.
_EXPERT = re.compile(
    r"(.+\.mlp\.experts\.(?:local_experts\.|linear_fc\d\.(?:weight|bias)))(\d{1,6})((?:\..+)?)", re.DOTALL
)
# The division of a tensor by the tensor-parallel ranks: by rows, by columns, or none. Tensors of no line stay in parts:
# the first matrix of a feed-forward layer holds gate and up side by side in each rank, or only one of them.
_ROWS, _COLUMNS, _WHOLE = 0, 1, None
_SHARES: tuple[tuple[re.Pattern[str], int | None], ...] = tuple(
    (re.compile(rf".*(?:{names}).*", re.DOTALL), share)
    for names, share in (
        (
            r"norm|router|linear_proj\.bias|linear_fc2\.bias|gate_weight|_down_proj\.|position_embeddings|inv_freq",
            _WHOLE,
        ),
        (r"word_embeddings\.weight|output_layer\.|linear_qkv\.|linear_q_proj\.|linear_q_up_proj\.|kv_up_proj\.", _ROWS),
        (r"linear_proj\.weight|linear_fc2\.weight", _COLUMNS),
    )
)
# Experts of a rank in one tensor, as in old releases: they cannot be told apart.
_GROUPED = re.compile(r".+\.mlp\.experts\.weight[12]", re.DOTALL)
# The kinds of model-parallel ranks, in the order of the numbers in names; the last is the first's name in old releases.
_KINDS = ("tensor_model", "pipeline_model", "expert_model", "model")
_LEFT_OUT = "_extra_state"
_NAMESPACE = Global("argparse", "Namespace")


def sniff(probe: Probe) -> Guess | None:
    """Recognize the directory of a step, or of a run with a file that names the last step."""
    if not probe.is_directory:
        return None
    step, _ = pointed(probe.place) or (probe.place, None)
    return _GUESS if any(_files(step)) else None


def read(place: Location, wanted: Wanted) -> Source:
    """Open the only rank's file; for a map, open the model of all ranks. Parts that are not joined have their rank
    before their names, as in `1.<name>`.

    Raise UnsupportedError if there are several ranks, and no map: each holds a part of the model. Raise CorruptError if
    files are missing or do not fit together.
    """
    step, pointer = pointed(place) or (place, None)
    files = list(_files(step))
    pointers = [pointer.path] if pointer else []
    if len(files) == 1 and not wanted.parts:
        source = torch_file.read(files[0], wanted)
        return source._replace(path=place.path, pointers=pointers, notes=[f"Took {files[0]}."])
    if not wanted.parts:
        raise UnsupportedError(
            f"{step} contains the files of {len(files)} Megatron-LM ranks: "
            f"{some([file.parent.name for file in files], form=str)}. Each has a part of every tensor, and the files "
            "do not record how to join the parts.",
            "Join them with a map, such as --map megatron-llama; save with --ckpt-format torch_dist, which records "
            "the layout; or convert one rank's file with --alone.",
        )
    opened, log = read_all({f"{file.parent.name}/{file.name}": file for file in files})
    ranks = _ranks(step, files, opened)
    parts = _joined(step, ranks)
    called = f"{len(files)} {'rank' if len(files) == 1 else 'ranks'} of Megatron-LM"
    return parts.source(place, called, log, _facts(ranks, opened), wanted)._replace(pointers=pointers)


def _files(step: Location) -> Iterable[Location]:
    for name, entry in step.names.items():
        if entry.kind == "directory" and re.fullmatch(MEGATRON_RANK, name):
            rank = step.child(name)
            yield from (rank.join(file) for file in _FILES if file in rank.names)


@dataclass(frozen=True)
class _Rank:
    """A rank: its numbers among the ranks of tensors, pipeline and experts, its file, and its state dicts by stage."""

    tensor: int
    pipeline: int
    expert: int
    file: Location
    states: Mapping[int, Mapping[str, LazyTensor]]


def _ranks(step: Location, files: Sequence[Location], opened: Sequence[TorchFile]) -> list[_Rank]:
    """Return the ranks in order. Raise CorruptError if one is missing, UnsupportedError for a model that is not
    Megatron-core's."""
    ranks: dict[tuple[int, int, int], _Rank] = {}
    sizes_in_files: dict[str, int] = {}
    for file, content in zip(files, opened, strict=True):
        match = re.fullmatch(MEGATRON_RANK, file.parent.name)
        assert match is not None
        numbers = [int(number) for number in match.groups() if number is not None]
        value = content.value if isinstance(content.value, dict) else {}
        args = _arguments(value)
        sizes_in_files.update(parallel_sizes(value))
        if len(numbers) == 2 and _size(args, "expert_model") > 1 and _size(args, "pipeline_model") == 1:
            numbers.insert(1, 0)  # mp_rank_00_001 is the second expert rank if there is no pipeline
        tensor, pipeline, expert = (*numbers, 0, 0)[:3]
        if (tensor, pipeline, expert) in ranks:
            raise CorruptError(
                f"{step} contains two files of the same rank: {ranks[tensor, pipeline, expert].file} and {file}."
            )
        words = (_STATE.fullmatch(key) for key in value if isinstance(key, str))
        states = {int(word[1] or 0): value[word[0]] for word in words if word}
        if not states or not all(isinstance(state, dict) for state in states.values()):
            raise CorruptError(f"{file} has no state dict under the key 'model', where Megatron-LM writes it.")
        tensors = {stage: tensors_in(state) for stage, state in states.items()}
        if not any(tensors.values()) and any(state for state in states.values()):
            raise UnsupportedError(
                f"{file} was written by a Megatron-LM release without Megatron-core: its state dict is nested.",
                "First convert it to Megatron-core with Megatron-LM's tools/checkpoint.",
            )
        if expert and any(_GROUPED.fullmatch(name) for state in tensors.values() for name in state):
            raise UnsupportedError(
                f"{file} contains the experts of one rank in one tensor; other files contain the experts of other "
                "ranks.",
                "Save it with --ckpt-format torch_dist.",
            )
        shared = _size(args, "tensor_model")
        if _size(args, "expert_tensor", shared) != shared and _size(args, "expert_model") > 1:
            raise UnsupportedError(
                f"{file} has {shared} tensor-parallel ranks, but {_size(args, 'expert_tensor')} for experts.",
                "Save it with --ckpt-format torch_dist.",
            )
        ranks[tensor, pipeline, expert] = _Rank(tensor, pipeline, expert, file, tensors)
    sizes = [max([*(key[axis] for key in ranks), sizes_in_files.get(_KINDS[axis], 1) - 1]) + 1 for axis in range(3)]
    cells = itertools.product(*map(range, sizes))
    missing = [cell for cell in itertools.islice(cells, len(ranks) + 1) if cell not in ranks]
    if missing:
        raise CorruptError(
            f"{step} lacks the file of rank {missing[0]} (tensor, pipeline, expert) in a layout of "
            f"{' × '.join(map(str, sizes))} ranks.",
            "Copy the files of all ranks.",
        )
    return [ranks[key] for key in sorted(ranks)]


def _arguments(value: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return the arguments of the training in a file; none if it has none."""
    args = value.get("args")
    state = args.state[0] if type(args) is Opaque and args.cls == _NAMESPACE and len(args.state) == 1 else None
    return state if isinstance(state, dict) else {}


def parallel_sizes(value: Mapping[Any, Any]) -> dict[str, int]:
    """Return the number of ranks of each kind in the training, as far as the file has it."""
    args = _arguments(value)
    return {kind: _size(args, kind) for kind in _KINDS if type(args.get(f"{kind}_parallel_size")) is int}


def _size(args: Mapping[Any, Any], kind: str, default: int = 1) -> int:
    """Return the number of parallel ranks of a kind in the arguments."""
    size = args.get(f"{kind}_parallel_size")
    return size if type(size) is int else default


def _joined(step: Location, ranks: Sequence[_Rank]) -> Parts:
    """Return the tensors of all ranks, with layers and experts numbered consecutively."""
    parts = Parts(step.path)
    first = [rank for rank in ranks if not rank.tensor and not rank.expert]
    # Stages follow one another: the first virtual stages of all ranks, then the second ones.
    stages = sorted((stage, rank.pipeline) for rank in first for stage in rank.states)
    layers = {(stage, rank.pipeline): _count(_LAYER, state) for rank in first for stage, state in rank.states.items()}
    starts = dict(zip(stages, itertools.accumulate((layers[key] for key in stages), initial=0), strict=False))
    experts = max((_count(_EXPERT, state) for rank in first for state in rank.states.values()), default=0)
    for pipeline, expert in sorted({(rank.pipeline, rank.expert) for rank in ranks}):
        group = [rank for rank in ranks if (rank.pipeline, rank.expert) == (pipeline, expert)]
        for stage in sorted({stage for rank in group for stage in rank.states}):
            rank_states = [rank.states.get(stage, {}) for rank in group]
            parts.check_same_names(rank_states, [rank.file for rank in group])
            if (stage, pipeline) not in starts:
                raise CorruptError(
                    f"{group[0].file} contains 'model{stage}', but the first rank of its stage does not."
                )
            for name in rank_states[0]:
                if _LEFT_OUT not in name:
                    new = _moved(_EXPERT, _moved(_LAYER, name, starts[stage, pipeline]), expert * experts)
                    _add(parts, name, new, [state[name] for state in rank_states])
    return parts


def _add(parts: Parts, name: str, new: str, shares: Sequence[LazyTensor]) -> None:
    """Add the shares of the tensor-parallel ranks of one tensor."""
    share = next((share for pattern, share in _SHARES if pattern.fullmatch(name)), -1)
    if len(shares) == 1 or share is _WHOLE:
        for tensor in shares:
            parts.add_whole(new, tensor)
    elif share == -1:
        for rank, tensor in enumerate(shares):
            parts.add_whole(f"{rank}.{new}", tensor)
    else:
        parts.add_whole(new, parts.joined(new, shares, share))


def _count(pattern: re.Pattern[str], names: Iterable[str]) -> int:
    return max((int(match[2]) + 1 for match in map(pattern.fullmatch, names) if match), default=0)


def _moved(pattern: re.Pattern[str], name: str, by: int) -> str:
    """Return `name` with its number of a layer or expert increased by `by`."""
    match = pattern.fullmatch(name)
    return f"{match[1]}{int(match[2]) + by}{match[3]}" if match else name


def _facts(ranks: Sequence[_Rank], opened: Sequence[TorchFile]) -> dict[str, Any]:
    sizes = {
        called: max(getattr(rank, axis) for rank in ranks) + 1
        for called, axis in (("TP", "tensor"), ("PP", "pipeline"), ("EP", "expert"))
    }
    value = opened[0].value
    step = value.get("iteration") if isinstance(value, dict) else None
    iteration = {"iteration": step} if type(step) is int else {}
    return {**iteration, **{name: size for name, size in sizes.items() if size > 1}, "files": len(opened)}


def _of_megatron(file: LoneFile) -> bool:
    if file.get("args") is not None:
        sizes = parallel_sizes(file.tree)
        if sizes:
            return max(sizes.values()) > 1
    is_optimizer = file.place.name.startswith("distrib_optim") and any(
        matching(pattern, file.place.parent.name) for pattern in _RANKS
    )
    return is_optimizer or is_numbered(file.place.parent, *_RANKS)


# Files that are one of many, and the paths to give in their place.
LONE = (
    LoneKind(
        "belongs to one of several model-parallel ranks of Megatron-LM.",
        "Specify the directory of the step and a map that joins the ranks, for example: ckptconv convert {} OUTPUT "
        "--map megatron-llama",
        _of_megatron,
        up=2,
        lies=lambda place: any(matching(pattern, place.parent.name) for pattern in _RANKS),
    ),
)
