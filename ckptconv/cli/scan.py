"""The command `scan`: a verdict for each file, and an exit code for CI."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ckptconv.cli import signals
from ckptconv.cli.options import named, output_of, taking
from ckptconv.errors import UsageError
from ckptconv.options.table import COMMAND


@taking(*named("sarif fail_on json quiet verbose storage_options"))
def scan(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATH...", show_default=False, help="Files, directories and URLs, of any format."),
    ],
    allow_suspicious: Annotated[bool, typer.Option("--allow-suspicious", hidden=True)] = False,
    *,
    sarif: str = "",
    fail_on: str = "",
    **options: Any,
) -> None:
    """Would loading these files run something?

    Says of each checkpoint whether it is safe, unknown, suspicious, an attack, or unreadable, and why. Nothing in a
    file is run, and no tensor data is read. Directories are searched to any depth; files that are no checkpoints are
    skipped. Exit code 3: something is as bad as --fail-on says, or worse; 4: something cannot be judged, and nothing is
    worse.

    \b
    Examples:
      ckptconv scan model.pt
      ckptconv scan --sarif scan.sarif .
      ckptconv scan --fail-on unknown hf://org/model
    """
    from ckptconv.inspection.scan.report import ATTACK
    from ckptconv.inspection.scan.scanning import scan as scanned

    # Before there was --fail-on, that was --allow-suspicious.
    if allow_suspicious and fail_on not in ("", ATTACK):
        raise UsageError(f"--allow-suspicious is --fail-on attack, and --fail-on {fail_on} was given too.")
    level = fail_on or (ATTACK if allow_suspicious else COMMAND["fail_on"].default)
    output = output_of("scan", options)
    if sarif:
        from ckptconv.inspection.file import check_whole

        check_whole(sarif, "the SARIF file")
    report = scanned(*paths, **options)
    signals.ignore()
    if sarif:
        from ckptconv.inspection.file import write_whole
        from ckptconv.inspection.scan.sarif import document

        write_whole(sarif, document(report).encode(), "the SARIF file", [each.path for each in report.files])
    raise typer.Exit(output.scanned(report, level))
