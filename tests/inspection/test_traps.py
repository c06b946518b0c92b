"""`scan`: known names are known with what their own pickling gives them, and with nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from attacks import held_back, traps
from verdicts import fails, found

import ckptconv
from ckptconv.inspection.scan.report import counts


def test_no_known_name_is_safe_with_a_trap() -> None:
    payloads = traps.payloads()
    assert len(payloads) > 14_000
    assert [what for what, data in payloads.items() if not found(data)] == []


# Of known names alone, these only take time or memory, or fail.
UNKNOWN_ONLY = {
    "a fraction of a billion digits",
    "a layer of billions",
    "an LSTM of billions of layers",
    "a state with a number for a key",
    "a method of an enumeration",
    "a pattern that prints",
    "an array of more objects than its list has",
    "an optimizer whose method is an object",
    "a bound of a space that is no array",
}


def test_what_runs_something_fails_by_default() -> None:
    passed = {what for what, chain in traps.CHAINS.items() if not fails(b"\x80\x04" + chain + b".")}
    assert passed == UNKNOWN_ONLY


@pytest.mark.parametrize("what", traps.FILES)
def test_no_file_hides_a_pickle_or_a_program(what: str, tmp_path: Path) -> None:
    file, make = traps.FILES[what]
    (tmp_path / file).write_bytes(make(traps.evil(str(tmp_path / "canary"))))
    assert ckptconv.scan(tmp_path).verdict in ("unknown", "suspicious", "attack")
    assert not (tmp_path / "canary").exists()


def test_payloads_that_no_table_was_made_with_fail(tmp_path: Path) -> None:
    for what, (file, data) in held_back.payloads(str(tmp_path / "canary")).items():
        (tmp_path / file).write_bytes(data)
        found_ = ckptconv.scan(tmp_path / file)
        assert any(counts(each.rule, "call") for one in found_.files for each in one.findings), what
    assert not (tmp_path / "canary").exists()
