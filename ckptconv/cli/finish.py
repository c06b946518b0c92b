"""`ckptconv finish`: publishes outputs that were made in parts."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ckptconv.cli import signals
from ckptconv.cli.options import named, run, taking
from ckptconv.options.table import OPTIONS

OTHER_WORDS = {"finish": ("commit", "publish", "finalize")}


@taking(
    OPTIONS["checksum"].explained("Read all again, and compare it with its checksums."),
    *named("overwrite fsync manifest attest storage_options json quiet verbose progress"),
)
def finish_(
    outputs: Annotated[
        list[str], typer.Argument(metavar="OUTPUT...", show_default=False, help="What was made in parts.")
    ],
    **options: Any,
) -> None:
    """Publish outputs that were made in parts.

    OUTPUT is what the conversions with --part were given. All parts have to be there, or nothing is published, and the
    missing ones are named.

    \b
    Examples:
      ckptconv zero-to-fp32 --part 0/2 checkpoints model/
      ckptconv zero-to-fp32 --part 1/2 checkpoints model/
      ckptconv finish model/
    """
    from ckptconv.publish.finish import finish

    shown, report = run("finish", options, finish, outputs, before_commit=signals.ignore)
    shown.done(report)
