"""The program `ckptconv` for scripts that call it often: all is imported once, by a server that forks for each call.

    python prepared.py DIRECTORY     started by `prepared_program`

What a call is given goes to the child: arguments, directory, environment, and the streams themselves. Signals do not:
where it matters what the process is, the usual program is started.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import ckptconv

_CALLING = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [b"!"], [0, 1, 2])
    server.sendall(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode())
    server.shutdown(socket.SHUT_WR)
    code = server.recv(1)
sys.exit(code[0] if code else "the child of the server has died")
"""


@contextlib.contextmanager
def prepared_program(place: Path) -> Iterator[Path]:
    """A directory for the PATH, below `place`, in which `ckptconv` is, for as long as the block runs."""
    programs, address = place / "bin", place / "socket"
    programs.mkdir()
    program = programs / "ckptconv"
    program.write_text(_CALLING.format(python=sys.executable, address=str(address)))
    program.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(Path(ckptconv.__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, __file__, str(address)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        assert server.stdout.read(1) == b"!"
        yield programs  # and then its input ends


def _serve(address: str) -> None:
    for module in pkgutil.walk_packages(ckptconv.__path__, "ckptconv."):
        with contextlib.suppress(ImportError):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    importlib.import_module("numpy")
    assert "torch" not in sys.modules
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen(64)
        gc.freeze()
        os.write(1, b"!")
        # Until the input ends: whoever started this goes, however that is.
        while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
            asking, _ = listening.accept()
            with asking:
                _, streams, _, _ = socket.recv_fds(asking, 1, 3)
                if not os.fork():
                    listening.close()
                    _call(asking, streams)
                for stream in streams:
                    os.close(stream)


def _call(asking: socket.socket, streams: list[int]) -> None:
    """Be the program, and end."""
    code = 1
    try:
        with asking.makefile("rb") as told:
            arguments, place, environment = json.load(told)
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            os.dup2(streams[number], number)
            os.close(streams[number])
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.chdir(place)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv[1:] = arguments
        code = _ended()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        asking.sendall(bytes([code & 255]))
        os._exit(code)


def _ended() -> int:
    """How the command line ends."""
    from ckptconv.__main__ import main

    try:
        main()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
            return 1
        return ended.code or 0
    return 0


if __name__ == "__main__":
    _serve(sys.argv[1])
