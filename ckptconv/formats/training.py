"""What a training goes on from: the optimizer's states by parameter, and how many steps it has made."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from ckptconv.errors import CkptconvError, UnsupportedError, UsageError
from ckptconv.formats.dcp.paths import listed
from ckptconv.formats.ranks.optimizer import matched
from ckptconv.formats.source import Source
from ckptconv.formats.values import first_bytes
from ckptconv.options.table import Options
from ckptconv.structure import keymap
from ckptconv.tensors.lazy import LazyTensor, same_bytes
from ckptconv.text import some

# Keys under which training checkpoints keep the weights.
_WEIGHTS = ("state_dict", "model_state_dict", "model", "module")
_STATE, _GROUPS = "state", "param_groups"
_UNPACK = {"float32": "<f", "float64": "<d", "int32": "<i", "int64": "<q"}
# The name under which an optimizer is, and its state dict.
_Optimizer: TypeAlias = tuple[str, Mapping[str, Any]]
FRESH = "Give --fresh-optimizer for zero moments in their place."


def weights_key(tree: Any) -> str:
    """Return the key that selects the weights in a training checkpoint; "" if there is none."""
    return next((key for key in _WEIGHTS if _holds_names(tree, key)), "")


def _holds_names(tree: Any, key: str) -> bool:
    return isinstance(tree, Mapping) and isinstance(tree.get(key), Mapping) and bool(tree[key])


def with_training(source: Source, options: Options) -> Source:
    """Return `source` with its optimizer's states by parameter name, and its step, if it holds an optimizer and
    `options` do not ask for a fresh one. A ZeRO checkpoint has them already, unless it is for another stage.

    In a file that torch.save wrote, the optimizer is beside the weights. Read one value: the step. Raise
    UnsupportedError if nothing tells which states are of which parameter, UsageError if nothing tells where the weights
    are.
    """
    if source.training is not None and not options.zero_stage:
        return source
    key = options.key or weights_key(source.weights)
    beside = optimizers_in(source.weights, key) if isinstance(source.weights, Mapping) else []
    if beside and key in ("", "."):
        raise UsageError(
            f"{source.path} holds an optimizer under {beside[0][0]!r}, and nothing tells where its model is. Nothing "
            "was written.",
            f"Name the model with --key; there are: {some(list(map(str, source.weights)))}.",
        )
    if options.fresh_optimizer:
        return source
    try:
        optimizer = source.states()
    except CkptconvError as error:
        error.hint = error.hint if FRESH in error.hint else f"{error.hint} {FRESH}".strip()
        raise
    if optimizer is None and beside:
        optimizer = _named(beside, keymap.flatten(_below(source.weights, key))[0], source.path)
    if optimizer is None:
        return source
    step = next((state["step"] for state in optimizer[_STATE].values() if "step" in state), None)
    return replace(source, optimizer=optimizer, step=_number(step, options.storage_options))


def optimizers_in(tree: Mapping[Any, Any], key: str = "") -> list[_Optimizer]:
    """Return the optimizers in a training checkpoint whose weights are under `key`, with the names they are under."""
    return [
        (str(name), optimizer)
        for name, value in tree.items()
        if name != key
        for optimizer in (value if isinstance(value, (list, tuple)) else [value])
        if _is_optimizer(optimizer)
    ]


def _below(tree: Any, key: str) -> Any:
    """Return what is under `key`, a name or names joined with dots; {} if there is nothing."""
    if isinstance(tree, Mapping) and key in tree:
        return tree[key]
    for name in key.split("."):
        tree = tree.get(name, {}) if isinstance(tree, Mapping) else {}
    return tree


def _is_optimizer(value: Any) -> bool:
    if not isinstance(value, Mapping) or not isinstance(value.get(_STATE), Mapping):
        return False
    groups = value.get(_GROUPS)
    return isinstance(groups, list) and bool(groups) and all(isinstance(group, Mapping) for group in groups)


def _named(found: list[_Optimizer], model: Mapping[str, LazyTensor], path: str) -> dict[str, Any]:
    """Return the state dict of the only optimizer in the file at `path`, with names in the place of numbers.

    torch numbers parameters in the order in which they were given to the optimizer; since release 2.6 it can name them
    too. Numbers are believed if there is one assignment to the `model`'s tensors, and no other, by which all states
    have the shapes of their parameters.
    """
    if len(found) > 1:
        raise UnsupportedError(
            f"{path} holds {len(found)} optimizers ({some([name for name, _ in found])}), and a universal checkpoint "
            "has one. Nothing was written.",
            FRESH,
        )
    ((at, optimizer),) = found
    groups = [dict(group) for group in optimizer[_GROUPS]]
    states = {key: value for key, value in optimizer[_STATE].items() if isinstance(value, Mapping)}
    numbers = [[each if type(each) is int else str(each) for each in listed(group.get("params"))] for group in groups]
    names = [listed(group.pop("param_names", None)) for group in groups]
    if not all(type(number) is int for own in numbers for number in own):
        names = numbers
    elif [len(own) for own in names] != [len(own) for own in numbers]:
        known: dict[Any, str] = {}
        for name, tensor in model.items():
            if tensor.dtype.kind == "f":
                key = same_bytes(tensor)
                known.setdefault(name if key is None else key, name)
        shapes = [[_shape(states.get(number)) for number in own] for own in numbers]
        fitting = matched(shapes, [(name, model[name].shape) for name in known.values()])
        if fitting is None:
            raise UnsupportedError(
                f"{path}: the optimizer under {at!r} numbers its {sum(map(len, numbers))} parameters, and their shapes "
                f"are not those of the model's {len(known)} tensors in this order and no other: nothing tells which "
                "states are of which parameter. Nothing was written.",
                "Name the parameters in the training run: torch.optim.AdamW(model.named_parameters()). " + FRESH,
            )
        names = fitting
    texts = [list(map(str, own)) for own in names]
    every = [name for own in texts for name in own]
    by_number = dict(zip([number for own in numbers for number in own], every, strict=True))
    return {
        _STATE: {by_number[number]: dict(state) for number, state in states.items() if number in by_number},
        _GROUPS: [{**group, "params": own} for group, own in zip(groups, texts, strict=True)],
    }


def _shape(state: Any) -> tuple[int, ...] | None:
    """Return the shape of a parameter by its states; None if it has none yet."""
    tensors = [value for key, value in (state or {}).items() if isinstance(value, LazyTensor) and key != "step"]
    return tensors[0].shape if tensors else None


def _number(value: Any, storage_options: Mapping[str, Any]) -> int | None:
    """Return a step as a number; None if there is none."""
    if isinstance(value, LazyTensor) and value.numel == 1 and value.dtype.name in _UNPACK:
        (value,) = struct.unpack(_UNPACK[value.dtype.name], first_bytes(value, value.nbytes, storage_options)[0])
    return int(value) if type(value) in (int, float) and 0 <= value < 1 << 53 else None
