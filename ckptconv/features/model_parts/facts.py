"""Facts of a part other than its tensors: its layers and experts, and the new names of its modules. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ckptconv.features.model_facts import places


class Renaming(NamedTuple):
    """The names of a checkpoint's tensors and modules in a part.

    `component` is the component that the part is, "" for all. `experts` has for each module with experts the new
    numbers of those that are kept, {old: new}, and `layers` those of the layers in the stack at `place`.
    """

    component: str = ""
    experts: Mapping[str, Mapping[int, int]] = {}
    place: str = ""
    layers: Mapping[int, int] = {}

    def of(self, name: str, is_module: bool = False) -> str | None:
        """Return the new name of a tensor, or the new path of a module, which may lack its beginning; None if it is not
        in the part. Raise ValueError for a path that may lead to several modules with experts."""
        if self.component in ("text", "vision"):
            within = places.named_in(self.component, name)
            counterpart = "vision" if self.component == "text" else "text"
            if not within and (not is_module or places.is_beside(name) or places.named_in(counterpart, name)):
                return None
            name = within or name
        if self.experts and (expert := places.expert_in(name)):
            module, number, suffix = expert
            numbers = self.experts.get(module) or self._experts_at(module) if is_module else self.experts.get(module)
            if numbers is not None and number not in numbers:
                return None
            if numbers is not None:
                name = ".".join(filter(None, (module, "experts", str(numbers[number])))) + suffix
        layer = places.numbered(name)
        if not self.place or not layer or places.is_beside(layer[0]) or places.is_further(layer[0]):
            return name
        place, old = layer
        if place != self.place and not (is_module and f".{self.place}".endswith(f".{place}")):
            return name
        return f"{place}.{self.layers[old]}{name[len(place) + 1 + len(str(old)) :]}" if old in self.layers else None

    def _experts_at(self, module: str) -> Mapping[int, int]:
        every = [numbers for path, numbers in self.experts.items() if not module or f".{path}".endswith(f".{module}")]
        if not every or any(numbers != every[0] for numbers in every):
            raise ValueError(f"{module} may be several modules with experts")
        return every[0]

    @property
    def moves(self) -> bool:
        """Whether any kept layer or expert has another number, or modules have other paths."""
        every = [self.layers, *self.experts.values()]
        return bool(self.component) or any(old != new for numbers in every for old, new in numbers.items())


class Facts(NamedTuple):
    """The numbers that the configuration of a part has to state.

    `layers` is how many the model has, without those that predict further tokens, and `total` with them. `kept` are the
    numbers of the layers in the part, these included, in their new order; None: all of them. `further` is how many
    layers predict further tokens, and `experts` how many each module has, each as (in the model, in the part).
    `has_head`: the part has a head apart from its embeddings.
    """

    renaming: Renaming = Renaming()
    layers: int = 0
    total: int = 0
    kept: tuple[int, ...] | None = None
    further: tuple[int, int] = (0, 0)
    experts: tuple[int, int] | None = None
    has_head: bool = False

    @property
    def kept_layers(self) -> tuple[int, ...]:
        """The numbers of the layers in the part, except those that predict further tokens."""
        return tuple(number for number in self.kept or () if number < self.layers)

    @property
    def is_beginning(self) -> bool:
        """Whether the kept layers are the first ones, in their order."""
        return self.kept_layers == tuple(range(len(self.kept_layers)))
