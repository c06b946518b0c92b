"""Staging on local disks: a hidden directory with its own lock and records.

An output directory is written in a hidden directory inside it; a single file or a tree, in one next to it. A record is
written once its file is on the disk, and then vouches for it. With `durable` off, nothing waits for the disk, and the
record says so: a crash of the machine may have lost data since. Such a file is resumed only after all its bytes are
read again and match the CRC-32 of its record.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptconv.errors import CorruptError, FailedError
from ckptconv.formats.registered import is_companion_name
from ckptconv.outputs.targets import MANIFEST
from ckptconv.plan import Copied, FilePlan
from ckptconv.publish.staging.area import (
    BUSY,
    DESCRIPTION,
    FILE,
    LOCK,
    MOST_RECORD,
    PUBLISHED,
    Place,
    allocated,
    enter,
    hidden,
    is_sibling,
    record_of,
    remove_dead,
    remove_emptied,
    wait_for,
)
from ckptconv.publish.staging.base import GO_ON, FinishedFile, Staging
from ckptconv.storage.files import DescriptorReader
from ckptconv.storage.handles import HIDDEN, ForeignError, Handle, resolved
from ckptconv.storage.reading import Reader
from ckptconv.storage.writing import LocalWriter, Writer, check_space, writing
from ckptconv.tensors.moves import File
from ckptconv.text import reason

if TYPE_CHECKING:
    from ckptconv.storage.digests import Digests


class LocalStaging(Staging):
    """A file, or with `is_ours` a directory of files, that is written in a hidden directory.

    `is_ours(name)`: the new output replaces an earlier file of that name. `index` is the name that makes an output
    complete: it is removed first and written last, so that a kill in between leaves no index, never a wrong one.
    The hidden directory, `token`, is in `home` and private to the user; its name begins with `prefix`, as do those of
    other plans. A process that makes a whole output locks it alone; those that make `shared` parts share the lock.
    """

    def __init__(
        self,
        path: str,
        plan_id: str,
        durable: bool = True,
        shared: bool = False,
        index: str = "",
        is_ours: Callable[[str], bool] | None = None,
    ) -> None:
        super().__init__(plan_id, durable)
        self.path, self.shared, self.index, self.is_ours = resolved(path), shared, index, is_ours
        self.is_file = is_ours is None
        self.home, self.name = (self.path, "") if is_ours else os.path.split(self.path)
        self.prefix = hidden(self.name) if self.name else HIDDEN
        self.token = self.prefix + plan_id
        # A process that publishes locks this directory in `home`.
        self.busy = self.prefix + BUSY
        # Whether any part of an earlier output was replaced.
        self._touched = False
        self._home: Handle | None = None
        self._staging: Handle | None = None
        self._guard = -1
        self._made: list[str] = []
        # Files that were begun, and the records of files that already have their final name.
        self._begun: set[str] = set()
        self._renamed: dict[str, dict[str, Any]] = {}
        self._files = 0

    # ---- where things are

    @property
    def staging(self) -> str:
        return os.path.join(self.home, self.token)

    def inside(self, name: str) -> tuple[str, ...]:
        """Return the path of the file `name` in the staging directory, as a tuple of names."""
        return (FILE if self.is_file else name,)

    def outside(self, name: str) -> tuple[str, ...]:
        """Return the final path of the file `name` below `home`, as a tuple of names."""
        return (self.name if self.is_file else name,)

    def _place(self, name: str) -> Place:
        assert self._staging is not None
        *above, last = self.inside(name)
        return Place(self._staging, tuple(above), last)

    def _final(self, name: str) -> Place:
        assert self._home is not None
        *above, last = self.outside(name)
        return Place(self._home, tuple(above), last)

    def place(self, name: str) -> str:
        """Return the path where the file `name` is written."""
        return os.path.join(self.staging, *self.inside(name))

    def final(self, name: str) -> str:
        """Return the final path of the file `name`."""
        return os.path.join(self.home, *self.outside(name))

    def staged(self, name: str) -> str:
        return self.final(name) if name in self._renamed else self.place(name)

    # ---- entering and leaving

    def __enter__(self) -> Staging:
        try:
            with writing(self.path):
                self._prepare()
        except BaseException:
            self.discard()
            self.close()
            raise
        return self

    def _prepare(self) -> None:
        if not self.is_file:
            missing = self.home
            while not os.path.exists(missing):
                self._made.append(missing)
                missing = os.path.dirname(missing)
            os.makedirs(self.home, exist_ok=True)
        self._home = home = Handle.open(self.home)
        try:
            self._enter(home)
        except ForeignError:
            if not self.is_file or self.shared:
                raise
            # A single file can be staged under any other name.
            self.token += f"-{os.urandom(4).hex()}"
            self._enter(home)
        # Remove leftovers of other plans, unless this run makes parts: parts of another plan may be waiting for
        # `finish`.
        for sibling in home.names() if not self.shared else ():
            is_leftover = is_sibling(sibling, self.prefix) and sibling not in (self.token, self.busy)
            # Inside an output directory, only directories are staging areas.
            if is_leftover and (self.name or stat.S_ISDIR(home.stat(sibling).st_mode)):
                remove_dead(home, sibling, self.recover)

    def _enter(self, home: Handle) -> None:
        """Open and lock the staging directory. If this is interrupted, remove what it has just created."""
        existed = home.has(self.token)
        try:
            self._staging, self._guard = enter(home, self.token, self.path, self.shared)
        except BaseException:
            if not existed:
                remove_dead(home, self.token)
            raise

    def recover(self, staging: Handle) -> None:
        """Restore files of others that a killed run has moved into `staging`, before `staging` is removed."""

    def elsewhere(self) -> LocalStaging:
        staging = copy.copy(self)
        staging._home, staging._staging, staging._guard = None, None, -1
        staging._writers, staging._made = [], []
        staging.recorded, staging._renamed, staging._begun = set(), {}, set()
        return staging

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        # If the staging directory is gone, no run wants the file any more, and this raises.
        with writing(self.path):
            self._home = Handle.open(self.home)
            self._staging = self._home.private(self.token)
        try:
            with super().opened():
                yield
        finally:
            self.close()

    def detach(self) -> None:
        if self.committed:
            self._end()
        elif self.durable and self._guard >= 0 and self._staging is not None:
            self._staging.sync()
        self.close()

    def keep(self) -> str:
        if self._guard < 0:
            return ""
        if self.committing:
            self.close()
            return GO_ON
        if not self.recorded or (self._files < 2 and not self.shared):
            # A single file is kept only as a part of something larger: else the next run makes it again.
            return ""
        if self.shared:
            for name in self._begun - self.recorded:
                self._drop(name)
        else:
            self._clear(self.recorded)
        self.close()
        return f"{self._kept_files()} kept in {self.staging}: run the same command again to continue."

    def discard(self) -> None:
        if self._guard >= 0 and not self.shared:
            self._end()
        elif self._guard >= 0:
            # Other processes may be writing here.
            for name in self._begun:
                self._forget(name)
                self._drop(name)
        self.close()
        for path in self._made:
            with contextlib.suppress(OSError):
                os.rmdir(path)

    def _drop(self, name: str) -> None:
        """Remove a staged file, if it exists."""
        place = self._place(name)
        with contextlib.suppress(OSError), place.open() as directory:
            directory.unlink(place.name)

    def _clear(self, kept: Iterable[str]) -> None:
        """Remove everything staged except the files `kept` and their records."""
        assert self._staging is not None
        names = [os.path.join(*self.inside(name)) for name in kept]
        self._staging.clear({*names, *map(record_of, kept), LOCK, DESCRIPTION})

    def _end(self) -> None:
        if self._guard < 0:
            return
        assert self._home is not None
        assert self._staging is not None
        if self.committed:
            # If this process is killed from here on, the new name says that the output is published.
            with contextlib.suppress(OSError):
                self._staging.replace(DESCRIPTION, self._staging, PUBLISHED)
        remove_emptied(self._home, self.token, self._staging)

    def close(self) -> None:
        for handle in (self._staging, self._home):
            if handle is not None:
                handle.close()
        self._staging = self._home = None
        if self._guard >= 0:
            os.close(self._guard)
            self._guard = -1

    # ---- finished files

    def finished(self, name: str, size: int, digest: str = "") -> FinishedFile | None:
        self._files += 1
        with writing(self.path):
            return super().finished(name, size, digest)

    def _known(self, name: str, size: int) -> dict[str, Any] | None:
        assert self._staging is not None
        record = self._read_record(name)
        if record is None:
            return None
        if (record["name"], record["size"], record["plan"]) != (name, size, self.plan_id):
            self._no_record(name, "it belongs to another file or plan")
            return None
        for place in (self._place(name), self._final(name)):
            now = place.stat()
            if now is None:
                continue
            renamed = place.root is self._home
            if not stat.S_ISREG(now.st_mode) or now.st_size != size or (renamed and not _is_same(now, record)):
                return None
            if renamed:
                self._renamed[name] = record
            # The file may be a copy: record its identity once it has its final name.
            facts = {"inode": now.st_ino, "mtime": now.st_mtime_ns}
            if not record["synced"]:
                if any(crc is None for _, _, crc, _ in record["spans"]) or not self._has_checksums(name, record):
                    return None
                if self.durable:
                    with place.open() as directory:
                        directory.sync_file(place.name)
                    facts["synced"] = True
            if record != {**record, **facts}:
                record |= facts
                self._staging.write_whole(record_of(name), json.dumps(record).encode())
            return record
        return None

    def _read_record(self, name: str) -> dict[str, Any] | None:
        assert self._staging is not None
        try:
            data = self._staging.read(record_of(name), MOST_RECORD)
            if data is None:
                return None
            from ckptconv.outputs.schema import file_record

            return file_record(data)
        except (OSError, ValueError, ForeignError) as error:
            self._no_record(name, str(error))
            return None

    def _no_record(self, name: str, why: str) -> None:
        """Handle an invalid record: raise CorruptError in `finish`; any other run makes the file again."""
        if self.finishing:
            raise CorruptError(
                f"The record of {name!r} in {self.staging} is damaged: {why}.",
                "Run the part with this file again, then finish.",
            )

    @contextlib.contextmanager
    def _reading(self, name: str, record: Mapping[str, Any]) -> Iterator[Reader]:
        place = self._final(name) if name in self._renamed else self._place(name)
        with writing(self.path), place.open() as directory:
            fd = directory.open_file(place.name)
        try:
            yield DescriptorReader(File(self.staged(name), record["size"]), fd)
        finally:
            os.close(fd)

    def _forget(self, name: str) -> None:
        assert self._staging is not None
        with contextlib.suppress(OSError):
            self._staging.unlink(record_of(name))

    def describe(self, data: bytes) -> None:
        assert self._staging is not None
        with writing(self.path):
            self._staging.write_whole(DESCRIPTION, data)
            self._staging.unlink(PUBLISHED)

    # ---- making files

    def expect(self, files: Iterable[FilePlan]) -> None:
        # Useless staged files take up disk space.
        if not self.shared:
            self._clear(self.recorded)
        check_space(self.home, sum(self._missing(file.name, file.size) for file in files))

    def _missing(self, name: str, size: int) -> int:
        """Return how many of the `size` bytes of a file still need disk space."""
        place = self._place(name)
        with contextlib.suppress(OSError), place.open() as directory:
            return max(size - allocated(directory, place.name), 0)
        return size

    def create(self, name: str, size: int) -> Writer:
        place = self._place(name)
        check_space(self.home, self._missing(name, size))
        self._forget(name)
        path = self.place(name)
        with writing(path), place.open(make=True) as directory:
            try:
                writer = LocalWriter(path, size, directory, self.durable)
            except ForeignError:
                # In our own directory this can only be a leftover.
                directory.unlink(place.name)
                writer = LocalWriter(path, size, directory, self.durable)
        self._begun.add(name)
        self._writers.append(writer)
        return writer

    def record(self, file: FilePlan, crcs: Mapping[str, int] | None, digests: Digests | None = None) -> None:
        assert self._staging is not None
        place = self._place(file.name)
        with writing(self.path):
            with place.open() as directory:
                synced = self.durable
                # Copied files have no checksums, by which `finish` could trust them.
                if self.shared and not synced and any(isinstance(part, Copied) for part in file.parts):
                    directory.sync_file(place.name)
                    synced = True
                now = directory.stat(place.name)
            facts = {"plan": self.plan_id, "inode": now.st_ino, "mtime": now.st_mtime_ns, "synced": synced}
            from ckptconv.publish.manifest import record

            self._staging.write_whole(record_of(file.name), record(file, crcs, digests, facts))
        self.recorded.add(file.name)

    # ---- publishing

    def commit(self, names: Sequence[str]) -> None:
        with self._alone():
            self._check_renamed()
            self.committing = True
            with writing(self.path):
                try:
                    self.publish(names)
                except OSError as error:
                    if not self._touched:
                        self.committing = False
                        raise
                    raise self._unfinished(names, error) from error
        self.committed = True

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock out other conversions that publish into `home`; a single file needs no lock, being one rename."""
        if self.is_file:
            yield
            return
        assert self._home is not None
        with writing(self.path):
            busy, guard = wait_for(self._home, self.busy, self.path)
        try:
            yield
        finally:
            remove_emptied(self._home, self.busy, busy)
            busy.close()
            os.close(guard)

    def publish(self, names: Sequence[str]) -> None:
        """Give the staged files their final names, the index last."""
        assert self._home is not None
        assert self._staging is not None
        home = self._home
        previous = [name for name in home.names() if self.is_ours(name) and name not in names] if self.is_ours else []
        if self.index and self.index not in self._renamed:
            self._touched = home.has(self.index)
            home.unlink(self.index)
            if self.durable:
                home.sync()
        # Only the earlier manifest may say that these are ours: they go before it does, copied files first.
        if previous:
            for old in filter(is_companion_name, previous):
                home.unlink(old)
            previous = [old for old in previous if not is_companion_name(old)]
        for name in sorted(names, key=lambda name: (name == self.index, name == MANIFEST)):
            if name in (MANIFEST, self.index):
                for old in previous:
                    home.unlink(old)
                previous = []
                if self.durable:
                    home.sync()
            if name not in self._renamed:
                self._move(name)
                self._touched = True
        for old in previous:
            home.unlink(old)
        if self.durable:
            home.sync()

    def _move(self, name: str) -> None:
        """Move one staged file to its final path."""
        source, goal = self._place(name), self._final(name)
        with source.open() as before, goal.open() as after:
            before.replace(source.name, after, goal.name)

    def _check_renamed(self) -> None:
        """Raise FailedError if another conversion has replaced a file that an earlier run gave its final name."""
        for name, status in self._renamed.items():
            now = self._final(name).stat()
            if now is None or now.st_size != status["size"] or not _is_same(now, status):
                raise FailedError(
                    f"{self.final(name)} was replaced by another conversion, which published its output as well.",
                    "To replace that output, run this conversion again.",
                )

    def _unfinished(self, names: Sequence[str], error: OSError) -> FailedError:
        """Return the error for a publication that stopped midway; it names the files that are in place."""
        missing = [name for name in names if self._place(name).stat() is not None]
        return FailedError(
            f"{self.path} is not complete: {reason(error)}. Of {len(names)} files {len(names) - len(missing)} have "
            f"their final names; {self.final(missing[-1])} does not, and any earlier output is only partly "
            f"replaced. The other files are in {self.staging}.",
            GO_ON,
        )


def _is_same(now: os.stat_result, entry: Mapping[str, Any]) -> bool:
    """Return whether a file under a final name is the one of the record `entry`, not another of the same size."""
    return bool(now.st_mtime_ns == entry["mtime"] and now.st_ino == entry["inode"])
