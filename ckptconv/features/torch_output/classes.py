"""The lines of a report on classes that the way back does not write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptconv.features.torch_files import writable
from ckptconv.pickles.nodes import Global
from ckptconv.text import some


def of_classes(names: Sequence[str], most: int, verbose: bool) -> Iterator[str]:
    """Yield which classes, of those with these full names, are not written back, and if it is `verbose`, which are only
    with an option. `most` of them are named."""
    unlisted = [cls for name in names if writable.unlisted(cls := Global(*name.rpartition(".")[::2]))]
    reviewed = writable.reviewed(unlisted)
    known, others = ([cls for cls in unlisted if (cls in reviewed) is wanted] for wanted in (True, False))
    if known and verbose:
        yield f"of these, written back by safetensors2pt only with --opaque keep: {some(known, most, str)}"
    if others:
        yield f"of these, not written back by safetensors2pt: {some(others, most, str)}"
