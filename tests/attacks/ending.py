"""Converts files of the corpus in a process of its own, without torch, and tells how each ended.

    python -m attacks.ending     started by `ending_of`, once

It gets a line of JSON for each: the canary, the command, the input and the output, which is in a directory of its own.
It answers with one, an `Ending`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import json
import os
import resource
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from processes import counted

import ckptconv
from ckptconv.process import settled

# Inputs of more bytes than that are large.
LARGE = 300_000
# So many seconds of a processor are more than any of them take together, on any machine.
SECONDS = 600


@dataclass(frozen=True)
class Ending:
    """How a conversion ended: exit code and messages of the command line, and how many functions were `called`, or 0 if
    they were not counted: to count takes several times as long, and a `LARGE` input may take long.

    `written`: what is then in the output's directory. `canary`: it was made. `peak`: most bytes of memory meanwhile.
    """

    code: object
    err: str
    called: int
    written: list[str]
    canary: bool
    peak: int


@functools.cache
def _process() -> subprocess.Popen[str]:
    """What converts them, until this process ends."""
    paths = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(ckptconv.__file__).parents[1])])
    return subprocess.Popen(
        [sys.executable, "-m", "attacks.ending"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONPATH": paths},
    )


def ending_of(command: str, source: Path, output: Path, canary: Path) -> Ending:
    """How a conversion ends."""
    process = _process()
    assert process.stdin is not None
    assert process.stdout is not None
    print(json.dumps([*map(str, (canary, command, source, output))]), file=process.stdin, flush=True)
    answer = process.stdout.readline()
    assert answer, f"the process that converts {source} died"
    return Ending(**json.loads(answer))


def size_of(source: Path) -> int:
    """The bytes of a file, or of all files of a directory."""
    files = source.rglob("*") if source.is_dir() else [source]
    return sum(file.lstat().st_size for file in files)


def _forget_peak() -> None:
    with open("/proc/self/clear_refs", "w") as clearing:
        clearing.write("5")


def _peak() -> int:
    with open("/proc/self/status") as status:
        return int(next(line.split()[1] for line in status if line.startswith("VmHWM"))) << 10


def _code_of(arguments: list[str]) -> object:
    """What the command line ends with."""
    from ckptconv.cli import main

    try:
        main.main(arguments)
    except SystemExit as ended:
        return ended.code
    return None


@settled()  # else what is frozen would be counted for each file
def _answer() -> None:

    from ckptconv.cli import commands

    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    commands.app = commands.app.made()  # once, and not for each file
    for line in sys.stdin:
        canary, *arguments = json.loads(line)
        err = io.StringIO()
        gc.collect()  # without the garbage of those before
        gc.freeze()
        _forget_peak()
        work = functools.partial(_code_of, [*arguments, "--no-fsync"])
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
            called, code = (0, work()) if size_of(Path(arguments[1])) > LARGE else counted(work)
        written = os.listdir(os.path.dirname(arguments[-1]))
        ending = Ending(code, err.getvalue(), called, written, os.path.lexists(canary), _peak())
        print(json.dumps(asdict(ending)), flush=True)


if __name__ == "__main__":
    _answer()
