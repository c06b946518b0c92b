"""`scan`: known names are known with what their own pickling gives them, and with nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from attacks import traps
from verdicts import fails, found

import ckptconv


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
