"""`--verify`: the outputs of a conversion, compared with their sources before they are published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckptconv.features.verify.report import CheckedOutput
from ckptconv.features.verify.verifying import verify_outputs
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs.targets import Target
from ckptconv.publish.publish import Verifier
from ckptconv.storage.location import Location
from ckptconv.storage.progress import Progress


def verifier(work: Sequence[tuple[Source, Target]], options: Options) -> Verifier:
    """Return the function that compares every output with its source."""

    def verify(places: Sequence[Mapping[str, str] | None], progress: Progress) -> int:
        staged = [
            (
                source,
                CheckedOutput(
                    Location(target.path, dict(options.storage_options)), target.kind, at, options=target.options
                ),
            )
            for (source, target), at in zip(work, places, strict=True)
        ]
        return verify_outputs(staged, options, progress=progress).bytes_compared

    return verify
