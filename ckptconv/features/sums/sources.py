"""Sources whose tensors are computed from those of several checkpoints."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from ckptconv.formats.source import FileFacts, Source, without_states


def combined(source: Source, terms: Sequence[Source], inputs: Mapping[str, Hashable], **computations: Any) -> Source:
    """Return `source`, one of `terms`, as a source whose tensors are computed from all of them by `computations`, its
    new entries of `computed`; `inputs` identify the files that were read for the others."""
    return source.computing(**computations)._replace(
        inputs={**source.inputs, **inputs},
        equal=[pair for term in terms for pair in term.equal],
        files=FileFacts.of_all(term.files for term in terms),
        warnings=list(dict.fromkeys(text for term in terms for text in term.warnings)),
        notes=list(dict.fromkeys(without_states(text) for term in terms for text in term.notes)),
        bytes_read=sum(term.bytes_read for term in terms),
        reread=None,
    )
