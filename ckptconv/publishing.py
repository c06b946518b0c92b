"""Carries the plans of a conversion out in staging, and commits them when all are whole."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack

from .checksums import Checksums
from .errors import CorruptError
from .move import Progress, Tally, carry_out, same
from .options import Options
from .outputs import safetensors, universal
from .plan import Data, FilePlan, Plan
from .planning import Output
from .spool import SpoolingReaders
from .staging import DirectoryStaging, FileStaging, Staging, TreeStaging
from .storage import Syncing, check_unchanged, dirname, is_remote, join
from .targets import OUTPUT_NAMES, Target
from .tensors import File, LazyTensor
from .uploads import UploadStaging


def final_path(target: Target, file: FilePlan) -> str:
    if target.is_tree and file.name == universal.LATEST:
        return join(dirname(target.path), file.name)
    return target.path if target.is_file else join(target.path, file.name)


def _is_ours(name: str) -> bool:
    return OUTPUT_NAMES.fullmatch(name) is not None


def _staging(output: Output, options: Options) -> Staging:
    path, plan_id = output.target.path, output.plan.plan_id
    if is_remote(path):
        memory = options.buffers(far=True) // 2
        if output.target.is_file:
            return UploadStaging(path, plan_id, memory, options.storage_options)
        return UploadStaging(path, plan_id, memory, options.storage_options, safetensors.INDEX, _is_ours)
    if output.target.is_file:
        return FileStaging(path, plan_id, options.fsync)
    if output.target.is_tree:
        return TreeStaging(path, plan_id, marker=universal.ZERO, after=universal.LATEST, durable=options.fsync)
    return DirectoryStaging(
        path,
        plan_id,
        is_ours=_is_ours,
        index=safetensors.INDEX,
        durable=options.fsync,
    )


def publish(
    outputs: Sequence[Output],
    inputs: Sequence[File],
    equal: Sequence[tuple[str, LazyTensor, LazyTensor]],
    options: Options,
    progress: Progress | None,
    publishing: Callable[[], None] | None,
    checksums: Checksums | None = None,
    verify: Callable[[Sequence[Mapping[str, str] | None]], int] | None = None,
) -> Tally:
    """Carry out the plans in staging, and commit them when all are whole.

    `verify` is called before that with where each output's files are, by name; it raises if one is not as it should be,
    and tells how many bytes it compared. What is sent elsewhere can be read only when it has its name: then it is
    called at the end, with None for each.
    """
    jobs = options.jobs or min(os.cpu_count() or 1, 4)
    storage_options = dict(options.storage_options)
    total = Tally()
    sends = any(is_remote(output.target.path) for output in outputs)
    receives = any(is_remote(file.stored.path) for file in inputs)
    # Half is for what is read, where the other half is for what is sent.
    memory = options.buffers(sends or receives) // (2 if sends else 1)
    with ExitStack() as stack:
        readers = stack.enter_context(SpoolingReaders(storage_options, options.spool_dir))
        if any(file.packed for file in inputs):
            readers.expect(_packed(output.plan for output in outputs))
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
        stagings = [stack.enter_context(_staging(output, options)) for output in outputs]
        syncing = stack.enter_context(Syncing())
        for output, staging in zip(outputs, stagings, strict=True):
            for file in output.plan.files:
                writer = staging.create(file.name, file.size)
                total.add(
                    carry_out(
                        file,
                        writer,
                        readers,
                        jobs=jobs,
                        memory=memory,
                        progress=progress,
                        seen=checksums.seen if checksums else None,
                    )
                )
                seal = functools.partial(staging.seal, writer)
                if options.fsync:
                    syncing.add(seal)
                else:
                    seal()
        if checksums:
            checksums.check(readers, [output.plan for output in outputs])
        syncing.finish()
        check_unchanged(dict.fromkeys(file.stored for file in inputs), storage_options)
        total.bytes_read += readers.bytes_unpacked
        if verify and not sends:
            places = [
                {file.name: staging.staged(file.name) for file in output.plan.files}
                for output, staging in zip(outputs, stagings, strict=True)
            ]
            total.bytes_verified += verify(places)
        if publishing:
            publishing()
        for output, staging in zip(outputs, stagings, strict=True):
            staging.commit([file.name for file in output.plan.files])
        if verify and sends:
            total.bytes_verified += verify([None for _ in outputs])
    return total


def _packed(plans: Iterable[Plan]) -> Counter[File]:
    """The packed files that the plans read, and how many bytes of tensors come from each."""
    found: Counter[File] = Counter()
    for plan in plans:
        for part in (part for file in plan.files for part in file.parts if isinstance(part, Data)):
            found.update({file: part.nbytes for file in part.tensor.inputs() if file.packed})
    return found


def _places(*tensors: LazyTensor) -> str:
    return " and ".join(next((file.path for file in tensor.inputs()), "the description") for tensor in tensors)
