"""What a part is, beside its tensors: which layers and experts it has of how many, and what modules are called in it.
Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ckptconv.features.model_parts import places


class Renaming(NamedTuple):
    """What tensors and modules of a checkpoint are called in a part.

    `component` is the one that the part is, "" for all. `experts` has for each module with experts the new number of
    each that is kept, and `layers` those of layers of the stack at `place`.
    """

    component: str = ""
    experts: Mapping[str, Mapping[int, int]] = {}
    place: str = ""
    layers: Mapping[int, int] = {}

    def of(self, name: str, is_module: bool = False) -> str | None:
        """Return the new name of a tensor, or the new path of a module, which may lack its beginning; None if it is not
        in the part. Raise ValueError for a path that may be of several modules with experts."""
        if self.component in ("text", "vision"):
            within = places.named_in(self.component, name)
            other = "vision" if self.component == "text" else "text"
            if not within and (not is_module or places.is_beside(name) or places.named_in(other, name)):
                return None
            name = within or name
        if self.experts and (found := places.expert_in(name)):
            module, number, rest = found
            numbers = self.experts.get(module) or self._experts_at(module) if is_module else self.experts.get(module)
            if numbers is not None and number not in numbers:
                return None
            if numbers is not None:
                name = ".".join(filter(None, (module, "experts", str(numbers[number])))) + rest
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
        """Whether any layer or expert that is kept has another number, or modules have other paths."""
        every = [self.layers, *self.experts.values()]
        return bool(self.component) or any(old != new for each in every for old, new in each.items())


class Facts(NamedTuple):
    """What a configuration has to say of a part.

    `layers` is how many the model has, without those that predict further tokens, and `kept` are the numbers of those
    in the part, these included, in their new order; None: all of them. `further` is how many layers predict further
    tokens, `experts` how many each module has, and `vocabulary` how many rows, each before and in the part.
    """

    renaming: Renaming = Renaming()
    layers: int = 0
    total: int = 0
    kept: tuple[int, ...] | None = None
    further: tuple[int, int] = (0, 0)
    experts: tuple[int, int] | None = None
    vocabulary: tuple[int, int] | None = None

    @property
    def kept_layers(self) -> tuple[int, ...]:
        """The numbers of the layers in the part but for those that predict further tokens."""
        return tuple(number for number in self.kept or () if number < self.layers)

    @property
    def is_beginning(self) -> bool:
        """Whether the layers that are kept are the first ones, in their order."""
        return self.kept_layers == tuple(range(len(self.kept_layers)))
