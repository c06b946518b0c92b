"""The tensors and optimizer states of one model-parallel rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptconv.errors import CkptconvError
from ckptconv.formats.source import Training
from ckptconv.tensors.lazy import Equal, LazyTensor
from ckptconv.tensors.moves import File


@dataclass
class Weights:
    """The tensors of one model-parallel rank, by kind.

    `states` are the optimizer states by parameter, `groups` the optimizer's param_groups with names for parameters.
    """

    where: str
    stage: int | None = 0
    world: int = 1
    buffers: dict[str, LazyTensor] = field(default_factory=dict)
    frozen: dict[str, LazyTensor] = field(default_factory=dict)
    trainable: dict[str, LazyTensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    unaccounted: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    # Pairs of tensors, by name, that are stored twice and must be equal: weights, and optimizer states.
    equal: list[Equal] = field(default_factory=list)
    equal_states: list[Equal] = field(default_factory=list)
    # Pairs of states that each rank keeps for itself, and that may differ.
    alike: list[Equal] = field(default_factory=list)
    # Why the optimizer states cannot be determined, if so.
    states_error: CkptconvError | None = None

    def state_dict(self) -> dict[str, LazyTensor]:
        """Return all tensors by name, in the order in which DeepSpeed's own tool lists them."""
        weights = {**self.buffers, **self.frozen, **self.trainable}
        weights.update((alias, weights[owner]) for alias, owner in self.aliases.items())
        return weights

    def optimizer(self) -> dict[str, Any] | None:
        """Return the optimizer's state dict, with names for parameters; None if the checkpoint has none."""
        if not any(self.states.values()):
            return None
        return {"state": self.states, "param_groups": self.groups}

    def counts(self) -> dict[str, int]:
        counts = {
            "trainable": len(self.trainable),
            "frozen": len(self.frozen),
            "buffers": len(self.buffers),
            "aliases": len(self.aliases),
        }
        return {kind: count for kind, count in counts.items() if count}

    def training(self, common: Mapping[str, Any], models: Iterable[File]) -> Training:
        """Return the data that a universal checkpoint takes over: `common` are the facts in the optimizer's file about
        all parameters together, and `models` are the model files."""
        return Training(self.stage, list(self.trainable), common, list(models))

    def names(self) -> list[str]:
        """Return every name but aliases."""
        return [*self.buffers, *self.frozen, *self.trainable]

    def without_frozen(self) -> None:
        """Remove the frozen parameters and their aliases."""
        self.aliases = {alias: owner for alias, owner in self.aliases.items() if owner not in self.frozen}
        self.frozen = {}
