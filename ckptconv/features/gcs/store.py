"""Writes objects of Google Cloud Storage, with the files of gcsfs."""

from __future__ import annotations

from typing import Any

from ckptconv.features.remote.stores import Store
from ckptconv.features.remote.uploads import Upload


class FileUpload(Upload):
    """An fsspec file that is opened with `autocommit=False`, and committed on `complete`."""

    def __init__(self, fs: Any, inner: str, size: int, part: int) -> None:
        super().__init__()
        self._file = fs.open(inner, "wb", block_size=part, autocommit=False)

    def send(self, number: int, data: memoryview) -> None:
        self._file.write(data)

    def complete(self) -> None:
        self._file.close()
        self._file.commit()

    def abort(self) -> None:
        # Closing would send the rest, and could complete the upload.
        self._file.closed = True
        self._file.discard()


STORE = Store(extra="gcs", bucket="bucket", upload=FileUpload)
