"""How much tests with made up cases try: the same cases each time, or with `make thorough` others, and more of them."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# The variable that says how many times as many cases.
EFFORT = "CKPTCONV_TEST_EFFORT"
TIMES = int(os.environ.get(EFFORT, "1"))


def examples(count: int, *unchecked: HealthCheck) -> settings:
    """Settings of hypothesis: so many examples, or `TIMES` as many, however slow the machine is."""
    return settings(max_examples=count * TIMES, suppress_health_check=[HealthCheck.too_slow, *unchecked])
