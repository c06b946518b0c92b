"""The end of every conversion: check the planned outputs, publish them, and report the result."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from ckptconv.errors import FailedError, UsageError
from ckptconv.formats.optimizers import key_to_add
from ckptconv.formats.source import CONFIG, Source
from ckptconv.options.table import Options
from ckptconv.outputs.computed import reported
from ckptconv.outputs.kinds import further
from ckptconv.outputs.messages import is_inert, notes_of, warnings_of
from ckptconv.outputs.planning import Output, check_growth, check_size
from ckptconv.outputs.targets import files_behind, nearest_directory
from ckptconv.process import peak_rss
from ckptconv.publish.claims import claim_of
from ckptconv.publish.parts import files_of, part_of
from ckptconv.publish.publish import Done, Hooks, Inputs, Verifier, publish
from ckptconv.publish.replacing import Replacing, Spared, inputs_behind
from ckptconv.publish.statements import AFTERWARDS, needing_inputs, requested
from ckptconv.result import OutputFile, Report
from ckptconv.storage.paths import is_remote, join
from ckptconv.storage.progress import Progress
from ckptconv.storage.stores import reached
from ckptconv.storage.writing import check_space
from ckptconv.tensors.moves import File
from ckptconv.text import some

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from ckptconv.engine.checksums import Checksums
    from ckptconv.plan import FilePlan


_UNCHECKED = "The input contains checksums, which were not compared; --checksum compares them."


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
        with contextlib.ExitStack() as stack:
            for path, module in requested(chosen, AFTERWARDS).values():
                stack.enter_context(module.staged(path, production.every, outputs, production.inputs, chosen))
            hooks = Hooks(on_total, progress, before_commit, verify)
            done = publish(outputs, production.described(), chosen, hooks, executor)
    return production.report(done, started)


class _Production:
    """Outputs and their inputs.

    `every` are the sources and their references. `inputs` are the files that store those which the plans read: a packed
    file is stored in another.
    """

    def __init__(self, sources: Sequence[Source], outputs: Sequence[Output], options: Options) -> None:
        self._sources, self._outputs, self._options = sources, outputs, options
        self._references = [source.reference for source in sources if source.reference]
        self.every = [*sources, *self._references]
        self._read_by = [output.plan.inputs() for output in outputs]
        self._read = list(dict.fromkeys(itertools.chain.from_iterable(self._read_by)))
        self.inputs = list(dict.fromkeys(file.stored for file in self._read))
        self._checksums: Checksums | None = None
        if options.checksum:
            from ckptconv.engine.checksums import Checksums

            records = [source.files.records for source in self.every]
            self._checksums = Checksums({path: known for by_path in records for path, known in by_path.items()})

    def check(self) -> None:
        """Raise an error if an output would replace a protected file, or cannot be written as planned."""
        for output, files in zip(self._outputs, self._read_by, strict=True):
            check_growth(output, sum(file.size for file in files))
            check_size(output, self._options)
        self._replacing.check()

    @functools.cached_property
    def _replacing(self) -> Replacing:
        theirs = {path for reference in self._references for path in files_behind(reference)}
        theirs.update(path for output in self._outputs if output.target.layout for path in output.target.layout.behind)
        # A configuration in a directory may stand for the directory.
        told = [path for file in self._options.files() for path in (file, join(file, CONFIG))]
        named = [*inputs_behind(self._sources), *told]
        read = (file.path for file in self.inputs if file.path not in theirs)
        claims = [claim_of(output, self._sources, self._options) for output in self._outputs]
        return Replacing(self._options, Spared([*named, *read], theirs), claims)

    def described(self) -> Inputs:
        """Return the inputs for `publish`."""
        options = self._options
        named: list[dict[str, File]] = [{} for _ in self._outputs]
        if module := needing_inputs(options):
            named = [module.inputs_of(output, self._sources[0].path) for output in self._outputs]
        every_states = [source.of_states for source in self._sources if options.states or further(options)]
        equal = [pair for source in self._sources for pair in source.equal]
        equal.extend(pair for output in self._outputs for pair in output.notices.equal)
        equal.extend(pair for states in every_states for pair in states.equal)
        return Inputs(
            self._read,
            equal,
            [pair for states in every_states for pair in states.alike],
            {path: digest for source in self.every for path, digest in source.files.digests.items()},
            self._checksums,
            named,
            self._replacing,
        )

    def report(self, done: Done, started: float) -> Report:
        """Return the report of the conversion, or of its plan. `started` is as in `produce`."""
        sources, outputs, options = self._sources, self._outputs, self._options
        part = part_of(options)
        mine = files_of(outputs, part)
        checked, extra = (known.checked, known.extra_bytes) if (known := self._checksums) else (0, 0)
        recorded = list(dict.fromkeys(key for output in outputs for key in output.notices.recorded))
        is_unchecked = not options.checksum and any(source.files.has_checksums for source in self.every)
        counts: Counter[str] = Counter()
        for source in sources:
            counts.update(source.counts)
        return Report(
            input=sources[0].path,
            outputs=[
                OutputFile(output.target.final(file.name), file.size, output.tensors_of(file))
                for output, files in zip(outputs, mine, strict=True)
                for file in files
            ],
            format=sources[0].format,
            tensors=sum(output.tensors for output in outputs),
            aliases={alias: kept for output in outputs for alias, kept in output.aliases.items()},
            counts=dict(counts),
            opaque=list(_opaque(sources, outputs)),
            warnings=[
                *warnings_of(sources, outputs, options),
                *_warnings(outputs, options, self._checksums, done),
                *(_lacking(outputs, mine) if options.dry_run else ()),
            ],
            notes=[
                *dict.fromkeys(notes_of(sources, outputs, options)),
                *self._replacing.replaced,
                *_untried(outputs, options),
                *([_UNCHECKED] if done.tally.bytes_verified and is_unchecked else ()),
            ],
            beside={} if part else self._replacing.written(o.target.path for o in outputs if o.has_manifest),
            left={path: reason for output in outputs for path, reason in output.target.left.items()},
            input_bytes=sum(file.size for file in self.inputs),
            bytes_read=sum(source.bytes_read for source in self.every) + done.tally.bytes_read + extra,
            bytes_written=sum(file.size for files in mine for file in files) - done.reused_bytes,
            bytes_verified=0 if is_inert(outputs) else done.tally.bytes_verified,
            reused=done.reused,
            checksums=checked,
            extra_bytes=extra,
            seconds=time.monotonic() - started,
            peak_rss_bytes=peak_rss(),
            dry_run=options.dry_run,
            part=part.name if part else "",
            finish=[output.target.path for output in outputs] if part else [],
            dropped={
                name: cls for output in outputs if output.restored for name, cls in output.restored.left_out.items()
            },
            recorded=recorded,
            weights_key=key_to_add(sources[0].weights, options) if recorded else "",
            **reported(sources[0], [output.notices.reported for output in outputs]),
        )


def _check_digests(outputs: Sequence[Output], options: Options) -> None:
    """Raise UsageError if digests cannot be computed, or would be kept nowhere, or are needed and not asked for."""
    if options.digest:
        from ckptconv.storage.digests import hasher

        hasher(options.digest)
        files = [output.target.path for output in outputs if not output.has_manifest]
        if files and not (options.manifest or requested(options) or part_of(options)):
            raise UsageError(
                f"{files[0]} has no manifest to store the digests.",
                "Give --manifest FILE too, or convert to a directory without --for-hub.",
            )
    for option in requested(options) if not options.digest else ():
        raise UsageError(f"--{option} writes digests, but none are computed.", "Add --digest sha256.")


def _opaque(sources: Sequence[Source], outputs: Sequence[Output]) -> Iterator[str]:
    """Yield the opaque classes (known by name only) that an output keeps. A `.pt` file keeps none."""
    every = dict.fromkeys(name for source in sources for name in source.files.opaque)
    for name in every if not outputs[0].restored else ():
        if any(output.notices.kept is None or name in output.notices.kept for output in outputs):
            yield name


def _untried(outputs: Sequence[Output], options: Options) -> Iterator[str]:
    """Yield a note on each store that a dry run does not write to."""
    for output in outputs if options.dry_run else ():
        if is_remote(output.target.path):
            yield f"{output.target.path}: a dry run does not test writing to its store."


def _lacking(outputs: Sequence[Output], mine: Sequence[Sequence[FilePlan]]) -> Iterator[str]:
    """Yield a warning about each output whose disk has too little free space for the files that are `mine`."""
    for path, files in zip((output.target.path for output in outputs), mine, strict=True):
        try:
            check_space(nearest_directory(path), sum(file.size for file in files), path)
        except FailedError as error:
            yield f"{error.message} A run that reuses files of an interrupted run needs less."


def _warnings(outputs: Sequence[Output], chosen: Options, checksums: Checksums | None, done: Done) -> Iterator[str]:
    """Yield warnings about events while the outputs were written."""
    if checksums and checksums.unrecorded:
        unknown = some(checksums.unrecorded, 1, str)
        yield f"{unknown} cannot be checked: the input records no checksums for this data."
    if done.differing:
        yield (
            f"The tensor-parallel ranks differ in {len(done.differing)} states of unsplit parameters; the states of "
            f"the first rank were used: {some(done.differing, form=str)}."
        )
    yield from done.tally.lost(chosen.dtype or "their dtype").values()
    for output in outputs:
        if is_remote(output.target.path):
            sent = ((output.target.final(file.name), file.size) for file in output.plan.files)
            yield from reached(output.target.path).notes(sent, chosen.buffers(far=True) // 2)
