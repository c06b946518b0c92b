"""How files are written to Google Cloud Storage: as files of fsspec that wait for their commit, here on a disk."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from ckptconv.features.gcs.store import FileUpload
from ckptconv.features.remote import stores


@pytest.mark.parametrize("scheme", ["gs", "gcs"])
def test_its_schemes_are_written_as_files_that_wait(scheme: str) -> None:
    assert stores.of_scheme(scheme).upload is FileUpload


def test_a_file_is_there_when_it_is_complete(tmp_path: Path) -> None:
    upload = FileUpload(fsspec.filesystem("file"), str(tmp_path / "x"), 6, 4)
    for number, data in enumerate((b"abcd", b"ef")):
        upload.send(number, memoryview(data))
        assert not (tmp_path / "x").exists()
    upload.complete()
    assert (tmp_path / "x").read_bytes() == b"abcdef"
    assert list(tmp_path.iterdir()) == [tmp_path / "x"]
