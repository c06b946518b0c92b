"""Compares a step of torch_checkpointing with its source: the names that its reader finds, then its planned files."""

from __future__ import annotations

from collections.abc import Iterator

from ckptconv.errors import CkptconvError, DifferenceError
from ckptconv.features.dcp_output.comparing import check_files, check_keys, place_of
from ckptconv.features.dcp_output.contents import contents
from ckptconv.features.joining.files import leaves
from ckptconv.features.joining.names import dotted
from ckptconv.features.torch_checkpointing import output
from ckptconv.features.torch_checkpointing.read import read
from ckptconv.formats.source import Source, Wanted
from ckptconv.options.table import Options
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.verification import AGAIN, planned
from ckptconv.verification.names import rename_of
from ckptconv.verification.paired import paired
from ckptconv.verification.pairs import Attested, Differences
from ckptconv.verification.report import CheckedOutput, Verification
from ckptconv.verification.runs import ExpectedPair


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
    yield from paired(source, target, planned.compare(path, plans, where), done, attested)
