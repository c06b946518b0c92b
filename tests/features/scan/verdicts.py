"""What a scan finds in the bytes of a file, and whether it fails for that."""

from __future__ import annotations

from ckptconv.features.scan.contents import ScannedContents
from ckptconv.features.scan.report import counts
from ckptconv.pickles.refusing import refusing_attacks
from ckptconv.storage.buffered import InMemory


def found(data: bytes) -> set[str]:
    """The rules that a file breaks."""
    contents = ScannedContents()
    with refusing_attacks():
        contents.look(InMemory(data, "x.pkl"))
    return {finding.rule for finding in contents.findings}


def fails(data: bytes) -> bool:
    """Whether a scan fails for a file, by default."""
    return any(counts(rule, "call") for rule in found(data))
