"""What becomes of each step of a run: by the policy, and by what holds a step anyway. Nothing is changed."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ckptconv.errors import UsageError
from ckptconv.features.steps.run import Run, number_of, run_at
from ckptconv.features.steps.whole import Judged, Reading, judged, newest_good
from ckptconv.features.thin.area import LESSEN, LINKS, REMOVE, StrangeError, entries_of
from ckptconv.features.thin.metrics import best_of
from ckptconv.features.thin.policy import PERIODS, Candidate, Decision, Policy, decided
from ckptconv.storage.handles import Handle, resolved
from ckptconv.storage.location import Location
from ckptconv.storage.paths import is_remote, normalize
from ckptconv.text import format_time

KEEP = "keep"
# Why a step of files stays where less of others is kept.
FILE = "a file, of which nothing less is kept"


class Planned(NamedTuple):
    """A step, what is done with it, and why it stays if it does; of one that becomes a delta, the step that it is
    to be one of."""

    judged: Judged
    action: str
    why: tuple[str, ...]
    base: Judged | None = None


class Thinning(NamedTuple):
    """What is to be done with the steps of a run, the oldest first."""

    run: Run
    steps: tuple[Planned, ...]

    def of(self, *actions: str) -> list[Planned]:
        return [each for each in self.steps if each.action in actions]


def planned(run: str, options: Mapping[str, Any], stores: Mapping[str, Any], inert: bool) -> Thinning:
    """Return what `options`, those of `thin`, make of the steps of `run`. Raise UsageError if they keep nothing."""
    place = Location(normalize(run), dict(stores))
    found = run_at(place)
    every = judged(found, Reading(dict(stores), inert, each=True))
    policy = policy_of(options, every, stores)
    last = newest_good(every)
    now = time.time()
    read = {path for each in every for path in each.reads}
    candidates = [
        Candidate(
            each.step.name,
            each.step.number,
            each.step.time,
            each.is_good,
            tuple(_held(found, each, each is last, read, options["age"], now)),
        )
        for each in every
    ]
    others = LESSEN if options["drop"] or options["as_"] else REMOVE
    decisions = decided(candidates, policy)
    steps = [_planned(each, said, others) for each, said in zip(every, decisions, strict=True)]
    if options["as_"] == "delta":
        steps = [each._replace(base=_base_of(each, steps)) if each.action == LESSEN else each for each in steps]
    return Thinning(found, tuple(steps))


def _base_of(lesser: Planned, steps: Sequence[Planned]) -> Judged:
    """Return the step that stays whole and is nearest to a step, the later one of two."""
    at = steps.index(lesser)
    whole = [n for n, each in enumerate(steps) if each.action == KEEP and each.judged.is_good and not each.judged.reads]
    return steps[min(whole, key=lambda n: (abs(n - at), -n))].judged


def _planned(found: Judged, said: Decision, others: str) -> Planned:
    if said.stays:
        return Planned(found, KEEP, said.why)
    if others == LESSEN and found.step.is_made_here:
        return Planned(found, KEEP, ("already less",))
    if others == LESSEN and found.step.is_files:
        return Planned(found, KEEP, (FILE,))
    return Planned(found, others, ())


def policy_of(options: Mapping[str, Any], every: list[Judged], stores: Mapping[str, Any]) -> Policy:
    """Return the policy that options say. Raise UsageError if there is none, or if it names a step that is missing."""
    best: frozenset[str] = frozenset()
    if options["keep_best"]:
        good = {each.step.number: each.step.name for each in every if each.is_good and each.step.number is not None}
        metrics = Location(normalize(options["keep_best"]), dict(stores))
        numbers = best_of(metrics, options["metric"], options["highest"], options["best"], good)
        best = frozenset(each.step.name for each in every if each.step.number in numbers)
    policy = Policy(
        options["keep_last"] or 0,
        options["keep_every"] or 0,
        best,
        options["keep_within"],
        {period: count for period in PERIODS if (count := options[f"keep_{period}"])},
        frozenset(options["keep_step"]),
    )
    if policy.is_empty:
        raise UsageError(
            "Nothing says which steps stay, and thin would remove all but the last good one.",
            "Give --keep-last N, for one.",
        )
    known = {name for each in every for name in (each.step.name, str(each.step.number))}
    for name in policy.names - known:
        raise UsageError(f"--keep-step {name}: there is no such step.")
    return policy


def _held(run: Run, found: Judged, is_last: bool, read: Collection[str], age: int, now: float) -> Iterator[str]:
    """Yield why a step stays whatever the policy says. `read` are the directories that virtual steps are made of."""
    step = found.step
    own = os.path.realpath(step.path)
    if any(path == own or path.startswith(f"{own}/") for path in read):
        yield "other steps are made of it"
    if is_last:
        yield "the last good step"
    if step.name in run.named:
        names = [name for name, target in {**run.pointers, **run.links}.items() if target == step.name]
        yield f"{', '.join(names)} names it"
    if found.whole is None:
        yield "not read"
    elif not found.is_good:
        yield "not good"
    if step.time is None:
        yield "its age is not known"
    elif now - step.time < age:
        yield f"younger than {format_time(age)}"
    if step.links:
        yield LINKS
    elif not is_remote(run.place.path):
        yield from _strange(run, found)


def _strange(run: Run, found: Judged) -> Iterator[str]:
    """Yield what else than the files of one step, on the disk of the run, is in a step."""
    directories = {path.rpartition("/")[0] for path in found.step.files}
    inner = {name for path in directories for name in path.split("/")[1:]}
    if any(name.startswith(".") for name in inner) or sum(number_of(name) is not None for name in inner) > 1:
        yield "has more than one step's files in it"
    with Handle.open(resolved(run.place.path or ".")) as home:
        try:
            for name in found.step.names:
                entries_of(home, name)
        except StrangeError as error:
            yield error.why
