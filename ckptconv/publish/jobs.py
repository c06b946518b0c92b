"""Writes one file of an output into staging, in this process or in another that sees the inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptconv.engine.buffers import Tally
from ckptconv.engine.execute import carry_out
from ckptconv.plan import Checked, Data, FilePlan, Plan
from ckptconv.process import needed
from ckptconv.publish.staging.base import FinishedFile, Staging
from ckptconv.storage.files import Readers
from ckptconv.storage.progress import Progress
from ckptconv.tensors.moves import File

if TYPE_CHECKING:
    from ckptconv.engine.checksums import Checksums

# The feature that has the workers of an executor write files: `making` in its folder has `check` and `make_all`.
EXECUTING = "executors"


class Task(NamedTuple):
    """A file to write into `staging`. It can be pickled if its staging can.

    `digested`: compute the CRC-32 of its tensors. `recorded`: write a record when it is finished. `memory` (bytes)
    bounds the buffers of all `jobs` threads together (`jobs` None: as many as are useful). `requests` bounds the
    concurrent requests to remote storage. `digest` is the algorithm of its content digests; "": compute none. `forked`:
    processes make it, rather than threads.
    """

    file: FilePlan
    staging: Staging
    digested: bool
    recorded: bool
    jobs: int | None
    memory: int
    requests: int
    digest: str = ""
    forked: bool = False


@dataclass(eq=False, repr=False)
class Result:
    """A finished file, and the counts of its writing."""

    finished: FinishedFile
    tally: Tally = field(default_factory=Tally)
    checked: int = 0
    extra_bytes: int = 0
    unrecorded: tuple[str, ...] = ()


def make(
    task: Task, readers: Readers, progress: Progress | None = None, checksums: Checksums | None = None
) -> tuple[Result, Callable[[], None]]:
    """Write a file. Return the result and a function that waits for the disk and writes the record.

    The content digests in the result are empty until that function has run.
    """
    file, staging = task.file, task.staging
    writer = staging.create(file.name, file.size)
    parts = [part for part in file.parts if isinstance(part, Data)]
    ranges = ((part.offset, part.nbytes, part.name) for part in parts)
    digesting = None
    if task.digest:
        from ckptconv.storage.digests import DigestingWriter

        digesting = DigestingWriter(writer, file.size, ranges, task.digest)
    crcs: dict[str, int] | None = {} if task.digested else None
    try:
        if digesting:
            digesting.start()
        tally = carry_out(
            file,
            digesting or writer,
            readers,
            jobs=task.jobs,
            memory=task.memory,
            progress=progress,
            seen=checksums.seen if checksums else None,
            digests=crcs,
            requests=task.requests,
            forked=task.forked,
        )
    except BaseException:
        if digesting:
            digesting.give_up()
        raise
    digests = digesting.digests if digesting else None
    known = {part.name: None if crcs is None else crcs.get(part.name, 0) for part in parts}
    finished = FinishedFile(file.size, known, digests)

    def seal() -> None:
        if digesting:
            digesting.finish()
        staging.seal(writer)
        if task.recorded:
            staging.record(file, crcs, digests)

    return Result(finished, tally), seal


def executing() -> Any:
    """Return the module that has an executor write files. Raise UsageError if it is missing."""
    return needed(EXECUTING, "making", "An executor")


def packed_in(plans: Iterable[Plan]) -> Counter[File]:
    """Return the packed files that `plans` read, with the bytes of tensors that come from each."""
    from ckptconv.storage.packed import packed  # few inputs are compressed

    parts = (part for plan in plans for file in plan.files for part in file.parts)
    return packed(part.tensor for part in parts if isinstance(part, (Data, Checked)))
