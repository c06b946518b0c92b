"""Reads all data of a step: for the digests and checksums that it came with, and for statistics of its values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ckptconv.engine.checksums import Checksums
from ckptconv.engine.execute import carry_out
from ckptconv.errors import CorruptError
from ckptconv.features.joining.integrity import check_file
from ckptconv.features.reporting.measure import measured
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.pickles.children import walk
from ckptconv.plan import Data, FilePlan, Plan
from ckptconv.process import settled
from ckptconv.publish.jobs import packed_in
from ckptconv.storage.files import is_far
from ckptconv.storage.location import Location
from ckptconv.storage.packed import SpoolingReaders
from ckptconv.storage.progress import Progress
from ckptconv.storage.writing import Writer
from ckptconv.tensors.lazy import LazyTensor


class Values(NamedTuple):
    """How many values are NaN and infinite, and the norm of the finite weights."""

    nan: int
    inf: int
    norm: float


def checked(sources: Sequence[Source], options: Mapping[str, Any], progress: Progress | None) -> tuple[int, str]:
    """Read the checkpoints of a step. Return how many digests and checksums were compared, and what the first says that
    is wrong."""
    count = 0
    try:
        for source in sources:
            digests = source.files.digests
            for path in digests:
                check_file(Location(path, dict(options)), digests)
                count += 1
            count += _storages(source, options, progress)
        return count, ""
    except CorruptError as error:
        return count, error.message


def _storages(source: Source, options: Mapping[str, Any], progress: Progress | None) -> int:
    """Compare the storages of all tensors with their checksums. Return how many there are."""
    parts: list[Data] = []
    at = 0
    for tensor in tensors_of(source.weights, source.optimizer).values():
        parts.append(Data(at, tensor, f"{len(parts)}"))
        at += tensor.nbytes
    plan = FilePlan("", at, tuple(parts))
    checksums = Checksums(source.files.records)
    own = Options()
    with settled(), SpoolingReaders(dict(options)) as readers:
        packed = packed_in([Plan((plan,), "")])
        if packed:
            readers.expect(packed)
        memory = own.buffers(any(is_far(file.stored.path) for file in plan.inputs()))
        carry_out(plan, _Nowhere(progress), readers, jobs=own.jobs, memory=memory, seen=checksums.seen)
        checksums.check(readers, [Plan((plan,), "")])
    return checksums.checked


class _Nowhere(Writer):
    """Takes bytes, and keeps none."""

    positioned = True

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress

    def write_at(self, offset: int, data: memoryview) -> None:
        if self._progress:
            self._progress(len(data))


def values_of(sources: Sequence[Source], options: Mapping[str, Any], progress: Progress | None) -> Values:
    """Return the statistics of all values of a step, whose first checkpoint has the weights."""
    weights = tensors_of(sources[0].weights)
    others = [tree for source in sources for tree in (source.weights, source.optimizer)][1:]
    found, _ = measured(weights, options, progress)
    states, _ = measured(tensors_of(*others), options, progress)
    every = [*found.values(), *states.values()]
    squares = 0.0
    for name, each in found.items():
        finite = weights[name].numel - each.nan - each.inf
        if isinstance(each.mean, float) and each.std is not None:
            squares += finite * (each.mean**2 + each.std**2)
    return Values(sum(each.nan for each in every), sum(each.inf for each in every), math.sqrt(squares))


def tensors_of(*trees: Any) -> dict[str, LazyTensor]:
    """Return the tensors in trees, each object once, under numbers."""
    seen: set[int] = set()
    nodes = [node for tree in trees for node in walk(tree, seen) if isinstance(node, LazyTensor)]
    return {f"{number}": tensor for number, tensor in enumerate(nodes)}
