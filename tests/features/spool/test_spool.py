"""The temporary file for what can be read only once has no name, and reuses its room."""

from __future__ import annotations

import itertools
import os
import stat
from pathlib import Path

import pytest
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from spooling import without_nameless

from ckptconv.features.spool import spool
from ckptconv.features.spool.spool import Spool


@pytest.fixture(params=["nameless", "unlinked"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With a file system that has files without names, and with one that has not."""
    if request.param == "unlinked":
        without_nameless(monkeypatch)
    return str(request.param)


def test_the_file_has_no_name_and_is_ours_alone(either_way: str, tmp_path: Path) -> None:
    file = Spool(str(tmp_path))
    assert os.listdir(tmp_path) == []
    at = [file.room(3), file.room(4)]
    file.write_at(at[1], b"four")
    file.write_at(at[0], b"one")
    assert os.pread(file.descriptor, 10, 0) == b"onefour"
    found = os.fstat(file.descriptor)
    assert found.st_nlink == 0
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_dev == tmp_path.stat().st_dev
    assert os.listdir(tmp_path) == []
    file.close()
    file.close()


@given(data=st.data())
@examples(50)
def test_room_is_never_given_twice(data: st.DataObject) -> None:
    room = Spool("/nowhere")
    held: list[tuple[int, int]] = []
    for _ in range(data.draw(st.integers(1, 40))):
        if held and data.draw(st.booleans()):
            room.give_back(*held.pop(data.draw(st.integers(0, len(held) - 1))))
        else:
            size = data.draw(st.integers(0, 9))
            held.append((room.room(size), size))
        spans = sorted((start, start + size) for start, size in held if size)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    end = max((start + size for start, size in held), default=0)
    for start, size in held:
        room.give_back(start, size)
    # All is one piece again.
    assert end == 0 or room.room(end) == 0


def test_where_to_spool_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert spool.default_directory() == str(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    assert spool.default_directory() in ("/var/tmp", "/tmp")
