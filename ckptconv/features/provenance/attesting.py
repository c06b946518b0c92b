"""The interface for `publish` to a feature that writes statements next to outputs (`publish/statements.py`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ckptconv.errors import UsageError
from ckptconv.features.provenance.attestation import statements, without_digests
from ckptconv.features.provenance.inputs import Named, bytes_of, described, digested, found_again, inputs_of
from ckptconv.options.table import Options
from ckptconv.storage.reading import Reader

__all__ = ["bytes_of", "described", "digested", "inputs_of", "is_ours", "of_parts", "statements"]

# The end of a statement about an output, and the number of bytes that are read for it.
_ENDING = re.compile(
    rb'"builder":\{"id":"https://github\.com/ckptconv/ckptconv","version":\{"ckptconv":"[^"]*"\}\}\}\}\}\n\Z'
)
_TAIL = 512


def of_parts(planned: Sequence[tuple[str, Any]], options: Options) -> list[Named]:
    """Return the inputs of each output, given as its path and what `finish` knows of its plan, by name. Raise
    UsageError if no statement about an output is possible."""
    for path, plan in planned:
        if "digest" not in plan.heading:
            raise without_digests(path)
    if len(kinds := dict.fromkeys(plan.heading["digest"] for _, plan in planned)) > 1:
        raise UsageError(f"The outputs have different digests: {', '.join(kinds)}.", "Attest each output separately.")
    return [found_again(path, plan.inputs, plan.heading["source"]["inputs"], options) for path, plan in planned]


def is_ours(reader: Reader) -> bool:
    """Return whether this program wrote the file, judged by its form."""
    size = min(reader.file.size, _TAIL)
    return _ENDING.search(reader.read_at(reader.file.size - size, size)) is not None
