"""The search for garbage is as it was before, whatever became of a conversion."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ckptconv import convert
from ckptconv.errors import UsageError
from ckptconv.process import no_garbage, settled


@pytest.fixture(autouse=True)
def as_usual() -> Iterator[None]:
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    yield
    gc.unfreeze()
    gc.enable()


class Node:
    pass


def ring() -> weakref.ref[Node]:
    """Garbage that only a search finds."""
    one, other = Node(), Node()
    one.other, other.other = other, one  # type: ignore[attr-defined]
    return weakref.ref(one)


def test_a_conversion_leaves_the_search_as_it_found_it(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "m.pt")
    convert(tmp_path / "m.pt", tmp_path / "m.safetensors")
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    with pytest.raises(UsageError):
        convert(tmp_path / "m.pt", tmp_path / "m.safetensors", key="nowhere")
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_what_someone_has_frozen_stays_so(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "m.pt")
    gc.freeze()
    frozen = gc.get_freeze_count()
    convert(tmp_path / "m.pt", tmp_path / "m.safetensors")
    assert 0 < gc.get_freeze_count() <= frozen


def test_nothing_is_searched_for_among_many_new_objects() -> None:
    with no_garbage():
        assert not gc.isenabled()
        with no_garbage():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    with no_garbage():
        pass
    assert not gc.isenabled()


def test_what_is_settled_is_passed_over_and_found_afterwards() -> None:
    before = ring()
    with settled():
        during = ring()
        gc.collect()
        assert during() is None
        assert before() is not None
    gc.collect()
    assert before() is None


def test_what_is_frozen_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counted.append(0) or 0)
    with settled():
        with settled(), settled():
            pass
        with settled():
            pass
    assert len(counted) == 1


def test_what_is_frozen_stays_so_until_the_last_is_done() -> None:
    with contextlib.ExitStack() as second:
        with settled():
            second.enter_context(settled())
        assert gc.get_freeze_count()
    assert gc.get_freeze_count() == 0
