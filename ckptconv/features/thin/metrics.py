"""Reads the metrics of steps, for --keep-best: JSON lines, a table as CSV, or the `trainer_state.json` of transformers.

Each line or entry that has a step and the metric counts; of several for a step, the last one.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Container, Iterator, Mapping
from typing import Any

from ckptconv.errors import CkptconvError, CorruptError, StoppedError, UsageError
from ckptconv.storage.location import Location
from ckptconv.text import some

# The metrics that are compared where none is named, the Trainer's file with them, and how lines call the step.
USUAL = ("eval_loss", "val_loss", "valid_loss", "loss")
STATE = "trainer_state.json"
_STEPS = ("step", "global_step", "iteration", "iter", "epoch")
_MOST = 256 << 20
# Words in the names of metrics that are better when they are higher, and of those that are not.
_HIGHER = re.compile(
    r"acc|accuracy|auc|auroc|bleu\w*|chrf|dice|em|f1|iou|m?ap|meteor|miou|mrr|ndcg|pass|precision|psnr|r2|recall"
    r"|returns?|rewards?|rouge\w*|scores?|ssim|top\d|win|winrate"
)
_LOWER = re.compile(r"loss|error|err")


def best_of(
    place: Location, metric: str, highest: bool, count: int, among: Container[int | None]
) -> tuple[str, dict[int, float]]:
    """Return the metric that is compared, and its value for each of the `count` best steps `among` those that there
    are, by number, by the file at `place`, the best first. Of equal ones, the later one is better. Raise UsageError if
    it has no such metric, CorruptError if it cannot be read."""
    rows = list(_rows(place, place.read_text(_MOST)))
    known = dict.fromkeys(name for row in rows for name in row)
    chosen = metric or next((name for name in USUAL if name in known), "")
    found: dict[int, float] = {}
    for row in rows:
        step = next((number for name in _STEPS if (number := _number(row.get(name))) is not None), None)
        value = _number(row.get(chosen))
        if step is not None and value is not None and step == int(step):
            found[int(step)] = value
    if not found:
        what = metric or " or ".join(USUAL)
        raise UsageError(
            f"{place} has no {what} for any step.",
            f"It contains {some(list(known), 8, str)}: select one with --metric.",
        )
    there = [step for step in found if step in among]
    ranked = sorted(there, key=lambda step: (-found[step] if highest else found[step], -step))
    return chosen, {step: found[step] for step in ranked[:count]}


def may_be_highest(metric: str) -> bool:
    """Return whether the name of a metric has a word, such as acc, for values that are better when higher."""
    words = re.findall("[a-z0-9]+", metric.lower())
    return any(map(_HIGHER.fullmatch, words)) and not any(map(_LOWER.fullmatch, words))


def best_named(state: Location) -> str:
    """Return the name of the step that a `trainer_state.json` calls the best; "" if none is known."""
    try:
        whole = json.loads(state.read_text(_MOST))
    except StoppedError:
        raise
    except (CkptconvError, ValueError, RecursionError):
        return ""
    path = whole.get("best_model_checkpoint") if isinstance(whole, dict) else None
    return path.rstrip("/").rpartition("/")[2] if isinstance(path, str) else ""


def _rows(place: Location, text: str) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a file."""
    if text.lstrip()[:1] not in ("{", "["):
        yield from csv.DictReader(io.StringIO(text))
        return
    try:
        whole = json.loads(text)
    except RecursionError:
        raise CorruptError(f"{place} is nested too deeply.") from None
    except ValueError:
        whole = None
    if whole is None:
        for number, line in enumerate(text.splitlines(), 1):
            try:
                row = json.loads(line) if line.strip() else {}
            except (ValueError, RecursionError):
                raise CorruptError(f"{place}: line {number} is not valid JSON.") from None
            if isinstance(row, dict):
                yield row
        return
    if isinstance(whole, dict):
        whole = whole.get("log_history", [whole])
    yield from (row for row in whole if isinstance(row, dict)) if isinstance(whole, list) else ()


def _number(value: Any) -> float | None:
    """Return a finite number, of a file that may have it as text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
