"""The configuration of a base that a merge does not copy is named."""

from __future__ import annotations

import shutil
from pathlib import Path

from checkpoints import DATA

from ckptconv import merge


def test_the_configuration_of_the_base_stays_behind_and_is_named(tmp_path: Path) -> None:
    base, case = tmp_path / "base", sorted(path for path in (DATA / "peft").iterdir() if path.is_dir())[0]
    shutil.copytree(case / "base", base)
    for name in ("config.json", "tokenizer.json"):
        (base / name).write_text("{}")
    report = merge(base, case / "adapter", tmp_path / "out")
    assert f"left in {base}: config.json, tokenizer.json (not copied without --copy-config)." in report.notes
