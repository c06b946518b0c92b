"""Yield the pairs of an output that is compared with its plan, and note the further checks."""

from __future__ import annotations

from collections.abc import Iterator

from ckptconv.formats.source import Source
from ckptconv.result import OutputFile
from ckptconv.storage.paths import join
from ckptconv.verification.names import other_kind
from ckptconv.verification.pairs import Attested
from ckptconv.verification.planned import Compared
from ckptconv.verification.provenance import check
from ckptconv.verification.report import CheckedOutput, Verification
from ckptconv.verification.runs import ExpectedPair


def _check_frames(compared: Compared, attested: Attested) -> list[str]:
    """Check the bytes around the tensors of an output. The tensors have been compared."""
    compared.crcs = {name: attested.known(place.path) for name, place in compared.where.items()}
    compared.check_frames()
    return []


def paired(
    source: Source, target: CheckedOutput, compared: Compared, done: Verification, attested: Attested
) -> Iterator[ExpectedPair]:
    """Yield the pairs of an output that is compared with its plan."""
    done.outputs.extend(OutputFile(join(compared.path, plan.name), plan.size, plan.tensors) for plan in compared.plans)
    done.tensors += compared.tensors
    done.aliases.update(compared.aliases)
    attested.later(_check_frames, compared, attested)
    if target.manifest:
        attested.later(check, target.manifest, source, target.planned, compared)
    for pair in compared.pairs:
        error = other_kind(pair)
        if error:
            raise error
        attested.count(pair.path, pair.name)
        yield pair
