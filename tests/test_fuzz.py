"""A few seconds of what `make fuzz` does for longer: no traceback, only our errors, and no success that is wrong."""

from __future__ import annotations

import fuzz
import pytest


@pytest.mark.parametrize("reader", fuzz.READERS)
@pytest.mark.filterwarnings("ignore")
def test_changed_checkpoints_are_refused_or_read_as_torch_reads_them(reader: str) -> None:
    ends = fuzz.run(reader, seed=0, rounds=150)
    assert len(ends) > 1, "changes that change nothing"
