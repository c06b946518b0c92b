"""Yields the pairs of an output that is compared with its plan, and notes what else is to be checked."""

from __future__ import annotations

from collections.abc import Iterator

from ckptconv.formats.source import Source
from ckptconv.result import OutputFile
from ckptconv.storage.paths import join
from ckptconv.verification.names import other_kind
from ckptconv.verification.pairs import Attested
from ckptconv.verification.planned import Compared
from ckptconv.verification.provenance import check_compared
from ckptconv.verification.report import CheckedOutput, Verification
from ckptconv.verification.runs import ExpectedPair


def _check_frames(found: Compared, attested: Attested) -> list[str]:
    """Check what is around the tensors of an output, which have been compared."""
    found.crcs = {name: attested.known(place.path) for name, place in found.where.items()}
    found.check_frames()
    return []


def paired(
    source: Source, target: CheckedOutput, found: Compared, done: Verification, attested: Attested
) -> Iterator[ExpectedPair]:
    """Yield the pairs of an output that is compared with its plan."""
    done.outputs.extend(OutputFile(join(found.path, plan.name), plan.size, plan.tensors) for plan in found.plans)
    done.tensors += found.tensors
    attested.later(_check_frames, found, attested)
    if target.manifest:
        attested.later(check_compared, target.manifest, source, target.planned, found)
    for pair in found.pairs:
        error = other_kind(pair)
        if error:
            raise error
        attested.count(pair.path, pair.name)
        yield pair
