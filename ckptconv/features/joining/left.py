"""Counts what is next to the model of a checkpoint, and says in notes and warnings what is left out. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from ckptconv.features.joining.names import left_by_key, named
from ckptconv.text import count_of, some

# The noun of what is no tensor.
VALUE = "value"


@dataclass
class Left:
    """Counts of the rest next to the model, by the key of its part, and by noun; `optimizers` are the keys of
    optimizers."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    optimizers: set[str] = field(default_factory=set)

    def add(self, key: str, noun: str, *, is_state: bool) -> None:
        """Count a tensor or another value in the part `key`; `is_state` is whether it belongs to an optimizer."""
        self.counts.setdefault(key, Counter())[noun] += 1
        if is_state:
            self.optimizers.add(key)

    def without(self, keys: Collection[str]) -> Left:
        return Left({key: counts for key, counts in self.counts.items() if key not in keys}, self.optimizers - {*keys})

    def messages(self) -> tuple[list[str], list[str]]:
        """Return notes and warnings on the rest: tensors outside an optimizer are worth a warning."""
        notes: list[str] = []
        warnings: list[str] = []
        for surprising, messages in ((False, notes), (True, warnings)):
            keys = [
                key
                for key, counts in self.counts.items()
                if (key not in self.optimizers and bool(counts.keys() - {VALUE})) is surprising
            ]
            if keys:
                parts = some(keys, form=lambda key: f"{named(key)} ({_counted(self.counts[key])})")
                messages.append(left_by_key(parts, keys, bool(self.optimizers) and not surprising))
        return notes, warnings


def _counted(counts: Counter[str]) -> str:
    return ", ".join(count_of(count, noun) for noun, count in sorted(counts.items()))
