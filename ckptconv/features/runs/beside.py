"""Entries with a step's number that do not count as steps: outputs of this program, and further entries of one number.

Neither counts as a step, and neither is removed with one. Of several entries of one number, it is not known which one a
training goes on from: the one that adds nothing to the names of the others is the step.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ckptconv.features.runs.names import SUFFIXES, is_of_step, stem
from ckptconv.features.runs.places import inside
from ckptconv.features.runs.step import DESCRIBED, Step
from ckptconv.formats.model_files import INDEX
from ckptconv.outputs.targets import MANIFEST
from ckptconv.publish.earlier import Directory, file_made_as
from ckptconv.storage.location import Location
from ckptconv.storage.marks import CHANGED
from ckptconv.text import some

# The most names in a line.
_MOST_NAMES = 20
_DIGITS = re.compile(r"\d+")
# Ends of the names of files that hold tensors or objects, or say which files do.
_HOLDING = (*SUFFIXES, ".distcp", INDEX, ".pkl")


class Beside(NamedTuple):
    """An entry next to the steps of a run that is no step, and the reason; `like` is the step with the same number, ""
    for an output of this program."""

    step: Step
    why: str
    like: str = ""


def listed(beside: Mapping[str, str]) -> str:
    """Return the entries next to the steps in a line: each name, with the reason."""
    return some([f"{name} ({why})" for name, why in beside.items()], _MOST_NAMES, str)


def divided(steps: Sequence[Step]) -> tuple[list[Step], list[Beside]]:
    """Divide entries with the number of a step into steps, and other entries."""
    numbered = [step for step in steps if step.number is not None and not step.is_named_unfinished]
    ours = {step.name: is_ours(step) for step in _related(numbered)}
    outputs = [step for step in numbered if ours.get(step.name) and _is_output(step, numbered, ours)]
    left = [step for step in numbered if step not in outputs]
    shapes = Counter(_shape(step.name) for step in left)
    beside = [Beside(step, "an output of ckptconv") for step in outputs]
    for group in _by_number(left).values():
        first = max(
            group,
            key=lambda step: (
                not any(adds_words(step.name, other.name) for other in group),
                is_of_step(step.name),
                shapes[_shape(step.name)],
                step.bytes,
                step.name,
            ),
        )
        beside += [
            Beside(step, f"{first.name} has the same step number", first.name) for step in group if step is not first
        ]
    names = {other.step.name for other in beside}
    return [step for step in steps if step.name not in names], beside


def telling_series(steps: Sequence[Step], beside: Iterable[Beside]) -> list[Step]:
    """Return those of `steps`, and of the further entries of their numbers, whose names tell the series of a run."""
    further = [other.step for other in beside if other.like]
    of_series = Counter(series for step in further for series in step.series)
    # A single further entry of a number is not known. A name that adds words, such as checkpoint-7-best, is of its run.
    named = [*steps, *(step for step in further if any(of_series[series] > 1 for series in step.series))]
    return [
        step
        for step in named
        if step.number is not None
        and step.series
        and not step.is_named_unfinished
        and not any(adds_words(step.name, other.name) for other in named)
    ]


def adds_words(name: str, other: str) -> bool:
    """Return whether a name is `other` with more words, whatever the numbers in both.

    >>> adds_words("step-7-safetensors", "step-12"), adds_words("step-7.pt", "step-7"), adds_words("step-7", "step-12")
    (True, True, False)
    """
    (shape, own), (other_shape, inner) = ((_shape(one), _shape(stem(one))) for one in (name, other))
    if own == inner:
        return other_shape == inner != shape
    return inner in own and re.search(rf"(?<![a-z#]){re.escape(inner)}(?![a-z#])", own) is not None


def is_variant(name: str, other: str) -> bool:
    """Return whether a name is `other` with more words, or with another suffix, whatever the numbers in both."""
    return adds_words(name, other) or (_shape(stem(name)) == _shape(stem(other)) and _shape(name) != _shape(other))


def is_ours(step: Step) -> bool:
    """Return whether this program wrote all weights and states in a step."""
    if step.is_files:
        return all(is_our_file(step.at(path)) for path in step.files)
    inner = {path.partition("/")[2]: entry for path, entry in step.files.items()}
    written: Mapping[str, Any] = {}
    if MANIFEST in inner:
        written = (Directory(inside(step.home, step.name)).manifest or {}).get("files", {})
    elif not any(path.endswith(DESCRIBED) and "/" not in path for path in inner):
        return False
    return bool(written or MANIFEST not in inner) and all(
        path in written and entry.file.size == written[path]["size"]
        for path, entry in inner.items()
        if path.endswith(_HOLDING)
    )


def is_our_file(place: Location) -> bool:
    """Return whether this program wrote a file of weights that has not changed since."""
    return file_made_as(place, "weights") not in ("", CHANGED)


def _shape(name: str) -> str:
    return _DIGITS.sub("#", name.lower())


def _by_number(steps: Iterable[Step]) -> dict[int | None, list[Step]]:
    groups: dict[int | None, list[Step]] = {}
    for step in steps:
        groups.setdefault(step.number, []).append(step)
    return groups


def _related(steps: Sequence[Step]) -> list[Step]:
    """Return the steps that may be outputs by their names: another step has the number of one, or a name of which its
    name is a variant."""
    numbers = Counter(step.number for step in steps)
    names = {_shape(step.name): step.name for step in steps}
    variants = {
        shape
        for shape, name in names.items()
        if any(is_variant(name, other) for other in names.values() if other != name)
    }
    return [step for step in steps if numbers[step.number] > 1 or _shape(step.name) in variants]


def _is_output(step: Step, steps: Sequence[Step], ours: Mapping[str, bool]) -> bool:
    """Return whether a step that this program wrote is a copy of another step of the run, by its number or name."""
    name = step.name
    for other in steps:
        if other is step:
            continue
        has_number, other_is_ours = other.number == step.number, ours.get(other.name, False)
        if adds_words(name, other.name) and (has_number or re.search("[a-z]", stem(other.name).lower())):
            return True
        if not other_is_ours and has_number and not adds_words(other.name, name):
            return True
        if not other_is_ours and is_variant(name, other.name) and not adds_words(other.name, name):
            return True
    return False
