"""An optimizer's states by the names of its parameters, whichever program saved them. Pure.

torch numbers an optimizer's parameters. Names are in `param_names`, since torch 2.6, or FSDP puts them in the place of
the numbers. Otherwise `formats.numbers` decides which names the numbers have.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.formats.numbers.orders import may_be_trained
from ckptconv.formats.optimizers import entries, is_optimizer_alone, optimizers_in
from ckptconv.formats.wrappers import wrapper
from ckptconv.pickles.children import walk
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.text import name_of, quoted, some

if TYPE_CHECKING:
    from ckptconv.formats.numbers.matching import Model, Named, Numbers

_STATE, _GROUPS, _STEP = "state", "param_groups", "step"
# Optimizers' names for their states.
_STATES = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "step", "param", "fp32_param"})
_LONGEST_NAME = 60
# LBFGS has this state once, for all parameters in one row.
_JOINED = "prev_flat_grad"
# bitsandbytes' codes of 8 bits, one for each element of a parameter.
_CODES = "state1"
# The suffixes of Adafactor's states of rows and columns.
_FACTORS = ("_row", "_col")


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
                raise CorruptError(f"{where}: two of its optimizers have a state of {quoted(name, _LONGEST_NAME)}.")
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


# ------------------------------------------------------------------------------------------------------------ numbers


def optimizers_alone(tree: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the optimizers of a checkpoint without weights: it is the state dict of one, or holds some next to epochs,
    schedulers and random states. Return none if it has other tensors that may be weights."""
    if is_optimizer_alone(tree):
        return [("", tree)]
    optimizers = optimizers_in(tree)
    names = {name for name, _ in optimizers}
    others = walk({name: value for name, value in entries(tree).items() if name not in names})
    return [] if any(isinstance(leaf, LazyTensor) and may_be_trained(leaf.dtype) for leaf in others) else optimizers


def named(
    optimizers: Sequence[tuple[str, Mapping[str, Any]]], model: Model, where: str
) -> tuple[dict[str, Any], Named]:
    """Return the states of `optimizers` of a model, by parameter, and their groups; and the numbers' names and source.

    Each of several optimizers has some of the parameters. Raise UnsupportedError if the parameter of a state is
    unknown, CorruptError if two optimizers have a state of one parameter.
    """
    from ckptconv.formats.numbers import matching  # most optimizers have names, or are not converted

    trees, numbered, numbering = [], [], matching.Named()
    for at, (label, optimizer) in enumerate(optimizers):
        tree: dict[str, Any] = {_STATE: _states(optimizer, model.shapes), _GROUPS: _groups(optimizer)}
        if _JOINED in {key for state in tree[_STATE].values() for key in state}:
            raise UnsupportedError(
                f"{where} holds an optimizer with one state for all its parameters, such as LBFGS: it has no states by "
                "parameter.",
                "Convert only the weights.",
            )
        ids = [number for group in optimizer.get(_GROUPS, ()) for number in listed(group.get("params"))]
        if all(map(_is_number, (*optimizer[_STATE], *ids))):
            recorded = recorded_names(optimizer)
            names = recorded and matching.confirmed(recorded, tree[_STATE], numbers_of(tree), model)
            if recorded and not names:
                # Names of another model would be numbered in its order.
                model = model._replace(orders=[order for order in model.orders if order.is_asked])
                if not model.orders:
                    why = "the names in its groups do not match the model's names and the shapes of the states"
                    raise matching.refusal(numbers_of(tree), model, f"{where}: {_called([label])}", why)
            tree = renamed(tree, names or {number: f"{at}/{number}" for number in (*tree[_STATE], *map(str, ids))})
            if not names:
                numbered.append((label, tree))
        trees.append(tree)
    if numbered:
        joined = {
            _STATE: {number: state for _, tree in numbered for number, state in tree[_STATE].items()},
            _GROUPS: [group for _, tree in numbered for group in tree[_GROUPS]],
        }
        others = {name for tree in trees if not any(tree is entry for _, entry in numbered) for name in _named_in(tree)}
        left = {name: shape for name, shape in model.shapes.items() if name not in others}
        called = _called([label for label, _ in numbered])
        numbering = matching.named(numbers_of(joined), model._replace(shapes=left), f"{where}: {called}")
        others.update(numbering.names)
        trees = [renamed(_of(tree, others), numbering.names) for tree in trees]
    states: dict[str, Any] = {}
    for tree in trees:
        twice = next((name for name in tree[_STATE] if name in states), None)
        if twice is not None:
            raise CorruptError(f"{where}: two of its optimizers have a state of {quoted(twice, _LONGEST_NAME)}.")
        states.update(tree[_STATE])
    groups = [group for tree in trees for group in tree[_GROUPS]]
    by_name = _unwrapped({_STATE: states, _GROUPS: groups}, model)
    if states and model.shapes and not any(name in model.shapes or name in model.aliases for name in by_name[_STATE]):
        shown = some([*by_name[_STATE]])
        raise UnsupportedError(f"{where} has states of {shown}, but the model has no parameters with these names.")
    return by_name, numbering


def _called(labels: Sequence[str]) -> str:
    """Return the optimizers under `labels` as messages call them."""
    under = " and ".join(dict.fromkeys(f"{label!r}" for label in labels if label))
    return f"the {'set of optimizers' if len(labels) > 1 else 'optimizer'}{f' under {under}' * bool(under)}"


def _of(states: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the states and groups of the parameters in `names` alone."""
    groups = [{**group, "params": [name for name in group["params"] if name in names]} for group in states[_GROUPS]]
    return {_STATE: {name: state for name, state in states[_STATE].items() if name in names}, _GROUPS: groups}


def _is_number(key: Any) -> bool:
    return type(key) is int or (type(key) is str and key.isdecimal())


def is_numbered(tree: Any, parameters: Collection[str]) -> bool:
    """Whether an optimizer has states by the numbers of its parameters, nested, and none by a parameter's name."""
    states = tree.get(_STATE) if isinstance(tree, Mapping) else None
    return (
        isinstance(states, Mapping)
        and bool(states)
        and all(map(_is_number, states))
        and not any(name_of(number) in parameters for number in states)
    )


def _named_in(tree: Mapping[str, Any]) -> Iterable[str]:
    return [*tree[_STATE], *(name for group in tree[_GROUPS] for name in group["params"])]


def recorded_names(optimizer: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the names that the groups of an optimizer record for its numbers; None if they record none."""
    groups = [group for group in listed(optimizer.get(_GROUPS)) if isinstance(group, Mapping)]
    numbers = [listed(group.get("params")) for group in groups]
    names = [listed(group.get("param_names")) for group in groups]
    if not groups or not any(names) or [*map(len, names)] != [*map(len, numbers)]:
        return None
    pairs = zip(numbers, names, strict=True)
    flat = [pair for group in pairs for pair in zip(*group, strict=True)]
    recorded = {name_of(number): name_of(name) for number, name in flat}
    if len(recorded) < sum(map(len, numbers)):
        return None
    return recorded if {*map(str, optimizer[_STATE])} <= recorded.keys() else None


def numbers_of(by_name: Mapping[str, Any]) -> Numbers:
    """Return the numbers of an optimizer, and the shapes of their parameters, as far as the states show them. `by_name`
    has the form of `by_parameter`."""
    from ckptconv.formats.numbers.matching import Numbers

    shapes = {number: shape for number, state in by_name[_STATE].items() if (shape := _shape(state)) is not None}
    groups = [group["params"] for group in by_name[_GROUPS]]
    unlisted = by_name[_STATE].keys() - {number for group in groups for number in group}
    # MuonWithAuxAdam, Keller Jordan's and DeepSpeed's, sorts the parameters of such a group by size.
    is_sorted = [group.get("use_muon") is True for group in by_name[_GROUPS]]
    return Numbers(groups, {**dict.fromkeys(unlisted), **shapes}, is_sorted)


def _unwrapped(by_name: dict[str, Any], model: Model) -> dict[str, Any]:
    """Return states and groups without the prefix of a wrapper, if the optimizer was given the wrapper's parameters and
    the save has the model's own weights."""
    names = [*dict.fromkeys(_named_in(by_name))]
    known = {*model.shapes, *model.aliases}
    left = len(wrapper(names, known))
    bare = {name: name[left:] for name in names}
    return renamed(by_name, bare) if all(name in known for name in bare.values()) else by_name


def _shape(state: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the shape of a parameter by its states; None if they have none, or several. Factored ones have shapes of
    their own, and the two factors of a square parameter look like states of a vector. bitsandbytes nests a dict.
    """
    if any(map(is_factor, state)):
        return None
    inner = [nested for nested in state.values() if isinstance(nested, Mapping)]
    state = {**state, **{key: value for nested in inner for key, value in nested.items()}}
    codes = state.get(_CODES)
    if isinstance(codes, LazyTensor):
        return codes.shape
    tensors = [value for key, value in state.items() if isinstance(value, LazyTensor) and key != _STEP]
    shapes = {tensor.shape for tensor in tensors if tensor.shape}
    return shapes.pop() if len(shapes) == 1 else None


def is_factor(key: Any) -> bool:
    """Whether a state has the name of a factor, whose shape is not that of its parameter."""
    return str(key).endswith(_FACTORS)
