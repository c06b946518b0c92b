"""Names for an optimizer's numbers, by orders of parameters that are known and by shapes. Pure."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ckptconv.errors import UnsupportedError
from ckptconv.formats.numbers.orders import in_order, of_files
from ckptconv.formats.wrappers import wrapper
from ckptconv.text import some

# Comparisons of numbered parameters with the model's, at most.
_MOST = 1 << 20
# What lists the names of an optimizer's groups.
_RECIPE = (
    "json.dump([[n for p in g['params'] for n, q in model.named_parameters() if q is p] for o in [optimizer] for g in "
    "o.param_groups], open('order.json', 'w'))"
)
# How a note on what told the names of numbers begins.
NAMED = "The optimizer's numbers got their names by"
# What is not known of an order of the model's: no save records in which order a group was given its parameters.
_ASSUMED = (
    ". That is right if each group has its parameters in the order of model.parameters(); if not, name each group's "
    "with --order"
)
WAYS = (
    "Tell their order with --order: a file with the names of model.named_parameters(), one a line; a checkpoint that "
    "torch.save wrote of model.state_dict(); a directory with the config.json of a model of transformers; or, whatever "
    f"the optimizer was given, what this writes in the training run: {_RECIPE}. Or name the parameters there: "
    "torch.optim.AdamW(model.named_parameters())."
)


class Order(NamedTuple):
    """Names of a model's parameters in the order of its modules, or the `architecture` in the catalogue that has them,
    and what tells it, as the end of "by …".

    With `groups`, the names are those of each of the optimizer's groups, and nothing is matched. `asked`: the user
    named it, so it holds, or is an error. `inputs` identify the files that tell it, as those of a source.
    """

    told: str
    names: Sequence[str] = ()
    architecture: str = ""
    groups: Sequence[Sequence[str]] = ()
    asked: bool = False
    inputs: Mapping[str, Hashable] = {}


class Model(NamedTuple):
    """The shapes of what may be parameters, {name: shape}, each tensor once; other names of some of them, {alias:
    name}; the orders that are known of them; and why there are no others, for a message."""

    shapes: Mapping[str, Any]
    aliases: Mapping[str, str] = {}
    orders: Sequence[Order] = ()
    why: str = ""

    def called(self, names: Iterable[str]) -> list[str]:
        """Return names of parameters as the model has them: with its wrappers' prefixes, or without others, as files
        have PEFT's, and a tied one by the name that stands for all."""
        known = {*self.shapes, *self.aliases}
        before = wrapper(known)
        # Parameters that files have not, as those of a base model beside an adapter, say nothing of wrappers.
        plain = [name if name in known else of_files(name) for name in names]
        left = len(wrapper(plain, known))

        def saved(name: str) -> str:
            ways = (name, *(before[:end] + name[left:] for end in range(len(before) + 1)))
            return next((way for way in ways if way in known), name[left:])

        return [self.aliases.get(own, own) for own in map(saved, plain)]


class Numbers(NamedTuple):
    """The numbers of the parameters in each group of the optimizers at one place, and the shapes that their states
    tell; anything that can be compared. A number without a shape may have any. Groups may be `sorted` by shapes."""

    groups: Sequence[Sequence[str]]
    shapes: Mapping[str, Any]
    sorted: Sequence[bool] = ()

    def in_order(self) -> Numbers:
        """Return them in groups that have the order of the model: of sorted ones, those of each shape by themselves."""
        found: list[Sequence[str]] = []
        for group, is_sorted in itertools.zip_longest(self.groups, self.sorted):
            by_shape: dict[Any, list[str]] = {}
            for number in group if is_sorted else ():
                by_shape.setdefault(repr(self.shapes.get(number)), []).append(number)
            found += by_shape.values() if is_sorted else [group]
        return self._replace(groups=found, sorted=())

    @property
    def total(self) -> int:
        return sum(map(len, self.groups))


class Named(NamedTuple):
    """The names of numbers, {number: name}; what told them, as the end of "by …", "" if they had names; what identifies
    the files that did; and how many are left out, as those of another model."""

    names: Mapping[str, str] = {}
    told: str = ""
    inputs: Mapping[str, Hashable] = {}
    left: int = 0

    @property
    def notes(self) -> list[str]:
        """What a user should know of where the names are from."""
        left = f" It lists no names for {self.left} of the parameters: their states are left out." if self.left else ""
        return [f"{NAMED} {self.told}.{left}"] if self.told else []


def named(numbers: Numbers, model: Model, where: str) -> Named:
    """Return the names of numbered parameters among those of a model.

    An order that the user asked for tells, or else shapes that occur once, or the first order that fits in exactly one
    way. Raise UnsupportedError, which begins with `where`, if nothing tells.
    """
    reasons: list[str] = []
    found = attempted(numbers, model, reasons)
    if found is None:
        raise refusal(numbers, model, where, "; ".join(reasons) or model.why or "their order is not known")
    return found


def confirmed(recorded: Mapping[str, str], states: Collection[str], numbers: Numbers, model: Model) -> dict[str, str]:
    """Return the names that a save records for numbers as the model has them; {} if two are of one parameter, or if one
    with a state is none of the model's, or of another shape."""
    found = dict(zip(recorded, model.called(recorded.values()), strict=True))
    shapes = [(numbers.shapes.get(number), model.shapes.get(found[number])) for number in states]
    fits = all(shape is not None and own in (None, shape) for own, shape in shapes)
    return found if fits and len({*found.values()}) == len(found) else {}


def attempted(numbers: Numbers, model: Model, reasons: list[str]) -> Named | None:
    """Return what `named` does; None if nothing tells the names, and add the reasons to `reasons`."""
    every = [number for group in numbers.groups for number in group]
    if len({*every}) < len(every) or not numbers.shapes.keys() <= {*every}:
        reasons.append("its groups do not name each of its numbers once")
        return None
    is_asked = any(order.asked for order in model.orders)
    if not is_asked and (found := _by_shapes(numbers, model.shapes)) is not None:
        return Named(found, "shapes that occur once")
    for order in model.orders:
        found = _by_order(numbers, model, order)
        if found is not None:
            told = order.told if order.groups else f"{order.told}{_ASSUMED}"
            return Named(found, told, order.inputs, numbers.total - len(found))
        reasons.append(_misfit(model, order))
        if is_asked:
            break
    return None


def _misfit(model: Model, order: Order) -> str:
    """Return why an order tells nothing."""
    unknown = [name for name in model.called(itertools.chain(order.names, *order.groups)) if name not in model.shapes]
    left = f"; {some(unknown)} are no names of the weights, and it must have the names in their file" if unknown else ""
    return f"the order that is told by {order.told} fits the shapes of the states in several ways, or none{left}"


def refusal(numbers: Numbers, model: Model, where: str, why: str) -> UnsupportedError:
    """Return the error for numbers that nothing names."""
    groups = f" in {len(numbers.groups)} groups" if len(numbers.groups) > 1 else ""
    return UnsupportedError(
        f"{where} numbers its {numbers.total} parameters{groups}, the model has {len(model.shapes)} tensors, and "
        f"nothing tells which states are of which parameter: {why}.",
        WAYS,
    )


def _by_order(numbers: Numbers, model: Model, order: Order) -> dict[str, str] | None:
    """Return the names that an order gives to numbers; None if it gives none, or several. Those of groups for which it
    lists no names are of another model."""
    if order.groups:
        pairs = [*zip(numbers.groups, order.groups, strict=False)] if len(numbers.groups) == len(order.groups) else []
        own = [(group, model.called(names)) for group, names in pairs if names]
        return _paired(numbers._replace(groups=[group for group, _ in own]), [names for _, names in own], model.shapes)
    told = [*dict.fromkeys(model.called(order.names or in_order(order.architecture, [*model.shapes, *model.aliases])))]
    ordered = numbers.in_order()
    asked = [[numbers.shapes.get(number) for number in group] for group in ordered.groups]
    chosen = matched(asked, [(name, model.shapes[name]) for name in told if name in model.shapes])
    found = None if chosen is None or not chosen.is_only else _pairs(ordered, chosen.groups)
    if not order.asked or not order.names or len(numbers.groups) == 1 or len(told) != numbers.total:
        return found
    # A user may list the names as they are numbered, group after group.
    rest = iter(told)
    direct = _paired(numbers, [[next(rest) for _ in group] for group in numbers.groups], model.shapes)
    if chosen is None:
        return direct
    return found if direct in (None, found) else None


def _paired(numbers: Numbers, groups: Sequence[Sequence[str]], model: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the names in `groups`, one by one; None if they are not those of the model with the states' shapes."""
    names = [name for group in groups for name in group]
    if not names or [*map(len, groups)] != [*map(len, numbers.groups)] or len({*names}) < len(names):
        return None
    found = _pairs(numbers, groups)
    fits = all(name in model and numbers.shapes.get(number) in (None, model[name]) for number, name in found.items())
    return found if fits else None


def _pairs(numbers: Numbers, groups: Sequence[Sequence[str]]) -> dict[str, str]:
    pairs = zip(numbers.groups, groups, strict=True)
    return {number: name for own, names in pairs for number, name in zip(own, names, strict=True)}


def _by_shapes(numbers: Numbers, model: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the names of numbers of which each has a shape that occurs once; the last of as many numbers as tensors
    may have none. None if one number is left."""
    known = Counter(map(repr, model.values()))
    by_shape = {repr(shape): name for name, shape in model.items()}
    every = [number for group in numbers.groups for number in group]
    asked = Counter(repr(numbers.shapes.get(number)) for number in every)
    found = {
        number: by_shape[shape]
        for number in every
        if known[shape := repr(numbers.shapes.get(number))] == asked[shape] == 1
    }
    left = [number for number in every if number not in found]
    names = [name for name in model if name not in {*found.values()}]
    if len(left) == len(names) == 1 and numbers.shapes.get(left[0]) is None:
        return {**found, left[0]: names[0]}
    return None if left else found


class _Choice(NamedTuple):
    """In how many ways parameters were chosen so far, at most 2, and the last of one way: its group and name."""

    ways: int
    before: _Choice | None
    group: int = 0
    name: str = ""


class Matched(NamedTuple):
    """Names for each group, and whether no others fit."""

    groups: list[list[str]]
    is_only: bool


def matched(groups: Sequence[Sequence[Any]], known: Sequence[tuple[str, Any]]) -> Matched | None:
    """Return names for the parameters in each of the `groups`, by their shapes, among the `known`: in their order, with
    the frozen ones left out; None if no names fit. A shape that is None may be any; others may be anything that can be
    compared.

    >>> matched([[(2, 8)]], [("base", (8, 8)), ("lora_A", (2, 8)), ("lora_B", (8, 2))])
    Matched(groups=[['lora_A']], is_only=True)
    >>> matched([[(8, 8), (2, 8)], [(8,)]], [("up", (8, 8)), ("bias", (8,)), ("down", (2, 8))]).groups
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
            return Matched([], is_only=False)
    last = reached.get(tuple(map(len, groups)))
    if last is None:
        return None
    is_only = last.ways == 1
    found: list[list[str]] = [[] for _ in groups]
    while last.before is not None:
        found[last.group].append(last.name)
        last = last.before
    return Matched([own[::-1] for own in found], is_only)


def _join(reached: dict[tuple[int, ...], _Choice], at: tuple[int, ...], choice: _Choice) -> None:
    other = reached.get(at)
    reached[at] = choice if other is None else choice._replace(ways=min(choice.ways + other.ways, 2))
