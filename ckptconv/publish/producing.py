"""The end of every conversion: check the planned outputs, publish them, and report what was done."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from ckptconv.errors import UsageError
from ckptconv.formats.companions import CONFIG
from ckptconv.formats.optimizers import weights_key
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs.computed import reported
from ckptconv.outputs.kinds import further
from ckptconv.outputs.planning import Output, check_growth, check_size
from ckptconv.outputs.targets import files_behind, named_inputs
from ckptconv.outputs.telling import is_inert, notes_of, warnings_of
from ckptconv.process import peak_rss
from ckptconv.publish.parts import files_of, part_of
from ckptconv.publish.publish import Done, Hooks, Inputs, Verifier, last_path, publish
from ckptconv.publish.replacing import Replacing, Spared, claim_of, inputs_behind
from ckptconv.publish.staging.local import LocalStaging
from ckptconv.publish.statements import asked, needing_inputs
from ckptconv.result import OutputFile, Report
from ckptconv.storage.paths import is_remote, join, normalize
from ckptconv.storage.progress import Progress
from ckptconv.tensors.lazy import Equal
from ckptconv.tensors.moves import File

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from ckptconv.engine.checksums import Checksums


def produce(
    sources: Sequence[Source],
    outputs: Sequence[Output],
    chosen: Options,
    started: float,
    progress: Progress | None = None,
    on_total: Callable[[int], object] | None = None,
    before_commit: Callable[[], object] | None = None,
    verify: Verifier | None = None,
    executor: Executor | None = None,
) -> Report:
    """Check the planned `outputs` of `sources`, write them, and return the report.

    `started` is the monotonic time at which the conversion began. `verify` compares the staged files with the source.
    The other functions are those that `convert` takes.
    """
    _check_digests(outputs, chosen)
    production = _Production(sources, outputs, chosen)
    production.check()
    done = Done()
    if not chosen.dry_run:
        with _depfile(production.every, outputs, production.inputs, chosen):
            hooks = Hooks(on_total, progress, before_commit, verify)
            done = publish(outputs, production.described(), chosen, hooks, executor)
    return production.report(done, started)


class _Production:
    """Outputs and what they are made of.

    `every` are the sources and their references. `inputs` are the files in which those that the plans read are stored:
    a packed file is read from another.
    """

    def __init__(self, sources: Sequence[Source], outputs: Sequence[Output], options: Options) -> None:
        self._sources, self._outputs, self._options = sources, outputs, options
        self._references = [one.reference for one in sources if one.reference]
        self.every = [*sources, *self._references]
        self._read_by = [each.plan.inputs() for each in outputs]
        self._read = list(dict.fromkeys(itertools.chain.from_iterable(self._read_by)))
        self.inputs = list(dict.fromkeys(file.stored for file in self._read))
        self._checksums: Checksums | None = None
        if options.checksum:
            from ckptconv.engine.checksums import Checksums

            self._checksums = Checksums({path: each for one in self.every for path, each in one.files.records.items()})

    def check(self) -> None:
        """Raise an error if an output would replace what it may not, or cannot be written as planned."""
        for each, files in zip(self._outputs, self._read_by, strict=True):
            check_growth(each, sum(file.size for file in files))
            check_size(each, self._options)
        self._replacing.check()

    @functools.cached_property
    def _replacing(self) -> Replacing:
        theirs = {path for one in self._references for path in files_behind(one)}
        theirs.update(path for each in self._outputs if each.target.layout for path in each.target.layout.behind)
        order = [self._options.order, join(self._options.order, CONFIG)] if self._options.order else []
        own = [*inputs_behind(self._sources), *self._options.files(), *order]
        read = (file.path for file in self.inputs if file.path not in theirs)
        claims = [claim_of(each, self._sources, self._options) for each in self._outputs]
        return Replacing(self._options, Spared([*own, *read], theirs), claims)

    def described(self) -> Inputs:
        """Return what `publish` must know of the inputs."""
        options = self._options
        named: list[dict[str, File]] = [{} for _ in self._outputs]
        if module := needing_inputs(options):
            named = [module.inputs_of(each, self._sources[0].path) for each in self._outputs]
        return Inputs(
            self._read,
            list(self._equal()),
            list(self._alike()),
            {path: each for one in self.every for path, each in one.files.digests.items()},
            self._checksums,
            named,
            self._replacing,
        )

    def _equal(self) -> Iterator[Equal]:
        """Yield the pairs of tensors that must be the same."""
        for one in self._sources:
            yield from one.equal
        for each in self._outputs:
            yield from each.told.equal
        if self._has_states:
            for one in self._sources:
                yield from one.of_states.equal

    def _alike(self) -> Iterator[Equal]:
        """Yield the pairs of tensors that should be the same."""
        for one in self._sources if self._has_states else ():
            yield from one.of_states.alike

    @property
    def _has_states(self) -> bool:
        return bool(self._options.states or further(self._options))

    def report(self, done: Done, started: float) -> Report:
        """Return what was done, or planned. `started` is as in `produce`."""
        sources, outputs, options = self._sources, self._outputs, self._options
        part = part_of(options)
        mine = files_of(outputs, part)
        checked, extra = (known.checked, known.extra_bytes) if (known := self._checksums) else (0, 0)
        recorded = list(dict.fromkeys(key for each in outputs for key in each.told.recorded))
        counts: Counter[str] = Counter()
        for one in sources:
            counts.update(one.counts)
        return Report(
            input=sources[0].path,
            outputs=[
                OutputFile(each.target.final(file.name), file.size, each.tensors_of(file))
                for each, files in zip(outputs, mine, strict=True)
                for file in files
            ],
            format=sources[0].format,
            tensors=sum(each.tensors for each in outputs),
            aliases={alias: kept for each in outputs for alias, kept in each.aliases.items()},
            counts=dict(counts),
            opaque=list(_opaque(sources, outputs)),
            warnings=[
                *warnings_of(sources, outputs, options),
                *_met(outputs, options, self._checksums, done),
            ],
            notes=list(notes_of(sources, outputs, options)),
            input_bytes=sum(file.size for file in self.inputs),
            bytes_read=sum(one.bytes_read for one in self.every) + done.tally.bytes_read + extra,
            bytes_written=sum(file.size for files in mine for file in files) - done.reused_bytes,
            bytes_verified=0 if is_inert(outputs) else done.tally.bytes_verified,
            reused=done.reused,
            checksums=checked,
            extra_bytes=extra,
            seconds=time.monotonic() - started,
            peak_rss_bytes=peak_rss(),
            dry_run=options.dry_run,
            part=part.name if part else "",
            finish=[each.target.path for each in outputs] if part else [],
            dropped={name: cls for each in outputs if each.restored for name, cls in each.restored.left_out.items()},
            recorded=recorded,
            weights_key=_weights_key(sources, options) if recorded else "",
            **reported(sources[0], [each.told.reported for each in outputs]),
        )


def _check_digests(outputs: Sequence[Output], options: Options) -> None:
    """Raise UsageError if digests cannot be computed, or would be kept nowhere, or are needed and not asked for."""
    if options.digest:
        from ckptconv.storage.digests import hasher

        hasher(options.digest)
        files = [each.target.path for each in outputs if not each.has_manifest]
        if files and not (options.manifest or asked(options) or part_of(options)):
            raise UsageError(
                f"{files[0]} has no manifest for the digests.",
                "Give --manifest FILE too, or a directory as OUTPUT, without --for-hub.",
            )
    for option in asked(options) if not options.digest else ():
        raise UsageError(f"--{option} is about digests, and none were asked for.", "Add --digest sha256.")


def _opaque(sources: Sequence[Source], outputs: Sequence[Output]) -> Iterator[str]:
    """Yield the opaque classes (known by name only) that an output keeps. A `.pt` file keeps none."""
    every = dict.fromkeys(name for one in sources for name in one.files.opaque)
    for name in every if not outputs[0].restored else ():
        if any(each.told.kept is None or name in each.told.kept for each in outputs):
            yield name


def _weights_key(sources: Sequence[Source], chosen: Options) -> str:
    """Return the key that selects the weights in a training checkpoint; "" if there is none."""
    return "" if chosen.key else weights_key(sources[0].weights)


def _met(outputs: Sequence[Output], chosen: Options, checksums: Checksums | None, done: Done) -> Iterator[str]:
    """Yield warnings of what was met when the outputs were made."""
    if checksums and checksums.unrecorded:
        paths = list(checksums.unrecorded)
        more = f" and {len(paths) - 1} more files" if len(paths) > 1 else ""
        yield f"{paths[0]}{more} cannot be checked: the input records no checksums for this data."
    if done.differing:
        few = ", ".join(done.differing[:5]) + (", …" if len(done.differing) > 5 else "")
        yield (
            f"The tensor-parallel ranks differ in {len(done.differing)} states of unsplit parameters; the states of "
            f"the first rank were taken: {few}."
        )
    if warning := done.tally.overflowed(chosen.dtype or "their dtype"):
        yield warning
    for each in outputs:
        if is_remote(each.target.path):
            from ckptconv.publish.staging.remote import notes

            sent = ((each.target.final(file.name), file.size) for file in each.plan.files)
            yield from notes(sent, chosen.buffers(far=True) // 2)


@contextlib.contextmanager
def _depfile(
    sources: Sequence[Source], outputs: Sequence[Output], inputs: Sequence[File], options: Options
) -> Iterator[None]:
    """Stage a make rule for the outputs; commit it after the block has committed them."""
    if not options.depfile:
        yield
        return
    path = normalize(options.depfile)
    if is_remote(path):
        raise UsageError(f"{path}: --depfile must be a local file.")
    read = [file.path for file in inputs]
    for source in sources:
        read.extend([*named_inputs(source), *source.pointers])
    # make can check neither a pipe nor a remote file later.
    read = [os.path.normpath(name) for name in read if os.path.isfile(name)]
    from ckptconv.publish.depfile import rule

    text = os.fsencode(rule([last_path(each) for each in outputs], read))
    with LocalStaging(path, outputs[0].plan.plan_id, options.fsync) as staging:
        staging.made_as = "depfile"
        staging.seal(staging.put("", text))
        yield
        staging.commit([""])
