"""Joins consecutive deltas into one, which changes their first base into the result of the last one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from ckptconv.errors import UNWRITTEN, UsageError, leaving
from ckptconv.features.deltas.changes import read_chain
from ckptconv.features.deltas.options import PATCHING
from ckptconv.features.deltas.patching import check_changes, expected_of
from ckptconv.features.deltas.writing import AskedDelta
from ckptconv.formats.opening import opened
from ckptconv.options.option import checked
from ckptconv.options.table import Options
from ckptconv.outputs.pipeline import selected
from ckptconv.process import no_garbage
from ckptconv.storage.location import Location
from ckptconv.storage.paths import listed, normalize
from ckptconv.storage.progress import counter, shown

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckptconv.features.deltas.encoding import Pair
    from ckptconv.options.keywords import PatchOptions
    from ckptconv.result import Report
    from ckptconv.storage.progress import AnyProgress

# The module that compares two checkpoints, with `difference`: that of the feature to which deltas add.
_COMPARING = "ckptconv.features.diff.difference"
# Options for dividing and casting OUTPUT, which do not apply to a delta.
_OF_WEIGHTS = ("max_shard_size", "dtype", "manifest", "dry_run")


@leaving(UNWRITTEN)
@shown
@checked(PATCHING)
def squash(
    base: str | os.PathLike[str],
    deltas: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    progress: AnyProgress | None = None,
    on_total: Callable[[int], object] | None = None,
    before_commit: Callable[[], object] | None = None,
    **options: Unpack[PatchOptions],
) -> Report:
    """Write to `output`, a directory, one delta with the same changes to `base` as all `deltas`, one after the other.

    Their result is compared with their checksums first. Raise the errors of `patch`.
    """
    chosen = Options(**options)
    for name in _OF_WEIGHTS:
        if getattr(chosen, name) != getattr(Options(), name):
            raise UsageError(f"--{name.replace('_', '-')} applies to weights, but --squash writes a delta.")
    places = [Location(path, dict(chosen.storage_options)) for path in listed(deltas, "No delta was given to join.")]
    with no_garbage():
        chain = read_chain(places)
        before = opened(normalize(base), chosen, key=chosen.key)
        after = before.computing(patch=chain)
        whole = selected(after, chosen)
        aliases = whole.recorded_aliases()
        stored = whole.stored(aliases)
    first, last = chain[0], chain[-1]
    joined = AskedDelta(os.fspath(output), "auto", last.checksum, last.version, first.base_version)
    chosen = joined.checked(chosen)
    check_changes(stored, expected_of(chain, aliases), base, chosen, lambda: selected(before, chosen).stored(aliases))
    changed: dict[str, Pair] = {}
    with joined.encoder(chosen) as encoder:
        difference = import_module(_COMPARING).difference(
            before,
            after,
            chosen,
            progress=counter(progress),
            on_total=on_total,
            changed=changed,
            encoder=encoder,
            measure=False,
        )
        if before_commit:
            before_commit()
        _, report = joined.write(before, after, difference, changed, encoder, chosen)
    return report
