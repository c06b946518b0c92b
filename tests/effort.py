"""How much a test tries: all cases of a table, and of made up cases the same each time, or with `make thorough` others,
and more of them."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import reprlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# The variable that says how many times as many cases.
EFFORT = "CKPTCONV_TEST_EFFORT"
TIMES = int(os.environ.get(EFFORT, "1"))


def examples(count: int, *unchecked: HealthCheck) -> settings:
    """Settings of hypothesis: so many examples, or `TIMES` as many, however slow the machine is."""
    return settings(max_examples=count * TIMES, suppress_health_check=[HealthCheck.too_slow, *unchecked])


def spread(cases: Iterable[Any], count: int) -> list[Any]:
    """So many of the cases, or `TIMES` as many, spread over their table: for a test whose cases others try too."""
    table = list(cases)
    step = max(len(table) // (count * TIMES), 1)
    return table[::step]


def every(
    names: str, cases: Iterable[Any], ids: Iterable[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """One test that tries a table's cases one after the other: pytest's `parametrize` would make a test of each.

    The first failure is raised, with notes that name all cases that fail. Each case has a `tmp_path` of its own, and
    what it patches or prints is gone before the next. What other fixtures have made is there for all cases together.
    """
    keys = [name.strip() for name in names.split(",")]
    table = [(case,) if len(keys) == 1 else case for case in cases]
    titles = [*ids] or [f"case {number}" for number in range(len(table))]

    def decorated(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def tried(*suite: Any, **fixtures: Any) -> None:
            failures: dict[str, BaseException] = {}
            skipped: list[BaseException] = []
            for number, (title, case) in enumerate(zip(titles, table, strict=True)):
                values = dict(zip(keys, case, strict=True))
                try:
                    with _own(fixtures, number) as fresh:
                        test(*suite, **values, **fresh)
                except pytest.skip.Exception as reason:
                    skipped.append(reason)
                except (Exception, pytest.fail.Exception) as failure:
                    named = ", ".join(f"{key}={reprlib.repr(value)}" for key, value in values.items())
                    failures[f"{title}: {named}"] = failure
            if failures:
                first = next(iter(failures.values()))
                first.__notes__ = [*getattr(first, "__notes__", ()), *failures]
                raise first
            if skipped and len(skipped) == len(table):
                raise skipped[0]

        asked = inspect.signature(test)
        left = [parameter for name, parameter in asked.parameters.items() if name not in keys]
        tried.__signature__ = asked.replace(parameters=left)  # type: ignore[attr-defined]
        return tried

    return decorated


@contextlib.contextmanager
def _own(fixtures: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """The fixtures as one case has them."""
    fresh = dict(fixtures)
    if "capsys" in fixtures:
        fixtures["capsys"].readouterr()
    with pytest.MonkeyPatch.context() as patched:
        if "monkeypatch" in fixtures:
            fresh["monkeypatch"] = patched
        if "tmp_path" in fixtures:
            fresh["tmp_path"] = fixtures["tmp_path"] / f"case-{number}"
            fresh["tmp_path"].mkdir()
        yield fresh
