"""Reads all data of a step: for the digests and checksums that it came with, and for statistics of its values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ckptconv.engine.checksums import Checksums
from ckptconv.errors import CorruptError, damaged
from ckptconv.features.reporting.measure import measured, read_through
from ckptconv.features.runs.step import Step
from ckptconv.features.runs.whole import Judged, sources_of, weights_of
from ckptconv.formats.source import Source
from ckptconv.outputs.targets import MANIFEST
from ckptconv.pickles.children import tensors_of
from ckptconv.plan import Data
from ckptconv.publish.earlier import Directory
from ckptconv.storage.digests import digest_of
from ckptconv.storage.location import Location
from ckptconv.storage.progress import Progress
from ckptconv.storage.writing import Writer


class Values(NamedTuple):
    """Numbers of NaN and infinite values, and the norm of the finite weights."""

    nan: int
    inf: int
    norm: float


class Readings(NamedTuple):
    """The checks of a step's data: number of digests and checksums compared, None if none were asked for; the error of
    one that does not match; and the statistics of the values, if asked for."""

    checked: int | None = None
    damage: str = ""
    values: Values | None = None

    @property
    def why(self) -> str:
        """Why the step is not good by its data; "" if nothing speaks against it."""
        nan = self.values.nan if self.values else 0
        return self.damage or (f"{nan:,} of its values are NaN" if nan else "")


class _Stated(NamedTuple):
    """A digest in hex that is stated of a file, by whom, and its algorithm."""

    file: Location
    algorithm: str
    digest: str
    by: str


def read(
    known: Judged, inert: bool, *, check: bool = False, stats: bool = False, progress: Progress | None = None
) -> Readings:
    """Read all data of a step that is whole: for its digests with `check`, for its values with `stats`."""
    sources = sources_of(known.step, inert)
    readings = Readings(*checked(known.step, sources, progress)) if check else Readings()
    if stats:
        try:
            return readings._replace(values=values_of(known.step, sources, progress))
        except CorruptError as error:
            return readings._replace(damage=readings.damage or error.message)
    return readings


def checked(step: Step, sources: Sequence[Source], progress: Progress | None) -> tuple[int, str]:
    """Read a step and its checkpoints. Return the number of digests and checksums compared, and the first error that
    one shows."""
    count = 0
    try:
        for stated in _stated(step, sources):
            _check(stated)
            count += 1
        for source in sources:
            count += _storages(source, step.home, progress)
    except CorruptError as error:
        return count, error.message
    return count, ""


def _stated(step: Step, sources: Sequence[Source]) -> Iterator[_Stated]:
    """Yield the digests of files that the checkpoints of a step state, and those in manifests of this program. Raise
    CorruptError for such a manifest that is not valid."""
    for source in sources:
        for path, digest in source.files.digests.items():
            yield _Stated(step.home.at(path), "sha256", digest, "its checkpoint")
    for path in step.files:
        above, _, name = path.rpartition("/")
        if name != MANIFEST:
            continue
        directory = step.home.join(*above.split("/"))
        manifest = Directory(directory).manifest
        if manifest is None:
            raise damaged(f"{directory.join(name)} is not valid, or was written by another release.")
        for file, entry in manifest["files"].items():
            if "digests" in entry:
                yield _Stated(directory.join(file), manifest["digest"], entry["digests"]["file"], name)


def _check(stated: _Stated) -> None:
    """Raise CorruptError for a file whose digest is another one."""
    if stated.file.kind != "file":
        raise damaged(f"{stated.by} lists {stated.file}, which does not exist.")
    with stated.file.open_reader() as reader:
        digest = digest_of(reader, stated.algorithm)
    if digest != stated.digest:
        raise damaged(
            f"{stated.file} has changed since it was written: its {stated.algorithm} is {digest}, but {stated.by} "
            f"records {stated.digest}."
        )


def _storages(source: Source, run: Location, progress: Progress | None) -> int:
    """Compare the storages of all tensors with their checksums. Return the number of storages."""
    parts: list[Data] = []
    at = 0
    for tensor in tensors_of(source.weights, source.optimizer):
        parts.append(Data(at, tensor, f"{len(parts)}"))
        at += tensor.nbytes
    checksums = Checksums(source.files.records)
    read_through(parts, _Nowhere(progress), run.options, checksums)
    return checksums.checked


class _Nowhere(Writer):
    """Takes bytes, and keeps none."""

    positioned = True

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress

    def write_at(self, offset: int, data: memoryview) -> None:
        if self._progress:
            self._progress(len(data))


def values_of(step: Step, sources: Sequence[Source], progress: Progress | None) -> Values:
    """Return the statistics of all values of a step, whose first checkpoint has the weights."""
    of_weights = weights_of(sources[0])
    counted = {id(tensor) for tensor in of_weights}
    every_tensor = tensors_of(*(tree for source in sources for tree in (source.weights, source.optimizer)))
    others = [tensor for tensor in every_tensor if id(tensor) not in counted]
    weights, states = ({f"{number}": tensor for number, tensor in enumerate(each)} for each in (of_weights, others))
    of_each, _ = measured(weights, step.home.options, progress)
    of_states, _ = measured(states, step.home.options, progress)
    squares = 0.0
    for name, statistics in of_each.items():
        finite = weights[name].numel - statistics.nan - statistics.inf
        if isinstance(statistics.mean, float) and statistics.std is not None:
            squares += finite * (statistics.mean**2 + statistics.std**2)
    every = [*of_each.values(), *of_states.values()]
    return Values(
        sum(statistics.nan for statistics in every), sum(statistics.inf for statistics in every), math.sqrt(squares)
    )
