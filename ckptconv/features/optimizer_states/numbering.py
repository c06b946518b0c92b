"""Optimizer states that are stored by the number of their parameter: the interface to the feature that names them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptconv.errors import UnsupportedError
from ckptconv.formats import registered
from ckptconv.process import lacking, needed, of_feature
from ckptconv.text import count_of

if TYPE_CHECKING:
    from ckptconv.storage.location import Location

# The feature `NUMBERS` (`formats/registered.py`) names them. `naming` in its folder has
# - `named(optimizers, trees, model, where)`: the states of labelled optimizers of a model by name, in the form of
#   `states.by_parameter`, and the names of their numbers; or UnsupportedError, which begins with `where`;
# - `attempted(numbers, model, reasons)`: the names of numbers; or None, and the reasons are added to `reasons`;
# - `numbers_of(states)`: the numbers in states of that form;
# - `recorded_names(optimizer)`: the names that an optimizer's groups record for its numbers, None if there are none;
# - `is_factor(key)`: whether the key of a state is that of a factor, whose shape is not that of its parameter.
# `matching` has `WAYS`, ways to give numbers names, for messages. `order_files` has `order_in(path, reaching)`, the
# order of the weights of a checkpoint, None if it keeps none. `beside` has `with_file(source, place, wanted)`: a source
# with the optimizer in a file next to its model; and `marked(source)`, if it is an optimizer alone, with an error.
# The beginning of a note on the source of the names of numbers.
NAMED = "The names of the optimizer's parameters were derived from"


class Order(NamedTuple):
    """Names of a model's parameters in the order of its modules, or the `architecture` in the catalogue that has them.
    `source` is the end of "from …", for messages.

    With `groups`, the names are those of each of the optimizer's groups, and nothing is matched. `is_asked`: the user
    named the order, so it holds, or is an error. `inputs` identify its files, as the inputs of a source do.
    """

    source: str
    names: Sequence[str] = ()
    architecture: str = ""
    groups: Sequence[Sequence[str]] = ()
    is_asked: bool = False
    inputs: Mapping[str, Hashable] = {}


class Model(NamedTuple):
    """The shapes of possible parameters, {name: shape}, each tensor once; other names of some of them, {alias: name};
    the known orders; and the reason why no other order is known, for a message.

    `saved` is the order in which they were saved: it is known if the names, or the state dict `tree`, show that it is
    that of the modules. Without a reason `why`, the configuration in the directory `place` may tell an order too.
    """

    shapes: Mapping[str, Any]
    aliases: Mapping[str, str] = {}
    orders: Sequence[Order] = ()
    why: str = ""
    saved: Order | None = None
    tree: Any = None
    place: Location | None = None


class Numbers(NamedTuple):
    """The numbers of the parameters in each group of the optimizers at one place, and the shapes of their states, as
    any values that can be compared. A number without a shape may have any. `sorted`: each group is sorted by shape."""

    groups: Sequence[Sequence[str]]
    shapes: Mapping[str, Any]
    sorted: Sequence[bool] = ()


class Named(NamedTuple):
    """The names of numbers, {number: name}; their source, as the end of "from …", "" if there were names already; the
    identities of the files that gave them; and the number of those left out, which are another model's."""

    names: Mapping[str, str] = {}
    source: str = ""
    inputs: Mapping[str, Hashable] = {}
    left: int = 0

    @property
    def notes(self) -> list[str]:
        """Notes for the user on the source of the names."""
        unnamed = count_of(self.left, "parameter")
        left = f" The states of {unnamed} without a name there are left out." if self.left else ""
        return [f"{NAMED} {self.source}.{left}"] if self.source else []


def part(name: str) -> Any:
    """Return the module `name` of the feature; None if it is not here."""
    return of_feature(registered.NUMBERS, name)


def naming(where: str) -> Any:
    """Return the module that names numbers. Raise UnsupportedError, which begins with `where`, if it is missing."""
    subject = f"{where} numbers its parameters: finding their names"
    return needed(registered.NUMBERS, "naming", subject, "Convert only the weights.", UnsupportedError)


def ways() -> str:
    """Return the ways to give numbers names, for a message."""
    module = part("matching")
    return str(module.WAYS) if module else str(lacking("Finding the names of numbered parameters", registered.NUMBERS))
