"""Carries out the plans of a conversion in staging, and commits them when all files are complete."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ckptconv.engine.buffers import Tally
from ckptconv.engine.execute import is_scattered, usual_threads, worth_processes
from ckptconv.errors import UNPUBLISHED, CkptconvError, CorruptError, StoppedError, leaving
from ckptconv.formats.run_names import TREES
from ckptconv.options.table import Options
from ckptconv.outputs.planning import Output
from ckptconv.outputs.targets import MANIFEST, Target, directory_of, kind_of_directory, of_trees
from ckptconv.plan import FilePlan, Plan
from ckptconv.publish.jobs import Result, Task, executing, make, packed_in
from ckptconv.publish.parts import files_of, is_one_upload, part_of
from ckptconv.publish.replacing import Replacing
from ckptconv.publish.staging.base import FinishedFile, Staging
from ckptconv.publish.staging.local import LocalStaging
from ckptconv.publish.statements import needing_inputs, requested
from ckptconv.storage.files import Readers, check_unchanged
from ckptconv.storage.location import Location
from ckptconv.storage.paths import is_remote, normalize
from ckptconv.storage.progress import Announced, Progress, on_file
from ckptconv.storage.reading import REQUESTS
from ckptconv.storage.stores import reached
from ckptconv.storage.syncing import Syncing
from ckptconv.tensors.lazy import Equal, LazyTensor
from ckptconv.tensors.moves import File

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from ckptconv.engine.checksums import Checksums

# A function that compares outputs with their sources. Takes the paths of each output's staged files by name (None for
# files under their final names), and a counter of the bytes compared, and returns their sum.
Verifier: TypeAlias = Callable[[Sequence[Mapping[str, str] | None], Progress], int]


@dataclass(eq=False, repr=False)
class Done:
    """Figures of a publication.

    `reused` files, with `reused_bytes`, were finished by an earlier run. `differing` are the names of states of which
    every rank has its own copy, and the copies differ.
    """

    tally: Tally = field(default_factory=Tally)
    differing: list[str] = field(default_factory=list)
    reused: int = 0
    reused_bytes: int = 0


class Inputs(NamedTuple):
    """The inputs of outputs.

    `files` are read, and must not change meanwhile. The two tensors of each of `equal` must be the same; where those of
    `alike` are not, the user is warned. `digests` are the SHA-256 that files must have, by path. `checksums` compares
    the data that is read with the checksums recorded for it; None: none are checked. `named` are the inputs of each
    output by name: statements have their digests, and the description of parts the places where `finish` finds them.
    `replacing` has allowed the outputs, and is asked again before the commit.
    """

    files: Sequence[File]
    equal: Sequence[Equal]
    alike: Sequence[Equal]
    digests: Mapping[str, str]
    checksums: Checksums | None
    named: Sequence[Mapping[str, File]]
    replacing: Replacing


class Hooks(NamedTuple):
    """Functions of the caller that are called on the way; None: none.

    `on_total` is called with the number of bytes to write, verify and digest, and `progress` with those done since its
    last call. `verify` is called before the commit, and raises if a file is wrong; with a remote output, which can be
    read only under its final name, after the commit. `before_commit` is called before anything gets a final name.
    """

    on_total: Callable[[int], object] | None = None
    progress: Progress | None = None
    before_commit: Callable[[], object] | None = None
    verify: Verifier | None = None


def staging_for(
    path: str,
    plan_id: str,
    kind: str,
    options: Options,
    shared: bool = False,
    in_parts: bool = False,
    replaces: frozenset[str] = frozenset(),
) -> Staging:
    """Return the staging of an output of the given `kind` (see `Target.form`), or of a file next to it.

    `shared`: other processes make parts of it at the same time. `in_parts`: on a store, several processes work on it.
    `replaces` are files of an earlier output that are removed, in addition to those with an output's names.
    """
    if kind in TREES and not is_remote(path):
        tree: Staging = of_trees("staging", path).TreeStaging(path, plan_id, TREES[kind], options.fsync, shared)
        return tree
    directory = directory_of(kind)
    index = directory.last if directory else ""
    is_ours = functools.partial(_is_ours, kind, replaces) if index else None
    if not is_remote(path):
        return LocalStaging(path, plan_id, options.fsync, shared, index, is_ours)
    place, memory = Location(path, dict(options.storage_options)), options.buffers(far=True) // 2
    staging: Staging = reached(path).staging(
        place,
        plan_id,
        memory,
        TREES.get(kind, index),
        is_ours,
        tree=kind in TREES,
        shared=shared,
        shards=directory.shards if in_parts and directory else None,
    )
    return staging


def _is_ours(kind: str, replaces: frozenset[str], name: str) -> bool:
    return kind_of_directory(kind).is_file(name) or name in replaces


class Staged(NamedTuple):
    """An output whose files are staged: its path, whether it is a file, and the names of the files.

    There are no names if an earlier run has published it. `manifest` returns its manifest, which is among the files if
    `has_manifest`.
    """

    path: str
    is_file: bool
    staging: Staging
    names: Sequence[str]
    manifest: Callable[[], bytes]
    has_manifest: bool


@dataclass(eq=False, repr=False)
class _Work:
    """An output, its staging, the files to make in this run, and those made so far by name.

    `digested`: whether the CRC-32 of the tensors are computed too. `here`: whether this process writes the files.
    """

    output: Output
    staging: Staging
    digested: bool
    files: list[FilePlan]
    here: bool
    finished: dict[str, FinishedFile] = field(default_factory=dict)

    @property
    def left(self) -> list[FilePlan]:
        """The files still to make."""
        return [file for file in self.files if file.name not in self.finished]

    @property
    def nbytes(self) -> int:
        """The size of all files of this run, made or not."""
        return sum(file.size for file in self.files)

    def resume(self, in_parts: bool, digest: str) -> None:
        """Count the files that an earlier run has finished as made. Those of a part get their digests in `finish`."""
        for file in self.files:
            # Files without tensors are quickly made again.
            is_kept = file.tensors or in_parts
            known = self.staging.finished(file.name, file.size, "" if in_parts else digest) if is_kept else None
            if known and (known.digested or not self.digested):
                # The manifest must not depend on whether the run was resumed.
                self.finished[file.name] = known if self.digested else known._replace(crcs=dict.fromkeys(known.crcs))

    def paths(self) -> dict[str, str]:
        """Return the paths of the output's staged files by name."""
        return {file.name: self.staging.staged(file.name) for file in self.output.plan.files}

    def staged(self) -> Staged:
        """Return the output, all of whose files are staged."""
        output, names = self.output, [file.name for file in self.output.plan.files]
        target = output.target
        return Staged(target.path, target.is_file, self.staging, names, self._manifest, output.has_manifest)

    def _manifest(self) -> bytes:
        from ckptconv.publish.manifest import document

        return document(self.output.heading, {file.name: self.finished[file.name] for file in self.output.plan.files})


def publish(
    outputs: Sequence[Output], inputs: Inputs, options: Options, hooks: Hooks, executor: Executor | None = None
) -> Done:
    """Carry out the plans in staging and commit when all files are complete; or make one part, and keep it staged.

    Files that an earlier run of the same plan has finished are not made again. `executor`, if given, writes the files.
    """
    if part := part_of(options):
        part.check(outputs, options, hooks.verify is not None, bool(inputs.replacing.replaced))
    with ExitStack() as stack:
        run = _Run(outputs, inputs, options, hooks, executor, stack)
        run.check_copies()
        run.open_staging()
        run.resume()
        run.announce()
        stack.enter_context(leaving(unpublished([output.target for output in outputs], part or executor)))
        run.make()
        digests = run.digest_inputs()
        beside = run.describe(digests)
        run.settle()
        if part:
            run.detach()
        else:
            run.complete(beside)
    return run.done


def unpublished(places: Iterable[Target | Location], in_parts: object) -> str:
    """Return the sentence of an error about unfinished outputs at `places`, made `in_parts` or by this process alone:
    parts in a store have their names."""
    return "The index was not written." if in_parts and any(is_remote(place.path) for place in places) else UNPUBLISHED


class _Run:
    """One call of `publish`. Its public methods are the steps, in the order in which they stand here.

    `stack` closes everything that is opened. `done` is complete after the last step.
    """

    def __init__(
        self,
        outputs: Sequence[Output],
        inputs: Inputs,
        options: Options,
        hooks: Hooks,
        executor: Executor | None,
        stack: ExitStack,
    ) -> None:
        self.done = Done()
        self._outputs, self._inputs, self._options, self._hooks = outputs, inputs, options, hooks
        self._executor, self._stack = executor, stack
        self._part = part_of(options)
        self._files = files_of(outputs, self._part)
        # This process must complete the upload of a single remote file, even if an executor writes the other files.
        self._here = [executor is None or is_one_upload(output) for output in outputs]
        self._sends = any(is_remote(output.target.path) for output in outputs)
        self._far = self._sends or any(is_remote(file.stored.path) for file in inputs.files)
        self._works: list[_Work] = []
        self._readers = stack.enter_context(Readers(dict(options.storage_options), options.spool_dir))
        if any(file.packed for file in inputs.files):
            plans = (Plan(tuple(files), "") for files, is_here in zip(self._files, self._here, strict=True) if is_here)
            self._readers.expect(packed_in(plans))
        self._syncing, self._noting = Syncing(), threading.Lock()

    @property
    def _nbytes(self) -> int:
        """The size of all files of this run, made or not."""
        return sum(work.nbytes for work in self._works)

    def check_copies(self) -> None:
        """Compare tensors that are stored twice, and files with their digests. Of several parts, the first does it."""
        if self._part and not self._part.is_first:
            return
        _check_equal(self._outputs, self._inputs.equal, self._readers)
        _check_digests(self._inputs, self._readers)
        different = (name for name, first, second in self._inputs.alike if not _is_same(first, second, self._readers))
        self.done.differing = list(dict.fromkeys(different))

    def open_staging(self) -> None:
        """Open the staging of each output."""
        part = self._part
        for output, files, is_here in zip(self._outputs, self._files, self._here, strict=True):
            digested, target = _is_digested(output, self._options, part is not None), output.target
            staging = staging_for(
                target.path,
                output.plan.plan_id,
                target.form,
                # Files that are not synced are trusted by their CRC-32s: a part that has none is synced.
                self._options if digested or part is None else self._options.replaced(fsync=True),
                shared=part is not None,
                in_parts=part is not None or not is_here,
                replaces=target.replaces,
            )
            staging.made_as = output.made_as
            self._works.append(_Work(output, self._stack.enter_context(staging), digested, files, is_here))
        self._stack.enter_context(self._syncing)  # so that it has ended when a staging is closed

    def resume(self) -> None:
        """Count the files that an earlier run has finished as made."""
        for work in self._works:
            work.resume(self._part is not None, self._options.digest)
            sizes = [file.size for file in work.finished.values()]
            self.done.reused += len(sizes)
            self.done.reused_bytes += sum(sizes)
            work.staging.expect(work.left)

    def announce(self) -> None:
        """Tell how many bytes there are to write, to verify and to digest."""
        if self._hooks.on_total:
            # Verification reads all of it once more.
            verifying = self._nbytes if self._hooks.verify else 0
            digesting = sum(module.bytes_of(self._inputs.named) for _, module in requested(self._options).values())
            self._hooks.on_total(self._nbytes - self.done.reused_bytes + verifying + digesting)

    def make(self) -> None:
        """Write the files that are left, and check the checksums of the data that was read for them."""
        counted = Announced(self._hooks.progress, self._nbytes - self.done.reused_bytes)
        tasks = [(work, task) for work in self._works for task in self._tasks(work)]
        if part := self._part:
            for index, work in enumerate(self._works):
                replacing, module = self._inputs.replacing, needing_inputs(self._options)
                permissions = [*replacing.claims[index].permissions(), *replacing.read_permissions()]
                inputs = module.described(self._inputs.named[index]) if module else {}
                work.staging.describe(part.described(work.output, index, inputs, permissions))
        if self._executor:
            self._make_elsewhere([job for job in tasks if not job[0].here], self._executor, counted)
        self._make_here([job for job in tasks if job[0].here], counted)
        counted.finish()
        if self._inputs.checksums:
            self._inputs.checksums.check(self._readers, [output.plan for output in self._outputs])

    def digest_inputs(self) -> dict[str, Any]:
        """Return the digests of each output's inputs by name, for each option that asks for statements."""
        named, options, digests = self._inputs.named, self._options, {}
        for option, (_, module) in requested(options).items():
            digests[option] = module.digested(named, options.digest, options, self._hooks.progress)
            self.done.tally.bytes_read += module.bytes_of(named)
        return digests

    def describe(self, inputs: Mapping[str, Any]) -> list[Staging]:
        """Stage the manifests in directories, and the requested files next to the outputs. Return the staging of the
        latter. A part has neither."""
        if self._options.digest:
            self._syncing.finish()  # digests are complete when their files are sealed
        if self._part:
            return []
        staged = [work.staged() for work in self._works]
        return describe(staged, inputs, self._outputs[0].plan.plan_id, self._options, self._syncing, self._stack)

    def settle(self) -> None:
        """Wait until all is on the disk. Raise an error if an input has changed meanwhile."""
        self._syncing.finish()
        check_unchanged(dict.fromkeys(file.stored for file in self._inputs.files), dict(self._options.storage_options))
        self.done.tally.bytes_read += self._readers.bytes_unpacked

    def detach(self) -> None:
        """Keep a part staged."""
        for work in self._works:
            work.staging.detach()

    def complete(self, beside: Sequence[Staging]) -> None:
        """Verify the files, and give them their final names, then the files `beside` the outputs."""
        verify = self._hooks.verify
        if verify:
            on_file(self._hooks.progress, "verifying")
        if verify and not self._sends:
            self._verify(verify, [work.paths() for work in self._works])
        complete([work.staged() for work in self._works], beside, self._inputs.replacing, self._hooks.before_commit)
        if verify and self._sends:
            with leaving(""):
                self._verify(verify, [None for _ in self._works])

    def _tasks(self, work: _Work) -> Iterator[Task]:
        """Yield the files of an output that are left to write."""
        options = self._options
        jobs, requests = options.jobs or (1 if self._executor else None), options.jobs or REQUESTS
        for file in work.left:
            # No records for a single file, which is made again until it has its final name, or for files without
            # tensors, which are quickly made again.
            recorded = self._part is not None or (bool(file.tensors) and not work.output.target.is_file)
            # With uploads, half of the memory is for reading and half for sending.
            memory = options.buffers(self._far, is_scattered(file)) // (2 if self._sends else 1)
            yield Task(file, work.staging, work.digested, recorded, jobs, memory, requests, options.digest)

    def _make_here(self, tasks: Sequence[tuple[_Work, Task]], counted: Progress) -> None:
        """Write files in this process, several at a time, each in a thread of its own: two that write into one file
        wait for each other. While some wait for the disk, the next are written."""
        threads = self._options.jobs or usual_threads()
        seen = self._inputs.checksums.seen if self._inputs.checksums else None
        tasks = [(work, task._replace(forked=worth_processes(task.file, seen))) for work, task in tasks]
        is_forked = any(task.forked for _, task in tasks)
        if self._far or self._options.digest or is_forked:
            threads = 1  # one file at a time has threads of its own for requests, or digests, or processes
        # The largest first. Files for which only one thread would be left when the others have ended get all threads.
        ordered = sorted(tasks, key=lambda job: -job[1].file.size) if threads > 1 else list(tasks)
        total = sum(task.file.size for _, task in tasks)
        shared = sum(task.file.size * threads > total for _, task in ordered) if threads > 1 else len(ordered)
        shared += (len(ordered) - shared) % threads
        for job in ordered[:shared]:
            if is_forked:
                self._syncing.finish()  # where there are threads, no process is forked
            self._make_one(job, counted)
        if ordered[shared:]:
            from ckptconv.engine.threads import in_threads

            stop = threading.Event()
            makers = [_Maker(self, counted, threads, stop) for _ in range(threads)]
            in_threads(iter(ordered[shared:]), makers, None, stop)

    def _make_one(self, job: tuple[_Work, Task], counted: Progress) -> None:
        """Write a file in this process. Several threads may do so."""
        work, task = job
        on_file(self._hooks.progress, task.file.name)
        result, seal = make(task, self._readers, counted, self._inputs.checksums)
        with self._noting:
            self._note(work, task, result)
        if self._options.fsync:
            self._syncing.add(seal)
        else:
            seal()

    def _make_elsewhere(self, tasks: Sequence[tuple[_Work, Task]], executor: Executor, counted: Progress) -> None:
        """Write files in `executor`."""

        def note(number: int, result: Result) -> None:
            work, task = tasks[number]
            self._note(work, task, result)
            if task.recorded:
                work.staging.recorded.add(task.file.name)
            counted(task.file.size)

        jobs = [task for _, task in tasks]
        executing().make_all(jobs, executor, self._options, self._inputs.checksums, note)

    def _note(self, work: _Work, task: Task, result: Result) -> None:
        self.done.tally.add(result.tally)
        work.finished[task.file.name] = result.finished

    def _verify(self, verify: Verifier, places: Sequence[Mapping[str, str] | None]) -> None:
        """Verify the files at `places`, and count all of their bytes for it, while `verify` counts tensors."""
        counted = Announced(self._hooks.progress, self._nbytes)
        self.done.tally.bytes_verified += verify(places, counted)
        counted.finish()


class _Maker:
    """Writes one file after another, each with the memory of one of `threads`, until `stop` is set."""

    def __init__(self, run: _Run, counted: Progress, threads: int, stop: threading.Event) -> None:
        self._run, self._counted, self._threads, self._stop = run, counted, threads, stop

    def run(self, job: tuple[_Work, Task]) -> int:
        work, task = job
        alone = task._replace(jobs=1, memory=task.memory // self._threads)
        self._run._make_one((work, alone), self._count)
        return task.file.size

    def _count(self, done: int) -> None:
        if self._stop.is_set():
            raise StoppedError("Stopped.")
        self._counted(done)


def describe(
    outputs: Sequence[Staged],
    inputs: Mapping[str, Any],
    plan_id: str,
    options: Options,
    syncing: Syncing,
    stack: ExitStack,
) -> list[Staging]:
    """Stage the manifests in directories, and the files that `options` request next to the outputs. Return the staging
    of the latter, which `stack` closes.

    `inputs` have the digests of the outputs' inputs, by the options that ask for statements.
    """
    documents: list[tuple[str, bool, bool, bytes]] = []
    stating = requested(options)
    for output in outputs:
        if output.has_manifest or options.manifest or stating:
            documents.append((output.path, output.is_file, output.has_manifest, output.manifest()))
        if output.has_manifest:
            writer = output.staging.put(MANIFEST, documents[-1][-1])
            syncing.add(functools.partial(output.staging.seal, writer))
    wanted: list[tuple[str, str, bytes]] = []
    if options.manifest:
        from ckptconv.publish.manifest import together

        wanted.append(("manifest", options.manifest, together([data for *_, data in documents])))
    for option, (path, module) in stating.items():
        wanted.append((option, path, module.statements(documents, inputs[option])))
    beside = []
    for kind, path, data in wanted:
        staging = stack.enter_context(staging_for(normalize(path), plan_id, "file", options))
        staging.made_as = kind
        staging.seal(staging.put("", data))
        beside.append(staging)
    return beside


def complete(
    outputs: Sequence[Staged],
    beside: Sequence[Staging],
    replacing: Replacing,
    before_commit: Callable[[], object] | None,
) -> None:
    """Give the files of all outputs their final names, then the files `beside` them. Before that, call `before_commit`,
    and ask once more whether everything may be replaced."""
    if before_commit:
        before_commit()
    replacing.check(again=True)
    done: list[str] = []
    with leaving(""):
        for output in (output for output in outputs if output.names):
            try:
                output.staging.commit([*output.names, *([MANIFEST] if output.has_manifest else [])])
            except CkptconvError as error:
                if done:
                    error.message += f" Complete: {', '.join(done)}."
                raise
            done.append(output.staging.path)
        for staging in beside:
            staging.commit([""])


def _is_digested(output: Output, options: Options, in_parts: bool) -> bool:
    """Return whether to compute the CRC-32 of the tensors, which costs a tenth of the work and more.

    An output of several files needs them, and so does a manifest that is requested; for one file made in a part it may
    be requested later. The manifest of a directory must be the same whether it is made in parts or not.
    """
    is_requested = bool(options.manifest) or (in_parts and output.target.is_file)
    return is_requested or sum(bool(file.tensors) for file in output.plan.files) > 1


def _is_same(first: LazyTensor, second: LazyTensor, readers: Readers) -> bool:
    """Return whether two tensors have the same bits."""
    from ckptconv.engine.reader import same  # few checkpoints store a tensor twice

    return same(first, second, readers)


def _check_equal(outputs: Iterable[Output], equal: Iterable[Equal], readers: Readers) -> None:
    """Raise CorruptError if tensors that are stored twice differ."""
    for name, first, second in equal:
        if not _is_same(first, second, readers):
            raise CorruptError(f"{name!r} is stored twice, with different values: in {_places(first, second)}.")
    for output in outputs:
        for first, second in output.restored.overlaps() if output.restored else ():
            if not _is_same(first, second, readers):
                raise CorruptError(
                    f"{_places(first)}: according to the structure record, these tensors share memory, but their "
                    "shared elements differ: one tensor was changed.",
                    "Make the shared elements equal in both tensors, or leave one tensor out with --exclude.",
                )


def _check_digests(inputs: Inputs, readers: Readers) -> None:
    """Raise CorruptError if a file has not the SHA-256 that its checkpoint states."""
    for file in dict.fromkeys(file.stored for file in inputs.files) if inputs.digests else ():
        stated = inputs.digests.get(file.path)
        if stated is not None:
            from ckptconv.storage.digests import check_digest, digest_of

            with readers.reading(file) as reader:
                check_digest(file.path, digest_of(reader, "sha256"), stated)


def _places(*tensors: LazyTensor) -> str:
    return " and ".join(next((file.path for file in tensor.inputs()), "the description") for tensor in tensors)
