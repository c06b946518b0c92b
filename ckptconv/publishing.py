"""Carries the plans of a conversion out in staging, and commits them when all are whole."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from . import manifest
from .ahead import REQUESTS
from .checksums import Checksums
from .errors import CorruptError
from .manifest import Made, document
from .move import Progress, Tally, carry_out, same
from .options import Options
from .outputs import safetensors, universal
from .plan import Blank, Data, FilePlan, Plan
from .planning import Output
from .spool import SpoolingReaders
from .staging import DirectoryStaging, FileStaging, Staging, TreeStaging
from .storage import Syncing, check_unchanged, dirname, is_remote, join, normalize
from .targets import OUTPUT_NAMES, Target
from .tensors import File, LazyTensor
from .uploads import UploadStaging


@dataclass
class Done:
    """What publishing took, and how much of it an earlier run had done: files, and bytes."""

    tally: Tally = field(default_factory=Tally)
    reused: int = 0
    reused_bytes: int = 0


def final_path(target: Target, file: FilePlan) -> str:
    """Where a file of an output goes."""
    if target.is_tree and file.name == universal.LATEST:
        return join(dirname(target.path), file.name)
    return target.path if target.is_file else join(target.path, file.name)


def _is_ours(name: str) -> bool:
    return OUTPUT_NAMES.fullmatch(name) is not None


def last_path(output: Output) -> str:
    """The file that gets its name last: when it is there, so are the others."""
    names = [file.name for file in output.plan.files]
    last = safetensors.INDEX if safetensors.INDEX in names else names[-1 if output.target.is_tree else 0]
    return final_path(output.target, next(file for file in output.plan.files if file.name == last))


def _staging(output: Output, options: Options) -> Staging:
    path, plan_id = output.target.path, output.plan.plan_id
    if output.target.is_file:
        return _file_staging(path, plan_id, options)
    if is_remote(path):
        memory = options.buffers(far=True) // 2
        return UploadStaging(path, plan_id, memory, options.storage_options, safetensors.INDEX, _is_ours)
    if output.target.is_tree:
        return TreeStaging(path, plan_id, marker=universal.ZERO, after=universal.LATEST, durable=options.fsync)
    return DirectoryStaging(
        path,
        plan_id,
        is_ours=_is_ours,
        index=safetensors.INDEX,
        durable=options.fsync,
    )


def _file_staging(path: str, plan_id: str, options: Options) -> Staging:
    if is_remote(path):
        return UploadStaging(path, plan_id, options.buffers(far=True) // 2, options.storage_options)
    return FileStaging(path, plan_id, options.fsync)


@dataclass
class _Work:
    """An output, where it grows, what of it is made, and whether the CRC-32 of its tensors are."""

    output: Output
    staging: Staging
    digested: bool
    made: dict[str, Made] = field(default_factory=dict)

    @property
    def left(self) -> list[FilePlan]:
        """The files that are still to be made."""
        return [file for file in self.output.plan.files if file.name not in self.made]

    def take_over(self) -> None:
        """Count as made what an earlier run has finished."""
        for file in self.output.plan.files:
            # What is not data is made again in no time.
            found = self.staging.finished(file) if file.tensors else None
            if found and not (self.digested and found.crcs is None):
                self.made[file.name] = found

    def manifest(self) -> bytes:
        """The manifest of the output, all of which is made."""
        files = {file.name: (self.made[file.name], _tensors(file)) for file in self.output.plan.files}
        return document(self.output.heading, files)


def publish(
    outputs: Sequence[Output],
    inputs: Sequence[File],
    equal: Sequence[tuple[str, LazyTensor, LazyTensor]],
    options: Options,
    announce: Callable[[int], None] | None,
    progress: Progress | None,
    publishing: Callable[[], None] | None,
    checksums: Checksums | None = None,
    verify: Callable[[Sequence[Mapping[str, str] | None]], int] | None = None,
) -> Done:
    """Carry out the plans in staging, and commit them when all are whole.

    What an earlier run of the same plan has finished is not made again. `announce` is told how many bytes are, and are
    verified. `verify` is called before the commit with where each output's files are, by name; it raises if one is not
    as it should be, and tells how many bytes it compared. What is sent elsewhere can be read only when it has its name:
    then it is called at the end, with None for each.
    """
    storage_options = dict(options.storage_options)
    done = Done()
    sends = any(is_remote(output.target.path) for output in outputs)
    receives = any(is_remote(file.stored.path) for file in inputs)
    # Half is for what is read, where the other half is for what is sent.
    memory = options.buffers(sends or receives) // (2 if sends else 1)
    with ExitStack() as stack:
        readers = stack.enter_context(SpoolingReaders(storage_options, options.spool_dir))
        if any(file.packed for file in inputs):
            readers.expect(_packed(output.plan for output in outputs))
        _check_equal(outputs, equal, readers)
        works = [
            _Work(output, stack.enter_context(_staging(output, options)), _is_digested(output, options))
            for output in outputs
        ]
        for work in works:
            work.take_over()
            sizes = [made.size for made in work.made.values()]
            done.reused += len(sizes)
            done.reused_bytes += sum(sizes)
            work.staging.expect(work.output.plan.nbytes - sum(sizes))
        if announce:
            # To verify is to go over all of it once more.
            whole = sum(output.plan.nbytes for output in outputs)
            announce(whole - done.reused_bytes + (whole if verify else 0))
        syncing = stack.enter_context(Syncing())
        for work in works:
            for file in work.left:
                seal = _make(work, file, readers, options, memory, progress, checksums, done.tally)
                if options.fsync:
                    syncing.add(seal)
                else:
                    seal()
        if checksums:
            checksums.check(readers, [output.plan for output in outputs])
        names = [[file.name for file in work.output.plan.files] for work in works]
        for work, listed in zip(works, names, strict=True):
            if not work.output.target.is_file:
                listed.append(manifest.NAME)
                syncing.add(_write(work.staging, manifest.NAME, work.manifest()))
        described = _manifest_file(works, options, stack)
        syncing.finish()
        check_unchanged(dict.fromkeys(file.stored for file in inputs), storage_options)
        done.tally.bytes_read += readers.bytes_unpacked
        if verify and not sends:
            places = [{file.name: work.staging.staged(file.name) for file in work.output.plan.files} for work in works]
            done.tally.bytes_verified += verify(places)
        if publishing:
            publishing()
        for work, listed in zip(works, names, strict=True):
            work.staging.commit(listed)
        if described:
            described.commit([""])
        if verify and sends:
            done.tally.bytes_verified += verify([None for _ in outputs])
    return done


def _make(
    work: _Work,
    file: FilePlan,
    readers: SpoolingReaders,
    options: Options,
    memory: int,
    progress: Progress | None,
    checksums: Checksums | None,
    tally: Tally,
) -> Callable[[], None]:
    """Make one file; what is left to be done is to wait for the disk, and to record that it is finished."""
    writer = work.staging.create(file.name, file.size)
    crcs: dict[str, int] | None = {} if work.digested else None
    tally.add(
        carry_out(
            file,
            writer,
            readers,
            jobs=options.jobs or min(os.cpu_count() or 1, 4),
            memory=memory,
            progress=progress,
            seen=checksums.seen if checksums else None,
            digests=crcs,
            requests=options.jobs or REQUESTS,
        )
    )
    work.made[file.name] = Made(file.size, crcs)
    if not file.tensors:
        return functools.partial(work.staging.seal, writer)
    work.staging.note(file, crcs)

    def seal() -> None:
        work.staging.seal(writer)
        work.staging.confirm(file.name)

    return seal


def _write(staging: Staging, name: str, data: bytes) -> Callable[[], None]:
    """Stage a small file; what is left to be done is to wait for the disk."""
    writer = staging.create(name, len(data))
    writer.write_at(0, memoryview(data))
    return functools.partial(staging.seal, writer)


def _manifest_file(works: Sequence[_Work], options: Options, stack: ExitStack) -> Staging | None:
    """The manifest of all outputs, staged where it was asked for."""
    if not options.manifest:
        return None
    documents = [work.manifest() for work in works]
    data = documents[0] if len(documents) == 1 else b'{"outputs": [\n' + b",\n".join(documents) + b"]}\n"
    staging = _file_staging(normalize(options.manifest), works[0].output.plan.plan_id, options)
    stack.enter_context(staging)
    _write(staging, "", data)()
    return staging


def _is_digested(output: Output, options: Options) -> bool:
    """Whether the CRC-32 of the tensors are made: they cost, and serve where there are several files, or a manifest."""
    return bool(options.manifest) or sum(bool(file.tensors) for file in output.plan.files) > 1


def _tensors(file: FilePlan) -> list[str]:
    return [part.name for part in file.parts if isinstance(part, Data)]


def _check_equal(
    outputs: Iterable[Output], equal: Iterable[tuple[str, LazyTensor, LazyTensor]], readers: SpoolingReaders
) -> None:
    """Raise CorruptError for what is stored twice and differs."""
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


def _packed(plans: Iterable[Plan]) -> Counter[File]:
    """The packed files that the plans read, and how many bytes of tensors come from each."""
    found: Counter[File] = Counter()
    for plan in plans:
        for part in (part for file in plan.files for part in file.parts if isinstance(part, (Data, Blank))):
            found.update({file: part.tensor.nbytes for file in part.tensor.inputs() if file.packed})
    return found


def _places(*tensors: LazyTensor) -> str:
    return " and ".join(next((file.path for file in tensor.inputs()), "the description") for tensor in tensors)
