"""The call `survey`: what is known of each step of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ckptconv.errors import CorruptError
from ckptconv.features.steps.report import RunSummary, StepSummary
from ckptconv.features.steps.run import run_at
from ckptconv.features.steps.whole import Judged, Reading, judged, sources_of
from ckptconv.pickles.refusing import refusing_attacks
from ckptconv.process import no_garbage
from ckptconv.storage.location import Location
from ckptconv.storage.paths import normalize
from ckptconv.storage.progress import Progress
from ckptconv.storage.stores import pinned


def survey(
    run: str,
    *,
    check: bool = False,
    stats: bool = False,
    inert: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    on_total: Callable[[int], object] | None = None,
) -> RunSummary:
    """Return what is known of the steps of `run`, a path or URL. With `check`, all data is compared with digests and
    checksums; with `stats`, all values are read. Attacks are opened only if `inert`.

    Raise UsageError if it has no steps, FailedError if it cannot be read.
    """
    started = time.monotonic()
    stores = dict(storage_options or {})
    place = Location(pinned(normalize(run), stores), stores)
    with no_garbage(), refusing_attacks(not inert):
        found = run_at(place)
        reading = Reading(stores, inert, each=check or stats)
        every = judged(found, reading)
        if on_total:
            on_total(sum(each.step.bytes for each in every) * (check + stats))
        summaries = [_summary(each) for each in every]
        for each, summary in zip(every, summaries, strict=True):
            if each.whole and (check or stats):
                _read(each, summary, reading, check, stats, progress)
    last = next((summary for summary in reversed(summaries) if summary.good), None)
    warnings = [
        f"{name} names a step that is not there."
        for name, step in {**found.pointers, **found.links}.items()
        if not step
    ]
    warnings += (
        f"{each.name} has {each.nan:,} NaN and {each.inf:,} infinite values."
        for each in summaries
        if each.nan or each.inf
    )
    return RunSummary(
        input=run,
        path=found.place.path,
        steps=summaries,
        last_good=last.path if last else None,
        newest_is_good=bool(summaries) and summaries[-1].good,
        named={**found.pointers, **found.links},
        warnings=warnings,
        seconds=time.monotonic() - started,
    )


def _summary(found: Judged) -> StepSummary:
    step = found.step
    return StepSummary(
        name=step.name,
        path=step.path,
        number=step.number,
        time=step.time,
        format=found.format,
        good=found.is_good,
        whole=found.whole,
        why=found.why,
        marked=found.marked,
        marks=found.marks,
        files=len(step.files),
        bytes=step.bytes,
        weights_bytes=found.weights,
        optimizer_bytes=found.optimizer,
        rest_bytes=found.rest,
        like=found.like,
    )


def _read(
    found: Judged, summary: StepSummary, reading: Reading, check: bool, stats: bool, progress: Progress | None
) -> None:
    """Read all data of a step, and add to its `summary` what that tells."""
    from ckptconv.features.steps.reading import checked, values_of

    sources = sources_of(found.step, reading)
    if check:
        summary.checked, summary.damage = checked(sources, reading.storage_options, progress)
        summary.good = summary.good and not summary.damage
    if stats:
        try:
            values = values_of(sources, reading.storage_options, progress)
        except CorruptError as error:
            summary.good, summary.damage = False, summary.damage or error.message
        else:
            summary.nan, summary.inf, summary.norm = values
