"""A model of the policy in plain Python, written from its page and not from its code."""

from __future__ import annotations

import datetime
from typing import Any


def stays(steps: list[dict[str, Any]], policy: dict[str, Any]) -> set[str]:
    """The names of the steps that stay. A step has a name, a number, a time, whether it is good, and whether it is
    held."""
    kept = {step["name"] for step in steps if step["held"] or not step["good"]}
    good = [step for step in steps if step["good"]]
    if good:
        kept.add(good[-1]["name"])
    if policy.get("last"):
        kept |= {step["name"] for step in good[-policy["last"] :]}
    if policy.get("every"):
        kept |= {step["name"] for step in good if step["number"] is not None and step["number"] % policy["every"] == 0}
    for name in policy.get("names", ()):
        kept |= {step["name"] for step in good if name in (step["name"], str(step["number"]))}
    kept |= {step["name"] for step in good if step["name"] in policy.get("best", ())}
    timed = [step for step in good if step["time"] is not None]
    if timed and policy.get("within") is not None:
        newest = max(step["time"] for step in timed)
        kept |= {step["name"] for step in timed if newest - step["time"] <= policy["within"]}
    for period, form in (("hourly", "%Y%m%d%H"), ("daily", "%Y%m%d"), ("monthly", "%Y%m"), ("yearly", "%Y")):
        kept |= in_periods(timed, policy.get(period, 0), form)
    return kept | in_periods(timed, policy.get("weekly", 0), "%G%V")


def in_periods(timed: list[dict[str, Any]], count: int, form: str) -> set[str]:
    """The last step of each of the last `count` periods."""
    last: dict[str, str] = {}
    runs: list[str] = []
    previous = None
    for step in reversed(timed):
        key = datetime.datetime.fromtimestamp(step["time"], datetime.timezone.utc).strftime(form)
        if key != previous:
            runs.append(step["name"])
        previous = key
        last.setdefault(key, step["name"])
    return set(runs[:count])
