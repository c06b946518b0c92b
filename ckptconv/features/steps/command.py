"""`ckptconv steps`: which steps of a run are whole, and which is the last good one."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptconv.cli import signals
from ckptconv.cli.options import SHOWING, output_of, taking
from ckptconv.errors import CorruptError
from ckptconv.options.kinds import FLAG
from ckptconv.options.option import Option, options_in
from ckptconv.options.table import COMMAND
from ckptconv.text import format_size, padded

if TYPE_CHECKING:
    from ckptconv.features.steps.report import RunSummary, StepSummary

OTHER_WORDS = {"steps": ("runs", "checkpoints", "latest", "last")}


class _Steps:
    """Options that only `steps` has."""

    last = Option(FLAG, "Print the path of the last good step, and nothing else.", common=True)
    check = Option(
        FLAG,
        "Read all data, and compare it with the digests and checksums that whoever wrote it has left.",
        common=True,
    )
    stats = COMMAND["stats"].explained("Read all values: how many are NaN or infinite, and the norm of the weights.")


STEPS = options_in(_Steps)


@taking(*STEPS.values(), *SHOWING)
def steps(
    run: Annotated[
        str, typer.Argument(metavar="RUN", show_default=False, help="The directory of a run: a path or a URL.")
    ],
    **options: Any,
) -> None:
    """Say which steps of a run are complete.

    steps says of each step what it is, and whether it is complete: by its geometry, which is that the bytes of every
    tensor are there, and by the markers that its trainer writes. The last line names the last good step. No tensor data
    is read, unless --check or --stats asks for it. Exit code 4: the newest step is not good.

    \b
    Examples:
      ckptconv steps runs/7b
      train.py --resume "$(ckptconv steps --last runs/7b)"
      ckptconv steps --check s3://bucket/runs/7b
    """
    from ckptconv.cli.console import say
    from ckptconv.cli.failures import described
    from ckptconv.features.steps.survey import survey

    output, last = output_of("steps", options), options.pop("last", False)
    with output.progress() as progress:
        found = survey(run, progress=progress, on_total=progress.begin, **options)
    signals.ignore()
    for warning in found.warnings:
        output.warn(warning)
    error = _error(found)
    if output.json:
        failure = {"error": described(error)} if error else {}
        output.print_json(error is None, {**dataclasses.asdict(found), **failure})
    elif last:
        output.tell([found.last_good] if found.last_good else [])
    else:
        output.tell(_lines(found))
    if error:
        say(str(error))
        raise typer.Exit(error.exit_code)


def _lines(found: RunSummary) -> Iterator[str]:
    """Yield a line for each step, and one that names the last good one."""
    rows = [
        (
            each.name,
            "" if each.time is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.time)),
            format_size(each.weights_bytes),
            format_size(each.optimizer_bytes),
            format_size(each.rest_bytes),
            each.format or "-",
            _said(each),
        )
        for each in found.steps
    ]
    heads = ("step", "time", "weights", "optimizer", "rest", "format", "complete")
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, *rows):
        columns = (
            padded(cell, width, right=2 <= at <= 4) for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(columns).rstrip()
    yield f"last good: {found.last_good or 'none'}"


def _said(step: StepSummary) -> str:
    """Say whether a step is complete, and why not."""
    told = {True: "yes", False: f"no: {step.why}", None: f"not read: {step.why}"}[step.whole]
    if step.whole and step.marked is False:
        told = f"by its geometry, and not by its markers: {step.marks}"
    elif step.whole is False and step.marked:
        told = f"{told} (its markers say yes: {step.marks})"
    if step.damage:
        told = f"no: {step.damage}"
    if step.checked is not None and not step.damage:
        told += f", {step.checked:,} digests and checksums compared"
    if step.norm is not None:
        told += f", norm {step.norm:.6g}, {step.nan:,} NaN, {step.inf:,} infinite"
    return told


def _error(found: RunSummary) -> CorruptError | None:
    """Return the error for a run whose newest step is not good."""
    if found.newest_is_good:
        return None
    step = found.steps[-1]
    why = step.damage or step.why or step.marks
    good = f"The last good one is {found.last_good}." if found.last_good else "No step is good."
    return CorruptError(f"{step.path}, the newest step, is not good: {why.rstrip('.')}. {good}")
