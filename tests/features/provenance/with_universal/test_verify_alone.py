"""`verify OUTPUT` of a universal checkpoint, whose last file lies next to it."""

from __future__ import annotations

from pathlib import Path

from cells import verify, verifying
from checkpoints import seven_shards

from ckptconv import convert


@verifying
def test_the_file_that_names_it_is_compared_too(tmp_path: Path) -> None:
    source, step = seven_shards(tmp_path / "model.pt", rows=5), tmp_path / "step"
    convert(source, step, to="universal", digest="sha256")
    report = verify(step)
    assert str(tmp_path / "latest_universal") in [file.path for file in report.outputs]
    assert len(report.warnings) == 1
    assert (
        f"This replaces files in {step}, an earlier output of ckptconv." in convert(source, step, to="universal").notes
    )
