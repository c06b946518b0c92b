"""Stages a directory tree on a disk, and gives it its name in one rename."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from ckptconv.publish.staging.local import LocalStaging
from ckptconv.storage.handles import Handle

# Names in a staging directory: the tree, and the old tree that it replaces.
TREE, OLD = "tree", "old"


class TreeStaging(LocalStaging):
    """A directory tree that is published as a whole, followed by a file next to it.

    It is written in a hidden sibling. `after` is the name of the file that is put next to the directory at the end.
    """

    def __init__(self, path: str, plan_id: str, after: str, durable: bool = True, shared: bool = False) -> None:
        super().__init__(path, plan_id, durable, shared)
        self.is_file = False
        self.after = after

    def inside(self, name: str) -> tuple[str, ...]:
        return (name,) if name == self.after else (TREE, *name.split("/"))

    def outside(self, name: str) -> tuple[str, ...]:
        return (name,) if name == self.after else (self.name, *name.split("/"))

    def _prepare(self) -> None:
        super()._prepare()
        assert self._staging is not None
        self.recover(self._staging)

    def recover(self, staging: Handle) -> None:
        """Move an earlier output back that a killed run has moved out of the way without replacing it."""
        assert self._home is not None
        if staging.has(TREE) and not self._home.has(self.name):
            with contextlib.suppress(FileNotFoundError):
                os.rename(OLD, self.name, src_dir_fd=staging.fd, dst_dir_fd=self._home.fd)

    def publish(self, names: Sequence[str]) -> None:
        assert self._home is not None
        assert self._staging is not None
        home, staging = self._home, self._staging
        inside = [name for name in names if name != self.after]
        if self._renamed.keys() & set(inside):
            # The tree already had its final name when an earlier run was killed: only some small files were made again.
            for name in inside:
                if name not in self._renamed:
                    self._move(name)
        else:
            with staging.inside(TREE) as tree:
                if self.durable:
                    tree.sync_below()
            staging.clear({name for name in staging.names() if name != OLD})
            with contextlib.suppress(FileNotFoundError):
                os.rename(self.name, OLD, src_dir_fd=home.fd, dst_dir_fd=staging.fd)
            try:
                os.rename(TREE, self.name, src_dir_fd=staging.fd, dst_dir_fd=home.fd)
            except OSError:
                self.recover(staging)
                raise
            self._touched = True
        if self.after not in self._renamed:
            self._move(self.after)
        if self.durable:
            home.sync()
