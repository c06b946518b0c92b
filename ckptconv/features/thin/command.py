"""`ckptconv thin`: remove the steps of a run that a policy does not keep."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptconv.cli.options import named, output_of, taking
from ckptconv.errors import UnsupportedError, UsageError
from ckptconv.features.thin.options import THIN
from ckptconv.options.option import filled
from ckptconv.text import count_of, format_size, padded

if TYPE_CHECKING:
    from ckptconv.features.thin.planning import Thinning
    from ckptconv.features.thin.report import ThinReport

OTHER_WORDS = {"thin": ("prune", "forget", "rotate", "clean", "delete")}
# Messages on options of other programs.
OTHER_OPTIONS = {
    "--dry-run": "thin changes nothing without --yes.",
    "--keep --last --keep-n": "Use --keep-last N.",
}
_WOULD = {"keep": "stays", "remove": "would go", "lessen": "would be less"}
_DONE = {"keep": "stays", "remove": "went", "lessen": "is less"}


@taking(*THIN.values(), *named("json quiet verbose storage_options inert"))
def thin(
    run: Annotated[str, typer.Argument(metavar="RUN", show_default=False, help="The directory of a run.")],
    **options: Any,
) -> None:
    """Remove the steps of this run that a policy does not keep.

    thin lists the steps to keep and to remove, with their sizes; only --yes removes them. A step is kept if any of the
    --keep options keeps it. thin never removes the last good step, a step that is not good or not readable, a step that
    changed recently (--age), or a step that `latest` or a link names. With --drop or --as, the other steps are not
    removed, but replaced by their weights, after a comparison. The next run with --yes finishes an interrupted one.

    \b
    Examples:
      ckptconv thin runs/7b --keep-last 3 --keep-every 1000
      ckptconv thin runs/7b --keep-last 3 --keep-best metrics.jsonl --yes
      ckptconv thin runs/7b --keep-last 1 --drop optimizer --as bf16 --yes
    """
    from ckptconv.features.thin.carrying import carry_out
    from ckptconv.features.thin.planning import planned
    from ckptconv.pickles.refusing import refusing_attacks
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
    if not chosen["keep_best"] and (chosen["metric"] or chosen["highest"]):
        raise UsageError("--metric and --highest say how --keep-best compares.", "Give --keep-best FILE too.")
    with refusing_attacks(not inert):
        thinning = planned(run, chosen, stores, inert)
        found = _report(run, thinning)
        if chosen["yes"]:
            done: dict[str, str] = {}
            found.finished = carry_out(thinning, {**chosen, "inert": inert}, stores, done.__setitem__)
            for step in found.steps:
                step.done = step.name in done or step.name in found.finished
            found.carried_out = True
    found.seconds = time.monotonic() - started
    found.warnings = list(_warnings(thinning, chosen))
    for warning in found.warnings:
        output.warn(warning)
    if output.json:
        output.print_json(True, dataclasses.asdict(found))
    else:
        output.tell(_lines(found))


def _report(run: str, thinning: Thinning) -> ThinReport:
    from ckptconv.features.thin.planning import KEEP
    from ckptconv.features.thin.report import ThinnedStep, ThinReport

    steps = [
        ThinnedStep(
            each.judged.step.name,
            each.judged.step.number,
            each.judged.step.time,
            each.judged.step.bytes,
            each.action,
            each.why,
        )
        for each in thinning.steps
    ]
    kept = sum(step.bytes for step in steps if step.action == KEEP)
    return ThinReport(run, thinning.run.place.path, steps, False, kept, sum(step.bytes for step in steps) - kept)


def _warnings(thinning: Thinning, chosen: Mapping[str, Any]) -> Iterator[str]:
    """Yield what an earlier run has left, and what names steps that are not there."""
    from ckptconv.features.thin.area import AREA
    from ckptconv.features.thin.planning import FILE

    if not chosen["yes"] and os.path.lexists(os.path.join(thinning.run.place.path or ".", AREA)):
        yield "An earlier run was stopped, and --yes finishes it, or another one is at work."
    whole = sum(FILE in each.why for each in thinning.steps)
    if whole:
        yield f"Steps that are files stay as they are ({whole:,} here): --drop and --as keep less of directories only."
    for name, step in {**thinning.run.pointers, **thinning.run.links}.items():
        if not step:
            yield f"{name} names a step that is not there."


def _lines(found: ThinReport) -> Iterator[str]:
    """Yield a line for each step, and what all together are."""
    words = _DONE if found.carried_out else _WOULD
    rows = [(step.name, format_size(step.bytes), words[step.action], ", ".join(step.why)) for step in found.steps]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (padded(cell, width, right=at == 1) for at, (cell, width) in enumerate(zip(row, widths, strict=True)))
        yield "  ".join(cells).rstrip()
    if found.finished:
        yield f"an earlier run was finished: {', '.join(found.finished)}"
    others = [step for step in found.steps if step.action != "keep"]
    lesser = any(step.action == "lessen" for step in others)
    would = "" if found.carried_out else "would "
    what = ("became less" if found.carried_out else "become less") if lesser else "went" if found.carried_out else "go"
    yield (
        f"{count_of(len(found.steps) - len(others), 'step')} of {format_size(found.kept_bytes)} "
        f"{'stay' if would else 'stayed'}, {count_of(len(others), 'step')} of {format_size(found.removed_bytes)} "
        f"{would}{what}"
    )
    if would and others:
        yield "nothing was changed: --yes does it"
