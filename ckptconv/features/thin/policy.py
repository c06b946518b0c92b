"""A policy for the steps of a run to keep, after restic's `forget`. Pure: it looks at no file.

A step stays if any rule keeps it. Rules count good steps only, the newest first. A step that is not good, or is held
for another reason, stays whatever the rules say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import NamedTuple


class Candidate(NamedTuple):
    """A step: its name and number, when it changed last, in seconds since 1970, whether it is good, and why it stays
    whatever the policy says."""

    name: str
    number: int | None
    time: float | None
    is_good: bool
    held: tuple[str, ...] = ()


class Policy(NamedTuple):
    """Rules for steps to keep: the `last` good steps; steps whose number `every` divides; the `best` steps, each with a
    reason; steps at most `within` seconds older than the newest; and the last step of each of so many hours, days and
    so on, by `periods`."""

    last: int = 0
    every: int = 0
    best: Mapping[str, str] = {}
    within: int | None = None
    periods: Mapping[str, int] = {}
    names: frozenset[str] = frozenset()

    @property
    def is_empty(self) -> bool:
        return self == Policy()


# In which period a time lies: two times in the same one have the same text.
PERIODS: dict[str, Callable[[datetime], str]] = {
    "hourly": lambda when: when.strftime("%Y-%m-%d %H"),
    "daily": lambda when: when.strftime("%Y-%m-%d"),
    "weekly": lambda when: "{}-W{:02}".format(*when.isocalendar()),
    "monthly": lambda when: when.strftime("%Y-%m"),
    "yearly": lambda when: when.strftime("%Y"),
}


def reasons_to_stay(steps: Sequence[Candidate], policy: Policy) -> dict[str, list[str]]:
    """Return why each of `steps`, which are in the order of a run, the oldest first, stays; nothing for one that does
    not."""
    reasons = {step.name: list(step.held) for step in steps}
    good = [step for step in reversed(steps) if step.is_good]
    for name, why in _kept(good, policy):
        reasons[name].append(why)
    for step in steps:
        if not step.is_good and not step.held:
            reasons[step.name].append("not good")
    if good and not reasons[good[0].name]:
        reasons[good[0].name].append("last good")
    return reasons


def _kept(good: Sequence[Candidate], policy: Policy) -> Iterator[tuple[str, str]]:
    """Yield the good steps that rules keep, the newest first, each with the rule."""
    newest = max((step.time for step in good if step.time is not None), default=None)
    left = dict(policy.periods)
    seen: dict[str, str] = {}
    for at, step in enumerate(good):
        if at < policy.last:
            yield step.name, "last"
        if policy.every and step.number is not None and step.number % policy.every == 0:
            yield step.name, "every"
        if step.name in policy.best:
            yield step.name, policy.best[step.name]
        if step.name in policy.names or (step.number is not None and str(step.number) in policy.names):
            yield step.name, "named"
        if step.time is None or newest is None:
            continue
        if policy.within is not None and newest - step.time <= policy.within:
            yield step.name, "within"
        when = datetime.fromtimestamp(step.time, timezone.utc)
        for period, count in left.items():
            key = PERIODS[period](when)
            if count and seen.get(period) != key:
                seen[period] = key
                left[period] -= 1
                yield step.name, period
