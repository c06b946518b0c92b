"""Yield the pairs of an output that is compared with its plan, and note the further checks."""

from __future__ import annotations

from collections.abc import Iterator

from ckptconv.features.pairs.runs import ExpectedPair
from ckptconv.features.verify import planned
from ckptconv.features.verify.names import other_kind
from ckptconv.features.verify.pairs import Attested, Differences
from ckptconv.features.verify.planned import Compared
from ckptconv.features.verify.provenance import check
from ckptconv.features.verify.report import CheckedOutput, Verification
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs import planning
from ckptconv.outputs.kinds import entry_of
from ckptconv.outputs.targets import MANIFEST, directory_of
from ckptconv.result import OutputFile
from ckptconv.storage.paths import dirname, join


def paired(
    source: Source, target: CheckedOutput, compared: Compared, done: Verification, attested: Attested
) -> Iterator[ExpectedPair]:
    """Yield the pairs of an output that is compared with its plan."""
    done.outputs.extend(OutputFile(compared.path_of(plan.name), plan.size, plan.tensors) for plan in compared.plans)
    done.tensors += compared.tensors
    done.aliases.update(compared.aliases)
    attested.later(compared.check_frames, attested.known)
    if target.manifest:
        attested.later(check, target.manifest, source, target.planned, compared)
    for pair in compared.pairs:
        error = other_kind(pair)
        if error:
            raise error
        attested.count(pair.path, pair.name)
        yield pair


def pairs(
    source: Source, target: CheckedOutput, options: Options, done: Verification, attested: Attested, wrong: Differences
) -> Iterator[ExpectedPair]:
    """Compare an output whose format has no reader here with the plan of a conversion. Raise DifferenceError if its
    directory has further files of its kind."""
    output = planning.planned(source, target.planned, options)
    files = output.plan.files
    form = entry_of(target.kind).form
    above = dirname(target.path) if form == "file" else target.path
    where = {file.name: target.place.at((target.at or {}).get(file.name, join(above, file.name))) for file in files}
    if target.at is None and (directory := directory_of(form)):
        extra = sorted(filter(directory.is_file, target.place.names.keys() - {*where, MANIFEST}))
        if extra:
            planned.differs(above, f"{extra[0]} is not part of the output", file=join(above, extra[0]))
    compared = planned.compare(above, files, where, {})
    compared.aliases, compared.record = output.aliases, output.notices.record
    yield from paired(source, target, compared, done, attested)
