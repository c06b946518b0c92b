"""Give tensors the names and the chunks under which Megatron-core stores them. Pure.

Source: `sharded_state_dict` of megatron/core/transformer/{transformer_block,transformer_layer}.py and moe/experts.py,
and models/gpt/gpt_layer_specs.py, of Megatron-core 0.16 to 0.19. Layers that are all alike are one tensor, with the
number of the layer as its first axis, and a chunk for each; layers of several kinds keep their numbers in names. The
experts of a layer are one tensor, with a chunk for each. Modules with a matrix also have an object, `_extra_state`,
which is empty unless they compute with 8-bit floats; the loader asks for each.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.features.joining.chunks import Box
from ckptconv.features.joining.names import named
from ckptconv.features.megatron_core.arguments import ADAPTER
from ckptconv.tensors.lazy import Concat, LazyTensor, View
from ckptconv.text import count_of, some

# Values of `to`: for Megatron-core's own layers, and for those of Transformer Engine.
LOCAL, TRANSFORMER_ENGINE = "megatron", "megatron-te"
# Names that no model of Megatron-core has.
_FOREIGN = re.compile(r".*\.(?:[qkvo]|qkv|gate|up|gate_up|down)_proj\.", re.DOTALL)
_LAYER = re.compile(r"((?:.+\.)?decoder\.layers)\.(\d+)\.(.+)", re.DOTALL)
# A layer that predicts further tokens keeps its number.
_FURTHER = re.compile(r"((?:.+\.)?mtp\.layers\.\d+\.transformer_layer)\.(.+)", re.DOTALL)
# Experts one by one: of a grouped matrix, and of a list of modules.
_EXPERT = re.compile(
    r"(?P<above>.*mlp\.experts)\.(?:(?P<grouped>linear_fc[12]\.(?:weight|bias))(?P<number>\d+)"
    r"|local_experts\.(?P<index>\d+)\.(?P<module>linear_fc[12]\.(?:weight|bias)))",
    re.DOTALL,
)
_EXPERTS = re.compile(r".*mlp\.experts\.experts\.linear_fc[12]\.(?:weight|bias)", re.DOTALL)
_STACKED = re.compile(r"(?:.+\.)?decoder\.layers\.(?!\d+\.).+", re.DOTALL)
# Modules with an `_extra_state`: of Megatron-core's own layers, and, of Transformer Engine's, norms too.
_LINEAR = re.compile(r"(?:.+\.)?(?:linear_\w+|eh_proj)", re.DOTALL)
_NORM = re.compile(r"(?:.+\.)?(?:\w*layernorm|enorm|hnorm)", re.DOTALL)
_WEIGHT, _STATE = ".weight", "._extra_state"
_ROUTER, _LATENT = "mlp.router.", "self_attention.linear_kv_down_proj."
# Norms under the names of modules of their own, and under those that they have inside the matrix after them.
_ATTENTION = ("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
_MLP = ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
_QUERIES = ("self_attention.q_layernorm.", "self_attention.linear_q_up_proj.layer_norm_")
_KEYS = ("self_attention.kv_layernorm.", "self_attention.linear_kv_up_proj.layer_norm_")


class Sharded(NamedTuple):
    """Tensors under Megatron-core's names. `axes` is the number of leading axes of each along which a chunk has one
    element; `objects` are the names of the empty objects stored with them. `layers` is the number of the decoder's
    layers."""

    tensors: dict[str, LazyTensor]
    axes: dict[str, int]
    objects: list[str]
    layers: int

    def beside(self, further: Mapping[str, Sharded]) -> Sharded:
        """Return these tensors and `further` ones, whose names get the key before them."""
        tensors, axes = dict(self.tensors), dict(self.axes)
        for key, other in further.items():
            tensors |= {f"{key}.{name}": tensor for name, tensor in other.tensors.items()}
            axes |= {f"{key}.{name}": other.axes[name] for name in other.tensors}
        return self._replace(tensors=tensors, axes=axes)

    def boxes(self, name: str, chunks: int) -> Iterator[Box]:
        """Yield the chunks of a tensor; each is cut into `chunks` along its first own axis, as tensor-parallel ranks
        save them."""
        shape, axes = self.tensors[name].shape, self.axes[name]
        own = shape[axes:]
        step = max(1, -(-own[0] // chunks)) if own else 1
        starts = range(0, own[0], step) if own and own[0] else (0,)
        for cell in itertools.product(*map(range, shape[:axes])):
            for start in starts:
                size = (min(step, own[0] - start), *own[1:]) if own else ()
                yield Box((*cell, *((start, *(0 for _ in own[1:])) if own else ())), (*(1 for _ in cell), *size))


def sharded(tensors: Mapping[str, LazyTensor], implementation: str, where: str) -> Sharded:
    """Return `tensors`, by Megatron-core's names of parameters, as it stores them for layers of the `implementation`.

    Raise UnsupportedError for names of other programs, CorruptError for a layer or an expert that is missing.
    """
    foreign = next((name for name in tensors if _FOREIGN.match(name)), "")
    if foreign:
        raise UnsupportedError(
            f"{where} does not use Megatron-core's tensor names: {named(foreign)} is a name of transformers.",
            "Specify a map, such as --map megatron-llama (ckptconv maps lists them), and --size _=N, the number of "
            "padding rows to add to the vocabulary (0 for none).",
        )
    layers: dict[str, dict[int, dict[str, LazyTensor]]] = {}
    others: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        match = _LAYER.fullmatch(name)
        if match:
            layers.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = tensor
        else:
            others[name] = tensor
    placed = _joined(_further(others, implementation), where)
    axes: dict[str, int] = {}
    count = 0
    for stack, by_number in layers.items():
        count += len(by_number)
        _check_numbers(by_number, f"{where}: the layers {stack}")
        named_layers = {
            number: _joined(_renamed(by_number[number], implementation), f"{where}: {stack}.{number}")
            for number in sorted(by_number)
        }
        if _are_alike(named_layers.values()):
            for suffix in named_layers[0]:
                name = f"{stack}.{suffix}"
                placed[name] = _stack([layer[suffix] for layer in named_layers.values()])
                axes[name] = 1
        else:
            placed |= {
                f"{stack}.{number}.{suffix}": tensor
                for number, layer in named_layers.items()
                for suffix, tensor in layer.items()
            }
    for name, tensor in placed.items():
        if name not in axes:
            axes[name] = 1 if _STACKED.fullmatch(name) and tensor.shape else 0
            count = max(count, tensor.shape[0] if axes[name] else 0)
        axes[name] += bool(_EXPERTS.fullmatch(name))
        if axes[name] > len(tensor.shape):
            raise CorruptError(
                f"{where}: {named(name)} has the shape {list(tensor.shape)}, but at least "
                f"{count_of(axes[name], 'dimension')} were expected."
            )
    return Sharded(placed, axes, list(_objects(placed, axes, implementation)), count)


def is_of_expert(name: str) -> bool:
    """Return whether a tensor of this name belongs to one expert, or to all experts of a layer."""
    return bool(_EXPERT.fullmatch(name) or _EXPERTS.fullmatch(name))


def is_stacked(name: str) -> bool:
    """Return whether a tensor of this name has one element along its first axis for each layer."""
    return _STACKED.fullmatch(name) is not None


def _renamed(layer: Mapping[str, LazyTensor], implementation: str) -> dict[str, LazyTensor]:
    """Return the tensors of a layer with the names of norms that an implementation stores them under."""
    has_experts = any(name.startswith(_ROUTER) for name in layer)
    is_latent = any(name.startswith(_LATENT) for name in layer)
    inside = implementation == TRANSFORMER_ENGINE
    # Of Transformer Engine's layers, a norm is part of the matrix after it, where there is one. Megatron-core's own
    # layers are stored under these names too, but for latent attention; there, experts make no difference.
    pairs = [
        (_ATTENTION, not is_latent),
        (_MLP, not has_experts if inside else not is_latent),
        *(((_QUERIES, inside), (_KEYS, inside)) if is_latent else ()),
    ]
    renamed: dict[str, LazyTensor] = {}
    for name, tensor in layer.items():
        for pair, is_inside in pairs:
            other, own = pair if is_inside else pair[::-1]
            if name.startswith(other):
                name = own + name[len(other) :]
        renamed[name] = tensor
    return renamed


def _further(tensors: Mapping[str, LazyTensor], implementation: str) -> dict[str, LazyTensor]:
    """Return the tensors outside the decoder's layers, with the names of norms in layers for further tokens."""
    groups: dict[str, dict[str, LazyTensor]] = {}
    for name, tensor in tensors.items():
        match = _FURTHER.fullmatch(name)
        groups.setdefault(match[1] if match else "", {})[match[2] if match else name] = tensor
    return {
        f"{above}.{name}" if above else name: tensor
        for above, group in groups.items()
        for name, tensor in (_renamed(group, implementation) if above else group).items()
    }


def _joined(tensors: Mapping[str, LazyTensor], where: str) -> dict[str, LazyTensor]:
    """Return `tensors`, with one for all experts in place of one for each."""
    joined: dict[str, LazyTensor] = {}
    experts: dict[str, dict[int, LazyTensor]] = {}
    for name, tensor in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            joined[name] = tensor
            continue
        into = f"{match['above']}.experts.{match['grouped'] or match['module']}"
        experts.setdefault(into, {})[int(match["number"] or match["index"])] = tensor
    for into, by_number in experts.items():
        _check_numbers(by_number, f"{where}: the experts of {into}")
        joined[into] = _stack([by_number[number] for number in sorted(by_number)])
    return joined


def _check_numbers(numbers: Iterable[int], subject: str) -> None:
    present = sorted(numbers)
    missing = next((number for number, there in enumerate(present) if number != there), None)
    if missing is not None:
        raise CorruptError(
            f"{subject} are numbered up to {present[-1]}, but number {missing} is missing.", "Convert the whole model."
        )


def _are_alike(layers: Iterable[Mapping[str, LazyTensor]]) -> bool:
    """Return whether all layers have tensors of the same names, shapes and dtypes."""
    kinds = [{name: (tensor.shape, tensor.dtype) for name, tensor in layer.items()} for layer in layers]
    return all(kind == kinds[0] for kind in kinds)


def _stack(tensors: list[LazyTensor]) -> LazyTensor:
    """Return `tensors`, which have one shape, as one with a further first axis. Raise UnsupportedError otherwise."""
    kinds = {(tensor.shape, tensor.dtype.name) for tensor in tensors}
    if len(kinds) > 1:
        raise UnsupportedError(
            "The experts of one layer differ in shape or dtype: "
            f"{some(kinds, form=lambda kind: f'{kind[1]} {[*kind[0]]}')}."
        )
    views: list[LazyTensor] = [View(tensor, tensor.dtype, (1, *tensor.shape)) for tensor in tensors]
    return views[0] if len(views) == 1 else Concat(tuple(views), 0)


def _objects(tensors: Mapping[str, LazyTensor], axes: Mapping[str, int], implementation: str) -> Iterator[str]:
    """Yield the names of the objects of modules: the module, and a number and a count for each leading axis."""
    for name, tensor in tensors.items():
        module = name.removesuffix(_WEIGHT)
        is_norm = implementation == TRANSFORMER_ENGINE and _NORM.fullmatch(module)
        # Megatron-Bridge stores no objects of adapters.
        if module == name or ADAPTER in name or not (_LINEAR.fullmatch(module) or is_norm):
            continue
        grid = tensor.shape[: axes[name]] or (1,)
        for cell in itertools.product(*map(range, grid)):
            yield f"{module}{_STATE}/shard_{'.'.join(map(str, cell))}_{'.'.join(map(str, grid))}"
