"""`ckptconv thin`: remove the steps of a run that a policy does not keep."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptconv.cli.options import named, output_of, taking
from ckptconv.errors import UnsupportedError, UsageError
from ckptconv.features.removal.area import LESSEN, REMOVE
from ckptconv.features.reporting.columns import in_columns
from ckptconv.features.thin.options import THIN
from ckptconv.options.option import filled
from ckptconv.text import count_of, format_size, some

if TYPE_CHECKING:
    from ckptconv.features.thin.planning import Thinning
    from ckptconv.features.thin.report import ThinnedStep, ThinReport

OTHER_WORDS = {"thin": ("prune", "forget", "rotate", "clean", "delete", "rm", "remove")}
# Messages on options of other programs.
OTHER_OPTIONS = {
    "--delete --prune": "Use --remove NAME for a step; thin removes it only with --yes.",
    "--dry-run": "thin changes nothing without --yes.",
    "--keep --last --keep-n --save-total-limit --max-to-keep --keep-latest-k --total-limit --max-checkpoints "
    "--checkpoints-total-limit": "Use --keep-last N.",
    "--keep-period": "Use --keep-every N.",
    "--older-than --older --max-age": "Use --keep-within TIME, such as --keep-within 7d; --age is another limit.",
}
_WOULD = {"keep": "stays", "remove": "would go", "lessen": "would be reduced"}
_DONE = {"keep": "stays", "remove": "went", "lessen": "reduced"}
# Verbs for the steps that stay, and for the others, by whether these are reduced, and whether it was done.
_TOGETHER = {
    (False, False): ("stay", "would go"),
    (False, True): ("stayed", "went"),
    (True, False): ("stay", "would be reduced"),
    (True, True): ("stayed", "reduced"),
}
# The most names in a line.
_MOST_NAMES = 20


@taking(*THIN.values(), *named("json quiet verbose storage_options inert"))
def thin(
    run: Annotated[str, typer.Argument(metavar="RUN", show_default=False, help="The directory of a run.")],
    **options: Any,
) -> None:
    """Remove the steps of this run that a policy does not keep.

    thin lists the steps to keep and to remove, with their sizes; only --yes removes them. A step is kept if any of the
    --keep options keeps it, or if the newest trainer_state.json names it as the best. thin never removes the last good
    step, a step that is not good or not readable, a step that changed recently (--age), or a step that `latest` or a
    link names. Only --check and --stats read data to say which steps are good. With --drop or --as, the other steps are
    not removed, but reduced to their weights and small files, after a comparison. The next run with --yes finishes an
    interrupted one.

    \b
    Examples:
      ckptconv thin runs/7b --keep-last 3 --keep-every 1000
      ckptconv thin runs/7b --keep-last 3 --keep-best metrics.jsonl --yes
      ckptconv thin runs/7b --keep-last 1 --drop optimizer --as bf16 --yes
    """
    from ckptconv.cli.progress import shown_by
    from ckptconv.features.thin.carrying import carry_out, expected_size
    from ckptconv.features.thin.planning import planned, run_of
    from ckptconv.pickles.refusing import refusing_attacks
    from ckptconv.storage.location import Location
    from ckptconv.storage.paths import is_remote, normalize

    started = time.monotonic()
    output = output_of("thin", options)
    stores, inert = options.pop("storage_options", {}) or {}, options.pop("inert", False)
    chosen = filled(THIN, options)
    if is_remote(normalize(run)) and chosen["yes"]:
        raise UnsupportedError(
            f"{run} is on a store, where a step cannot be removed in one piece: thin removes steps of local runs only.",
            "Without --yes, it says which steps would go.",
        )
    if not chosen["keep_best"] and (chosen["metric"] or chosen["highest"] or chosen["lowest"]):
        raise UsageError("--metric, --highest and --lowest say how --keep-best compares.", "Give --keep-best FILE too.")
    if chosen["highest"] and chosen["lowest"]:
        raise UsageError("--highest and --lowest exclude each other.", "Give one of them.")
    if chosen["remove"] and (chosen["drop"] or chosen["as_"]):
        raise UsageError("--remove removes, and --drop and --as reduce: they cannot be given together.")
    left: dict[str, int | None] = {}
    with refusing_attacks(not inert), shown_by(output) as progress:
        plan = functools.partial(planned, run, chosen, stores, inert, progress)
        if chosen["yes"]:
            place = run_of(Location(normalize(run), stores)).place.path or "."
            thinning, finished = carry_out(place, plan, {**chosen, "inert": inert}, stores, left.__setitem__)
        else:
            thinning, finished = plan(), ""
            left = {
                step.judged.step.name: expected_size(step, {**chosen, "inert": inert}, stores)
                for step in thinning.of(LESSEN)
            }
    report = _report(run, thinning, left)
    report.carried_out, report.finished = chosen["yes"], [finished] if finished else []
    for step in report.steps:
        step.done = chosen["yes"] and step.name in left
    report.seconds = time.monotonic() - started
    report.warnings = [*_warnings(thinning)]
    for warning in report.warnings:
        output.warn(warning)
    if output.json:
        output.print_json(True, dataclasses.asdict(report))
    else:
        output.tell(_lines(report, chosen))


def _report(run: str, thinning: Thinning, left: Mapping[str, int | None]) -> ThinReport:
    """Return the report on `thinning`; `left` are the bytes that are left of steps that go or are reduced."""
    from ckptconv.features.thin.planning import KEEP
    from ckptconv.features.thin.report import ThinnedStep, ThinReport

    steps = [
        ThinnedStep(
            step.name,
            step.number,
            step.time,
            step.bytes,
            planned.action,
            planned.why,
            left_bytes=left.get(step.name, {KEEP: step.bytes, REMOVE: 0}.get(planned.action)),
            lost=[path.partition("/")[2] for path in planned.lost],
        )
        for planned in thinning.every
        for step in (planned.judged.step,)
    ]
    kept = sum(step.bytes for step in steps if step.action == KEEP)
    named = {planned.judged.step.name for planned in thinning.beside}
    total = sum(step.bytes for step in steps)
    beside = {other.step.name: other.why for other in thinning.run.beside if other.step.name not in named}
    return ThinReport(run, thinning.run.place.path, steps, False, kept, total - kept, beside)


def _warnings(thinning: Thinning) -> Iterator[str]:
    """Yield a warning about steps that are files, and the warnings about the run."""
    from ckptconv.features.thin.planning import FILE

    files = sum(FILE in step.why for step in thinning.steps)
    if files:
        yield f"Steps that are files stay as they are ({files:,} here): --drop and --as reduce directories only."
    yield from thinning.run.warnings


def _sizes(steps: Sequence[ThinnedStep]) -> str:
    """Return the size of steps together; of those that are reduced, their sizes before and after."""
    before, left = sum(step.bytes for step in steps), [step.left_bytes for step in steps]
    if None in left or not any(step.action == "lessen" for step in steps):
        return format_size(before)
    return f"{format_size(before)} → {format_size(sum(size or 0 for size in left))}"


def _lines(report: ThinReport, chosen: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each step, by what a plan calls steps good if no data is read, and what all together are."""
    from ckptconv.features.runs.beside import listed

    words = _DONE if report.carried_out else _WOULD
    rows = [(step.name, _sizes([step]), words[step.action], ", ".join(step.why)) for step in report.steps]
    yield from in_columns(rows, right=(1,))
    if report.beside:
        yield f"not counted, and left alone unless --remove names it: {listed(report.beside)}"
    if report.finished:
        yield f"an earlier run was finished: {', '.join(report.finished)}"
    others = [step for step in report.steps if step.action != "keep"]
    if lost := dict.fromkeys(name for step in others for name in step.lost):
        goes = "went too" if report.carried_out else "would go too"
        names = some([*lost], _MOST_NAMES, str)
        yield f"{names} {goes}: reduced steps keep only weights, and small files that have a suffix and are no pickles"
    if others and not (report.carried_out or chosen["check"] or chosen["stats"]):
        yield "good is by sizes and markers: no data was read; --check compares digests, --stats looks for NaN"
    stay, go = _TOGETHER[bool(chosen["drop"] or chosen["as_"]), report.carried_out]
    kept = len(report.steps) - len(others)
    stay = "stays" if (kept, stay) == (1, "stay") else stay
    yield (
        f"{count_of(kept, 'step')} {stay} ({format_size(report.kept_bytes)} in all), "
        f"{count_of(len(others), 'step')} {go} ({_sizes(others)} in all)"
    )
    if not report.carried_out:
        yield f"nothing was changed: {'--yes does it' if others else f'no step {go}'}"
