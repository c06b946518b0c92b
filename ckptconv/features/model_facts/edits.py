"""Changes of a configuration, so that it is true of an output's weights; and the report of them.

A change is a function that returns a configuration as `Edited`. Features add theirs to a selection, one after another.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckptconv.errors import CorruptError
from ckptconv.features.configs.configs import QUANTIZING
from ckptconv.features.model_facts.counts import is_other
from ckptconv.formats.source import NOT_CONVERTED, Source
from ckptconv.outputs.selected import Selected
from ckptconv.text import brief, some

# The key of the change from the configuration of a model to that of one of its components.
WHOLE = "(all)"


class Row(NamedTuple):
    """A changed value of a configuration: its key, with those of the objects around it, and both values."""

    key: str
    old: Any
    new: Any


class Edited(NamedTuple):
    """A changed configuration: the changes, and sentences for the user on values that could not change, and on those of
    which it is not known whether they have to."""

    config: dict[str, Any]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


class Editor:
    """Changes one configuration. `rows` are its changes, `notes` and `warnings` further sentences for the user, and
    `counted` the nouns whose number it states."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self.counted: set[str] = set()

    def changed(self, where: str, old: Any, new: Any) -> Any:
        """Return the new value of a key."""
        if new != old:
            self.rows.append(Row(where, old, new))
        return new

    def walked(
        self,
        config: Mapping[str, Any],
        value_of: Callable[[str, Any, str, Mapping[str, Any]], Any],
        codes_of: Callable[[Any, str], Any] = lambda value, where: value,
        at: str = "",
    ) -> dict[str, Any]:
        """Return a configuration with the values that `value_of` returns for a key, its value, its place and the object
        around it, wherever that describes the language model; `codes_of` does so for the quantization of weights."""
        walked: dict[str, Any] = {}
        for key, value in config.items():
            where, new = f"{at}{key}", value
            if key in QUANTIZING:
                new = codes_of(value, where)
            elif not (isinstance(value, Mapping) and is_other(key, value)):
                new = self.changed(where, value, value_of(key, value, where, config))
                if new is value and isinstance(value, Mapping):
                    new = self.walked(value, value_of, codes_of, f"{where}.")
            walked[key] = new
        return walked

    def check(self, number: int, noun: str, keys: tuple[str, ...]) -> None:
        """Raise CorruptError if the configuration does not count the `number` of some `noun`, 0 for any."""
        if number and noun not in self.counted:
            raise CorruptError(
                f"config.json does not specify the number of {noun}, {number} in the weights: it has neither "
                f"{some(keys, form=str)} nor a list with an entry for each.",
                "Specify the configuration of the model with --config FILE, or omit config.json from the output with "
                "--no-copy-config.",
            )

    def edited(self, config: dict[str, Any]) -> Edited:
        """Return the configuration that it changed, with all that is said of it."""
        return Edited(config, tuple(self.rows), tuple(dict.fromkeys(self.notes)), tuple(self.warnings))


@dataclass(frozen=True)
class Edits:
    """Changes of a configuration, one after the other. `first` is that of another kind, before them."""

    first: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    steps: tuple[Callable[[Mapping[str, Any]], Edited], ...] = ()

    def __call__(self, config: Mapping[str, Any]) -> dict[str, Any]:
        config = self.first(config)
        for step in self.steps:
            config = step(config).config
        return config

    def rows(self, config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Return the keys of a configuration that change, each with both values."""
        rows: dict[str, tuple[Any, Any]] = {}
        config = self.first(config)
        for step in self.steps:
            edited = step(config)
            rows |= {key: (rows.get(key, (old, new))[0], new) for key, old, new in edited.rows}
            config = edited.config
        return {key: values for key, values in rows.items() if values[0] != values[1]}


def configured(
    chosen: Selected, source: Source, step: Callable[[Mapping[str, Any]], Edited], *, is_told: bool = True
) -> Selected:
    """Return `chosen` with a further change of its configuration, with notes and warnings on it, and a note on the
    changed keys: always if `is_told`, else only if a key changes."""
    before = chosen.edit if isinstance(chosen.edit, Edits) else Edits(chosen.edit or dict)
    edits = Edits(before.first, (*before.steps, step))
    chosen = chosen._replace(edit=edits)
    if source.config is None or source.reference is not None:
        return chosen
    edited = step(before(source.config))
    rows = edits.rows(source.config)
    changes = {key: [json.dumps(value, ensure_ascii=False) for value in values] for key, values in rows.items()}
    return chosen._replace(
        notes=(*chosen.notes, *([_told(edited)] if is_told or edited.rows else ()), *edited.notes),
        warnings=(*chosen.warnings, *edited.warnings),
        reporters=(*chosen.reporters, lambda chosen, stored: lambda files: {"configuration": changes}),
    )


def tensors_alone(chosen: Selected, what: str) -> Iterator[str]:
    """Yield a note if an output, called `what`, leaves out values that are no tensors."""
    if chosen.structured and (chosen.described.values or chosen.described.inert):
        values = some(chosen.described.values, form=str) or "objects of other classes"
        yield f"{NOT_CONVERTED}{values}, because {what} contains only tensors."


def _told(edited: Edited) -> str:
    if not edited.rows:
        return "config.json was not changed."
    rows = [
        f"it is {row.new} of the model" if row.key == WHOLE else f"{row.key}: {_short(row.old)} to {_short(row.new)}"
        for row in edited.rows
    ]
    return f"config.json was changed to match the part: {some(rows, len(rows), str)}."


def _short(value: Any) -> str:
    return f"{len(value):,} entries" if isinstance(value, (list, dict)) and len(value) > 4 else brief(value)
