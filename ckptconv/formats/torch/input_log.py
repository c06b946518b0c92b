"""The log of the files of a checkpoint that consists of several."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ckptconv.formats.source import FileFacts
from ckptconv.formats.torch.container import TorchFile
from ckptconv.formats.torch.file import fingerprint
from ckptconv.storage.records import Records


class InputLog:
    """Log of the files of torch.save that were read, and their share of a source. `size` is the sum of their sizes."""

    def __init__(self) -> None:
        self.opaque: dict[str, None] = {}
        self.mentioned: dict[str, None] = {}
        self.warnings: dict[str, None] = {}
        self.records: dict[str, Records] = {}
        self.digests: dict[str, str] = {}
        self.inputs: dict[str, Hashable] = {}
        self.bytes_read = self.size = 0

    def add(self, file: TorchFile, name: str) -> None:
        """Add a file; `name` is its path relative to the source."""
        self.opaque.update(dict.fromkeys(map(str, file.opaque)))
        self.mentioned.update(dict.fromkeys(map(str, file.globals)))
        self.warnings.update(dict.fromkeys(file.warnings))
        self.records[file.file.path] = file.records
        self.inputs[name] = fingerprint(file)
        self.bytes_read += file.bytes_read
        self.size += file.file.size

    @property
    def files(self) -> FileFacts:
        """The facts that the files have besides tensors."""
        return FileFacts(list(self.opaque), list(self.mentioned), self.records, self.digests)

    def fields(self) -> dict[str, Any]:
        """Return the fields of a source that follow from its files. The caller adds their warnings."""
        return {"files": self.files, "inputs": self.inputs, "bytes_read": self.bytes_read}
