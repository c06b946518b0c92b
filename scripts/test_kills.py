"""Kills real savers while they save: the last good step that `steps` names is one that the trainer's own loader takes.

    test_kills.py [--kills 30] [--directory build/kills] [NAME …]

Each module in scripts/kills is for one library, and is left out where that is not installed. A saver trains in
processes of its own, saves two steps, and is killed by SIGKILL at one of so many moments from the beginning of the
third save to a little after its end. Then `steps` is asked for the last good step, and the trainer's loader takes it,
or refuses it. The exit code is 1 if it refuses any, or if none was named.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from libraries import emptied, parser_of, present

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
# Whole saves that are timed first; how much later than their end the last kill comes; seconds that a child may take.
TIMED, LATER, PATIENCE = 3, 1.15, 300.0
FIRST, SECOND, THIRD = 10, 20, 30


class Saver(NamedTuple):
    """A way to save. `train(run, rank, begun, ended)` saves the steps 10, 20 and 30 to the directory `run`, and calls
    `begun` just before the last one, and `ended` after it. `load(run, step, rank)` has the trainer's loader load the
    directory or file `step`; it raises whatever that raises. `ranks` processes do each together."""

    train: Callable[[Path, int, Callable[[], None], Callable[[], None]], None]
    load: Callable[[Path, Path, int], None]
    ranks: int = 1


def forked(work: Callable[[int], None], ranks: int, log: Path) -> list[int]:
    """Start a process for each rank, which are a group, and return their numbers. Their output goes to `log`."""
    group, pids = 0, []
    port = str(free_port())
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.setpgid(0, group)
                output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(output, 1)
                os.dup2(output, 2)
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                work(rank)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        group = group or pid
        os.setpgid(pid, group)
        pids.append(pid)
    return pids


def free_port() -> int:
    import socket

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
    return port


def ended(pids: list[int]) -> bool:
    """Wait for processes. Return whether all succeeded."""
    until = time.monotonic() + PATIENCE
    left, good = set(pids), True
    while left:
        for pid in [*left]:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                left.discard(pid)
                good = good and os.waitstatus_to_exitcode(status) == 0
        if left and (time.monotonic() > until or not good):
            os.killpg(pids[0], signal.SIGKILL)
            good = False
            until = time.monotonic() + PATIENCE
        time.sleep(0.005)
    return good


def trained(saver: Saver, run: Path, kill_after: float | None) -> float | None:
    """Train, and kill it so many seconds after the third save has begun; None: never. Return how long the save took;
    None if it was killed before its end."""
    heard, tell = os.pipe()

    def train(rank: int) -> None:
        saver.train(run, rank, lambda: told(b"b"), lambda: told(b"e"))

    def told(word: bytes) -> None:
        if os.environ["RANK"] == "0":
            os.write(tell, word)

    pids = forked(train, saver.ranks, run.with_suffix(".log"))
    os.close(tell)
    with os.fdopen(heard, "rb", buffering=0) as hearing:
        if hearing.read(1) != b"b":
            raise SystemExit(f"{run}: it could not be saved: {run.with_suffix('.log').read_text()[-3000:]}")
        begun = time.monotonic()
        took: float | None = None
        if kill_after is None:
            took = time.monotonic() - begun if hearing.read(1) == b"e" else None
            if took is None or not ended(pids):
                raise SystemExit(f"{run}: it could not be saved: {run.with_suffix('.log').read_text()[-3000:]}")
            return took
        time.sleep(max(begun + kill_after - time.monotonic(), 0))
        os.killpg(pids[0], signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)
        return time.monotonic() - begun if hearing.read(1) == b"e" else None


def taken(saver: Saver, run: Path, step: Path) -> bool:
    """Whether the trainer's own loader takes a step. It works on a copy, as it may write."""
    copy = run.with_suffix(".copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run, copy, symlinks=True)
    inner = copy / step.relative_to(run)
    good = ended(forked(lambda rank: saver.load(copy, inner, rank), saver.ranks, run.with_suffix(".loaded.log")))
    shutil.rmtree(copy)
    return good


def killed(name: str, saver: Saver, place: Path, kills: int) -> Iterator[str]:
    """Kill a saver so many times. Yield what is wrong, a sentence each; print what was seen."""
    from ckptconv.features.steps.survey import survey

    times = [trained(saver, place / f"whole-{number}", None) or 0.0 for number in range(TIMED)]
    if not taken(saver, place / "whole-0", Path(str(survey(str(place / "whole-0")).last_good))):
        yield f"the loader refuses a step that nothing has disturbed: {place / 'whole-0'}"
        return
    took = statistics.median(times)
    before_end = newest = also = 0
    for number in range(kills):
        run = place / f"killed-{number}"
        before_end += trained(saver, run, took * LATER * number / max(kills - 1, 1)) is None
        found = survey(str(run))
        if found.last_good is None:
            yield f"no step is named: {run}"
            continue
        last = Path(found.last_good)
        if not taken(saver, run, last):
            yield f"{last} is named, and the loader refuses it"
        steps = {step.number: Path(step.path) for step in found.steps}
        newest += last == steps.get(THIRD)
        also += last != steps.get(THIRD) and THIRD in steps and taken(saver, run, steps[THIRD])
        shutil.rmtree(run)
    print(
        f"{name}: {kills} kills, {before_end} of them before the end of the save, which took {took * 1000:.0f} ms; the "
        f"third step was named {newest} times, and {also} times an older one where the loader took the third as well",
        flush=True,
    )


def main() -> int:
    """Kill the savers that are asked for, all by default."""
    parser = parser_of(__doc__, "kills")
    parser.add_argument("--kills", type=int, default=30)
    given = parser.parse_args()
    wrong = 0
    for _, savers in present("kills", given.names):
        savers.prepare()
        for name, saver in savers.SAVERS.items():
            place = emptied(given.directory.resolve() / name)
            for why in killed(name, saver, place, given.kills):
                print(f"{name}: {why}", flush=True)
                wrong += 1
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
