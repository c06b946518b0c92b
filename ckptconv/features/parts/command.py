"""`ckptconv finish`: publishes outputs that were made in parts."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ckptconv.cli import signals
from ckptconv.cli.options import named, run, taking
from ckptconv.options.table import OPTIONS

OTHER_WORDS = {"finish": ("commit", "finalize")}
# It prints what conversions print.
OF_CONVERSIONS = ("finish",)


@taking(
    OPTIONS["checksum"].explained("Read all parts again, and compare them with their checksums."),
    *named("overwrite fsync manifest attest storage_options json quiet verbose progress"),
)
def finish_(
    outputs: Annotated[
        list[str],
        typer.Argument(metavar="OUTPUT...", show_default=False, help="The outputs of conversions with --part."),
    ],
    **options: Any,
) -> None:
    """Publish outputs that were converted in parts (--part).

    Specify the same OUTPUT as for the conversions with --part. If parts are missing, finish publishes nothing, and
    lists the missing parts.

    \b
    Examples:
      ckptconv zero-to-fp32 --part 0/2 checkpoints model/
      ckptconv zero-to-fp32 --part 1/2 checkpoints model/
      ckptconv finish model/
    """
    from ckptconv.features.parts.finish import finish

    shown, report = run("finish", options, finish, outputs, before_commit=signals.ignore)
    shown.done(report)
