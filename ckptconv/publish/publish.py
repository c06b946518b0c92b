"""Carries out the plans of a conversion in staging, and commits them when all files are complete."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from ckptconv.engine.checksums import Checksums
from ckptconv.engine.execute import same
from ckptconv.engine.worker import Tally
from ckptconv.errors import CkptconvError, CorruptError, FailedError, StoppedError, UsageError
from ckptconv.formats.companions import is_companion_name
from ckptconv.options.table import Options
from ckptconv.outputs.planning import Output
from ckptconv.outputs.targets import DIRECTORIES, Target
from ckptconv.plan import FilePlan, Plan
from ckptconv.publish import manifest
from ckptconv.publish.attestation import statements
from ckptconv.publish.inputs import DIGESTING, Digested, described, digested, files_in
from ckptconv.publish.jobs import Elsewhere, Task, make, make_elsewhere, packed_in
from ckptconv.publish.manifest import Made, document, together
from ckptconv.publish.parts import assign
from ckptconv.publish.staging.base import Staging
from ckptconv.publish.staging.local import LocalStaging, TreeStaging
from ckptconv.storage.files import check_unchanged
from ckptconv.storage.location import Location
from ckptconv.storage.paths import is_remote, join, normalize
from ckptconv.storage.prefetch import REQUESTS
from ckptconv.storage.progress import Announced, Progress
from ckptconv.storage.spool import SpoolingReaders
from ckptconv.storage.writing import Syncing
from ckptconv.tensors.lazy import Equal, LazyTensor
from ckptconv.tensors.moves import File

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future

# Compares outputs with their sources. Takes the paths of each output's staged files by name (None for files under their
# final names), and what counts the bytes compared, of which it returns the sum.
Verifier: TypeAlias = Callable[[Sequence[Mapping[str, str] | None], Progress], int]


@dataclass
class Done:
    """What publishing took.

    `reused` files, with `reused_bytes`, were finished by an earlier run. `differing` are the names of states of which
    every rank has its own copy, and the copies differ.
    """

    tally: Tally = field(default_factory=Tally)
    differing: list[str] = field(default_factory=list)
    reused: int = 0
    reused_bytes: int = 0


def final_path(target: Target, file: FilePlan) -> str:
    """Return the final path of a file of an output."""
    if target.is_tree:
        from ckptconv.outputs import universal  # which nothing else needs

        if file.name == universal.LATEST:
            return universal.pointer(target.path)
    return target.path if target.is_file else join(target.path, file.name)


def last_path(output: Output) -> str:
    """Return the path of the file that gets its final name last: once it exists, so do the others."""
    names = [file.name for file in output.plan.files if output.target.is_tree or not is_companion_name(file.name)]
    index = output.target.index
    last = index if index in names else names[-1 if output.target.is_tree else 0]
    return final_path(output.target, next(file for file in output.plan.files if file.name == last))


def staging_for(
    path: str,
    plan_id: str,
    kind: str,
    options: Options,
    shared: bool = False,
    in_parts: bool = False,
    replaces: frozenset[str] = frozenset(),
) -> Staging:
    """Return the staging of an output of the given `kind` (see `Target.kind`), or of a file beside it.

    `shared`: other processes make parts of it at the same time. `in_parts`: on a store, several processes work on it.
    `replaces` are files of an earlier output that go, beside those with an output's names.
    """
    if kind == "tree":
        from ckptconv.outputs import universal

        if not is_remote(path):
            return TreeStaging(path, plan_id, universal.ZERO, universal.LATEST, options.fsync, shared)
        from ckptconv.publish.staging.remote_parts import TreeOnStore

        memory = options.buffers(far=True) // 2
        place = Location(path, dict(options.storage_options))
        return TreeOnStore(place, plan_id, memory, universal.ZERO, universal.LATEST, shared)
    index = DIRECTORIES[kind].last if kind in DIRECTORIES else ""
    is_ours = functools.partial(_is_ours, kind, replaces) if index else None
    if not is_remote(path):
        return LocalStaging(path, plan_id, options.fsync, shared, index, is_ours)
    place, memory = Location(path, dict(options.storage_options)), options.buffers(far=True) // 2
    if in_parts and is_ours:
        from ckptconv.publish.staging.remote_parts import PartsOnStore

        return PartsOnStore(place, plan_id, memory, index, is_ours, shared)
    from ckptconv.publish.staging.remote import UploadStaging

    return UploadStaging(place, plan_id, memory, index, is_ours)


def _is_ours(kind: str, replaces: frozenset[str], name: str) -> bool:
    return DIRECTORIES[kind].is_file(name) or name in replaces


def _is_one_upload(output: Output) -> bool:
    """Whether a remote output is one file: it is complete once it has its name, while shards need an index."""
    index = output.target.index
    has_index = output.target.is_tree or any(file.name == index for file in output.plan.files)
    return is_remote(output.target.path) and not has_index


@dataclass
class _Work:
    """An output, its staging, the files to make in this run, and those made so far by name.

    `digested`: whether the CRC-32 of the tensors are computed too.
    """

    output: Output
    staging: Staging
    digested: bool
    files: list[FilePlan]
    made: dict[str, Made] = field(default_factory=dict)

    @property
    def left(self) -> list[FilePlan]:
        """The files still to make."""
        return [file for file in self.files if file.name not in self.made]

    @property
    def nbytes(self) -> int:
        """The size of all files of this run, made or not."""
        return sum(file.size for file in self.files)

    def resume(self, in_parts: bool, digest: str) -> None:
        """Count the files that an earlier run has finished as made. Those of a part get their digests in `finish`."""
        for file in self.files:
            # Files without tensors are quickly made again.
            known = file.tensors or in_parts
            found = self.staging.finished(file.name, file.size, "" if in_parts else digest) if known else None
            if found and (found.digested or not self.digested):
                # The manifest must not depend on whether the run was resumed.
                self.made[file.name] = found if self.digested else replace(found, crcs=dict.fromkeys(found.crcs))

    def manifest(self) -> bytes:
        """Return the manifest of the output, all of whose files are made."""
        return document(self.output.heading, {file.name: self.made[file.name] for file in self.output.plan.files})


def publish(
    outputs: Sequence[Output],
    inputs: Sequence[File],
    equal: Sequence[Equal],
    alike: Sequence[Equal],
    options: Options,
    on_total: Callable[[int], object] | None,
    progress: Progress | None,
    before_commit: Callable[[], object] | None,
    checksums: Checksums | None = None,
    verify: Verifier | None = None,
    executor: Executor | None = None,
    made_of: Sequence[Mapping[str, File]] = (),
) -> Done:
    """Carry out the plans in staging and commit when all files are complete; or make one part, and keep it staged.

    Files that an earlier run of the same plan has finished are not made again. `on_total` is called with the number of
    bytes to write, verify and digest. `verify` is called before the commit, and raises if a file is wrong; with a
    remote output, which can be read only under its final name, after the commit. `executor`, if given, writes the
    files. `made_of` are the inputs of each output by name, whose digests an attestation needs.
    """
    storage_options = dict(options.storage_options)
    part = options.part
    done = Done()
    for option, asked, hint in (
        ("--verify", verify, "Verify it when it is finished."),
        ("--manifest", options.manifest, "Give it to `ckptconv finish`."),
        ("--attest", options.attest, "Give it to `ckptconv finish`."),
        ("--depfile", options.depfile, "Write the rule by hand, for `ckptconv finish`."),
    ):
        if part and asked:
            raise UsageError(f"{option} is about an output as a whole, and --part makes a part of it.", hint)
    sends = any(is_remote(output.target.path) for output in outputs)
    for output in outputs if part else ():
        if output.target.to == "dcp-hf" and is_remote(output.target.path):
            raise UsageError(
                f"{output.target.path}: on a store, parts need a file that says when all are there, and safetensors "
                "shards of torch.distributed.checkpoint have none.",
                "Convert it without --part, or write it to a shared disk.",
            )
        if _is_one_upload(output):
            raise UsageError(
                f"{output.target.path}: on a store, parts are the shards of an output with an index, and this output "
                "is one file.",
                "Convert it without --part, write it to a shared disk, or divide it with a smaller --max-shard-size.",
            )
    receives = any(is_remote(file.stored.path) for file in inputs)
    # With uploads, half of the memory is for reading and half for sending.
    memory = options.buffers(sends or receives) // (2 if sends else 1)
    with ExitStack() as stack:
        readers = stack.enter_context(SpoolingReaders(storage_options, options.spool_dir))
        chosen = files_of(outputs, part)
        # This process must complete the upload of a single remote file, whoever writes the other files.
        made_here = [executor is None or _is_one_upload(each) for each in outputs]
        if any(file.packed for file in inputs):
            plans = (Plan(tuple(files), "") for files, here in zip(chosen, made_here, strict=True) if here)
            readers.expect(packed_in(plans))
        if not part or not part[0]:
            _check_equal(outputs, equal, readers)
            different = (name for name, one, other in alike if not same(one, other, readers))
            done.differing = list(dict.fromkeys(different))
        works = [
            _Work(
                output,
                stack.enter_context(
                    staging_for(
                        output.target.path,
                        output.plan.plan_id,
                        output.target.kind,
                        # What is not synced is trusted by its CRC-32s: a part that has none is synced.
                        options if digested or part is None else replace(options, fsync=True),
                        part is not None,
                        part is not None or not here,
                        output.target.replaces,
                    )
                ),
                digested,
                files,
            )
            for output, files, here in zip(outputs, chosen, made_here, strict=True)
            for digested in [_is_digested(output, options)]
        ]
        for work in works:
            work.resume(part is not None, options.digest)
            sizes = [made.size for made in work.made.values()]
            done.reused += len(sizes)
            done.reused_bytes += sum(sizes)
            work.staging.expect(work.left)
        whole = sum(work.nbytes for work in works)
        if on_total:
            # Verification reads all of it once more.
            digesting = sum(file.size for file in files_in(made_of)) if options.attest else 0
            on_total(whole - done.reused_bytes + (whole if verify else 0) + digesting)
        counted = Announced(progress, whole - done.reused_bytes)
        syncing = stack.enter_context(Syncing())
        requests = options.jobs or REQUESTS
        jobs = options.jobs or (1 if executor else None)
        own: list[tuple[_Work, Task]] = []
        elsewhere: list[tuple[_Work, Task]] = []
        for work, here in zip(works, made_here, strict=True):
            for file in work.left:
                # No records for a single file, which is made again until it has its final name, or for files without
                # tensors, which are quickly made again.
                recorded = part is not None or (bool(file.tensors) and not work.output.target.is_file)
                task = Task(file, work.staging, work.digested, recorded, jobs, memory, requests, options.digest)
                (own if here else elsewhere).append((work, task))
        if part:
            for index, work in enumerate(works):
                work.staging.describe(_description(work.output, part[1], index, made_of[index]))
        if executor:
            _elsewhere(elsewhere, executor, options, checksums, counted, done.tally)
        on_file = getattr(progress, "on_file", None)
        for work, task in own:
            if on_file:
                on_file(task.file.name)
            result, seal = make(task, readers, counted, checksums)
            done.tally.add(result.tally)
            work.made[task.file.name] = result.made
            if options.fsync:
                syncing.add(seal)
            else:
                seal()
        counted.finish()
        if checksums:
            checksums.check(readers, [output.plan for output in outputs])
        inputs_digested: Sequence[Mapping[str, Digested]] = ()
        if options.attest:
            if on_file:
                on_file(DIGESTING)
            inputs_digested = digested(made_of, options.digest, options, progress)
            done.tally.bytes_read += sum(file.size for file in files_in(made_of))
        if options.digest:
            syncing.finish()  # digests are complete when their files are sealed
        names = [[file.name for file in work.files] for work in works]
        beside: list[Staging] = []
        for work, listed in zip(works, names, strict=True) if not part else ():
            if not work.output.target.is_file:
                listed.append(manifest.NAME)
                writer = work.staging.put(manifest.NAME, work.manifest())
                syncing.add(functools.partial(work.staging.seal, writer))
        if not part:
            beside = _described(works, inputs_digested, options, stack)
        syncing.finish()
        check_unchanged(dict.fromkeys(file.stored for file in inputs), storage_options)
        done.tally.bytes_read += readers.bytes_unpacked
        if part:
            for work in works:
                work.staging.detach()
            return done
        if on_file and verify:
            on_file("verifying")
        if verify and not sends:
            places = [{file.name: work.staging.staged(file.name) for file in work.output.plan.files} for work in works]
            done.tally.bytes_verified += _verified(verify, places, progress, whole)
        if before_commit:
            before_commit()
        commit([(work.staging, listed) for work, listed in zip(works, names, strict=True)])
        for staging in beside:
            staging.commit([""])
        if verify and sends:
            done.tally.bytes_verified += _verified(verify, [None for _ in outputs], progress, whole)
    return done


def _verified(
    verify: Verifier, places: Sequence[Mapping[str, str] | None], progress: Progress | None, total: int
) -> int:
    """Verify, and count `total` bytes for it: those of whole files, while `verify` counts tensors."""
    counted = Announced(progress, total)
    compared = verify(places, counted)
    counted.finish()
    return compared


def commit(works: Sequence[tuple[Staging, Sequence[str]]]) -> None:
    """Give the files of each output, all of which are staged, their final names."""
    done: list[str] = []
    for staging, names in works:
        try:
            staging.commit(names)
        except CkptconvError as error:
            if done:
                error.message += f" Complete is {' and '.join(done)}."
            raise
        done.append(staging.path)


def files_of(outputs: Sequence[Output], part: tuple[int, int] | None) -> list[list[FilePlan]]:
    """Return the files of each output to make now: all, or those of one part."""
    if not part:
        return [list(output.plan.files) for output in outputs]
    number, count = part
    # Assign each output separately, so that `finish` can tell which part a file belongs to.
    found = []
    for index, output in enumerate(outputs):
        files = output.plan.files
        parts = assign([file.size for file in files], count, index)
        found.append([file for file, of in zip(files, parts, strict=True) if of == number])
    return found


def _description(output: Output, parts: int, shift: int, made_of: Mapping[str, File]) -> bytes:
    """Return what `finish` needs to know of a plan, as JSON: its files, how to publish them, and what they are made
    of."""
    target, files = output.target, output.plan.files
    return json.dumps(
        {
            "plan": output.plan.plan_id,
            "kind": target.kind,
            "parts": parts,
            "shift": shift,
            "heading": output.heading,
            "files": [[file.name, file.size, file.tensors] for file in files],
            "inputs": described(made_of),
        }
    ).encode()


def _elsewhere(
    tasks: Sequence[tuple[_Work, Task]],
    executor: Executor,
    options: Options,
    checksums: Checksums | None,
    progress: Progress,
    tally: Tally,
) -> None:
    """Run the tasks in `executor`, the largest first."""
    from concurrent.futures import FIRST_EXCEPTION, wait

    known = Elsewhere(options.storage_options, options.spool_dir, checksums.records if checksums else None)
    ordered = sorted(tasks, key=lambda each: -each[1].file.size)
    futures = {}
    try:
        for work, task in ordered:
            away = replace(task, staging=task.staging.elsewhere())
            futures[executor.submit(make_elsewhere, away, known)] = work, task
        waiting = set(futures)
        while waiting:
            ended, waiting = wait(waiting, timeout=1, return_when=FIRST_EXCEPTION)
            # Successes first: count the files made even if another task failed at the same time.
            for future in sorted(ended, key=_has_failed):
                work, task = futures[future]
                result = future.result()
                if isinstance(result, CkptconvError):
                    raise result
                work.made[task.file.name] = result.made
                if task.recorded:
                    work.staging.recorded.add(task.file.name)
                tally.add(result.tally)
                if checksums:
                    checksums.include(result.checked, result.extra_bytes, result.unrecorded)
                progress(task.file.size)
    except BaseException as error:
        for future in futures:
            future.cancel()
        if isinstance(error, Exception) and not isinstance(error, StoppedError):
            wait(futures)  # so that no task still writes once this has failed
        if isinstance(error, (CkptconvError, MemoryError)) or not isinstance(error, Exception):
            raise
        raise FailedError(
            f"The executor did not carry out its tasks: {type(error).__name__}: {error}. Nothing was put under a final "
            "name.",
            "Run it again: what is finished stays.",
        ) from error


def _has_failed(future: Future[Any]) -> bool:
    return future.exception() is not None or isinstance(future.result(), CkptconvError)


def _described(
    works: Sequence[_Work], inputs: Sequence[Mapping[str, Digested]], options: Options, stack: ExitStack
) -> list[Staging]:
    """Stage the manifest of all outputs and the statements about them, each where it was asked for."""
    documents = [work.manifest() for work in works] if options.manifest or options.attest else []
    targets = [work.output.target for work in works]
    made = [(each.path, each.is_file, data) for each, data in zip(targets, documents, strict=bool(documents))]
    return stage_beside(made, inputs, works[0].output.plan.plan_id, options, stack)


def stage_beside(
    outputs: Sequence[tuple[str, bool, bytes]],
    inputs: Sequence[Mapping[str, Digested]],
    plan_id: str,
    options: Options,
    stack: ExitStack,
) -> list[Staging]:
    """Stage what is written beside `outputs`, as `options` say. Each output is given as its path, whether it is a file,
    and its manifest; `inputs` have the digests of what it was made of, if a statement is to be written."""
    wanted: list[tuple[str, bytes]] = []
    if options.manifest:
        wanted.append((options.manifest, together([data for _, _, data in outputs])))
    if options.attest:
        wanted.append((options.attest, statements(outputs, inputs)))
    staged = []
    for path, data in wanted:
        staging = stack.enter_context(staging_for(normalize(path), plan_id, "file", options))
        staging.seal(staging.put("", data))
        staged.append(staging)
    return staged


def _is_digested(output: Output, options: Options) -> bool:
    """Whether to compute the CRC-32 of the tensors, which costs a tenth of the work and more.

    They serve where there are several files, or where a manifest is requested; for one file made in a part it may be
    requested later. The manifest of a directory must be the same whether it is made in parts or not.
    """
    asked = bool(options.manifest) or (options.part is not None and output.target.is_file)
    return asked or sum(bool(file.tensors) for file in output.plan.files) > 1


def _check_equal(outputs: Iterable[Output], equal: Iterable[Equal], readers: SpoolingReaders) -> None:
    """Raise CorruptError if tensors that are stored twice differ."""
    for name, one, other in equal:
        if not same(one, other, readers):
            raise CorruptError(f"{name!r} is stored twice, in {_places(one, other)}, and the two differ.")
    for output in outputs:
        for one, other in output.restored.overlaps() if output.restored else ():
            if not same(one, other, readers):
                raise CorruptError(
                    f"{_places(one)}: tensors that share memory, as the structure record says, differ in what they "
                    "share: one of them was changed since.",
                    "Change them alike, or convert them one without the other (--exclude).",
                )


def _places(*tensors: LazyTensor) -> str:
    return " and ".join(next((file.path for file in tensor.inputs()), "the description") for tensor in tensors)
