"""The configuration of a base that a merge copies, or leaves behind, is named."""

from __future__ import annotations

import shutil
from pathlib import Path

from checkpoints import DATA

from ckptconv import merge


def test_the_configuration_of_the_base_is_copied_or_named(tmp_path: Path) -> None:
    base, case = tmp_path / "base", sorted(path for path in (DATA / "peft").iterdir() if path.is_dir())[0]
    shutil.copytree(case / "base", base)
    for name in ("config.json", "tokenizer.json"):
        (base / name).write_text("{}")
    assert "copied: config.json, tokenizer.json" in merge(base, case / "adapter", tmp_path / "out").notes
    report = merge(base, case / "adapter", tmp_path / "bare", copy_config=False)
    assert f"not copied from {base}: config.json, tokenizer.json (--no-copy-config)." in report.notes
