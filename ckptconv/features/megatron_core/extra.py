"""Megatron-core's checkpoints: their content beyond that of other directories of torch.distributed.checkpoint.

Source: megatron/core/dist_checkpointing/{mapping,optimizer,serialization}.py, its strategies/{common,torch}.py and
megatron/core/optimizer/{optimizer,distrib_optimizer}.py of Megatron-core 0.5 to 0.19.

`metadata.json` names the backend. `common.pt` is a dict of the values that all ranks shared; from release 0.19 on, it
is a ShardedObject called `common_state`. A tensor of a layer is stored in one of all layers, under the name without the
layer's number. `<key>/shard_<index>_<shape>` is a ShardedObject: a list of pickled values of a rank.
`[chained_N.]optimizer.state.<state>.<parameter>` is a state in the parameter's shape, or flattened: a distributed
optimizer cuts each shard of a parameter, as one row, wherever a rank's buffer ends.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptconv.errors import CkptconvError, CorruptError, UnsupportedError
from ckptconv.features.dcp.metadata import Description, SavedTensor, Shape
from ckptconv.features.joining.chunks import ChunkTile, join
from ckptconv.features.joining.integrity import check_file
from ckptconv.features.joining.names import is_optimizer, named
from ckptconv.features.megatron_core import fsdp
from ckptconv.features.megatron_core.alone import COMMON, CONFIG_FILE
from ckptconv.features.megatron_core.optimizers import optimizers_in
from ckptconv.formats.registered import MEGATRON
from ckptconv.formats.source import Wanted
from ckptconv.formats.torch.file import read_torch
from ckptconv.formats.torch.input_log import InputLog
from ckptconv.formats.values import number_in
from ckptconv.pickles.nodes import Global, NumpyArray, NumpyScalar, Opaque, Size, TorchConstant
from ckptconv.storage import strict_json
from ckptconv.storage.location import Location
from ckptconv.tensors.lazy import LazyTensor, Narrow, View
from ckptconv.tensors.slices import Steps, strided
from ckptconv.text import some

# The object with the values that all ranks share: a list of one dict.
COMMON_STATE = "common_state/shard_0_1"
_BACKEND_KEY, BACKEND = "sharded_backend", "torch_dist"
_VERSION_KEY, _VERSION = "sharded_backend_version", 1
# The keys in the tree for the values of common.pt, and for those of ShardedObjects.
_COMMON_KEY, _OBJECTS_KEY = "common", "objects"
# The largest metadata.json that is read, in bytes, and the deepest values that are kept.
_LARGEST, _DEEPEST = 1 << 20, 32
# The most layers of a stack, and the most shards of a parameter: far more than any model has.
_MOST_LAYERS, _MOST_SHARDS = 1 << 14, 1 << 20
# States that are the parameter itself, in fp32.
_MASTERS = ("fp32_param", "param")
# States in the buffers of a distributed optimizer: those of many parameters one after the other.
_BUFFER = re.compile(
    r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.(?:gbuf_idx_\d+\..+|param_state/.+)", re.DOTALL
)
# Weights of the experts of all ranks, which have the same names in all classes.
_GROUPED = re.compile(r".+\.mlp\.experts\.experts\.linear_fc[12]\.weight", re.DOTALL)
_LAYERS = re.compile(r"((?:.+\.)?layers)\.(?!\d+\.)(.+)", re.DOTALL)
_NAMESPACES = (Global("argparse", "Namespace"), Global("types", "SimpleNamespace"))
_KEYS = (str, int, float, bool, type(None))
# Tensors of one element that are kept as numbers: the step of an optimizer that is not distributed, and the loss scale.
_NUMBERS = ("common_step", "scale")
_KEPT = (bool, int, float, complex, str, bytes, type(None), Size, TorchConstant, NumpyScalar, NumpyArray)
# The arguments of a training that inspect shows.
_SHOWN = {
    "tensor_model_parallel_size": "TP",
    "pipeline_model_parallel_size": "PP",
    "context_parallel_size": "CP",
    "expert_model_parallel_size": "EP",
    "expert_tensor_parallel_size": "expert TP",
    "world_size": "ranks",
    "consumed_train_samples": "samples",
}


class _NotPlainError(Exception):
    """A value holds a tensor or an object."""


@dataclass
class Extra:
    """The content of a checkpoint of Megatron-core besides its tensors.

    `common` are the plain values of common.pt, or, if it `is_object`, of the object in its place; `left` names the
    values that are left out, and `rest` are all of them, except the optimizer's. `without` are weights without a
    master. `where` is the directory.
    """

    where: str
    format: str = MEGATRON
    common: dict[str, Any] = field(default_factory=dict)
    is_object: bool = False
    left: list[str] = field(default_factory=list)
    rest: list[Any] = field(default_factory=list)
    without: list[str] = field(default_factory=list)
    log: InputLog = field(default_factory=InputLog)

    def arranged(
        self,
        weights: Any,
        states: dict[str, Any] | None,
        described: Description,
        values: Mapping[str, Any],
        wanted: Wanted,
    ) -> tuple[Any, dict[str, Any] | None, CkptconvError | None]:
        """Return the `wanted` weights and states, and the reason if there are no states.

        `values` are those that were read of the `described` ones, by name. `states` is as in `Source.optimizer`, as
        stored.
        """
        shapes = {name: tensor.shape for name, tensor in described.tensors.items()}
        tree = {name: value for name, value in weights.items() if name not in values}
        error = None
        if wanted.states or wanted.master:
            error = _without_names((*described.tensors, *described.values), self.where)
            if error and wanted.master:
                raise error
        shaped = {} if states is None else _shaped_states(states["state"], described.tensors, self.where)
        if wanted.master:
            masters = _masters(tree, shaped, self.where)
            self.without = [name for name in tree if name not in masters]
            tree |= masters
        if wanted.unstack:
            tree = _unstacked(tree, {name: shapes[name] for name in tree}, self.where)
            shaped = _unstacked(shaped, {name: shapes.get(name, ()) for name in shaped}, self.where)
        beside = {name: value for name, value in values.items() if name in weights}
        if self.is_object:
            beside.pop(COMMON_STATE, None)
        objects = _Plain(self.left).take(beside)
        for key, plain_values in ((_COMMON_KEY, self.common), (_OBJECTS_KEY, objects)):
            if key in tree:
                raise UnsupportedError(
                    f"{self.where} contains a tensor called {key!r}, but the record has other values under that name."
                )
            if plain_values:
                tree[key] = plain_values
        return tree, None if states is None else {**states, "state": shaped}, error

    def notes(self) -> list[str]:
        """Return notes for the user on values that were left out, and on weights without a master."""
        sentences = []
        if self.left:
            sentences.append(f"Left out of the record, because they are not plain data: {some(self.left, form=str)}.")
        if self.without:
            sentences.append(
                f"Left at their stored precision, because they have no fp32 master: {some(self.without, form=named)}."
            )
        return sentences


# ---------------------------------------------------------------------------------------------------------- reading


def read_extra(
    place: Location, described: Description, objects: Mapping[str, Any], digests: Mapping[str, str]
) -> Extra | fsdp.Extra | None:
    """Read the content besides the tensors, if Megatron-core or Megatron-FSDP wrote the directory; else return None.

    `objects` are the checkpoint's values by name, `digests` the SHA-256 of its files by path. As in Megatron-core,
    common.pt counts if both it and `COMMON_STATE` exist. Raise UnsupportedError for tensors of another backend than
    torch_dist, UnsafeError if common.pt is an attack, CorruptError if it is damaged.
    """
    if fsdp.is_fsdp(described):
        left: list[str] = []
        return fsdp.Extra(_Plain(left).take(fsdp.shared(described, objects)), left, place.path)
    check_backend(place)
    has_common = place.has_file(COMMON)
    if not backend_of(place) and not has_common and COMMON_STATE not in objects:
        return None
    if described.nested:
        # Megatron-core's checkpoints have no paths: these are another program's files of the same names. They are
        # checked, as one reader of the directory may take them for Megatron-core's, and not used.
        objects = {}
    extra = Extra(place.path)
    extra.log.bytes_read += sum(check_file(place.join(name), digests) for name in (CONFIG_FILE, COMMON))
    common, where = None, f"{place}: {COMMON_STATE}"
    if has_common:
        torch_file = read_torch(place.join(COMMON))
        common, where = torch_file.value, torch_file.file.path
        extra.log.add(torch_file, COMMON)
    elif COMMON_STATE in objects:
        state = objects[COMMON_STATE]
        common = state[0] if type(state) is list and len(state) == 1 else state
        extra.is_object = True
    if has_common or extra.is_object:
        if type(common) not in (dict, OrderedDict):
            raise CorruptError(f"{where} does not contain the dict that Megatron-core writes.")
        extra.common = _Plain(extra.left, place.options).take(common)
        extra.rest = [value for key, value in (common or {}).items() if type(key) is not str or not is_optimizer(key)]
    return None if described.nested else extra


def check_backend(place: Location) -> None:
    """Raise UnsupportedError if metadata.json names another backend than torch_dist, or another version of it."""
    values = _configuration(place)
    backend, version = backend_of(place), values.get(_VERSION_KEY, _VERSION)
    if backend not in ("", BACKEND) or version != _VERSION:
        said = f"{backend[:100]!r}" if version == _VERSION else f"version {str(version)[:100]} of {backend[:100]!r}"
        raise UnsupportedError(
            f"{place.join(CONFIG_FILE)} records that the tensors are stored with {said}; only version {_VERSION} of "
            f"{BACKEND} is supported.",
            f"Load it in Megatron, and save it with --ckpt-format {BACKEND}.",
        )


def is_of_another_backend(place: Location) -> bool:
    """Return whether zarr, not torch, stored the tensors, in a directory for each."""
    return backend_of(place) not in ("", BACKEND)


def backend_of(place: Location) -> str:
    """Return the backend in metadata.json; "" if there is no such file of Megatron-core."""
    return _configuration(place).get(_BACKEND_KEY, "")  # type: ignore[no-any-return]


def _configuration(place: Location) -> dict[str, Any]:
    """Return the values in metadata.json; none if it is not there, or of another program."""
    entry = place.names.get(CONFIG_FILE)
    if entry is None or entry.kind != "file" or entry.file.size > _LARGEST:
        return {}
    try:
        values = strict_json.parse(place.join(CONFIG_FILE).read_text(_LARGEST))
    except ValueError:
        return {}
    return values if isinstance(values, dict) and isinstance(values.get(_BACKEND_KEY), str) else {}


def _attributes(value: Any) -> Mapping[Any, Any] | None:
    """Return the entries of a dict, or the attributes of an argparse.Namespace; None for other values."""
    if type(value) in (dict, OrderedDict):
        return value  # type: ignore[no-any-return]
    if type(value) is Opaque and value.cls in _NAMESPACES and len(value.state) == 1:
        state = value.state[0]
        return state if isinstance(state, dict) else None
    return None


@dataclass
class _Plain:
    """Takes the plain values out of nested ones; `left` names the others: tensors, objects, recursive ones. `options`
    are those of the store of tensors that are read."""

    left: list[str]
    options: Mapping[str, Any] = field(default_factory=dict)
    # The containers so far, by identity: a shared one is copied once.
    known: dict[int, Any] = field(default_factory=dict)

    def take(self, value: Any, path: str = "", depth: int = 0) -> Any:
        """Return `value` with each Namespace as a dict, and without the entries of dicts that are not plain. Raise
        _NotPlainError if nothing remains."""
        if type(value) in _KEPT:
            return value
        inner = _attributes(value)
        if depth > _DEEPEST or self.known.get(id(value)) is _NotPlainError:
            raise _NotPlainError
        if id(value) not in self.known:
            self.known[id(value)] = _NotPlainError
            if inner is not None:
                self.known[id(value)] = self._entries(inner, path, depth)
            elif type(value) in (list, tuple):
                self.known[id(value)] = type(value)(self.take(item, path, depth + 1) for item in value)
        if self.known[id(value)] is _NotPlainError:
            raise _NotPlainError
        return self.known[id(value)]

    def _entries(self, values: Mapping[Any, Any], path: str, depth: int) -> dict[Any, Any]:
        plain: dict[Any, Any] = {}
        for key, value in values.items():
            below = f"{path}.{key}" if path else str(key)
            try:
                if type(key) not in _KEYS:
                    raise _NotPlainError
                number = number_in(value, self.options) if key in _NUMBERS else value
                plain[key] = self.take(number, below, depth + 1)
            except _NotPlainError:
                self.left.append(below)
        return plain


# ------------------------------------------------------------------------------------------------------------ facts


def facts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts in a training's values that inspect shows: its iteration, its mesh, its learning rate."""
    shown_facts: dict[str, Any] = {}
    for key in ("iteration", "checkpoint_version"):
        if type(values.get(key)) in (int, float):
            shown_facts[key.replace("_", " ")] = values[key]
    inner = _attributes(values.get("args"))
    for key, shown in _SHOWN.items():
        if inner and type(inner.get(key)) is int:
            shown_facts[shown] = inner[key]
    groups = [group for optimizer in optimizers_in(values.get("optimizer")) for group in optimizer.groups]
    rates = [group["lr"] for group in (*groups, inner or {}) if group.get("lr") is not None]
    if rates and type(rates[0]) in (int, float):
        shown_facts["learning rate"] = rates[0]
    return shown_facts


# ----------------------------------------------------------------------------------------------------- the optimizer


def _without_names(names: Iterable[str], where: str) -> CkptconvError | None:
    """Return the reason why states are not converted: they are stored without the names of their parameters."""
    buffers = [name for name in names if _BUFFER.fullmatch(name)]
    if not buffers:
        return None
    return UnsupportedError(
        f"{where}: the buffers of a distributed optimizer, such as {named(buffers[0])}, contain the optimizer states "
        "without a record of which elements belong to which parameter.",
        "Leave out --optimizer and --master to convert the weights. To convert the states, load the checkpoint in "
        "Megatron and save it with --dist-ckpt-optim-fully-reshardable, which stores them by parameter.",
    )


def _shaped_states(states: Mapping[str, Any], weights: Mapping[str, SavedTensor], where: str) -> dict[str, Any]:
    """Return states by parameter, each in the shape of its parameter."""
    shaped: dict[str, Any] = {}
    for name, parameter_states in states.items():
        shaped[name] = dict(parameter_states)
        for state, value in parameter_states.items():
            if name in weights and isinstance(value, LazyTensor):
                called, shape = f"{where}: {named(f'{name}.{state}')}", weights[name].shape
                if _is_transposed(name, value, weights[name]):
                    shaped[name][state] = _transposed(_shaped(value, (*shape[:-2], shape[-1], shape[-2]), called))
                else:
                    shaped[name][state] = _shaped(value, shape, called)
    return shaped


def _is_transposed(name: str, state: LazyTensor, weight: SavedTensor) -> bool:
    """Return whether a flattened state has the last two dimensions of its parameter in the other order.

    Megatron transposes the experts of `GroupedMLP` when it saves them, as one chunk for all experts of a rank. It does
    not transpose their flattened states, which it cuts by expert. Other classes save chunks of one expert, cut like
    their states.
    """
    if not _GROUPED.fullmatch(name) or len(weight.shape) < 3 or len(state.shape) != len(weight.shape) + 1:
        return False
    *_, experts, rows, columns = weight.chunks[0].sizes if weight.chunks else weight.shape
    if not rows or not columns:
        return False
    parts = (weight.shape[-2] // rows, weight.shape[-1] // columns)
    return experts > 1 or (parts != state.shape[-3:-1] and parts[::-1] == state.shape[-3:-1])


def _transposed(tensor: LazyTensor) -> LazyTensor:
    """Return `tensor` with its last two dimensions exchanged."""
    *outer, rows, columns = range(len(tensor.shape))
    return strided(
        tensor, [0] * len(tensor.shape), [Steps(tensor.shape[dim], dim, 1) for dim in (*outer, columns, rows)]
    )


def _shaped(state: LazyTensor, shape: Shape, called: str) -> LazyTensor:
    """Return `state` in the `shape` of its parameter; raise CorruptError if it cannot have it.

    A flattened state has one row for each shard of the parameter: its shape is the grid of the shards, and the length
    of a row.
    """
    if state.shape == shape:
        return state
    *grid, length = state.shape or (0,)
    if (
        len(grid) != len(shape)
        or any(not parts or extent % parts for parts, extent in zip(grid, shape, strict=True))
        or state.numel != math.prod(shape)
        or math.prod(grid) > _MOST_SHARDS
    ):
        raise CorruptError(
            f"{called} has the shape {list(state.shape)}, but its parameter has {list(shape)}. The two come from "
            "different saves."
        )
    sizes = tuple(extent // parts for parts, extent in zip(grid, shape, strict=True))
    rows = View(state, state.dtype, (math.prod(grid), length))
    tiles = [
        ChunkTile(
            tuple(at * size for at, size in zip(cell, sizes, strict=True)),
            View(Narrow(rows, 0, number, 1), state.dtype, sizes),
        )
        for number, cell in enumerate(itertools.product(*map(range, grid)))
    ]
    return join(state.dtype, shape, tiles, lambda: called)


def _masters(weights: Mapping[str, LazyTensor], states: Mapping[str, Any], where: str) -> dict[str, LazyTensor]:
    """Return the fp32 masters of those `weights` that have one.

    Raise UnsupportedError if there are none, CorruptError if one is not fp32 or has another shape.
    """
    masters = {}
    for name, weight in weights.items():
        own_states = states.get(name, {})
        master = next((own_states[key] for key in _MASTERS if isinstance(own_states.get(key), LazyTensor)), None)
        if master is None:
            continue
        if (master.dtype.name, master.shape) != ("float32", weight.shape):
            raise CorruptError(
                f"{where}: the master of {named(name)} is {master.dtype} of shape {list(master.shape)}, but float32 of "
                f"shape {list(weight.shape)} was expected."
            )
        masters[name] = master
    if not masters:
        raise UnsupportedError(
            f"{where} contains no fp32 masters: neither optimizer.state.{_MASTERS[0]}.* nor "
            f"optimizer.state.{_MASTERS[1]}.*.",
            "Leave out --master to convert the weights as they are stored.",
        )
    return masters


# ---------------------------------------------------------------------------------------------------------- layers


def _unstacked(values: Mapping[str, Any], shapes: Mapping[str, Shape], where: str) -> dict[str, Any]:
    """Return `values`, tensors or a parameter's states by name, with one for each layer in place of one for all layers.

    `shapes` are those of the tensors or parameters. Raise UnsupportedError if the tensors of one stack have different
    numbers of layers, CorruptError for an impossible number of layers or a layer that is there twice.
    """
    unstacked: dict[str, Any] = {}
    counts: dict[str, tuple[int, str]] = {}
    for name, value in values.items():
        match, shape = _LAYERS.fullmatch(name), shapes[name]
        if match is None or not shape:
            unstacked[name] = value
            continue
        stack, suffix = match.groups()
        if not 0 < shape[0] <= _MOST_LAYERS:
            raise CorruptError(
                f"{where}: {named(name)} has {shape[0]} layers, but --unstack supports 1 to {_MOST_LAYERS}."
            )
        count, first = counts.setdefault(stack, (shape[0], name))
        if count != shape[0]:
            raise UnsupportedError(
                f"{where}: {named(first)} has {count} layers, but {named(name)} has {shape[0]}. They cannot be "
                "unstacked.",
                "Leave out --unstack.",
            )
        for layer in range(count):
            into = f"{stack}.{layer}.{suffix}"
            if into in values:
                raise CorruptError(f"{where} contains both {named(name)} and {named(into)}, a layer of the former.")
            unstacked[into] = _layer(value, layer)
    return unstacked


def _layer(value: Any, layer: int) -> Any:
    """Return one layer of a tensor, or of each tensor of a parameter's states."""
    if isinstance(value, LazyTensor):
        return View(Narrow(value, 0, layer, 1), value.dtype, value.shape[1:])
    return {key: _layer(state, layer) if isinstance(state, LazyTensor) else state for key, state in value.items()}
