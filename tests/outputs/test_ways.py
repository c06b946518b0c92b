"""The ways to compute an output of several inputs: what the table says of them is so, and what a manifest says too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cells import of_features, verify, verifying
from computed import NAMES, sources

import ckptconv
from ckptconv.errors import CkptconvError
from ckptconv.options.table import OPTIONS
from ckptconv.outputs.computed import COMPUTED, made_as

MANIFEST = ".ckptconv-manifest.json"


def test_the_table_names_what_each_of_them_has() -> None:
    for name, way in COMPUTED.items():
        computing = way.computing
        assert {member.rstrip("?") for member in computing.heading} == {*way.members}, name
        assert set(way.options) <= OPTIONS.keys(), name
        assert (computing.again is None) == bool(way.options), name
        assert way.options or callable(getattr(ckptconv, name)), name


# What makes an output with each of them, and the source that verify is asked of.
WAYS: dict[str, tuple[Callable[..., object], str]] = {
    **{name: job for ways in of_features("COMPUTING") for name, job in ways.items()},
}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sources(tmp_path_factory.mktemp("ways"))


def _changed(value: Any) -> Any:
    """Another value of the same type, of which a reader cannot tell that it is none."""
    if isinstance(value, dict):
        first = next(iter(value))
        return {**value, first: _changed(value[first])}
    if isinstance(value, list):
        return [*value, *value]
    return f"{value}x" if isinstance(value, str) else value + 1


def _is_refused(source: Path, output: Path) -> bool:
    try:
        verify(source, output)
    except CkptconvError:
        return True
    return False


@verifying
def test_what_a_manifest_says_of_each_of_them_is_checked(here: Path) -> None:
    assert WAYS.keys() == COMPUTED.keys()
    records = {}
    for name, (make, source) in WAYS.items():
        out = here / f"out-{name}"
        make(here, source, out)
        assert verify(here / source, out).tensors == len(NAMES) * (2 if name == "quantize" else 1), name
        told = json.loads((out / MANIFEST).read_text())
        records[name] = {member: told[member] for member in COMPUTED[name].members if member in told}
        assert records[name], name
        assert made_as(told) == ("weights" if COMPUTED[name].options else f"weights/{name}")
    for name, (_, source) in WAYS.items():
        path = here / f"out-{name}" / MANIFEST
        told = json.loads(path.read_text())
        others = {member: value for record in records.values() for member, value in record.items()}
        wrong = {f"no {member}": {key: told[key] for key in told if key != member} for member in records[name]}
        wrong |= {member: {**told, member: _changed(value)} for member, value in records[name].items()}
        wrong |= {f"also {member}": {**told, member: value} for member, value in others.items() if member not in told}
        for what, changed in wrong.items():
            path.write_text(json.dumps(changed))
            if what == "like":  # where it lay decides nothing once it is named
                assert verify(here / source, here / f"out-{name}", like=here / "b").tensors
                continue
            assert _is_refused(here / source, here / f"out-{name}"), f"{name}: {what}"
        path.write_text(json.dumps(told))
