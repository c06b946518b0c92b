"""Publishes outputs that were made in parts: `finish`."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ckptconv.errors import CorruptError, FailedError, UsageError, leaving
from ckptconv.features.parts.description import PlanDescription, description
from ckptconv.features.parts.finishing import FINISHING
from ckptconv.features.parts.making import assign
from ckptconv.features.parts.staged import StagedParts, described, directories
from ckptconv.formats.run_names import TREES
from ckptconv.options.option import checked
from ckptconv.options.table import OPTIONS, Options
from ckptconv.outputs.computed import made_as
from ckptconv.outputs.targets import MANIFEST, directory_of, final_path
from ckptconv.process import peak_rss
from ckptconv.publish.claims import INPUT, NEW_NAME, READ, Claim
from ckptconv.publish.manifest import document
from ckptconv.publish.publish import Staged, complete, describe, staging_for, unpublished
from ckptconv.publish.replacing import Replacing, Spared
from ckptconv.publish.staging.area import MOST_RECORD, RECORD, is_sibling
from ckptconv.publish.staging.base import FinishedFile, Staging
from ckptconv.publish.statements import requested
from ckptconv.result import OutputFile, Report
from ckptconv.storage.files import look, read_text
from ckptconv.storage.handles import HIDDEN
from ckptconv.storage.location import Location
from ckptconv.storage.paths import is_remote, join, listed, real_place
from ckptconv.storage.progress import Progress, counter, on_file, shown
from ckptconv.storage.syncing import Syncing
from ckptconv.text import Proposed, brief, count_of, some

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckptconv.options.keywords import FinishOptions
    from ckptconv.storage.progress import AnyProgress

_RANK = re.compile(r"mp_rank_\d+")
# Number of missing files to name for each part.
_NAMED = 3


class _Planned(NamedTuple):
    """An output whose parts are staged, as the processes that made them described it.

    `published`: an earlier run has published the output and had only the clean-up left.
    """

    path: str
    plan: PlanDescription
    published: bool

    @property
    def is_file(self) -> bool:
        return self.plan.kind == "file"

    def final(self, name: str) -> str:
        return final_path(self.path, self.plan.kind, name)


@shown
@checked(FINISHING)
def finish(
    outputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    before_commit: Callable[[], object] | None = None,
    progress: AnyProgress | None = None,
    on_total: Callable[[int], object] | None = None,
    **options: Unpack[FinishOptions],
) -> Report:
    """Check that all parts of `outputs`, one path or several, are staged, and publish them.

    With `checksum`, read every file again and compare it with the CRC-32 of its record. If `manifest` or `attest` is
    given, write that there too; for `attest`, read the inputs where the parts found them. `before_commit` is called
    when all is checked, before the first output gets its final name. `progress` and `on_total` are those of `convert`,
    for the bytes read again. Raises UsageError if nothing is staged, FailedError if parts or inputs are missing, and
    CorruptError if a file has changed; then nothing is published, and the staged files stay.

    Examples:
        >>> for part in ("0/2", "1/2"):
        ...     report = ckptconv.convert("model.pt", "model", max_shard_size=50, part=part)
        >>> ckptconv.finish("model").tensors
        2
    """
    started = time.monotonic()
    chosen = Options(**options)
    places = [Location(path, dict(chosen.storage_options)) for path in listed(outputs)]
    with ExitStack() as stack:
        stack.enter_context(leaving(unpublished(places, in_parts=True)))
        planned = [output for place in places for output in _planned(place)]
        claims = [_claim_of(output.path, output.plan, chosen.overwrite) for output in planned if not output.published]
        spared = Spared(path for output in planned for path in _spared(output.plan.permissions))
        replacing = Replacing(chosen, spared, claims)
        replacing.check()
        stating, plans = requested(chosen), [(output.path, output.plan) for output in planned]
        named = {option: module.of_parts(plans, chosen) for option, (_, module) in stating.items()}
        if on_total and (chosen.checksum or named):
            again = sum(size for output in planned for _, size, _ in output.plan.files) if chosen.checksum else 0
            on_total(again + sum(stating[option][1].bytes_of(inputs) for option, inputs in named.items()))
        staged = [_staged(output, chosen, counter(progress), stack) for output in planned]
        first = planned[0].plan
        inputs = {
            option: stating[option][1].digested(paths, first.heading["digest"], chosen, counter(progress))
            for option, paths in named.items()
        }
        with Syncing() as syncing:
            beside = describe(staged, inputs, first.plan_id, chosen, syncing, stack)
        complete(staged, beside, replacing, before_commit)
    report = _report(planned, chosen, started, replacing.replaced)
    report.beside = replacing.written(output.path for output in staged if output.has_manifest)
    return report


def _staged(planned: _Planned, options: Options, progress: Progress | None, stack: ExitStack) -> Staged:
    """Check that every file of an output is staged or published. `stack` releases its staging."""
    plan = planned.plan
    staging = staging_for(planned.path, plan.plan_id, plan.kind, options, in_parts=True)
    staging.finishing, staging.made_as = True, made_as(plan.heading)
    staging.__enter__()
    stack.callback(staging.detach)
    if planned.published:
        _check_published(planned)
        staging.committed = True
        return Staged(planned.path, planned.is_file, staging, [], partial(_manifest, planned), False)
    if planned.is_file and "digest" in plan.heading and not (options.manifest or requested(options)):
        raise UsageError(
            f"{planned.path} is a single file without a manifest, in which its digests would be recorded.",
            "Add --manifest FILE.",
        )
    records = _collected(planned, staging)
    if options.checksum:
        _check(planned, staging, progress)
    manifest = partial(document, plan.heading, records)
    return Staged(planned.path, planned.is_file, staging, list(records), manifest, not planned.is_file)


def _report(planned: Sequence[_Planned], options: Options, started: float, notes: Iterable[str]) -> Report:
    first = planned[0].plan.heading["source"]
    tensors = sum(count for output in planned for _, _, count in output.plan.files)
    return Report(
        input=", ".join(list(first["inputs"])[:1]),
        outputs=[
            OutputFile(output.final(name), size, count) for output in planned for name, size, count in output.plan.files
        ],
        format=first["format"],
        tensors=tensors,
        aliases={alias: kept for output in planned for alias, kept in output.plan.heading["aliases"].items()},
        counts={},
        opaque=[],
        warnings=[],
        notes=[*notes],
        checksums=tensors if options.checksum else 0,
        seconds=time.monotonic() - started,
        peak_rss_bytes=peak_rss(),
        finished=True,
    )


def _check_published(planned: _Planned) -> None:
    """Raise FailedError if a file of an output that is published was changed or removed since."""
    for name, size, _ in planned.plan.files:
        entry = look(planned.final(name))
        if entry.kind != "file" or entry.file.size != size:
            raise FailedError(
                f"{planned.path} was complete, but {planned.final(name)} was changed or removed later.",
                "Convert it again.",
            )


def _manifest(planned: _Planned) -> bytes:
    """Return the manifest of an output that is published. Raise FailedError if it can no longer be made."""
    path = join(planned.path, MANIFEST)
    if planned.is_file or look(path).kind != "file":
        raise FailedError(
            f"{planned.path} is complete, but the records for its manifest no longer exist.",
            "If you need a manifest, convert again with --manifest or --attest.",
        )
    return read_text(path, MOST_RECORD).encode()


def _claim_of(path: str, plan: PlanDescription, overwrite: bool) -> Claim:
    """Return the claim of an output whose parts are staged, as their description says."""
    names, permissions = [name for name, _, _ in plan.files], plan.permissions
    proposed = None if "typed" in permissions else Proposed(path, NEW_NAME)
    beside, overwrite = "beside" in permissions, overwrite or "overwrite" in permissions
    read = frozenset(word.removeprefix(READ) for word in permissions if word.startswith(READ))
    return Claim(path, plan.kind, made_as(plan.heading), names, proposed, beside, overwrite, read=read)


def _spared(permissions: Iterable[str]) -> Iterator[str]:
    """Yield the paths of the inputs of parts, from their `permissions`."""
    return (word.removeprefix(INPUT) for word in permissions if word.startswith(INPUT))


def _planned(output: Location) -> list[_Planned]:
    """Return `output`, or the outputs of the tensor-parallel ranks in it."""
    path, descriptions = output.path, described(output)
    if not descriptions:
        ranks = [output.join(name) for name in directories(output) if _RANK.fullmatch(name)]
        if any(map(described, ranks)):
            return [planned for rank in ranks for planned in _planned(rank)]
    if not descriptions:
        there = "" if output.kind == "missing" else f" {path} exists: an earlier finish may have published it."
        if left := [name for name in directories(output) if is_sibling(name, HIDDEN)]:
            raise UsageError(
                f"No parts of {path} are staged: {output.join(left[0])} belongs to a conversion without --part, "
                "which was interrupted or is still running.",
                "To continue that conversion, run the same command again. It does not need finish.",
            )
        raise UsageError(
            f"No parts of {path} are staged, so finish has nothing to publish.{there}",
            "First run the conversions with --part, then specify their OUTPUT.",
        )
    if len(descriptions) > 1:
        raise UsageError(
            f"Parts of {len(descriptions)} different conversions are staged for {path}: "
            f"{_told(descriptions, output)}. The input changed in between, or the conversions used different options "
            "or releases of ckptconv.",
            "Remove the unwanted conversion, and run the missing parts of the other.",
        )
    (only,) = descriptions
    plan = _parsed(only)
    return [_Planned(real_place(path) if plan.kind in TREES else path, plan, only.published)]


def _parsed(staged: StagedParts) -> PlanDescription:
    try:
        return description(staged.data, staged.plan_id, staged.kinds, directory_of)
    except ValueError as error:
        raise CorruptError(
            f"The description of the parts in {staged.place} is damaged: {error}.",
            "To replace the description, run one of the parts again.",
        ) from None


def _told(descriptions: Sequence[StagedParts], output: Location) -> str:
    """Say of each conversion whose parts are staged where they are, how many files are made, since when, and with which
    options that others lack."""
    plans = [_parsed(staged) for staged in descriptions]
    parts = []
    for staged, plan in zip(descriptions, plans, strict=True):
        complete = sum(name.startswith(RECORD) for name in output.at(staged.place).names)
        facts = [f"{complete} of {count_of(len(plan.files), 'file')} complete"]
        if not is_remote(staged.place):
            changed = time.localtime(os.stat(staged.place).st_mtime)
            facts.append(f"last changed {time.strftime('%Y-%m-%d %H:%M:%S', changed)}")
        others = [other.heading["options"] for other in plans if other is not plan]
        options = {
            name: value
            for name, value in plan.heading["options"].items()
            if any(other.get(name) != value for other in others)
        }
        facts += [f"{OPTIONS[name].flags[0]} {brief(value)}" for name, value in options.items() if name in OPTIONS]
        parts.append(f"{staged.place} ({', '.join(facts)})")
    return " and ".join(parts)


def _collected(planned: _Planned, staging: Staging) -> dict[str, FinishedFile]:
    """Return the `FinishedFile` of every file, by name. Raises FailedError if some are missing."""
    digest = planned.plan.heading.get("digest", "")
    every = ((name, staging.finished(name, size, digest)) for name, size, _ in planned.plan.files)
    records = {name: record for name, record in every if record is not None}
    for name, _, count in planned.plan.files:
        if name in records and len(records[name].crcs) != count:
            raise CorruptError(
                f"The record of {name!r} in {planned.path} is damaged: it describes "
                f"{count_of(len(records[name].crcs), 'tensor')}, but the plan has {count}.",
                f"Run {_by_part(planned, [name])} again, then finish.",
            )
    missing = [name for name, _, _ in planned.plan.files if name not in records]
    if missing:
        raise FailedError(
            f"{planned.path} is not complete: it lacks {_by_part(planned, missing)}. The staged files are kept.",
            f"Run {'that part' if len(_parts_of(planned, missing)) == 1 else 'those parts'} again, then finish.",
        )
    return records


def _check(planned: _Planned, staging: Staging, progress: Progress | None) -> None:
    changed = []
    for name, size, _ in planned.plan.files:
        on_file(progress, name)
        if not staging.check(name, size, progress):
            changed.append(name)
    if changed:
        raise CorruptError(
            f"{planned.path}: staged files no longer match their checksums: {_by_part(planned, changed)}.",
            f"Run {'that part' if len(_parts_of(planned, changed)) == 1 else 'those parts'} again, then finish.",
        )


def _parts_of(planned: _Planned, names: Sequence[str]) -> dict[int, list[str]]:
    parts = assign([size for _, size, _ in planned.plan.files], planned.plan.parts, planned.plan.shift)
    names_of: dict[int, list[str]] = {}
    for (name, _, _), part in zip(planned.plan.files, parts, strict=True):
        if name in names:
            names_of.setdefault(part, []).append(name)
    return dict(sorted(names_of.items()))


def _by_part(planned: _Planned, names: Sequence[str]) -> str:
    return "; ".join(
        f"part {part}/{planned.plan.parts} ({some(lacking, _NAMED, str)})"
        for part, lacking in _parts_of(planned, names).items()
    )
