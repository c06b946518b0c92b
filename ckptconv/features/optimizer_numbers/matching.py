"""Names for an optimizer's numbers, by known orders of parameters and by shapes. Pure."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ckptconv.errors import UnsupportedError
from ckptconv.features.optimizer_numbers.orders import in_order, of_files
from ckptconv.features.optimizer_states.numbering import Model, Named, Numbers, Order
from ckptconv.formats.source import OF_REFERENCE
from ckptconv.formats.wrappers import wrapper
from ckptconv.text import count_of, some

# The most comparisons of numbered parameters with the model's.
_MOST = 1 << 20
# A way to save the names of an optimizer's groups.
_RECIPE = (
    "json.dump([[n for p in g['params'] for n, q in model.named_parameters() if q is p] for o in [optimizer] for g in "
    "o.param_groups], open('order.json', 'w'))"
)
# The caveat to an order of the model: no save records in which order a group was given its parameters.
_ASSUMED = (
    ". This is correct if each group lists its parameters in the order of model.parameters(); if not, specify the "
    "names of each group with --order"
)
# Ways to give the order of all parameters of a model.
NAMES = "a file with the names of model.named_parameters(), one per line"
CHECKPOINT = "a checkpoint of model.state_dict() saved with torch.save"
CONFIGURED = "a directory with the config.json of a transformers model"
_LAST = (
    f"the file that this line writes in the training run: {_RECIPE}. Or train with named parameters: "
    "torch.optim.AdamW(model.named_parameters())."
)


def ways(tried: Collection[str] = (), is_partial: bool = False) -> str:
    """Return the ways to give numbers names, for a message, without those that were `tried`. `is_partial`: the
    optimizer may lack some of the model's parameters."""
    left = [way for way in (NAMES, CHECKPOINT, CONFIGURED) if way not in tried]
    texts = [way + ", without the frozen ones" * (is_partial and way == NAMES) for way in left]
    return f"Specify their order with --order: {'; '.join(texts)}; or, for any optimizer, {_LAST}"


WAYS = ways()


def called(model: Model, names: Iterable[str]) -> list[str]:
    """Return the model's own names for parameters: with its wrappers' prefixes, without those of others (files have
    PEFT's), and for a tied tensor the name that stands for all."""
    known = {*model.shapes, *model.aliases}
    before = wrapper(known)
    # Parameters that are not in the files, such as those of an adapter's base model, show nothing of wrappers.
    plain = [name if name in known else of_files(name) for name in names]
    left = len(wrapper(plain, known))

    def saved(name: str) -> str:
        ways = (name, *(before[:end] + name[left:] for end in range(len(before) + 1)))
        return next((way for way in ways if way in known), name[left:])

    return [model.aliases.get(name, name) for name in map(saved, plain)]


def _in_order(numbers: Numbers) -> Numbers:
    """Return these numbers in groups that follow the model's order: a sorted group gives one for each shape."""
    groups: list[Sequence[str]] = []
    for group, is_sorted in itertools.zip_longest(numbers.groups, numbers.sorted):
        by_shape: dict[Any, list[str]] = {}
        for number in group if is_sorted else ():
            by_shape.setdefault(repr(numbers.shapes.get(number)), []).append(number)
        groups += by_shape.values() if is_sorted else [group]
    return numbers._replace(groups=groups, sorted=())


def _total(numbers: Numbers) -> int:
    return sum(map(len, numbers.groups))


def named(numbers: Numbers, model: Model, where: str) -> Named:
    """Return the names of numbered parameters among those of a model.

    The source is an order that the user asked for, or else shapes that occur once, or the first order that fits in
    exactly one way. Raise UnsupportedError, which begins with `where`, if there is none.
    """
    reasons: list[str] = []
    result = attempted(numbers, model, reasons)
    if result is None:
        is_ambiguous = any(_is_ambiguous(numbers, model, order) for order in model.orders)
        why = "; ".join(reasons) or model.why or "the parameter order is not known"
        raise refusal(numbers, model, where, why, is_ambiguous)
    return result


def confirmed(recorded: Mapping[str, str], states: Collection[str], numbers: Numbers, model: Model) -> dict[str, str]:
    """Return the names that a save records for numbers, as the model has them. Return {} if two numbers have one
    parameter, or if one with a state is not in the model, or has another shape there."""
    names = dict(zip(recorded, called(model, recorded.values()), strict=True))
    shapes = [(numbers.shapes.get(number), model.shapes.get(names[number])) for number in states]
    fits = all(shape is not None and stated in (None, shape) for stated, shape in shapes)
    return names if fits and len({*names.values()}) == len(names) else {}


def attempted(numbers: Numbers, model: Model, reasons: list[str]) -> Named | None:
    """Return the result of `named`; if there is none, return None, and add the reasons to `reasons`."""
    every = [number for group in numbers.groups for number in group]
    if len({*every}) < len(every) or not numbers.shapes.keys() <= {*every}:
        reasons.append("its groups do not list each number exactly once")
        return None
    is_asked = any(order.is_asked for order in model.orders)
    if not is_asked and (names := _by_shapes(numbers, model.shapes)) is not None:
        return Named(names, "shapes that occur once")
    for order in model.orders:
        names = _by_order(numbers, model, order)
        if names is not None:
            source = order.source if order.groups else f"{order.source}{_ASSUMED}"
            return Named(names, source, order.inputs, _total(numbers) - len(names))
        reasons.append(_misfit(numbers, model, order))
        if is_asked:
            break
    return None


def _misfit(numbers: Numbers, model: Model, order: Order) -> str:
    """Return why an order gives no names."""
    unknown = [name for name in called(model, itertools.chain(order.names, *order.groups)) if name not in model.shapes]
    left = f". These are not names of weights: {some(unknown)}. Use the names in the weights' file" if unknown else ""
    ways_to_fit = "more than one way" if _is_ambiguous(numbers, model, order) else "no way"
    subject = order.source.removeprefix("the order ")
    preposition = "" if subject != order.source else "of " if order.architecture else "in "
    return f"the order {preposition}{subject} fits the shapes of the states in {ways_to_fit}{left}"


def refusal(numbers: Numbers, model: Model, where: str, why: str, is_ambiguous: bool = False) -> UnsupportedError:
    """Return the error for numbers without names. `is_ambiguous`: an order of all parameters leaves a choice."""
    groups = f" in {len(numbers.groups)} groups" if len(numbers.groups) > 1 else ""
    hint = ways(tuple(filter(None, map(_way, model.orders))), _total(numbers) < len(model.shapes))
    if is_ambiguous and groups:
        hint = f"Specify the parameter names of each group with --order: {_LAST}"
    elif is_ambiguous:
        alone = "a file with the names of the optimizer's parameters only, in the optimizer's order, one per line"
        hint = f"Specify their names with --order: {alone}; or {_LAST}"
    return UnsupportedError(
        f"{where} numbers its {count_of(_total(numbers), 'parameter')}{groups}, and the model has "
        f"{count_of(len(model.shapes), 'tensor')}. The states cannot be matched to parameters: {why}.",
        f"{hint} In Python, ckptconv.open(PATH).tree contains the states by number.",
    )


def _way(order: Order) -> str:
    """Return the way by which an order was given or looked for; "" for one that came with the states."""
    if order.architecture or not order.is_asked:
        return CONFIGURED if order.architecture else ""
    return CHECKPOINT if any(name.startswith(OF_REFERENCE) for name in order.inputs) else NAMES


def _is_ambiguous(numbers: Numbers, model: Model, order: Order) -> bool:
    """Return whether an order of a model's parameters fits the shapes of the states in more than one way."""
    chosen = None if order.groups else _chosen(_in_order(numbers), model, _names_in(model, order))
    return chosen is not None and not chosen.is_only


def _names_in(model: Model, order: Order) -> list[str]:
    """Return the model's names in an order that is not that of groups."""
    listed = order.names or in_order(order.architecture, [*model.shapes, *model.aliases])
    return [*dict.fromkeys(called(model, listed))]


def _chosen(numbers: Numbers, model: Model, names: Iterable[str]) -> Matched | None:
    """Return the names for the groups of `numbers`, among `names` in order."""
    wanted = [[numbers.shapes.get(number) for number in group] for group in numbers.groups]
    return matched(wanted, [(name, model.shapes[name]) for name in names if name in model.shapes])


def _by_order(numbers: Numbers, model: Model, order: Order) -> dict[str, str] | None:
    """Return the names that an order gives to numbers; None if it gives none, or several. Groups for which it lists no
    names are those of another model."""
    if order.groups:
        pairs = [*zip(numbers.groups, order.groups, strict=False)] if len(numbers.groups) == len(order.groups) else []
        named_groups = [(group, called(model, names)) for group, names in pairs if names]
        groups = [group for group, _ in named_groups]
        return _paired(numbers._replace(groups=groups), [names for _, names in named_groups], model.shapes)
    ordered_names, ordered = _names_in(model, order), _in_order(numbers)
    chosen = _chosen(ordered, model, ordered_names)
    matching_names = None if chosen is None or not chosen.is_only else _pairs(ordered, chosen.groups)
    if not order.is_asked or not order.names or len(numbers.groups) == 1 or len(ordered_names) != _total(numbers):
        return matching_names
    # A user may list the names as they are numbered, group after group.
    following = iter(ordered_names)
    direct = _paired(numbers, [[next(following) for _ in group] for group in numbers.groups], model.shapes)
    if chosen is None:
        return direct
    return matching_names if direct in (None, matching_names) else None


def _paired(numbers: Numbers, groups: Sequence[Sequence[str]], model: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the names in `groups`, one by one; None unless they are the model's, with the shapes of the states."""
    names = [name for group in groups for name in group]
    if not names or [*map(len, groups)] != [*map(len, numbers.groups)] or len({*names}) < len(names):
        return None
    names_of = _pairs(numbers, groups)
    fits = all(name in model and numbers.shapes.get(number) in (None, model[name]) for number, name in names_of.items())
    return names_of if fits else None


def _pairs(numbers: Numbers, groups: Sequence[Sequence[str]]) -> dict[str, str]:
    pairs = zip(numbers.groups, groups, strict=True)
    return {number: name for group, names in pairs for number, name in zip(group, names, strict=True)}


def _by_shapes(numbers: Numbers, model: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the names of numbers, if each has a shape that occurs once. If there are as many numbers as tensors, the
    last number may have no shape. Return None if a number is left."""
    known = Counter(map(repr, model.values()))
    by_shape = {repr(shape): name for name, shape in model.items()}
    every = [number for group in numbers.groups for number in group]
    counts = Counter(repr(numbers.shapes.get(number)) for number in every)
    names_of = {
        number: by_shape[shape]
        for number in every
        if known[shape := repr(numbers.shapes.get(number))] == counts[shape] == 1
    }
    left = [number for number in every if number not in names_of]
    names = [name for name in model if name not in {*names_of.values()}]
    if len(left) == len(names) == 1 and numbers.shapes.get(left[0]) is None:
        return {**names_of, left[0]: names[0]}
    return None if left else names_of


class _Choice(NamedTuple):
    """The number of ways, at most 2, to choose the parameters so far, and the last choice: its group and name."""

    ways: int
    before: _Choice | None
    group: int = 0
    name: str = ""


class Matched(NamedTuple):
    """Names for each group, and whether no other names fit."""

    groups: list[list[str]]
    is_only: bool


def matched(groups: Sequence[Sequence[Any]], known: Sequence[tuple[str, Any]]) -> Matched | None:
    """Return names for the parameters in each of the `groups`, by their shapes, among the `known` names: in the known
    order, without the frozen ones. Return None if no names fit. A shape of None fits any; shapes may be any values that
    can be compared.

    >>> matched([[(2, 8)]], [("base", (8, 8)), ("lora_A", (2, 8)), ("lora_B", (8, 2))])
    Matched(groups=[['lora_A']], is_only=True)
    >>> matched([[(8, 8), (2, 8)], [(8,)]], [("up", (8, 8)), ("bias", (8,)), ("down", (2, 8))]).groups
    [['up', 'down'], ['bias']]
    """
    total = sum(map(len, groups))
    # By how many parameters of each group are chosen among the names so far.
    reached = {(0,) * len(groups): _Choice(1, None)}
    work = 0
    for left, (name, shape) in zip(range(len(known) - 1, -1, -1), known, strict=True):
        after: dict[tuple[int, ...], _Choice] = {}
        for at, choice in reached.items():
            if total - sum(at) <= left:
                _join(after, at, choice)
            for group, shapes in enumerate(groups):
                if at[group] < len(shapes) and shapes[at[group]] in (None, shape):
                    further = (*at[:group], at[group] + 1, *at[group + 1 :])
                    _join(after, further, _Choice(choice.ways, choice, group, name))
        reached = after
        work += len(reached) * len(groups)
        if work > _MOST:
            return Matched([], is_only=False)
    last = reached.get(tuple(map(len, groups)))
    if last is None:
        return None
    is_only = last.ways == 1
    names: list[list[str]] = [[] for _ in groups]
    while last.before is not None:
        names[last.group].append(last.name)
        last = last.before
    return Matched([shapes[::-1] for shapes in names], is_only)


def _join(reached: dict[tuple[int, ...], _Choice], at: tuple[int, ...], choice: _Choice) -> None:
    known = reached.get(at)
    reached[at] = choice if known is None else choice._replace(ways=min(choice.ways + known.ways, 2))
