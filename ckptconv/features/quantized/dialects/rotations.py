"""compressed-tensors' rotations of modules' inputs and outputs: the modules that have them, and their matrices.

Source: `transform` of 0.20. All modules of a group share one matrix of a size, which is stored with the first of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ckptconv.errors import UnsupportedError
from ckptconv.features.quantized.parts import WEIGHT
from ckptconv.features.quantized.words import is_in
from ckptconv.tensors.dtypes import SUMMED
from ckptconv.tensors.lazy import LazyTensor

OUTPUT, INPUT = "output", "input"
# Queries and keys: what multiplies one has to be undone by what multiplies the other.
_PAIR = {"q_attn": "k_cache", "k_cache": "q_attn"}
# Types of matrices that are orthogonal, if they are divided by the root of their size.
HADAMARD = ("hadamard", "random-hadamard")


class Rotation(NamedTuple):
    """A group of rotations, one of its entries, and the matrices of the group by name."""

    group: str
    settings: Mapping[str, Any]
    entry: Mapping[str, Any]
    matrices: Mapping[str, LazyTensor]

    @property
    def place(self) -> str:
        return str(self.entry["location"])

    def refused(self, why: str) -> UnsupportedError:
        rotation = f"The rotation {self.group!r} in transform_config, with the location {self.place!r},"
        return UnsupportedError(f"{rotation} {why}.", "compressed-tensors and vLLM support such rotations.")

    def modules(self, every: set[str], linear: set[str]) -> list[str]:
        """Return the names of `every` module that it is for. `linear` are those that are known to be of that class."""

        def those_of(target: str) -> set[str]:
            if target.startswith("re:"):
                return {module for module in every if is_in("^" + target.removeprefix("re:"), module)}
            if target == "Linear" and linear:
                return linear
            if target[:1].isupper() and target not in every:
                raise self.refused(
                    f"is for the class {target!r}, but the checkpoint does not specify which modules have that class"
                )
            return every & {target}

        chosen, left = (set[str]().union(*map(those_of, self.entry.get(key, ()))) for key in ("targets", "ignore"))
        if not chosen - left:
            raise self.refused("is for modules that the checkpoint lacks")
        return sorted(chosen - left)

    def matrix(self, module: str, size: int) -> str:
        """Return the name of the matrix of a module, of `size` rows and columns."""
        fitting = [name for name, matrix in self.matrices.items() if matrix.shape == (size, size)]
        own = f"{module}.{self.group}_{self.place}{WEIGHT}"
        names = [own] if own in fitting else fitting
        if len(names) != 1:
            raise self.refused(f"has {len(names)} matrices of {size} rows and columns for {module!r}; expected one")
        return names[0]


def rotations(tensors: Mapping[str, LazyTensor], groups: Mapping[str, Any]) -> tuple[list[Rotation], set[str]]:
    """Return the rotations of outputs and inputs in `groups`, in this order, and the names of all matrices.

    Raise UnsupportedError for a rotation that no weight can undo.
    """
    ends = {f"{group}_{place}": group for group in groups for place in (OUTPUT, INPUT, *_PAIR)}
    ends_of = {name: name.rpartition(".")[0].rpartition(".")[2] for name in tensors}
    stored = {name: ends[end] for name, end in ends_of.items() if end in ends}
    every: dict[str, list[Rotation]] = {OUTPUT: [], INPUT: []}
    for group, settings in groups.items():
        own = [name for name in stored if stored[name] == group and tensors[name].dtype.name in SUMMED]
        matrices = {name: tensors[name] for name in own}
        for entry in settings["apply"]:
            rotation = Rotation(group, settings, entry, matrices)
            other = _PAIR.get(rotation.place)
            if other and (settings["type"] not in HADAMARD or {**entry, "location": other} not in settings["apply"]):
                raise rotation.refused(f"is not undone by a rotation with the location {other!r}")
            if rotation.place in every and settings.get("randomize"):
                raise rotation.refused("has matrices that are permuted (randomize)")
            every.setdefault(rotation.place, []).append(rotation)
    return [*every[OUTPUT], *every[INPUT]], {*stored}


def linear_of(quantized: set[str], told: Mapping[str, Any]) -> set[str]:
    """Return the modules that are known to be of the class Linear: if a configuration says that these are quantized,
    those that are, and those that it leaves."""
    groups = (told.get("config_groups") or {}).values()
    is_told = bool(groups) and all(group.get("targets") == ["Linear"] for group in groups)
    return quantized.union(told.get("ignore") or ()) if is_told else set()
