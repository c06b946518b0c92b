"""Makes the map of a model's adapters from the map of the model. Pure.

The second factor of an adapter has the rows of the matrix that it adapts: it is laid out like that, with the rank in
the place of the columns. The first factor has the columns: where Megatron-core joins several matrices, PEFT has a copy
of it for each. CanonicalLoRA has both factors for each matrix, as PEFT has them. But it stores the second ones of gate
and up as if each were both: the halves of each tensor-parallel rank's rows, first the upper halves of all ranks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ckptconv.errors import UnsupportedError, UsageError
from ckptconv.features.maps.chosen import ChosenMap
from ckptconv.features.maps.file import Map, parse_map
from ckptconv.features.maps.notation import MapTensor, Rule
from ckptconv.features.megatron_adapters.names import IN, OUT, PART
from ckptconv.features.megatron_adapters.training import Trained
from ckptconv.features.megatron_core.arguments import ADAPTER
from ckptconv.features.merge.peft import PREFIX
from ckptconv.text import some

MEGATRON, PEFT = "megatron", "hf"
_PROGRAMS = {MEGATRON: "Megatron-Bridge", PEFT: "PEFT"}
# The built-in maps of models whose adapters have a map.
MAPS = ("megatron-llama", "megatron-qwen2", "megatron-qwen3")
_WEIGHT = ".weight"
# The matrices that adapters change, of those that a map has.
_ADAPTED = re.compile(r"decoder\.layers\.\{l\}\.(?:self_attention\.linear_(?:qkv|proj)|mlp\.linear_fc[12])\.weight")
_RANK = "rank"
# The size of a map that is the number of tensor-parallel ranks, and the matrices that are stored in halves of each.
RANKS = "t"
_HALVED = re.compile(r".+\.mlp\.linear_fc1\.weight")


def derived(chosen: ChosenMap, side: str, where: str, *, apart: bool = False) -> ChosenMap:
    """Return the map of adapters to the names of `side`, in the place of the map of their model, for the adapters at
    `where`: of LoRA, or if they are `apart`, of CanonicalLoRA. Raise UnsupportedError for a model whose adapters have
    none."""
    if chosen.map.name not in MAPS or chosen.target not in ("", side):
        raise UnsupportedError(
            f"{where} contains adapters, but {chosen.map.name} does not map adapters to the names of "
            f"{_PROGRAMS[side]}.",
            f"The maps with adapters are {some(MAPS, form=str)}.",
        )
    return replace(chosen, map=of_adapters(chosen.map, apart=apart))


def with_ranks(chosen: ChosenMap, told: Trained) -> ChosenMap:
    """Return a map of CanonicalLoRA with the number of tensor-parallel ranks that a training states, if it does. Raise
    UsageError if another one was given."""
    ranks = told.ranks
    if type(ranks) is not int or ranks < 1:
        return chosen
    if chosen.sizes.get(RANKS, ranks) != ranks:
        raise UsageError(
            f"{told.path} specifies {ranks} tensor-parallel ranks, but --size specifies {RANKS}={chosen.sizes[RANKS]}.",
            f"Leave out --size {RANKS}.",
        )
    return replace(chosen, sizes={**chosen.sizes, RANKS: ranks})


def of_adapters(model: Map, *, apart: bool = False) -> Map:
    """Return the map of the adapters of a model that has the map `model`, one of `MAPS`."""
    side = model.side(MEGATRON)
    texts = [f"about = {_text(f'Adapters of {model.about}')}", f"source = {_text(model.words.get('source', ''))}"]
    adapted: list[MapTensor] = []
    for rule in model.rules:
        matrices = _matrices(rule, side)
        if matrices:
            joined, *others = matrices
            if apart and len(others) > 1:
                texts += [rule for matrix in others for rule in _of_part(joined, matrix)]
                continue
            adapted += matrices
            texts += [_first_factor(matrices), _second_factor(matrices)]
    axes = {word for matrix in adapted for axis in matrix.axes for word in axis.split(" ")}
    # The columns of the matrices are no axis of a factor that has axes.
    axes -= {matrix.text.rpartition(" ")[2] for matrix in adapted if matrix.dims}
    texts.append("[sizes]")
    texts += [f"{name} = {json.dumps([*model.sizes[name]])}" for name in model.sizes if name in axes]
    return parse_map("\n".join(texts) + "\n", f"{model.name}, of adapters")


def joined_matrices(model: Map) -> Iterator[list[MapTensor]]:
    """Yield the matrices of transformers that Megatron-core joins in one, for each that adapters change."""
    side = model.side(MEGATRON)
    for rule in model.rules:
        apart = _matrices(rule, side)[1:]
        if len(apart) > 1:
            yield apart


def factors_of(matrix: MapTensor, layer: str) -> tuple[str, str]:
    """Return PEFT's names of the factors of a matrix in a layer."""
    first, second = (_name(matrix, factor).replace("{l}", layer) for factor in ("lora_A", "lora_B"))
    return first, second


def _matrices(rule: Rule, side: int) -> list[MapTensor]:
    """Return the tensors of a rule if it has an adapted matrix: that of Megatron-core first."""
    joined, *others = rule.sides[side]
    return [joined, *rule.sides[1 - side]] if not others and _ADAPTED.fullmatch(str(joined.name)) else []


def _first_factor(matrices: Sequence[MapTensor]) -> str:
    joined, *apart = matrices
    names = [_name(matrix, "lora_A") for matrix in apart]
    copied = "copied = true\n" if len(names) > 1 else ""
    return f"[[rule]]\n{copied}{MEGATRON} = {_text(_of(joined, ADAPTER + IN))}\n{PEFT} = {json.dumps(names)}"


def _second_factor(matrices: Sequence[MapTensor]) -> str:
    joined, *apart = matrices
    names = [_name(matrix, "lora_B") + _rows(matrix) for matrix in apart]
    return f"[[rule]]\n{MEGATRON} = {_text(_of(joined, ADAPTER + OUT) + _rows(joined))}\n{PEFT} = {json.dumps(names)}"


def _of_part(joined: MapTensor, matrix: MapTensor) -> Iterator[str]:
    """Yield the rules of both factors of one of the matrices that are `joined`."""
    part = f"{PART}{str(matrix.name).removesuffix(_WEIGHT).rpartition('.')[2].removesuffix('_proj')}."
    halves, whole = (
        (f" : (2 {RANKS} x) {_RANK}", f" : ({RANKS} 2 x) {_RANK}") if _HALVED.fullmatch(str(joined.name)) else ("", "")
    )
    for end, factor, there, here in ((IN, "lora_A", "", ""), (OUT, "lora_B", halves, whole)):
        name = _of(joined, ADAPTER + part + end)
        yield f"[[rule]]\n{MEGATRON} = {_text(name + there)}\n{PEFT} = {_text(_name(matrix, factor) + here)}"


def _of(matrix: MapTensor, end: str) -> str:
    return str(matrix.name).removesuffix(_WEIGHT) + end


def _name(matrix: MapTensor, factor: str) -> str:
    return PREFIX + _of(matrix, f".{factor}{_WEIGHT}")


def _rows(matrix: MapTensor) -> str:
    """Return the axes of a matrix, with the rank in the place of its columns; "" if its rule only renames."""
    _, colon, axes = matrix.text.rpartition(" : ")
    return f"{colon}{axes.rpartition(' ')[0]} {_RANK}" if matrix.dims else ""


def _text(value: str) -> str:
    return json.dumps(value)
