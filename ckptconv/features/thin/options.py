"""The options of `thin`."""

from __future__ import annotations

import re
from typing import Any

from ckptconv.errors import UsageError
from ckptconv.features.runs.options import READING
from ckptconv.options import RUNNING, TAKE
from ckptconv.options.kinds import FLAG, PATH, TEXT, TEXTS, ValueKind, choice, counted
from ckptconv.options.option import Option, options_in
from ckptconv.options.table import COMMAND
from ckptconv.text import brief

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_MOST = 1_000_000_000


def parse_time(value: Any, called: str) -> int:
    """Return the seconds that `value`, such as 90s, 10m, 2h or 7d, says, or a number of them. Raise UsageError, naming
    `called`, if none, and for a text without a unit, except 0."""
    match = re.fullmatch(r"(\d{1,9})([smhdw]?)", value) if isinstance(value, str) else None
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST:
        return value
    if match is None:
        raise UsageError(f"{called} {brief(value)} is not a time.", "Use a time such as 90s, 10m, 2h, 7d or 4w.")
    if not match[2] and int(match[1]):
        hint = f"Use {value}s for seconds, {value}h for hours, or {value}d for days."
        raise UsageError(f"{called} {value} has no unit.", hint)
    return int(match[1]) * _SECONDS[match[2] or "s"]


SECONDS = ValueKind(parse_time, stored=int, accepts="int | str")
_COUNT = counted(1, _MOST)


class _Thin:
    """Options that only `thin` has. A step stays if any of them keeps it."""

    keep_last = Option(_COUNT, "Keep the last N good steps.", metavar="N", group=TAKE, common=True)
    keep_every = Option(_COUNT, "Keep steps whose number is a multiple of N.", metavar="N", group=TAKE, common=True)
    keep_best = Option(
        PATH,
        "Keep the best step according to the metrics in FILE: JSON lines, CSV, or trainer_state.json.",
        metavar="FILE",
        group=TAKE,
        common=True,
    )
    metric = Option(
        TEXT,
        "The metric that --keep-best compares.",
        metavar="NAME",
        group=TAKE,
        fallback="eval_loss, otherwise val_loss, valid_loss or loss",
    )
    highest = Option(FLAG, "With --keep-best, a higher metric is better.", group=TAKE)
    lowest = Option(
        FLAG, "With --keep-best, a lower metric is better: the default, except for metrics such as acc.", group=TAKE
    )
    best = Option(_COUNT, "With --keep-best, keep the best N steps.", metavar="N", default=1, group=TAKE)
    keep_within = Option(SECONDS, "Keep steps that are at most TIME older than the newest.", metavar="TIME", group=TAKE)
    keep_hourly, keep_daily, keep_weekly, keep_monthly, keep_yearly = (
        Option(_COUNT, f"Keep the last step of each of the last N {period}, in UTC.", metavar="N", group=TAKE)
        for period in ("hours with steps", "days", "weeks", "months", "years")
    )
    keep_step = Option(TEXTS, "Keep the step of this name or number; repeatable.", metavar="STEP", group=TAKE)
    remove = Option(
        TEXTS,
        "Also remove the step NAME, or the output or other entry NAME next to the steps; repeatable.",
        metavar="NAME",
        group=TAKE,
    )
    age = Option(
        SECONDS,
        "Keep steps that changed less than TIME ago: another program may still be writing them.",
        metavar="TIME",
        default="1h",
        group=TAKE,
        common=True,
    )
    drop = Option(
        choice("optimizer"),
        "Reduce the other steps to their weights, as safetensors, and their small files except pickles.",
        metavar="optimizer",
        group=TAKE,
        common=True,
    )
    as_ = COMMAND["as_"].explained(
        "Reduce the other steps as --drop optimizer does, and cast their weights to DTYPE. With delta, keep only the "
        "differences of their weights from a kept step.",
        kind=choice("bf16", "fp16", "fp32", "delta"),
    )
    yes = Option(FLAG, "Make the changes. Without --yes, thin only lists them.", group=RUNNING, common=True)


THIN = options_in(_Thin) | READING
