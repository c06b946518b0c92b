"""Processes that start at once, are killed at any moment, and are counted: their calls, their files, what they show.

    python processes.py ADDRESS [MODULE ...]     started by `prepared`

A server has everything imported already, and forks for each call. What a call is given goes to the child: code,
arguments, directory, environment, and the streams themselves. It has a process number of its own, and takes signals.
Where it matters what a new interpreter is (its memory, what it has imported, the moments before it hears signals, its
standard streams), the usual one is started.
"""

from __future__ import annotations

import atexit
import contextlib
import cProfile
import functools
import importlib
import json
import os
import pkgutil
import pty
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from fcntl import ioctl
from io import TextIOWrapper
from pathlib import Path
from subprocess import CompletedProcess
from typing import IO, TYPE_CHECKING, Any

import ckptconv
from ckptconv.cli import commands
from ckptconv.process import settled
from ckptconv.tensors.float_formats import numpy_module

if TYPE_CHECKING:
    import pytest

PROGRAM = "import sys; from ckptconv.__main__ import main; main()"
_CALLING = f"""#!{{python}} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({{address!r}})
    socket.send_fds(server, [b"!"], [0, 1, 2])
    server.sendall(json.dumps([{PROGRAM!r}, sys.argv[1:], os.getcwd(), dict(os.environ)]).encode())
    server.shutdown(socket.SHUT_WR)
    code = int(server.makefile().readlines()[1])
sys.exit(code if code >= 0 else 128 - code)
"""


class Process:
    """A child of a server, which is used as `subprocess.Popen` is; its streams are texts."""

    def __init__(
        self,
        address: str,
        code: str,
        arguments: list[str],
        cwd: Path | None,
        env: Mapping[str, str],
        streams: Mapping[str, int | IO[Any] | None],
    ) -> None:
        given, self.returncode = [], None
        ours: dict[str, TextIOWrapper | None] = {}
        opened = []
        for name, stream in streams.items():
            ours[name] = None
            if stream == subprocess.PIPE:
                reading, writing = os.pipe()
                stream, kept = (reading, writing) if name == "stdin" else (writing, reading)
                ours[name] = open(kept, "w" if name == "stdin" else "r")  # noqa: SIM115
                opened.append(stream)
            elif stream in (None, subprocess.DEVNULL):
                stream = os.open(os.devnull, os.O_RDWR)
                opened.append(stream)
            elif stream == subprocess.STDOUT:
                stream = given[1]
            given.append(stream if isinstance(stream, int) else stream.fileno())
        self.stdin, self.stdout, self.stderr = ours["stdin"], ours["stdout"], ours["stderr"]
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(address)
        socket.send_fds(self._server, [b"!"], given)
        self._server.sendall(json.dumps([code, arguments, str(cwd or Path.cwd()), dict(env)]).encode())
        self._server.shutdown(socket.SHUT_WR)
        for each in opened:
            os.close(each)
        self._told = self._server.makefile()
        self.pid = int(self._told.readline())

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._server], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float = 600) -> int:
        if self.returncode is None:
            if not select.select([self._server], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            self.returncode = int(self._told.readline())
            self._told.close()
            self._server.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and that is not told yet
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, content: bytes = b"", timeout: float = 600) -> tuple[str, str]:
        """Give it `content`, close its stdin, and return what it has written when it has ended."""
        found = {"stdout": "", "stderr": ""}

        def read(name: str, stream: IO[str]) -> None:
            with stream:
                found[name] = stream.read()

        streams = {"stdout": self.stdout, "stderr": self.stderr}
        reading = [
            threading.Thread(target=read, args=(name, stream), daemon=True)
            for name, stream in streams.items()
            if stream is not None and not stream.closed
        ]
        for thread in reading:
            thread.start()
        if self.stdin is not None and not self.stdin.closed:
            with contextlib.suppress(BrokenPipeError), self.stdin:
                self.stdin.buffer.write(content)
        self.wait(timeout)
        for thread in reading:
            thread.join()
        return found["stdout"], found["stderr"]


class Server:
    """A server that has all of ckptconv imported, and `modules` ("numpy" as a command does: without threads), for as
    long as this process runs."""

    def __init__(self, *modules: str) -> None:
        self._place = tempfile.TemporaryDirectory()
        self._address = f"{self._place.name}/socket"
        # A directory for the PATH, in which `ckptconv` is.
        self.programs = Path(self._place.name) / "bin"
        self.programs.mkdir()
        program = self.programs / "ckptconv"
        program.write_text(_CALLING.format(python=sys.executable, address=self._address))
        program.chmod(0o755)
        environment = {**os.environ, "PYTHONPATH": str(Path(ckptconv.__file__).parents[1])}
        self._process = subprocess.Popen(
            [sys.executable, __file__, self._address, *modules],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.read(1) == b"!"
        atexit.register(self._process.communicate)

    def python(
        self,
        code: str,
        *arguments: object,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: int | IO[Any] | None = None,
        stdout: int | IO[Any] | None = subprocess.PIPE,
        stderr: int | IO[Any] | None = subprocess.PIPE,
    ) -> Process:
        """A process that runs `code`; without a stdin, it has an empty one."""
        streams = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
        return Process(self._address, code, list(map(str, arguments)), cwd, os.environ if env is None else env, streams)

    def run(self, code: str, *arguments: object, content: bytes = b"", **options: Any) -> CompletedProcess[str]:
        """How a process ends that `python` starts, which reads `content`."""
        process = self.python(code, *arguments, **{"stdin": subprocess.PIPE, **options})
        out, err = process.communicate(content)
        return CompletedProcess([code, *map(str, arguments)], process.wait(), out, err)


@functools.cache
def prepared(*modules: str) -> Server:
    """The server that has these modules imported, besides ckptconv and numpy. It ends when this process does."""
    return Server("numpy", *modules)


@functools.cache
def bare() -> Server:
    """The server that has only ckptconv imported, and what that imports, for tests of what else is."""
    return Server()


# ------------------------------------------------------------------------------------------------------- the server


def _serve(address: str, modules: list[str]) -> None:
    for module in pkgutil.walk_packages(ckptconv.__path__, "ckptconv."):
        with contextlib.suppress(ImportError):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    for name in modules:
        numpy_module() if name == "numpy" else importlib.import_module(name)
    commands.app = commands.app.made()  # once, and not for each child
    assert {"torch", "numpy"}.intersection(sys.modules) <= {*modules, *(["numpy"] if "torch" in modules else [])}
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that tell how the children end
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the keyboard's is for whoever started this
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen(64)
        os.write(1, b"!")
        _listen(listening)


@settled()  # what is frozen is not counted by each child for each conversion
def _listen(listening: socket.socket) -> None:
    """Fork for each call until the input ends: whoever started this goes, however that is."""
    while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
        asking, _ = listening.accept()
        with asking:
            _, streams, _, _ = socket.recv_fds(asking, 1, 3)
            if not os.fork():
                listening.close()
                _tell(asking, streams)
            for stream in streams:
                os.close(stream)


def _tell(asking: socket.socket, streams: list[int]) -> None:
    """Start what was asked for, and tell its number, and how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with asking.makefile("rb") as told:
        code, arguments, place, environment = json.load(told)
    pid = os.fork()
    if not pid:
        asking.close()
        _run(code, arguments, place, environment, streams)
    for stream in (0, 1, 2, *streams):
        os.close(stream)
    with contextlib.suppress(OSError):  # nobody may want to know
        asking.sendall(b"%d\n" % pid)
        asking.sendall(b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os._exit(0)


def _run(code: str, arguments: list[str], place: str, environment: dict[str, str], streams: list[int]) -> None:
    """Be the process, and end."""
    status = 1
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            os.dup2(streams[number], number)
            how = {"mode": "w" if number else "r", "buffering": 1 if number == 2 else -1}
            setattr(sys, name, open(number, closefd=False, **how))  # type: ignore[call-overload] # noqa: SIM115
        for stream in set(streams):
            os.close(stream)
        os.chdir(place)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv[1:] = arguments
        status = _ended(code)
        threading._shutdown()  # type: ignore[attr-defined]
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status & 255)


def _ended(code: str) -> int:
    """How `code` ends."""
    try:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
            return 1
        return ended.code or 0
    return 0


# What changes something on the disk.
CALLS = ("open", "pwrite", "write", "ftruncate", "fsync", "replace", "rename", "unlink", "rmdir", "mkdir")


def contents(place: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()}


def in_child(work: Callable[[], Any]) -> int:
    """Run `work` in a child process; how it ended."""
    pid = os.fork()
    if not pid:
        code = 1
        with contextlib.suppress(BaseException):
            work()
            code = 0
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def before_call(at: int, act: Callable[[], None]) -> list[str]:
    """Have `act` called before the call to the system of this number, from 1; the list holds what was called."""
    made: list[str] = []

    def wrapped(name: str) -> Callable[..., Any]:
        call = getattr(os, name)

        def counting(*arguments: Any, **options: Any) -> Any:
            made.append(name)
            if len(made) == at:
                act()
            return call(*arguments, **options)

        return counting

    for name in CALLS:
        setattr(os, name, wrapped(name))
    return made


def moments(made: list[str]) -> list[int]:
    """Numbers of calls before which to kill: of each kind the first, one in the middle, and the last. In a thorough
    run, of all."""
    from effort import TIMES

    if TIMES > 1:
        return [*range(1, len(made) + 1)]
    found = set()
    for name in CALLS:
        places = [number for number, each in enumerate(made, 1) if each == name]
        found |= set(places[:1] + places[len(places) // 2 :][:1] + places[-1:])
    return sorted(found)


def stepped(after: int) -> list[int]:
    """Have this process killed when so many functions were called; the list holds how many there were."""
    made = [0]

    def counting(frame: Any, event: str, argument: Any) -> None:
        made[0] += 1
        if made[0] == after:
            os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(counting)
    sys.setprofile(counting)
    return made


@contextlib.contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, call: str, after: int, error: Exception) -> Iterator[None]:
    usual = getattr(os, call)
    left = [after]

    def refused(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise error
        return usual(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, call, refused)
        yield


# The program itself, which says at its end how often it forked. `before` runs before each fork.
COUNTED = """
import os, sys
from ckptconv.__main__ import main
fork, forks = os.fork, []
def counted():
    {before}
    pid = fork()
    forks.append(pid)
    return pid
os.fork = counted
try:
    main()
finally:
    print(len(forks), file=sys.stderr)
"""


def counted(work: Callable[[], Any]) -> tuple[int, Any]:
    """How many functions, of Python's or of C's, are called in this thread while `work` runs; and what it returns."""
    profile = cProfile.Profile()
    result = profile.runcall(work)
    return sum(entry.callcount for entry in profile.getstats()), result


def calls(work: Callable[[], Any]) -> int:
    """How many functions are called in this thread while `work` runs."""
    return counted(work)[0]


def open_files() -> Counter[str]:
    """The files and directories that this process has open. `open_files() - before` are those it did not have before.

    Sockets are left out: connections of an earlier test to a store end when they have been idle for a while.
    """
    found: Counter[str] = Counter()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found[os.readlink(f"/proc/self/fd/{descriptor}")] += 1
    return Counter({path: count for path, count in found.items() if path.startswith("/")})


def shown_on(master: int) -> str:
    """What is written to a pseudo-terminal, by its controlling side, until the last that has it open has ended."""
    shown = b""
    # Linux reports the end as an error.
    with contextlib.suppress(OSError):
        while data := os.read(master, 1 << 16):
            shown += data
    os.close(master)
    return shown.decode()


def on_terminal(columns: int, *arguments: object, **environment: str) -> str:
    """What the command shows on a terminal of so many columns."""
    master, slave = pty.openpty()
    ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    clean = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    environment = {**clean, "TERM": "xterm-256color", **environment}
    process = prepared().python(PROGRAM, *arguments, stdout=slave, env=environment)
    os.close(slave)
    shown = shown_on(master)
    assert process.wait() == 0, process.communicate()
    return shown


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2:])


# Sends itself a signal when the shard of that number is begun, those before it have their records, and no other is
# begun after it.
AT_SHARD = """
import threading, time
from ckptconv.publish.staging import local
from ckptconv.publish.staging.area import record_of
create, begun, creating = local.LocalStaging.create, [], threading.RLock()
def dying(self, name, size):
    with creating:
        if "{0}" in name:
            while not all(os.path.exists(self.staging + "/" + record_of(each)) for each in begun):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.{1})
        begun.append(name)
        return create(self, name, size)
local.LocalStaging.create = dying
"""


def dying(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process that kills itself where `code` says so. It makes one file after another."""
    if "--jobs" not in arguments:
        arguments += ("--jobs", 1)
    code = f"import os, signal, sys\n{code}\nfrom ckptconv.cli.main import main; main(sys.argv[1:])"
    return prepared().run(code, *arguments)
