"""A table that is tried in one test fails where one of its cases does, and names all that do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from effort import every


def test_the_first_failure_is_raised_and_all_cases_that_fail_are_named() -> None:
    tried = []

    @every("number", [1, 2, 3])
    @every("name", ["a", "b"], ids=["first", "second"])
    def table(number: int, name: str) -> None:
        tried.append((number, name))
        assert number == 1 or name == "a", f"{number}{name}"

    with pytest.raises(AssertionError, match="2b") as caught:
        table()
    assert len(tried) == 6
    assert caught.value.__notes__ == ["second: name='b'", "case 1: number=2", "case 2: number=3"]


def test_a_case_that_fails_in_words_of_pytest_s_fails_the_table() -> None:
    @every("number", [1, 2])
    def table(number: int) -> None:
        if number == 2:
            pytest.fail("it does")

    with pytest.raises(pytest.fail.Exception, match="it does"):
        table()


def test_a_table_is_skipped_where_all_of_its_cases_are() -> None:
    tried = []

    @every("number, skipped", [(1, True), (2, False)])
    def table(number: int, skipped: bool) -> None:
        if skipped:
            pytest.skip("not here")
        tried.append(number)

    table()
    assert tried == [2]
    with pytest.raises(pytest.skip.Exception):
        every("skipped", [True, True])(lambda skipped: pytest.skip("not here"))()


@every("number", range(3))
def test_each_case_has_what_it_changes_for_itself(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert "CASE" not in os.environ
    monkeypatch.setenv("CASE", str(number))
    print(number)
    assert capsys.readouterr().out == f"{number}\n"
    print("more")
