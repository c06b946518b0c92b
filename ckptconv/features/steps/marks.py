"""Says what the markers of trainers tell of the steps of a run.

They are files that are written last, files that name a step, and names that a step has until it is complete.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ckptconv.features.steps.run import Run, Step
from ckptconv.formats.run_names import LATEST_UNIVERSAL
from ckptconv.text import some

# Files that trainers write when a step is complete, or that say what it consists of. Not every release writes them: one
# is missed where other steps of the run have it.
MARKERS = (
    ".metadata",
    "_integrity_manifest.json",
    "integrity.json",
    "trainer_state.json",
    "ckpt_contents.json",
    "checkpoint_manifest.json",
    "checkpoint_metadata.json",
    "commit_success.txt",
    "metadata.json",
    "data.pt",
    "_SUCCESS",
    "COMMITTED",
)
# What transformers' Trainer writes before `trainer_state.json`, which it needs to go on.
_OF_TRAINER = re.compile(r"training_args\.bin|scheduler\.(?:pt|bin)|rng_state(?:_\d+)?\.pth|optimizer\.(?:pt|bin)")
_TRAINER_STATE, _TRAINER_STEP = "trainer_state.json", re.compile(r"checkpoint-\d+")


def marks_of(run: Run) -> dict[str, tuple[bool | None, str]]:
    """Return what markers say of each step, and which do."""
    names = {step.name: {path.rpartition("/")[2] for path in step.files} for step in run.steps}
    used = [marker for marker in MARKERS if sum(marker in each for each in names.values()) > 1]
    last = next(
        (
            (pointer, step)
            for pointer, name in run.pointers.items()
            if pointer != LATEST_UNIVERSAL
            for step in run.steps
            if step.name == name
        ),
        None,
    )
    found: dict[str, tuple[bool | None, str]] = {}
    for step in run.steps:
        against = list(_against(step, names[step.name], used, last))
        own = [marker for marker in MARKERS if marker in names[step.name]]
        own += [pointer for pointer, name in run.pointers.items() if name == step.name]
        found[step.name] = (False, "; ".join(against)) if against else (True, ", ".join(own)) if own else (None, "")
    return found


def _against(step: Step, names: set[str], used: Iterable[str], last: tuple[str, Step] | None) -> Iterator[str]:
    """Yield what says that a step was not finished."""
    if step.is_named_unfinished:
        yield "its name is that of a step that is being written"
    missed = [] if step.is_made_here else [marker for marker in used if marker not in names]
    if missed:
        yield f"it lacks {some(missed, form=str)}, which other steps have"
    is_of_trainer = (
        not step.is_made_here and _TRAINER_STEP.fullmatch(step.name) and any(map(_OF_TRAINER.fullmatch, names))
    )
    if is_of_trainer and _TRAINER_STATE not in (*names, *missed):
        yield f"it lacks {_TRAINER_STATE}, which the Trainer writes last"
    if last and step.number is not None and last[1].number is not None and step.number > last[1].number:
        yield f"{last[0]} names {last[1].name}, and no later step"
