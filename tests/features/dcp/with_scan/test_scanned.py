"""Checkpoints that `scan` judges: data that nothing describes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from features.dcp.cases import CASES, checkpoint_of

import ckptconv


@pytest.mark.parametrize("head", [b"7z\xbc\xaf\x27\x1c", b"\x28\xb5\x2f\xfd", bytes(512) + b"\x80\x02N."])
@pytest.mark.parametrize("kind", [case for case in ("fsdp2_w2_nested", "zstd_w2") if case in CASES])
def test_data_that_no_description_beside_it_mentions_is_unknown(kind: str, head: bytes, tmp_path: Path) -> None:
    shutil.copytree(checkpoint_of(kind), tmp_path / "x")
    (tmp_path / "x/__9_9.distcp").write_bytes(head + bytes(50))
    told = {Path(file.path).name: [each.rule for each in file.findings] for file in ckptconv.scan(tmp_path).files}
    assert [name for name, rules in told.items() if rules == ["not-opened"]] == ["__9_9.distcp"]
