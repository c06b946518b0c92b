"""Tensors that a map makes one, as they are equal: such an output checks that they are."""

from __future__ import annotations

from pathlib import Path

from features.maps.mapping import check_copies


def test_copies_that_differ_are_refused_by_name(tmp_path: Path) -> None:
    check_copies("universal", tmp_path)
