"""Carries out a plan: each step is removed, or reduced, the oldest first.

`removal` sees to it that a step is at any time as it was, or as it is to be. A run that was killed is finished by the
next one.
"""

from __future__ import annotations

import functools
import glob
import os
import shutil
import stat
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckptconv.errors import DifferenceError, FailedError, UnsafeError, UnsupportedError
from ckptconv.features.removal.area import AREA, LESSEN, REMOVE, Area, entered
from ckptconv.features.removal.entries import entries_of
from ckptconv.features.removal.leaving import recover, remove, replace
from ckptconv.features.runs.step import Step
from ckptconv.features.runs.whole import Judged, newest_good
from ckptconv.features.thin.planning import Planned, Thinning
from ckptconv.formats.detect import choose, open_source
from ckptconv.formats.format import Probe
from ckptconv.formats.registered import DESCRIBING, is_companion_name
from ckptconv.options.table import Options
from ckptconv.outputs.naming import named
from ckptconv.storage.handles import Handle
from ckptconv.storage.location import Location
from ckptconv.storage.strict_json import MOST
from ckptconv.text import reason, some

if TYPE_CHECKING:
    from ckptconv.result import Report

_LEFT = "The remaining steps were not changed."


def carry_out(
    path: str,
    plan: Callable[[], Thinning],
    options: Mapping[str, Any],
    stores: Mapping[str, Any],
    on_done: Callable[[str, int], object],
) -> tuple[Thinning, str]:
    """Do what `plan` says is to be done with the steps in the directory at `path`, the oldest step first; `on_done` is
    called with each step and the bytes of it that are left. Return what was planned, and the step that an earlier run
    had begun, and that was finished before; "" if there was none.

    No other run plans or does anything meanwhile. Raise UnsafeError for a step that is not what it was when it was
    looked at, also for one that stays and that others need: then all that are left stay.
    """
    reaching = {"storage_options": dict(stores), "inert": options.get("inert", False)}
    with entered(path) as area:
        try:
            recovered = recover(area)
        except OSError as error:
            raise FailedError(
                f"{area.path}: the work of an earlier run cannot be finished: {reason(error)}."
            ) from error
        thinning = plan()
        if (thinning.run.place.path or ".") != path:
            raise UnsafeError(
                f"The steps are now in {thinning.run.place.path}, but were in {path}. Nothing was changed."
            )
        last = newest_good([planned.judged for planned in thinning.steps])
        for planned in thinning.of(REMOVE, LESSEN):
            step = planned.judged.step
            try:
                if last:
                    _check_stays(area, last.step)
                if planned.action == REMOVE:
                    remove(area, step.name, step.names, step.files)
                else:
                    write = functools.partial(_write_reduced, area, planned, options["as_"], reaching)
                    replace(area, step.name, step.files, write)
                left = _size_of(area, step.name) if planned.action == LESSEN else 0
            except OSError as error:
                raise FailedError(f"{step.name} could not be thinned: {reason(error)}.") from error
            on_done(step.name, left)
    return thinning, recovered


def _check_stays(area: Area, step: Step) -> None:
    """Raise UnsafeError unless a step that is to stay has the files that were looked at."""
    for path, entry in step.files.items():
        try:
            now = os.stat(path, dir_fd=area.home.fd)
        except OSError as error:
            raise UnsafeError(f"{step.path} must be kept, but {path} is missing: {reason(error)}. {_LEFT}") from error
        if entry.kind == "file" and (now.st_size, now.st_mtime) != (entry.file.size, entry.time):
            raise UnsafeError(f"{step.path} must be kept, but {path} has changed since it was checked. {_LEFT}")


def _write_reduced(area: Area, planned: Planned, dtype: Any, reaching: Mapping[str, Any], new: str) -> None:
    """Write a step, reduced, to the directory `new` in the area, and compare its weights with those of the step."""
    place = os.path.join(area.path, new)
    if planned.base:
        _write_delta(area, planned.judged, planned.base, new, reaching)
        _check_stays(area, planned.base.step)
    else:
        _converted(planned, place, dtype, verify=True, **reaching)
    # A delta is read by its own file, whatever is beside that.
    before = None if planned.base else _format_at(place)
    with area.inside.inside(new) as reduced:
        _dated(reduced, planned.judged.step.time)
        for path in planned.files:
            _copy(area.home, path, reduced)
    if before and _format_at(place) != before:
        raise UnsupportedError(
            f"{planned.judged.step.path} cannot be reduced: next to {some(planned.files, form=str)}, its weights would "
            "be read as another format. The step was not changed."
        )


def _converted(planned: Planned, output: str, dtype: Any, **options: Any) -> Report:
    """Write the weights of a step to `output`, with the files of the model among those that it keeps."""
    from ckptconv.conversion import convert

    # Of a file with everything in it, the optimizer is one part.
    options["exclude"] = [f"{glob.escape(name)}.*" for name in planned.judged.inner]
    has_companions = any(is_companion_name(path.rpartition("/")[2]) for path in planned.files)
    return convert(planned.judged.path, output, dtype=dtype or "keep", copy_config=has_companions, **options)


def _format_at(path: str) -> object:
    """Return the format that the directory at `path` is read as."""
    return choose(Probe(Location(path)))[0]


def expected_size(planned: Planned, options: Mapping[str, Any], stores: Mapping[str, Any]) -> int | None:
    """Return the approximate number of bytes left of a step that is reduced. None for a delta: only a comparison gives
    it."""
    if planned.base:
        return None
    step = planned.judged.step
    output = step.home.join(AREA).join(step.name).path
    reaching = {"storage_options": dict(stores), "inert": options.get("inert", False)}
    weights = _converted(planned, output, options["as_"], dry_run=True, **reaching).outputs
    own = {file.path.rpartition("/")[2] for file in weights}
    kept = (step.files[path].file.size for path in planned.files if path.rpartition("/")[2] not in own)
    return sum(file.bytes for file in weights) + sum(kept)


def _size_of(area: Area, step: str) -> int:
    entries = entries_of(area.home, step).values()
    return sum(entry.st_size for entry in entries if stat.S_ISREG(entry.st_mode))


def _copy(home: Handle, path: str, reduced: Handle) -> None:
    """Copy a file of a step, by its path in the run, with its time to the same place in the reduced step, unless that
    has one already."""
    step, *above, name = path.split("/")
    with home.descend([step, *above]) as old, reduced.descend(above, make=True) as new:
        if new.has(name):
            return
        with os.fdopen(old.open_file(name), "rb") as source:
            entry = os.fstat(source.fileno())
            with os.fdopen(new.create(name, stat.S_IMODE(entry.st_mode)), "wb") as copy:
                shutil.copyfileobj(source, copy)
                copy.flush()
                os.fsync(copy.fileno())
                os.utime(copy.fileno(), ns=(entry.st_atime_ns, entry.st_mtime_ns))


def _write_delta(area: Area, judged: Judged, base: Judged, new: str, reaching: Mapping[str, Any]) -> None:
    """Write a delta from `base` to a step to the directory `new` in the area, with a virtual checkpoint of both, and
    compare that with the step. Raise UnsupportedError if this program has no deltas."""
    diff, patch = (getattr(import_module("ckptconv"), name, None) for name in ("diff", "patch"))
    if not (diff and patch and DESCRIBING):
        raise UnsupportedError("--as delta requires deltas, which this installation does not support.")
    suffix, reader = next(iter(DESCRIBING.items()))
    place, name = os.path.join(area.path, new), f"model{suffix}"
    delta, whole = os.path.join(place, "delta"), os.path.join(place, name)
    os.mkdir(place, 0o777)
    diff(base.path, judged.path, measure=False, delta=delta, **reaching)
    with Handle.open(delta) as written:
        _dated(written, judged.step.time)
    patch(os.path.realpath(base.path), delta, whole, **reaching)
    virtual = import_module(reader)
    # The values that are no tensors are the step's own, not those of its base.
    with Handle.open(place) as written:
        written.write_whole(
            name, virtual.with_record(Location(whole).read_text(MOST), _record_of(judged, reaching)).encode()
        )
    if not diff(judged.path, whole, measure=False, **reaching).equal:
        raise DifferenceError(f"{whole} differs from {judged.path}, which was not replaced.")
    # A run that is moved keeps its bases.
    home = area.home.path
    with Handle.open(place) as written:
        text = Location(whole).read_text(MOST)
        bound = virtual.bound(text, os.path.join(home, judged.step.name), home)
        written.write_whole(name, bound.encode())
        written.sync_file(name)


def _record_of(judged: Judged, reaching: Mapping[str, Any]) -> str:
    """Return the structure record of a step's weights, which has its other values; "" if there is none."""
    return named(open_source(judged.path, **reaching), Options()).described.structure or ""


def _dated(place: Handle, when: float | None) -> None:
    """Give the files in a directory the time of the step that they come from: policies go by it."""
    for name in place.names() if when is not None else ():
        if when is not None and stat.S_ISREG(place.stat(name).st_mode):
            os.utime(name, (when, when), dir_fd=place.fd, follow_symlinks=False)
