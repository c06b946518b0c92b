"""An optimizer's states by the names of its parameters, whichever program saved them. Pure.

torch numbers an optimizer's parameters, and FSDP puts names in the place of the numbers. `numbering` says what names
those that are left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.features.optimizer_states.numbering import Model, Named, Order, naming
from ckptconv.formats.optimizers import entries, is_optimizer, optimizers_in
from ckptconv.formats.wrappers import wrapper
from ckptconv.pickles.children import walk
from ckptconv.tensors.dtypes import DType
from ckptconv.tensors.lazy import LazyTensor, same_bytes
from ckptconv.text import name_of, quoted, some

_STATE, _GROUPS = "state", "param_groups"
# Optimizers' names for their states.
_STATES = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "step", "param", "fp32_param"})
_LONGEST_NAME = 60
# The entry of a group with the rest of optax's states, which Orbax saved as one tree for all parameters.
_OF_OPTAX = "opt_state"
# LBFGS has this state once, for all parameters in one row.
_JOINED = "prev_flat_grad"
# The running statistics of a normalization in torch, all together. They are buffers, not parameters.
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


# ----------------------------------------------------------------------------------------------------- nested or flat


def by_parameter(trees: Iterable[tuple[str, Any]], weights: Collection[str], where: str) -> dict[str, Any] | None:
    """Return the optimizers' states by parameter, and groups: {"state": {name: {key: value}}, "param_groups": […]}.

    `trees` are the optimizers, each with the prefix of its parameters' names. States and groups are nested, or flat
    with the parameter's name in the key (flatten_optimizer_state_dict). Megatron puts the state before the parameter;
    the names of the `weights` show which it is. Return None if there is no state, and no group of `weights` without
    states, as plain SGD has. Raise CorruptError if two optimizers have a state of the same parameter.
    """
    states: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for prefix, tree in trees:
        if not isinstance(tree, Mapping):
            continue
        for name, state in _states(tree, weights).items():
            name = prefix + name
            if name in states:
                raise CorruptError(f"{where}: two of its optimizers contain a state of {quoted(name, _LONGEST_NAME)}.")
            states[name] = state
        groups += ({**group, "params": [prefix + name for name in group["params"]]} for group in _groups(tree))
    is_told = states or any(name in weights for group in groups for name in group["params"])
    return {"state": states, "param_groups": groups} if is_told else None


def _states(tree: Mapping[Any, Any], weights: Collection[str]) -> dict[str, dict[str, Any]]:
    states: dict[str, dict[str, Any]] = {}
    nested = tree.get(_STATE)
    if isinstance(nested, Mapping):
        for name, state in nested.items():
            states[name_of(name)] = dict(state) if isinstance(state, Mapping) else {_STATE: state}
    elif isinstance(nested, list):
        states.update((str(name), state) for name, state in enumerate(nested) if isinstance(state, dict))
    flat = _flat(tree, _STATE)
    split = _state_first if _is_state_first(flat, weights) else _state_last
    for key, value in flat.items():
        name, state = split(key)
        if name:
            states.setdefault(name, {})[state] = value
    return states


def _state_first(key: str) -> tuple[str, str]:
    state, _, name = key.partition(".")
    return name, state


def _state_last(key: str) -> tuple[str, str]:
    name, _, state = key.rpartition(".")
    return name, state


def _is_state_first(flat: Collection[str], weights: Collection[str]) -> bool:
    """Return whether flat keys are <state>.<parameter> rather than <parameter>.<state>."""
    ways = [sum(split(key)[0] in weights for key in flat) for split in (_state_first, _state_last)]
    return ways[0] > ways[1] or (not any(ways) and bool(flat) and all(_state_first(key)[1] in _STATES for key in flat))


def _groups(tree: Mapping[Any, Any]) -> list[dict[str, Any]]:
    nested = tree.get(_GROUPS)
    groups = [
        {**group, "params": [name_of(name) for name in listed(group.get("params", group.get("param_names")))]}
        for group in (nested if isinstance(nested, list) else ())
        if isinstance(group, Mapping)
    ]
    settings: dict[str, dict[str, Any]] = {}
    for key, value in _flat(tree, _GROUPS).items():
        name, setting = _state_last(key)
        if name:
            settings.setdefault(name, {})[setting] = value
    # Parameters with equal settings were in one group, or might have been.
    for name, values in settings.items():
        values.pop("params", None)
        group = next((group for group in groups if {**group, "params": None} == {**values, "params": None}), None)
        if group is None:
            group = {**values, "params": []}
            groups.append(group)
        group["params"].append(name)
    return groups


def listed(value: Any) -> list[Any]:
    """Return a list unchanged, and [] for other values."""
    return value if isinstance(value, list) else []


def _flat(tree: Mapping[Any, Any], word: str) -> dict[str, Any]:
    """Return the entries of flat keys that begin with `word`, such as state.layer.weight.exp_avg, without that word."""
    return {
        key[len(word) + 1 :]: value for key, value in tree.items() if type(key) is str and key.startswith(f"{word}.")
    }


def renamed(states: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return states and groups, in the form of `by_parameter`, with names in the place of numbers: {number: name}."""
    groups = [{**group, "params": [names.get(name, name) for name in group["params"]]} for group in states[_GROUPS]]
    return {_STATE: {names.get(name, name): state for name, state in states[_STATE].items()}, _GROUPS: groups}


# ------------------------------------------------------------------------------------------------------- of a model


def parameters(model: Mapping[str, Any]) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """Return the tensors that may be parameters: floating and complex ones, each tied one once, without the statistics
    of normalizations; and the other names of tied ones, {alias: name}."""
    first_names: dict[Any, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in model.items():
        if isinstance(tensor, LazyTensor) and may_be_trained(tensor.dtype) and not is_statistic(name, model):
            key = same_bytes(tensor)
            kept = first_names.setdefault(name if key is None else key, name)
            if kept != name:
                aliases[name] = kept
    return {name: model[name] for name in first_names.values()}, aliases


def model_of(weights: Mapping[str, Any], tree: Any = None) -> Model:
    """Return a model by its `weights`, whose order is that of its state dict, if `tree` is one and shows it."""
    trainable, aliases = parameters(weights)
    saved = None if tree is None else Order("the order of the state dict", [*weights])
    return Model({name: tensor.shape for name, tensor in trainable.items()}, aliases, saved=saved, tree=tree)


def may_be_trained(dtype: DType) -> bool:
    """Return whether a parameter of a dtype can have gradients."""
    return dtype.kind in ("f", "c")


def is_statistic(name: str, names: Iterable[str]) -> bool:
    """Return whether a tensor is certainly a buffer: one of a module's complete running statistics."""
    module, _, last = name.rpartition(".")
    prefix = f"{module}." if module else ""
    return last in STATISTICS and all(f"{prefix}{statistic}" in names for statistic in STATISTICS)


def optimizers_alone(tree: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the optimizers of a checkpoint without weights: it is the state dict of one, or holds some next to epochs,
    schedulers and random states. Return none if it has other tensors that may be weights."""
    if _is_alone(tree):
        return [("", tree)]
    optimizers = optimizers_in(tree)
    names = {name for name, _ in optimizers}
    others = walk({name: value for name, value in entries(tree).items() if name not in names})
    return [] if any(isinstance(leaf, LazyTensor) and may_be_trained(leaf.dtype) for leaf in others) else optimizers


def _is_alone(tree: Any) -> bool:
    """Return whether a whole checkpoint is the state dict of an optimizer, maybe without groups."""
    if not isinstance(tree, Mapping) or not is_optimizer({_GROUPS: [], **tree}):
        return False
    return bool(tree[_STATE] or tree.get(_GROUPS)) and all(
        isinstance(state, Mapping) for state in tree[_STATE].values()
    )


def named(
    optimizers: Sequence[tuple[str, Mapping[str, Any]]], model: Model, where: str
) -> tuple[dict[str, Any], Named]:
    """Return the states of `optimizers` of a model, by parameter, and their groups; and the names of numbers, and their
    source.

    Each of several optimizers has some of the parameters. Raise UnsupportedError if the parameter of a state is
    unknown, CorruptError if two optimizers have a state of one parameter.
    """
    trees = []
    for _, optimizer in optimizers:
        tree: dict[str, Any] = {_STATE: _states(optimizer, model.shapes), _GROUPS: _groups(optimizer)}
        if _JOINED in {key for state in tree[_STATE].values() for key in state}:
            raise UnsupportedError(
                f"{where} contains an optimizer with a single state for all parameters, such as LBFGS, but states "
                "per parameter are required.",
                "Convert only the weights.",
            )
        trees.append(tree)
    numbering = Named()
    if any(is_by_number(optimizer) for _, optimizer in optimizers):
        trees, numbering = naming(f"{where}: the optimizer").named(optimizers, trees, model, where)
    states: dict[str, Any] = {}
    for tree in trees:
        twice = next((name for name in tree[_STATE] if name in states), None)
        if twice is not None:
            raise CorruptError(f"{where}: two of its optimizers contain a state of {quoted(twice, _LONGEST_NAME)}.")
        states.update(tree[_STATE])
    groups = [group for tree in trees for group in tree[_GROUPS]]
    by_name = _unwrapped({_STATE: states, _GROUPS: groups}, model)
    if states and model.shapes and not any(name in model.shapes or name in model.aliases for name in by_name[_STATE]):
        shown = some([*by_name[_STATE]])
        raise UnsupportedError(f"{where} contains states of {shown}, but the model has no parameters with these names.")
    return by_name, numbering


def check_not_optax(optimizer: Mapping[str, Any] | None, where: str, advice: str) -> None:
    """Raise UnsupportedError, with `advice`, for states of optax, which optimizers of torch have under other names."""
    if optimizer is not None and any(_OF_OPTAX in group for group in optimizer[_GROUPS]):
        names = sorted({key for state in optimizer[_STATE].values() for key in state})
        raise UnsupportedError(
            f"{where} contains optax optimizer states, {some(names)}. Optimizers of torch and DeepSpeed expect other "
            "names, and a step count per parameter.",
            advice,
        )


def is_by_number(optimizer: Mapping[str, Any]) -> bool:
    """Return whether an optimizer's states and groups have numbers for parameters, no names."""
    return all(map(_is_number, (*optimizer[_STATE], *members(optimizer))))


def members(optimizer: Mapping[str, Any]) -> list[Any]:
    """Return the numbers or names of the parameters in an optimizer's groups."""
    return [number for group in optimizer.get(_GROUPS, ()) for number in listed(group.get("params"))]


def _is_number(key: Any) -> bool:
    return type(key) is int or (type(key) is str and key.isdecimal())


def is_numbered(tree: Any, parameters: Collection[str]) -> bool:
    """Return whether an optimizer has nested states by numbers of parameters, and none by a parameter's name."""
    states = tree.get(_STATE) if isinstance(tree, Mapping) else None
    return (
        isinstance(states, Mapping)
        and bool(states)
        and all(map(_is_number, states))
        and not any(name_of(number) in parameters for number in states)
    )


def _named_in(tree: Mapping[str, Any]) -> Iterable[str]:
    return [*tree[_STATE], *(name for group in tree[_GROUPS] for name in group["params"])]


def _unwrapped(by_name: dict[str, Any], model: Model) -> dict[str, Any]:
    """Return states and groups without the prefix of a wrapper, if the optimizer was given the wrapper's parameters and
    the save has the model's own weights."""
    names = [*dict.fromkeys(_named_in(by_name))]
    known = {*model.shapes, *model.aliases}
    left = len(wrapper(names, known))
    bare = {name: name[left:] for name in names}
    return renamed(by_name, bare) if all(name in known for name in bare.values()) else by_name
