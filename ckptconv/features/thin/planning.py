"""The plan for each step of a run: by the policy, and by other reasons to keep a step. It changes nothing."""

from __future__ import annotations

import math
import os
import shlex
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from ckptconv.cli.lines import format_time
from ckptconv.cli.progress import Counting
from ckptconv.errors import CkptconvError, MissingError, StoppedError, UsageError
from ckptconv.features.companions.directory import LARGEST
from ckptconv.features.removal.area import LESSEN, REMOVE
from ckptconv.features.removal.entries import LINKS, StrangeError, entries_of
from ckptconv.features.runs.marks import Marks
from ckptconv.features.runs.names import is_padded, number_of, stem
from ckptconv.features.runs.options import READING
from ckptconv.features.runs.reading import read
from ckptconv.features.runs.run import Run, run_at
from ckptconv.features.runs.step import Step
from ckptconv.features.runs.whole import WEIGHTS, Judged, is_optimizer, judged, newest_good, opened
from ckptconv.features.thin.forms import without_forms
from ckptconv.features.thin.metrics import STATE, best_named, best_of, may_be_highest
from ckptconv.features.thin.policy import PERIODS, Candidate, Policy, reasons_to_stay
from ckptconv.formats.model_files import INDEX
from ckptconv.formats.registered import describing, is_companion_name
from ckptconv.storage.handles import Handle, resolved
from ckptconv.storage.location import Location
from ckptconv.storage.paths import is_remote, normalize
from ckptconv.text import some

KEEP = "keep"
# Why a step of files stays where others are reduced.
FILE = "a file: only directories are reduced"
# Ends of the names of files that a reduced step does not keep: weights, their indexes and databases, and pickles.
_NOT_KEPT = (*WEIGHTS, INDEX, ".pkl", ".ocdbt")


class Planned(NamedTuple):
    """A step, what is done with it, and why it stays if it does.

    Of one that is reduced, `base` is the step that it is to be a delta of, if it is to be one; `files` are the files
    that stay as they are, and `lost` those that go although they are neither weights nor the optimizer, and parts of
    the checkpoint that do.
    """

    judged: Judged
    action: str
    why: Sequence[str] = ()
    base: Judged | None = None
    files: Sequence[str] = ()
    lost: Sequence[str] = ()


class Thinning(NamedTuple):
    """The plan for the steps of a run, the oldest first, and for the entries `beside` them that were named."""

    run: Run
    steps: tuple[Planned, ...]
    beside: tuple[Planned, ...] = ()

    @property
    def every(self) -> tuple[Planned, ...]:
        return (*self.steps, *self.beside)

    def of(self, *actions: str) -> list[Planned]:
        return [step for step in self.every if step.action in actions]


def run_of(place: Location) -> Run:
    """Return the run at `place`. Raise UsageError if there is none; for a step, it says how thin removes that."""
    try:
        return run_at(place)
    except UsageError as error:
        # The newest step goes only if an older one is the last good one.
        if f"{place} is one step of a run" in error.message and run_at(place.parent).steps[-1].name != place.name:
            words = (place.parent.path or ".", "--remove", place.name)
            command = f"ckptconv thin {' '.join(map(shlex.quote, words))}"
            error.hint += f" To remove only this step, unless it is the last good one: {command}"
        raise


def planned(
    path: str, options: Mapping[str, Any], stores: Mapping[str, Any], inert: bool, progress: Counting | None = None
) -> Thinning:
    """Return the plan of `options`, those of `thin`, for the steps of the run at `path`. Raise UsageError if they keep
    nothing."""
    run = run_of(Location(normalize(path), dict(stores)))
    every = judged(run, inert=inert, each=True)
    asked = {name: options[name] for name in READING}
    if any(asked.values()):
        if progress:
            progress.begin(sum(known.step.bytes for known in every if known.is_good) * sum(asked.values()))
        every = [
            known._replace(damage=read(known, inert, **asked, progress=progress).why) if known.is_good else known
            for known in every
        ]
    beside = [
        opened(Judged(other.step, Marks()), inert) for other in run.beside if other.step.name in options["remove"]
    ]
    policy = policy_of(options, every, stores)
    for name in {*options["remove"]} - {known.step.name for known in (*every, *beside)}:
        meant = [f"--remove {shlex.quote(step.name)}" for step in run.steps if str(step.number) == name]
        raise UsageError(
            f"--remove {name}: neither a step nor an entry next to the steps has this name.",
            f"Did you mean {' or '.join(meant)}?" if meant else "",
        )
    held = held_steps(run, every, beside, options)
    candidates = [
        Candidate(known.step.name, known.step.number, known.step.time, known.is_good, tuple(held[known.step.name]))
        for known in every
        if known.step.name not in options["remove"]
    ]
    best = {**_best_of_trainer(every), **policy.best}
    reasons = held | reasons_to_stay(candidates, policy._replace(best=best))
    if policy.is_empty:
        named = options["remove"]
        reasons = {name: why if why or name in named else ["not named"] for name, why in reasons.items()}
    is_lessening = bool(options["drop"] or options["as_"])
    if is_lessening:
        goal = options["as_"] or ""
        every = [known if reasons[known.step.name] else without_forms(known, goal, inert) for known in every]
    steps = [_planned(known, reasons[known.step.name], is_lessening) for known in every]
    if options["as_"] == "delta":
        steps = [step._replace(base=_base_of(step, steps)) if step.action == LESSEN else step for step in steps]
    return Thinning(run, tuple(steps), tuple(_planned(known, held[known.step.name], False) for known in beside))


def _planned(known: Judged, reasons: Sequence[str], is_lessening: bool) -> Planned:
    if not reasons and not is_lessening:
        return Planned(known, REMOVE)
    if not reasons and known.step.is_made_here and not known.optimizer:
        return Planned(known, KEEP, ("already reduced",))
    if not reasons and known.step.is_files:
        return Planned(known, KEEP, (FILE,))
    # In a checkpoint as in files: other weights, such as an average of the model's.
    parts = [repr(part) for part, tensors in known.left.items() if any(map(_may_be_weight, tensors))]
    if not reasons and (others := [*known.others, *parts]):
        return Planned(known, KEEP, (f"reduced, it would lack {some(others, form=str)}",))
    return Planned(known, KEEP, reasons) if reasons else _reduced(known)


def _may_be_weight(tensor: Any) -> bool:
    """Return whether a tensor next to a model may be a weight, also one that was not read: numbers, counters and the
    states of random number generators are none."""
    return tensor is None or (tensor.dtype.kind not in "iub" and math.prod(tensor.shape) > 1)


def _reduced(known: Judged) -> Planned:
    """Return the plan for a step that is reduced to its weights and its small files. The optimizer goes, and pickles
    do, such as those of the scheduler and of the random numbers."""
    kept = [path for path in known.step.files if _is_kept(path, known)]
    lost = [path for path in known.step.files if path not in {*kept, *known.read} and not is_optimizer(path)]
    lost += [f"{known.step.name}/{part}" for part in known.left]
    return Planned(known, LESSEN, files=kept, lost=lost)


def _is_kept(path: str, known: Judged) -> bool:
    """Return whether the reduction of a step keeps a file unchanged."""
    above, _, name = path.rpartition("/")
    # In folders, formats describe the bytes of their tensors.
    may_describe = path in known.read and above != known.step.name
    is_small = known.step.files[path].file.size <= LARGEST
    is_other = "." in name.lstrip(".") and not name.endswith(_NOT_KEPT)
    return is_companion_name(name) or (is_other and is_small and not may_describe)


def _base_of(lesser: Planned, steps: Sequence[Planned]) -> Judged:
    """Return the step that stays whole and is nearest to a step, the later one of two."""
    at = steps.index(lesser)
    whole = [
        number
        for number, step in enumerate(steps)
        if step.action == KEEP and step.judged.is_good and made_of(step.judged.step) == ()
    ]
    return steps[min(whole, key=lambda number: (abs(number - at), -number))].judged


def policy_of(options: Mapping[str, Any], every: Sequence[Judged], stores: Mapping[str, Any]) -> Policy:
    """Return the policy that options say. Raise UsageError if there is none, or if it names a step that is missing."""
    best: dict[str, str] = {}
    if options["keep_best"]:
        good = {known.step.number for known in every if known.is_good} - {None}
        metrics = Location(normalize(options["keep_best"]), dict(stores))
        try:
            metric, values = best_of(metrics, options["metric"], options["highest"], options["best"], good)
        except MissingError as error:
            states = [known.step.at(path).path for known in reversed(every) if (path := _state_of(known.step))]
            path = (states or [f"STEP/{STATE}"])[0]
            error.hint = f"--keep-best requires a file with metrics, such as {path}; --metric selects a metric."
            raise
        if may_be_highest(metric) and not (options["highest"] or options["lowest"]):
            raise UsageError(
                f"--metric {metric}: specify whether a higher or a lower value is better.",
                "Use --highest or --lowest.",
            )
        order = "highest" if options["highest"] else "lowest; use --highest for the highest"
        best = {
            known.step.name: f"best ({metric} {values[known.step.number]:.6g}, {order})"
            for known in every
            if known.step.number in values
        }
    policy = Policy(
        options["keep_last"] or 0,
        options["keep_every"] or 0,
        best,
        options["keep_within"],
        {period: count for period in PERIODS if (count := options[f"keep_{period}"])},
        frozenset(options["keep_step"]),
    )
    if policy.is_empty and not options["remove"]:
        raise UsageError(
            "No option selects steps to keep: thin would remove all steps except the last good step.",
            "Specify a --keep option, such as --keep-last N.",
        )
    names = {name for known in every for name in (known.step.name, str(known.step.number))}
    for name in policy.names - names:
        raise UsageError(f"--keep-step {name}: no step has this name or number.")
    return policy


def _best_of_trainer(every: Sequence[Judged]) -> dict[str, str]:
    """Return the name of the step that the Trainer calls the best, which it loads at the end of the training, with why
    it stays."""
    last = newest_good(every)
    path = _state_of(last.step) if last else ""
    named = best_named(last.step.at(path)) if last and path else ""
    return {named: f"best according to {path}"} if named else {}


def _state_of(step: Step) -> str:
    """Return the path of the Trainer's state among the files of a step; "" if it has none."""
    path = f"{step.name}/{STATE}"
    return path if path in step.files else ""


# ------------------------------------------------------------------------------------------- what stays in any case


def held_steps(
    run: Run, every: Sequence[Judged], beside: Sequence[Judged], options: Mapping[str, Any]
) -> dict[str, list[str]]:
    """Return why each step, and what is named `beside` them, stays whatever the policy says; nothing for one of which
    the policy decides, or that was named."""
    last, age, now = newest_good(every), options["age"], time.time()
    files = roots_of(run.place.at(entry.file) for entry in run.place.names.values())
    places = [files, *(made_of(step) for step in (*run.steps, *(other.step for other in run.beside)))]
    used = None if None in places else {place for several in places for place in several or ()}
    held = {
        known.step.name: [*_reasons(run, known, known is last, used, now - age, age)] for known in (*every, *beside)
    }
    for other in run.beside:
        if other.like and other.like not in options["remove"]:
            held[other.like].append(f"{other.step.name} has the same step number")
    for step in [] if run.is_named else run.steps:
        if step.name not in options["remove"] and not _is_surely_step(step, run):
            name = run.place.join(step.series[0] if step.series else step.name)
            held[step.name].append(
                f"its number may not be a step number; to select these files as steps: thin '{name}'"
            )
    return held


def _is_surely_step(step: Step, run: Run) -> bool:
    """Return whether more than a number in its name shows that a file is a step: vit_224.pt and vit_384.pt may be two
    models."""
    stems = [stem(name) for name in step.names if step.is_files]
    tells = any(number_of(name) is not None for name in stems) or any(
        is_padded(stem(other.name)) for other in run.steps
    )
    return not stems or tells or step.optimizers > 0 or step.name in run.naming.values()


def _reasons(
    run: Run, known: Judged, is_last: bool, used: Collection[str] | None, latest: float, age: int
) -> Iterator[str]:
    """Yield why a step stays. `used` are the directories that virtual checkpoints are made of, None if that is not
    known; what changed after `latest` is younger than `age`."""
    step = known.step
    own = os.path.realpath(step.path)
    if used is None:
        yield "a virtual checkpoint that cannot be read may refer to it"
    elif any(path == own or path.startswith(f"{own}/") for path in used):
        yield "a virtual checkpoint refers to it"
    if is_last:
        yield "the last good step"
    names = [name for name, target in run.naming.items() if target == step.name]
    if names:
        yield f"{', '.join(names)} names it"
    if known.whole is None:
        yield "not read"
    elif not known.is_good:
        yield f"not good: {known.damage.rstrip('.')}" if known.damage else "not good"
    if step.time is None:
        yield "its age is unknown"
    elif step.time > latest:
        yield f"younger than {format_time(age)} (--age)"
    if step.links:
        yield LINKS
    elif not is_remote(run.place.path):
        yield from _strange(run, step)


def made_of(step: Step) -> tuple[str, ...] | None:
    """Return the local directories outside of a step from which virtual checkpoints in it read; None if that is not
    known."""
    own = f"{os.path.realpath(step.path)}/"
    roots = roots_of(map(step.at, step.files))
    return None if roots is None else tuple(place for place in roots if not f"{place}/".startswith(own))


def roots_of(files: Iterable[Location]) -> tuple[str, ...] | None:
    """Return the local directories that virtual checkpoints among `files` are made of, without links; None if that is
    not known. What they are made of need not be there, nor be as it was: it may be mended."""
    places: list[str] = []
    for file in files:
        reader = describing(file.path)
        try:
            roots = import_module(reader).load(file, look=False).roots if reader else ()
        except StoppedError:
            raise
        except CkptconvError:
            return None
        places += (os.path.realpath(root) for root in roots if not is_remote(root))
    return tuple(places)


def _strange(run: Run, step: Step) -> Iterator[str]:
    """Yield the reasons not to touch a step: entries in it, on the disk of the run, other than the files of one
    step."""
    directories = {path.rpartition("/")[0] for path in step.files}
    inner = {name for path in directories for name in path.split("/")[1:]}
    if any(name.startswith(".") for name in inner) or sum(number_of(name) is not None for name in inner) > 1:
        yield "contains files of several steps"
    if any(entry.kind == "directory" for entry in step.files.values()):
        yield "contains directories that are nested too deeply"
    with Handle.open(resolved(run.place.path or ".")) as home:
        try:
            for name in step.names:
                entries_of(home, name)
        except StrangeError as error:
            yield error.why
