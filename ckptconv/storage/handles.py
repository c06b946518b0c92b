"""Directories by open descriptor, for places where other users can write too.

A handle is an open directory. Names given to it are single components, and links are not followed, so nothing that
others rename or replace meanwhile can redirect an operation. A leftover of ours is used or removed only if it belongs
to the current user and no other user can have written into it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from ckptconv.errors import FailedError, UnsafeError

if TYPE_CHECKING:
    from typing_extensions import Self

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Do not follow a link, nor wait for the other end of a pipe.
_SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# Directories of ours are less deep than this.
_DEEPEST = 32
# Number of links that the system follows.
_MOST_LINKS = 40
# Permissions of other users on a file or directory.
_OTHERS = 0o077
# The beginning, or the end, of the names of hidden files and directories in which an output is made.
HIDDEN = ".ckptconv-"
_PROBE = f"{HIDDEN}spool-"


class ForeignError(FailedError):
    """An entry with a name of ours is not ours: it is neither used nor removed."""

    def __init__(self, path: str, entry: str) -> None:
        super().__init__(
            f"{path} blocks the output: it is {entry}. It was neither used nor removed, and no output was published.",
            "Remove it if you know its owner, or write to another path. With --part, one user must write all parts.",
        )


class Handle:
    """An open directory, and a context manager that closes it. `path` is for messages.

    Methods raise OSError as the functions of `os` do.
    """

    def __init__(self, fd: int, path: str) -> None:
        self.fd, self.path = fd, path

    @classmethod
    def open(cls, path: str) -> Handle:
        """Open the directory `path`, which is `resolved`: a link that is put there meanwhile raises OSError."""
        return cls(os.open(path, _DIRECTORY | os.O_NOFOLLOW), path)

    def inside(self, name: str) -> Handle:
        """Open the directory `name` in this one; a link, or a name that leads out of it, raises OSError."""
        if name in ("", ".", "..") or "/" in name:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), name)
        return Handle(os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=self.fd), os.path.join(self.path, name))

    @contextlib.contextmanager
    def descend(self, names: Sequence[str], make: bool = False) -> Iterator[Handle]:
        """Yield the directory reached by `names`, one inside the other; with `make`, create those that are missing."""
        current = self
        try:
            for name in names:
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, dir_fd=current.fd)
                inner = current.inside(name)
                if current is not self:
                    current.close()
                current = inner
            yield current
        finally:
            if current is not self:
                current.close()

    def private(self, name: str) -> Handle:
        """Open the directory `name` in this one, if it is private to this user.

        Raises FileNotFoundError if there is none, ForeignError for anything else.
        """
        path = os.path.join(self.path, name)
        try:
            inner = self.inside(name)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise ForeignError(path, "not a directory") from None
            if error.errno in (errno.EACCES, errno.EPERM):
                raise ForeignError(path, "a directory of another user") from None
            raise
        try:
            status = os.fstat(inner.fd)
            if not self._is_ours(status):
                private = "" if status.st_uid == os.geteuid() else "owned by another user"
                raise ForeignError(path, f"a directory {private or 'that others can open or write to'}")
        except BaseException:
            inner.close()
            raise
        return inner

    def _is_ours(self, status: os.stat_result) -> bool:
        """Return whether an entry of this directory with the stat `status` is private to the current user.

        Some file systems give everything one owner or one mode: compare with a file created here.
        """
        others = status.st_mode & _OTHERS
        if status.st_uid == os.geteuid() and not others:
            return True
        fd = unnamed(self)
        try:
            created = os.fstat(fd)
        finally:
            os.close(fd)
        return status.st_uid == created.st_uid and not others & ~created.st_mode

    def make_private(self, name: str) -> None:
        """Create the directory `name`, which only this user can open."""
        os.mkdir(name, 0o700, dir_fd=self.fd)

    def names(self) -> list[str]:
        return os.listdir(self.fd)

    def stat(self, name: str) -> os.stat_result:
        """Return the stat of `name`; a link is not followed."""
        return os.stat(name, dir_fd=self.fd, follow_symlinks=False)

    def has(self, name: str) -> bool:
        """Return whether there is an entry `name`."""
        with contextlib.suppress(OSError):
            self.stat(name)
            return True
        return False

    def open_file(self, name: str, flags: int = os.O_RDONLY) -> int:
        """Open the regular file `name`. Raises FileNotFoundError if there is none, ForeignError for anything else."""
        path = os.path.join(self.path, name)
        try:
            fd = os.open(name, flags | _SAFELY, dir_fd=self.fd)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
                raise ForeignError(path, "not a regular file") from None
            raise
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise ForeignError(path, "not a regular file")
        return fd

    def open_private(self, name: str) -> int:
        """Open the regular file `name` for writing. Raises ForeignError if it has another owner, or a second name."""
        try:
            fd = self.open_file(name, os.O_RDWR)
        except PermissionError:
            raise ForeignError(os.path.join(self.path, name), "a file of another user") from None
        status = os.fstat(fd)
        if status.st_nlink > 1 or not (status.st_uid == os.geteuid() or self._is_ours(status)):
            os.close(fd)
            entry = "a file with a second name (hard link)" if status.st_nlink > 1 else "a file of another user"
            raise ForeignError(os.path.join(self.path, name), entry)
        return fd

    def create(self, name: str, mode: int = 0o666) -> int:
        """Create the file `name` and open it for writing. Raises FileExistsError if something is there."""
        return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFELY, mode, dir_fd=self.fd)

    def open_or_create(self, name: str, mode: int = 0o666) -> int:
        """Open this user's file `name` for writing; create it if it does not exist."""
        while True:
            with contextlib.suppress(FileExistsError):
                return self.create(name, mode)
            with contextlib.suppress(FileNotFoundError):
                return self.open_private(name)

    def read(self, name: str, most: int) -> bytes | None:
        """Return the content of the file `name`, None if there is none. Raises ValueError for over `most` bytes."""
        try:
            fd = self.open_file(name)
        except FileNotFoundError:
            return None
        with os.fdopen(fd, "rb", buffering=0) as file:
            data: bytes = file.read(most + 1)
        if len(data) > most:
            raise ValueError(f"it has more than {most} bytes")
        return data

    def write_whole(self, name: str, data: bytes) -> None:
        """Write a small file atomically: it exists with all of its content, or not at all.

        It is not synced. A power cut may remove or damage it; that is detected, as it is JSON to the last byte.
        """
        temporary = f"{name}.{os.urandom(4).hex()}"
        fd = self.create(temporary)
        try:
            remaining = memoryview(data)
            while remaining:
                remaining = remaining[os.write(fd, remaining) :]
        finally:
            os.close(fd)
        self.replace(temporary, self, name)

    def replace(self, name: str, directory: Handle, new: str) -> None:
        """Rename `name` to `new` in `directory`, replacing an entry of that name; a link itself is replaced."""
        os.replace(name, new, src_dir_fd=self.fd, dst_dir_fd=directory.fd)

    def unlink(self, name: str) -> None:
        """Remove the file `name`, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def clear(self, kept: Collection[str] = (), prefix: str = "", deepest: int = _DEEPEST) -> None:
        """Remove everything in this directory except the files `kept`; errors are ignored.

        `kept` are paths that begin with `prefix`. Links are removed, not followed. File systems mounted here are left
        alone.
        """
        device = os.fstat(self.fd).st_dev
        for name in self.names():
            path = prefix + name
            if path in kept:
                continue
            with contextlib.suppress(OSError):
                status = self.stat(name)
                if not stat.S_ISDIR(status.st_mode):
                    os.unlink(name, dir_fd=self.fd)
                    continue
                if deepest and status.st_dev == device:
                    with self.inside(name) as inner:
                        inner.clear(kept, f"{path}/", deepest - 1)
                os.rmdir(name, dir_fd=self.fd)

    def sync(self) -> None:
        """Make the names in this directory durable, as far as the file system can. Errors are ignored."""
        with contextlib.suppress(OSError):
            os.fsync(self.fd)

    def sync_file(self, name: str) -> None:
        """Wait until the content of the file `name` is on the disk."""
        fd = self.open_file(name)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def sync_below(self, deepest: int = _DEEPEST) -> None:
        """Do the same for this directory and all directories in it."""
        for name in self.names():
            with contextlib.suppress(OSError):
                if deepest and stat.S_ISDIR(self.stat(name).st_mode):
                    with self.inside(name) as inner:
                        inner.sync_below(deepest - 1)
        self.sync()

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def unnamed(directory: Handle) -> int:
    """Create a file in `directory` that no other process can open and that needs no removal. Return its descriptor."""
    try:
        return os.open(".", os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600, dir_fd=directory.fd)
    except (OSError, AttributeError) as error:
        # Some file systems, and systems other than Linux, have no unnamed files.
        unknown = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)
        if isinstance(error, OSError) and error.errno not in unknown:
            raise
    for name in directory.names():
        # A process killed between the two steps below has left one.
        if name.startswith(_PROBE):
            with contextlib.suppress(OSError, FailedError):
                os.close(directory.open_private(name))
                directory.unlink(name)
    name = _PROBE + os.urandom(8).hex()
    fd = directory.create(name, 0o600)
    with contextlib.suppress(OSError):
        directory.unlink(name)
    return fd


def resolved(path: str) -> str:
    """Return `path` as an absolute path with all links followed; missing components stay as they are named.

    Every path to write to passes through here. Raises UnsafeError if a link on the way is a stranger's: of neither this
    user nor the owner of the directory that it is in, where others may create entries.
    """
    current, links = "/" if path.startswith("/") else os.getcwd(), 0
    names = path.split("/")[::-1]
    while names:
        name = names.pop()
        if name in ("", ".", ".."):
            current = os.path.dirname(current) if name == ".." else current
            continue
        inner = os.path.join(current, name)
        leads = _followed(current, inner) if links < _MOST_LINKS else None
        if leads is None:
            current = inner
            continue
        links += 1
        current = "/" if leads.startswith("/") else current
        names += leads.split("/")[::-1]
    return current


def _followed(directory: str, path: str) -> str | None:
    """Return where the link `path` in `directory` leads; None if it is no link. Raises UnsafeError for a stranger's."""
    try:
        link, around = os.lstat(path), os.stat(directory)
        leads = os.readlink(path) if stat.S_ISLNK(link.st_mode) else None
    except (OSError, ValueError):
        return None
    shared = around.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if leads is not None and shared and link.st_uid not in (os.geteuid(), around.st_uid):
        raise UnsafeError(
            f"{path} is a link to {leads} that another user created.",
            "Write to another path, or give the target of the link if you trust it.",
        )
    return leads
