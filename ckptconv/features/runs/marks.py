"""Markers of trainers: files that are written last, files that name a step, and names that a step has until it is
complete."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import NamedTuple

from ckptconv.features.runs import trainer
from ckptconv.features.runs.registered import MARKING
from ckptconv.features.runs.run import Run
from ckptconv.features.runs.step import Step
from ckptconv.formats.run_names import LATEST_UNIVERSAL
from ckptconv.text import some

# Markers of programs whose steps have no format of their own.
_OTHERS = ("checkpoint_manifest.json", "_SUCCESS", "COMMITTED")


class Marks(NamedTuple):
    """The verdict of a step's markers: `says` whether it is complete, None if it has none; `which` names the markers,
    or the problem."""

    says: bool | None = None
    which: str = ""


def marks_of(run: Run) -> dict[str, Marks]:
    """Return the marks of each step. A marker is missed where several steps of the run have it: not every release of
    its writer leaves it."""
    markers = [*dict.fromkeys(marker for module in MARKING for marker in import_module(module).MARKERS), *_OTHERS]
    names = {step.name: {path.rpartition("/")[2] for path in step.files} for step in run.steps}
    usual = [marker for marker in markers if sum(marker in inner for inner in names.values()) > 1]
    last = _last_named(run)
    marks = {}
    for step in run.steps:
        inner = names[step.name]
        against = "; ".join(_against(step, inner, usual, last))
        own = [marker for marker in markers if marker in inner]
        own += [pointer for pointer, name in run.pointers.items() if name == step.name]
        marks[step.name] = Marks(False, against) if against else Marks(True, ", ".join(own)) if own else Marks()
    return marks


def _last_named(run: Run) -> tuple[str, Step] | None:
    """Return the first file that names the last complete step, with that step."""
    steps = {step.name: step for step in run.steps}
    pointers = ((name, steps.get(step)) for name, step in run.pointers.items() if name != LATEST_UNIVERSAL)
    return next(((name, step) for name, step in pointers if step), None)


def _against(step: Step, names: set[str], usual: Sequence[str], last: tuple[str, Step] | None) -> Iterator[str]:
    """Yield the reasons to believe that a step was not finished."""
    if step.is_named_unfinished:
        yield "its name marks an unfinished step"
    if not step.is_made_here:
        missed = [marker for marker in usual if marker not in names]
        if missed:
            yield f"it lacks {some(missed, form=str)}, which other steps have"
        unfinished = trainer.unfinished(step.name, {*names, *missed})
        if unfinished:
            yield unfinished
    if last and step.number is not None and last[1].number is not None and step.number > last[1].number:
        yield f"{last[0]} refers to {last[1].name}, an earlier step"
