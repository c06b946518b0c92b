"""An fsspec file system of the files that a conversion would write.

fsspec.filesystem("ckptconv", source="checkpoints/", dtype="bf16").cat_file("model.safetensors", 0, 100)
fsspec.open("ckptconv://model.safetensors::step.virtual.json")
"""

from __future__ import annotations

import os
from typing import Any

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from ckptconv.errors import UsageError
from ckptconv.features.virtual_files.files import VirtualFiles


class VirtualFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """The files that a conversion of `source` with `options` would write to a directory. Read-only.

    `source` is a path, a URL or a virtual checkpoint; `fo` is the same, as fsspec names the target of a chained URL.
    Raise a `CkptconvError` as `VirtualFiles` does, FileNotFoundError for a name that none of the files has.
    """

    protocol = "ckptconv"
    root_marker = ""
    # A new one reads the descriptions again: the checkpoint may have changed.
    cachable = False
    # Files on stores, with a lock on each file system that serves one thread at a time.
    reads_with_threads = True

    def __init__(self, source: str | os.PathLike[str] = "", fo: str = "", **options: Any) -> None:
        of_fsspec = {name: options.pop(name) for name in _OF_FSSPEC if name in options}
        super().__init__(**of_fsspec)
        if not source and not fo:
            raise UsageError(
                "The file system requires a checkpoint.", 'Give it as source: filesystem("ckptconv", source=PATH).'
            )
        if of_fsspec.get("target_options"):
            options.setdefault("storage_options", of_fsspec["target_options"])
        self.files = VirtualFiles(source or fo, **options)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path)).strip("/")

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """List the files; `path` is "" for all, or one file."""
        path = self._strip_protocol(path)
        rows = [self.info(name) for name in ([path] if path else self.files)]
        return rows if detail else [row["name"] for row in rows]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Return the name, size, type and ETag of a file."""
        path = self._strip_protocol(path)
        if not path:
            return {"name": "", "size": 0, "type": "directory"}
        if path not in self.files:
            raise FileNotFoundError(path)
        file = self.files[path]
        return {"name": path, "size": file.size, "type": "file", "ETag": file.tag}

    def ukey(self, path: str) -> str:
        return str(self.info(path).get("ETag", self.files.version))

    def checksum(self, path: str) -> int:
        return int(self.ukey(path), 16)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """Return bytes `start` to `end` of a file; negative ones count from its end."""
        row = self.info(path)
        low, high, _step = slice(start, end).indices(row["size"])
        return self.files.read_bytes(row["name"], low, max(low, high))

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **options: Any) -> VirtualFileReader:
        if mode != "rb":
            raise UsageError(
                f"{path} is computed when it is read, and cannot be written.",
                "To write files, convert the checkpoint.",
            )
        return VirtualFileReader(self, path, mode, block_size or "default", **options)


class VirtualFileReader(AbstractBufferedFile):  # type: ignore[misc]
    """An open file."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        return bytes(self.fs.cat_file(self.path, start, end))


# Settings that fsspec gives to every file system.
_OF_FSSPEC = (
    "use_listings_cache",
    "listings_expiry_time",
    "max_paths",
    "skip_instance_cache",
    "asynchronous",
    "loop",
    "target_options",
    "target_protocol",
)
