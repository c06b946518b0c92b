"""Publishes outputs that were made in parts: `finish`."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ckptconv.errors import CorruptError, FailedError, UsageError, leaving
from ckptconv.options.table import FINISHING, Options, checked
from ckptconv.outputs import universal
from ckptconv.outputs.computed import made_as
from ckptconv.outputs.schema import MOST_RECORD, PlanDescription, description
from ckptconv.outputs.targets import DIRECTORIES, MANIFEST
from ckptconv.process import peak_rss
from ckptconv.publish.attestation import without_digests
from ckptconv.publish.inputs import DIGESTING, Digested, digested, files_in, found_again
from ckptconv.publish.manifest import Made, document
from ckptconv.publish.parts import assign
from ckptconv.publish.publish import commit, stage_beside, staging_for, unpublished
from ckptconv.publish.replacing import Claim, Replacing, Spared, of_parts, written_beside
from ckptconv.publish.staging import remote_parts
from ckptconv.publish.staging.area import StagedParts, described
from ckptconv.publish.staging.base import Staging
from ckptconv.result import OutputFile, Report
from ckptconv.storage.files import look, read_text
from ckptconv.storage.location import Location
from ckptconv.storage.paths import is_remote, join, listed, real_place
from ckptconv.storage.progress import Progress, counter, on_file, shown
from ckptconv.tensors.moves import File
from ckptconv.text import some

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckptconv.options.keywords import FinishOptions
    from ckptconv.storage.progress import AnyProgress

_RANK = re.compile(r"mp_rank_\d+")
# Number of missing files to name for each part.
_NAMED = 3


@dataclass(frozen=True)
class _Planned:
    """An output whose parts are staged, as the processes that made them described it.

    `published`: an earlier run has published the output and had only the clean-up left.
    """

    path: str
    told: PlanDescription
    published: bool

    @property
    def kind(self) -> str:
        return self.told.kind

    @property
    def files(self) -> list[tuple[str, int, int]]:
        """Name, size in bytes and number of tensors of each file."""
        return self.told.files

    def claim(self, force: bool) -> Claim:
        names = [name for name, _, _ in self.files]
        return of_parts(self.path, self.kind, made_as(self.told.heading), names, self.told.permissions, force)

    def final(self, name: str) -> str:
        if self.kind == "tree" and name == universal.LATEST:
            return universal.pointer(self.path)
        return self.path if self.kind == "file" else join(self.path, name)


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
        planned = [each for place in places for each in _planned(place)]
        replacing = Replacing(chosen, Spared([]))
        claims = [each.claim(chosen.overwrite) for each in planned if not each.published]
        replacing.check(claims, written_beside(chosen))
        named = _found_again(planned, chosen)
        if on_total and (chosen.checksum or named):
            again = sum(size for each in planned for _, size, _ in each.files) if chosen.checksum else 0
            on_total(again + sum(file.size for file in files_in(named)))
        staged = [_stage(each, chosen, counter(progress), stack) for each in planned]
        inputs: Sequence[Mapping[str, Digested]] = ()
        if named:
            on_file(counter(progress), DIGESTING)
            inputs = digested(named, planned[0].told.heading["digest"], chosen, counter(progress))
        described = [(each.path, each.kind == "file", one.manifest) for each, one in zip(planned, staged, strict=True)]
        beside = stage_beside(described, inputs, planned[0].told.plan_id, chosen, stack)
        if before_commit:
            before_commit()
        replacing.check_again(claims, written_beside(chosen))
        with leaving(""):
            commit([(one.staging, one.names) for one in staged if one.names])
            for staging in beside:
                staging.commit([""])
    return _report(planned, chosen, started)


class _Staged(NamedTuple):
    """An output whose files are all there: its staging, the names to commit, none if it is published, and its
    manifest."""

    staging: Staging
    names: list[str]
    manifest: bytes


def _found_again(planned: Sequence[_Planned], options: Options) -> list[dict[str, File]]:
    """Return the inputs of each output by name, if they are to be attested."""
    if not options.attest:
        return []
    _check_digests(planned)
    return [
        found_again(each.path, each.told.inputs, each.told.heading["source"]["inputs"], options) for each in planned
    ]


def _stage(planned: _Planned, options: Options, progress: Progress | None, stack: ExitStack) -> _Staged:
    """Check that every file of an output is staged or published, and stage its manifest. `stack` releases it."""
    needed = bool(options.manifest or options.attest)
    staging = staging_for(planned.path, planned.told.plan_id, planned.kind, options, in_parts=True)
    staging.finishing, staging.made_as = True, made_as(planned.told.heading)
    staging.__enter__()
    stack.callback(staging.detach)
    if planned.published:
        manifest = _published(planned, needed)
        staging.committed = True
        return _Staged(staging, [], manifest)
    if planned.kind == "file" and "digest" in planned.told.heading and not needed:
        raise UsageError(
            f"{planned.path} is one file, which has no manifest beside it to keep its digests in.",
            "Give --manifest FILE too.",
        )
    made = _collected(planned, staging)
    if options.checksum:
        _check(planned, staging, progress)
    manifest, names = document(planned.told.heading, made), list(made)
    if planned.kind != "file":
        staging.seal(staging.put(MANIFEST, manifest))
        names.append(MANIFEST)
    return _Staged(staging, names, manifest)


def _report(planned: Sequence[_Planned], options: Options, started: float) -> Report:
    first = planned[0].told.heading["source"]
    tensors = sum(count for each in planned for _, _, count in each.files)
    return Report(
        input=", ".join(list(first["inputs"])[:1]),
        outputs=[OutputFile(each.final(name), size, count) for each in planned for name, size, count in each.files],
        format=first["format"],
        tensors=tensors,
        aliases={alias: kept for each in planned for alias, kept in each.told.heading["aliases"].items()},
        counts={},
        opaque=[],
        warnings=[],
        checksums=tensors if options.checksum else 0,
        seconds=time.monotonic() - started,
        peak_rss_bytes=peak_rss(),
        finished=True,
    )


def _check_digests(planned: Sequence[_Planned]) -> None:
    """Raise UsageError if there is an output without digests, or if they are of two kinds."""
    for each in planned:
        if "digest" not in each.told.heading:
            raise without_digests(each.path)
    if len({each.told.heading["digest"] for each in planned}) > 1:
        raise UsageError("The outputs have digests of two kinds.", "Attest each by itself.")


def _published(planned: _Planned, needed: bool) -> bytes:
    """Return the manifest of an output that is published and has only to be cleaned up; b"" if there is none any more.

    Raises FailedError if a file was changed or removed since, or if the manifest is `needed` and can no longer be made.
    """
    for name, size, _ in planned.files:
        entry = look(planned.final(name))
        if entry.kind != "file" or entry.file.size != size:
            raise FailedError(
                f"{planned.path} was complete, and {planned.final(name)} was changed or removed since.",
                "Convert it again.",
            )
    path = planned.path if planned.kind == "file" else join(planned.path, MANIFEST)
    if planned.kind == "file" or look(path).kind != "file":
        if needed:
            raise FailedError(
                f"{planned.path} is complete, and the records that its manifest needs are gone.",
                "Convert it again with --manifest or --attest if you need that.",
            )
        return b""
    return read_text(path, MOST_RECORD).encode()


def _described(place: Location) -> list[StagedParts]:
    return remote_parts.described(place) if is_remote(place.path) else described(place.path)


def _directories(path: str) -> list[str]:
    with contextlib.suppress(OSError), os.scandir(path) as found:
        return sorted(entry.name for entry in found if entry.is_dir(follow_symlinks=False))
    return []


def _planned(output: Location) -> list[_Planned]:
    """Return `output`, or the outputs of the tensor-parallel ranks in it."""
    path, found = output.path, _described(output)
    if not found:
        listed = remote_parts.directories(output) if is_remote(path) else _directories(path)
        ranks = [output.join(name) for name in listed if _RANK.fullmatch(name)]
        if any(map(_described, ranks)):
            return [each for rank in ranks for each in _planned(rank)]
    if not found:
        raise UsageError(
            f"No parts of {path} are staged: there is nothing to finish.",
            "Give the OUTPUT that the parts were given, and a conversion with --part before.",
        )
    if len(found) > 1:
        places = " and ".join(each.place for each in found)
        raise UsageError(
            f"Parts of {len(found)} different conversions are staged for {path}: {places}. The input has changed in "
            "between, or the parts were given different options, or different releases of this program.",
            "Remove what is not wanted, and run the missing parts of the other.",
        )
    (each,) = found
    try:
        told = description(each.data, each.plan_id, each.kinds, DIRECTORIES)
    except ValueError as error:
        raise CorruptError(
            f"The description of the parts in {each.place} is damaged: {error}.",
            "Run one of the parts again, which writes it anew.",
        ) from None
    return [_Planned(real_place(path) if told.kind == "tree" else path, told, each.published)]


def _collected(planned: _Planned, staging: Staging) -> dict[str, Made]:
    """Return the `Made` of every file, by name. Raises FailedError if some are missing."""
    digest = planned.told.heading.get("digest", "")
    every = ((name, staging.finished(name, size, digest)) for name, size, _ in planned.files)
    made = {name: found for name, found in every if found is not None}
    for name, _, count in planned.files:
        if name in made and len(made[name].crcs) != count:
            raise CorruptError(
                f"The record of {name!r} in {planned.path} is damaged: it describes {len(made[name].crcs)} tensors, "
                f"and the plan {count}.",
                f"Run {_by_part(planned, [name])} again, then finish.",
            )
    missing = [name for name, _, _ in planned.files if name not in made]
    if missing:
        raise FailedError(
            f"{planned.path} is not complete: {_by_part(planned, missing)}. What is staged stays.",
            f"Run {'that part' if len(_parts_of(planned, missing)) == 1 else 'those parts'} again, then finish.",
        )
    return made


def _check(planned: _Planned, staging: Staging, progress: Progress | None) -> None:
    changed = []
    for name, size, _ in planned.files:
        on_file(progress, name)
        if not staging.check(name, size, progress):
            changed.append(name)
    if changed:
        raise CorruptError(
            f"{planned.path}: what was staged is no longer what its checksums say: {_by_part(planned, changed)}.",
            "Run the part again, then finish.",
        )


def _parts_of(planned: _Planned, names: Sequence[str]) -> dict[int, list[str]]:
    parts = assign([size for _, size, _ in planned.files], planned.told.parts, planned.told.shift)
    found: dict[int, list[str]] = {}
    for (name, _, _), part in zip(planned.files, parts, strict=True):
        if name in names:
            found.setdefault(part, []).append(name)
    return dict(sorted(found.items()))


def _by_part(planned: _Planned, names: Sequence[str]) -> str:
    return "; ".join(
        f"part {part}/{planned.told.parts} ({some(lacking, _NAMED, str)})"
        for part, lacking in _parts_of(planned, names).items()
    )
