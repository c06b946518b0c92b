"""The call `survey`: the facts about each step of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ckptconv.features.runs.reading import Readings, read
from ckptconv.features.runs.run import run_at
from ckptconv.features.runs.whole import Judged, judged
from ckptconv.features.steps.report import RunSummary, StepSummary
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
    """Return the facts about the steps of `run`, a path or URL. With `check`, all data is compared with digests and
    checksums; with `stats`, all values are read. Attacks are opened only if `inert`.

    Raise UsageError if it has no steps, FailedError if it cannot be read.
    """
    started = time.monotonic()
    stores = dict(storage_options or {})
    place = Location(pinned(normalize(run), stores), stores)
    with no_garbage(), refusing_attacks(not inert):
        listed = run_at(place)
        steps = judged(listed, inert=inert, each=check or stats)
        if on_total:
            on_total(sum(known.step.bytes for known in steps) * (check + stats))
        summaries = []
        for known in steps:
            is_read = known.whole and (check or stats)
            readings = read(known, inert, check=check, stats=stats, progress=progress) if is_read else Readings()
            summaries.append(_summary(known._replace(damage=readings.why), readings))
    last = next((summary for summary in reversed(summaries) if summary.good), None)
    of_values = [
        f"{summary.name} has {summary.nan:,} NaN and {summary.inf:,} infinite values."
        for summary in summaries
        if summary.nan or summary.inf
    ]
    return RunSummary(
        input=run,
        path=listed.place.path,
        steps=summaries,
        last_good=last.path if last else None,
        newest_is_good=bool(summaries) and summaries[-1].good,
        named=listed.naming,
        beside={other.step.name: other.why for other in listed.beside},
        warnings=[*listed.warnings, *of_values],
        seconds=time.monotonic() - started,
    )


def _summary(known: Judged, readings: Readings) -> StepSummary:
    step, values = known.step, readings.values
    return StepSummary(
        name=step.name,
        path=step.path,
        number=step.number,
        time=step.time,
        format=known.format,
        good=known.is_good,
        whole=known.whole,
        why=known.why,
        marked=known.marks.says,
        marks=known.marks.which,
        files=len(step.files),
        bytes=step.bytes,
        weights_bytes=known.weights,
        optimizer_bytes=known.optimizer,
        rest_bytes=known.rest,
        like=known.like,
        checked=readings.checked,
        damage=readings.damage,
        nan=values.nan if values else None,
        inf=values.inf if values else None,
        norm=values.norm if values else None,
    )
