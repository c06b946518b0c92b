"""An optimizer's states by the names of its parameters, whatever saved them. Pure.

torch numbers an optimizer's parameters in the order in which they were given to it, which is that of the model's
parameters, in each of its groups; names are in `param_names`, since torch 2.6, or FSDP puts them in place of the
numbers. Numbers are believed if there is exactly one assignment by which all states have the shapes of their
parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.formats.source import wrapper
from ckptconv.tensors.lazy import LazyTensor, Tagged, same_bytes
from ckptconv.text import name_of, quoted, some

_STATE, _GROUPS, _STEP = "state", "param_groups", "step"
# Optimizers' names for their states.
_STATES = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "step", "param", "fp32_param"})
# Comparisons of numbered parameters with the model's, at most.
_MOST = 1 << 20
_LONGEST_NAME = 60
# How Adafactor calls the rows and the columns of its states.
_FACTORS = ("_row", "_col")


# ----------------------------------------------------------------------------------------------------- nested or flat


def by_parameter(trees: Iterable[tuple[str, Any]], weights: Collection[str], where: str) -> dict[str, Any] | None:
    """Return the optimizers' states by parameter, and their groups: {"state": {name: {key: value}}, "param_groups":
    […]}.

    `trees` are the optimizers, each with the prefix of its parameters' names. States and groups are nested, or flat
    with the parameter's name in the key (flatten_optimizer_state_dict). Megatron puts the state before the parameter;
    the names of the `weights` tell. Return None if there is no state, and no group of `weights` that has none, such as
    those of plain SGD. Raise CorruptError if two optimizers have a state
    of the same parameter.
    """
    states: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for prefix, tree in trees:
        if not isinstance(tree, Mapping):
            continue
        for name, state in _states(tree, weights).items():
            name = prefix + name
            if name in states:
                raise CorruptError(f"{where}: two of its optimizers have a state of {quoted(name, _LONGEST_NAME)}.")
            states[name] = state
        groups += ({**group, "params": [prefix + name for name in group["params"]]} for group in _groups(tree))
    is_told = states or any(name in weights for group in groups for name in group["params"])
    return {"state": states, "param_groups": groups} if is_told else None


def _states(tree: Mapping[Any, Any], weights: Collection[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    nested = tree.get(_STATE)
    if isinstance(nested, Mapping):
        for name, state in nested.items():
            found[name_of(name)] = dict(state) if isinstance(state, Mapping) else {_STATE: state}
    elif isinstance(nested, list):
        found.update((str(name), state) for name, state in enumerate(nested) if isinstance(state, dict))
    flat = _flat(tree, _STATE)
    split = _state_first if _is_state_first(flat, weights) else _state_last
    for key, value in flat.items():
        name, state = split(key)
        if name:
            found.setdefault(name, {})[state] = value
    return found


def _state_first(key: str) -> tuple[str, str]:
    state, _, name = key.partition(".")
    return name, state


def _state_last(key: str) -> tuple[str, str]:
    name, _, state = key.rpartition(".")
    return name, state


def _is_state_first(flat: Collection[str], weights: Collection[str]) -> bool:
    """Whether flat keys are <state>.<parameter> rather than <parameter>.<state>."""
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
    # Parameters with equal settings were one group, or may as well have been.
    for name, own in settings.items():
        own.pop("params", None)
        group = next((group for group in groups if {**group, "params": None} == {**own, "params": None}), None)
        if group is None:
            group = {**own, "params": []}
            groups.append(group)
        group["params"].append(name)
    return groups


def listed(value: Any) -> list[Any]:
    """Return a list as it is, and none of anything else."""
    return value if isinstance(value, list) else []


def _flat(tree: Mapping[Any, Any], word: str) -> dict[str, Any]:
    """Return the entries of flat keys that begin with `word`, such as state.layer.weight.exp_avg, without it."""
    return {
        key[len(word) + 1 :]: value for key, value in tree.items() if type(key) is str and key.startswith(f"{word}.")
    }


def renamed(told: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return states and groups as `by_parameter` gives them, with names in the place of numbers: {number: name}."""
    groups = [{**group, "params": [names.get(one, one) for one in group["params"]]} for group in told[_GROUPS]]
    return {_STATE: {names.get(name, name): state for name, state in told[_STATE].items()}, _GROUPS: groups}


# ------------------------------------------------------------------------------------------------------------ numbers


def optimizers_in(tree: Any, key: str = "") -> list[tuple[str, Mapping[str, Any]]]:
    """Return the optimizers' state dicts beside the weights of a training, which are under `key`, with their names."""
    if not isinstance(tree, Mapping) or {*map(type, tree.values())} == {Tagged}:
        return []
    return [
        (name_of(name), optimizer)
        for name, value in tree.items()
        if type(value) is not Tagged and name != key
        for optimizer in (value if isinstance(value, (list, tuple)) else [value])
        if _is_optimizer(optimizer) and optimizer[_GROUPS]
    ]


def _is_optimizer(value: Any) -> bool:
    """Whether this is the state dict of an optimizer."""
    if not isinstance(value, Mapping) or not isinstance(value.get(_STATE), Mapping):
        return False
    groups = value.get(_GROUPS)
    return isinstance(groups, list) and all(isinstance(group, Mapping) for group in groups)


def is_optimizer_alone(tree: Any) -> bool:
    """Whether a whole checkpoint is the state dict of an optimizer, which may have no groups."""
    if not isinstance(tree, Mapping) or not _is_optimizer({_GROUPS: [], **tree}):
        return False
    return bool(tree[_STATE] or tree.get(_GROUPS)) and all(
        isinstance(state, Mapping) for state in tree[_STATE].values()
    )


def named(
    found: Sequence[tuple[str, Mapping[str, Any]]], model: Mapping[str, LazyTensor], where: str
) -> dict[str, Any]:
    """Return the states of the only optimizer that was `found`, by parameter, and its groups. `model` are the tensors
    whose parameters it may number.

    Raise UnsupportedError if there are more optimizers, or if nothing tells which states are of which parameter.
    """
    if len(found) > 1:
        raise UnsupportedError(
            f"{where} holds {len(found)} optimizers ({some([name for name, _ in found])}), and the states of one are "
            "converted.",
        )
    ((at, optimizer),) = found
    told = {_STATE: _states(optimizer, model), _GROUPS: _groups(optimizer)}
    numbers = [number for group in optimizer.get(_GROUPS, ()) for number in listed(group.get("params"))]
    if any(type(number) is not int for number in (*optimizer[_STATE], *numbers)):
        return told
    distinct = _distinct(model)
    names = names_by_shape(told, distinct)
    if names is None:
        called = f"the optimizer under {at!r}" if at else "the optimizer"
        raise UnsupportedError(
            f"{where}: {called} numbers its {len(numbers)} parameters, and their shapes do not fit the "
            f"model's {len(distinct)} tensors in exactly one order: nothing tells which states are of which parameter.",
            "Name the parameters in the training run: torch.optim.AdamW(model.named_parameters()).",
        )
    # An optimizer may have been made of a model in a wrapper, whose own weights were saved.
    left = len(wrapper(names.values(), model))
    bare = {number: name[left:] for number, name in names.items()}
    return renamed(told, bare if all(name in model for name in bare.values()) else names)


def names_by_shape(told: Mapping[str, Any], model: Mapping[str, LazyTensor]) -> dict[str, str] | None:
    """Return the names of numbered parameters, {number: name}, among those of the `model`, each of its tensors once;
    None if nothing tells the name of each that has a state. `told` is as `by_parameter` gives it."""
    shapes = {number: shape for number, state in told[_STATE].items() if (shape := _shape(state)) is not None}
    names = names_of_numbers(told[_GROUPS], [(shapes, [(name, tensor.shape) for name, tensor in model.items()])])
    return names if names is not None and told[_STATE].keys() <= names.keys() else None


def _distinct(model: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return what may be parameters: floating tensors, a tied one once."""
    found: dict[Any, str] = {}
    for name, tensor in model.items():
        if tensor.dtype.kind == "f":
            key = same_bytes(tensor)
            found.setdefault(name if key is None else key, name)
    return {name: model[name] for name in found.values()}


def _shape(state: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the shape of a parameter by its states; None if they have none, or several: those of 8 bits and factored
    ones have shapes of their own, and the two factors of a square parameter look like states of a vector."""
    if any(map(is_factor, state)):
        return None
    shapes = {each.shape for key, each in state.items() if isinstance(each, LazyTensor) and key != _STEP and each.shape}
    return shapes.pop() if len(shapes) == 1 else None


def is_factor(key: Any) -> bool:
    """Whether a state has the name of a factor, whose shape is not that of its parameter."""
    return str(key).endswith(_FACTORS)


def names_of_numbers(
    groups: Sequence[Mapping[str, Any]], ways: Sequence[tuple[Mapping[str, Any], Sequence[tuple[str, Any]]]]
) -> dict[str, str] | None:
    """Return the names of an optimizer's numbered parameters, {number: name}; None if nothing tells them.

    The `groups` may have them. Otherwise each of the `ways` has the shapes of parameters by number, as their states
    tell them, and the names of the model's tensors with their shapes, in order. Those that lead to names must lead to
    the same.
    """
    numbers = [[name_of(number) for number in listed(group.get("params"))] for group in groups]
    names = [listed(group.get("param_names")) for group in groups]
    if not all(names) or [len(own) for own in names] != [len(own) for own in numbers]:
        fitting = [matched([[told.get(each) for each in own] for own in numbers], known) for told, known in ways]
        found = [each for each in fitting if each is not None]
        if not found or any(each != found[0] for each in found):
            return None
        names = found[0]
    pairs = zip(numbers, names, strict=True)
    return {number: name_of(name) for own, given in pairs for number, name in zip(own, given, strict=True)}


class _Choice(NamedTuple):
    """In how many ways parameters were chosen so far, at most 2, and the last of one way: its group and name."""

    ways: int
    before: _Choice | None
    group: int = 0
    name: str = ""


def matched(groups: Sequence[Sequence[Any]], known: Sequence[tuple[str, Any]]) -> list[list[str]] | None:
    """Return the names of the parameters in each of the `groups`, by their shapes, among the `known`: in their order,
    with the frozen ones left out; None if there is no such choice, or more than one. A shape that is None may be any;
    others may be anything that can be compared.

    >>> matched([[(2, 8)]], [("base", (8, 8)), ("lora_A", (2, 8)), ("lora_B", (8, 2))])
    [['lora_A']]
    >>> matched([[(8, 8), (2, 8)], [(8,)]], [("up", (8, 8)), ("bias", (8,)), ("down", (2, 8))])
    [['up', 'down'], ['bias']]
    """
    total = sum(map(len, groups))
    # By how many parameters of each group were chosen among the names so far.
    reached = {(0,) * len(groups): _Choice(1, None)}
    work = 0
    for left, (name, shape) in zip(range(len(known) - 1, -1, -1), known, strict=True):
        after: dict[tuple[int, ...], _Choice] = {}
        for at, choice in reached.items():
            if total - sum(at) <= left:
                _join(after, at, choice)
            for group, own in enumerate(groups):
                if at[group] < len(own) and own[at[group]] in (None, shape):
                    further = (*at[:group], at[group] + 1, *at[group + 1 :])
                    _join(after, further, _Choice(choice.ways, choice, group, name))
        reached = after
        work += len(reached) * len(groups)
        if work > _MOST:
            return None
    last = reached.get(tuple(map(len, groups)))
    if last is None or last.ways != 1:
        return None
    found: list[list[str]] = [[] for _ in groups]
    while last.before is not None:
        found[last.group].append(last.name)
        last = last.before
    return [own[::-1] for own in found]


def _join(reached: dict[tuple[int, ...], _Choice], at: tuple[int, ...], choice: _Choice) -> None:
    other = reached.get(at)
    reached[at] = choice if other is None else choice._replace(ways=min(choice.ways + other.ways, 2))
