"""`ckptconv steps`: which steps of a run are whole, and which is the last good one."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptconv.cli import signals
from ckptconv.cli.options import SHOWING, output_of, taking
from ckptconv.errors import CorruptError
from ckptconv.features.reporting.columns import in_columns
from ckptconv.features.runs.options import READING
from ckptconv.options.kinds import FLAG
from ckptconv.options.option import Option, options_in
from ckptconv.text import format_size

if TYPE_CHECKING:
    from ckptconv.features.steps.report import RunSummary, StepSummary

OTHER_WORDS = {"steps": ("runs", "checkpoints", "latest", "last")}
# Messages on options of other programs.
OTHER_OPTIONS = {
    "--all --list": "Without --last, steps lists every step.",
    "steps --last-good --latest --newest": "Use --last: it prints only the path of the last good step.",
}


class _Steps:
    """Options that only `steps` has."""

    last = Option(FLAG, "Print only the path of the last good step.", common=True)


STEPS = options_in(_Steps) | READING


@taking(*STEPS.values(), *SHOWING)
def steps(
    run: Annotated[
        str, typer.Argument(metavar="RUN", show_default=False, help="The directory of a run: a path or a URL.")
    ],
    **options: Any,
) -> None:
    """Show which steps of a run are complete.

    steps shows the contents of each step, and whether it is complete. A step is complete if its files contain the bytes
    of every tensor, and no marker of its trainer contradicts this. The last line names the last good step. Only --check
    and --stats read tensor data. Exit code 4: the newest step is not good. --last also prints the last good step in
    this case; in a script with set -e: step=$(ckptconv steps --last RUN) || [ $? = 4 ].

    \b
    Examples:
      ckptconv steps runs/7b
      train.py --resume "$(ckptconv steps --last runs/7b)"
      ckptconv steps --check s3://bucket/runs/7b
    """
    from ckptconv.cli.console import say
    from ckptconv.cli.failures import described
    from ckptconv.cli.progress import shown_by
    from ckptconv.features.steps.survey import survey

    output, last = output_of("steps", options), options.pop("last", False)
    with shown_by(output) as progress:
        summary = survey(run, progress=progress, on_total=progress.begin, **options)
    signals.ignore()
    for warning in summary.warnings:
        output.warn(warning)
    error = _error(summary)
    if output.json:
        failure = {"error": described(error)} if error else {}
        output.print_json(error is None, {**dataclasses.asdict(summary), **failure})
    elif last:
        output.tell([summary.last_good] if summary.last_good else [])
    else:
        output.tell(_lines(summary))
    if error:
        say(str(error))
        raise typer.Exit(error.exit_code)


def _lines(run: RunSummary) -> Iterator[str]:
    """Yield a line for each step, and one that names the last good one."""
    from ckptconv.features.runs.beside import listed

    heads = ("step", "time", "weights", "optimizer", "rest", "format", "complete")
    rows = [
        (
            step.name,
            "" if step.time is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(step.time)),
            *_sizes(step),
            step.format or "-",
            ", ".join(_said(step)),
        )
        for step in run.steps
    ]
    yield from in_columns([heads, *rows], right=(2, 3, 4))
    if run.beside:
        yield f"not counted as steps: {listed(run.beside)}"
    yield f"last good: {run.last_good or 'none'}"


def _sizes(step: StepSummary) -> Sequence[str]:
    """Return the sizes of the weights, of the optimizer and of the rest; they are not known of a step that could not be
    opened."""
    sizes = (step.weights_bytes, step.optimizer_bytes, step.rest_bytes)
    return [format_size(size) if step.format else "?" for size in sizes]


def _said(step: StepSummary) -> Iterator[str]:
    """Yield in words whether a step is complete, the reason if not, and the results of reading its data."""
    if step.damage:
        yield f"no: {step.damage}"
    elif step.whole and step.marked is False:
        yield f"by its geometry, but not by its markers: {step.marks}"
    elif step.whole:
        yield "by its geometry" if step.checked == 0 else "yes"
    else:
        doubted = f" (complete by its markers: {step.marks})" if step.whole is False and step.marked else ""
        yield f"{'not read' if step.whole is None else 'no'}: {step.why}{doubted}"
    if step.checked is not None and not step.damage:
        compared = f"{step.checked:,} digests and checksums compared"
        yield compared if step.checked else "no recorded digests to compare"
    if step.norm is not None:
        yield f"norm {step.norm:.6g}, {step.nan:,} NaN, {step.inf:,} infinite"


def _error(run: RunSummary) -> CorruptError | None:
    """Return the error for a run whose newest step is not good."""
    if run.newest_is_good:
        return None
    step = run.steps[-1]
    nan = f"{step.nan:,} of its values are NaN" if step.nan else ""
    why = step.damage or step.why or nan or step.marks
    good = f"The last good step is {run.last_good}." if run.last_good else "No step is good."
    return CorruptError(f"{step.path}, the newest step, is not good: {why.rstrip('.')}. {good}")
