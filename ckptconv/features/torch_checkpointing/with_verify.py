"""Compares a step of torch_checkpointing with its source: the names that its reader finds, then its planned files."""

from __future__ import annotations

from collections.abc import Iterator

from ckptconv.errors import CkptconvError, DifferenceError
from ckptconv.features.dcp_output.contents import contents
from ckptconv.features.dcp_output.with_verify import check_files, check_keys, place_of
from ckptconv.features.joining.files import leaves
from ckptconv.features.joining.names import dotted
from ckptconv.features.pairs.runs import ExpectedPair
from ckptconv.features.torch_checkpointing import output
from ckptconv.features.torch_checkpointing.read import read
from ckptconv.features.verify import AGAIN, planned
from ckptconv.features.verify.names import rename_of
from ckptconv.features.verify.paired import paired
from ckptconv.features.verify.pairs import Attested, Differences
from ckptconv.features.verify.report import CheckedOutput, Verification
from ckptconv.formats.source import Source, Wanted
from ckptconv.options.table import Options
from ckptconv.tensors.lazy import LazyTensor


def pairs(
    source: Source, target: CheckedOutput, options: Options, done: Verification, attested: Attested, wrong: Differences
) -> Iterator[ExpectedPair]:
    """Compare a step of torch_checkpointing with its source, and yield the pairs of its tensors."""
    if options.states:
        source = source._replace(inputs=source.inputs_of_all)
    place, path = place_of(target), target.path
    want = contents(source, options, rename_of(options))
    try:
        got = dict(leaves(read(place, Wanted(key=".")).trees["."], path))
    except CkptconvError as error:
        raise DifferenceError(f"{path} cannot be read: {error.message}", AGAIN, what="file", file=path) from error
    tensors = {dotted(at) for at, value in got.items() if isinstance(value, LazyTensor)}
    check_keys(path, set(want.tensors), tensors, options)
    plans = output.file_plans(want, options)
    where = {plan.name: place.join(plan.name) for plan in plans}
    check_files(path, place, where, options)
    yield from paired(source, target, planned.compare(path, plans, where, want.chosen.record), done, attested)
