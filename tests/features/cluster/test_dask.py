"""A conversion whose files are made by the workers of a dask cluster."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import ckptconv_here, contents, model_and_shards
from processes import PROGRAM, Process, Server, prepared

from ckptconv.options.table import OPTIONS

SHARD = 100_000


model, expected = model_and_shards(SHARD)


@pytest.fixture(scope="module")
def dask() -> Server:
    """Starts what imports dask, which takes a second, at once."""
    pytest.importorskip("distributed")
    return prepared("distributed", "distributed.cli.dask_scheduler", "distributed.cli.dask_worker")


@pytest.fixture(scope="module")
def scheduler(dask: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[Process], Path]]:
    """The address of a scheduler, two workers, each a process of its own, and the file that lets these go on."""
    place = tmp_path_factory.mktemp("dask")
    go_on = place / "go-on"
    environment = {**os.environ, "TMPDIR": str(place), "GO_ON": str(go_on)}

    def started(kind: str, *arguments: object, log: Path) -> Process:
        with log.open("wb") as out:
            code = f"from distributed.cli.dask_{kind} import main; main()"
            return dask.python(code, *arguments, stdout=out, stderr=out, env=environment, cwd=place)

    log = place / "scheduler.log"
    main = started("scheduler", "--port", 0, "--host", "127.0.0.1", "--no-dashboard", log=log)
    address = None
    while not address and main.poll() is None:
        time.sleep(0.1)
        address = re.search(r"Scheduler at:\s+(tcp://\S+)", log.read_text())
    assert address, log.read_text()
    slow = Path(__file__).with_name("slow_worker.py")
    options = ["--nthreads", 1, "--no-nanny", "--no-dashboard", "--preload", slow]
    workers = [started("worker", address[1], *options, log=place / f"worker{n}.log") for n in range(2)]
    yield address[1], workers, go_on
    for process in [*workers, main]:
        process.kill()
        process.wait()


def test_a_dask_cluster_makes_the_same_although_a_worker_is_killed(
    model: Path,
    expected: dict[str, bytes],
    tmp_path: Path,
    dask: Server,
    scheduler: tuple[str, list[Process], Path],
) -> None:
    address, workers, go_on = scheduler
    out = tmp_path / "out"
    process = dask.python(PROGRAM, "pt2safetensors", model, out, "--max-shard-size", f"{SHARD}B", "--dask", address)
    # A worker dies while it makes a file: when it has said which, and before that is done.
    while process.poll() is None and not list(out.glob(f".ckptconv-*/.begun-{workers[0].pid}")):
        time.sleep(0.02)
    assert process.poll() is None, process.communicate()
    workers[0].send_signal(signal.SIGKILL)
    go_on.touch()
    shown, err = process.communicate()
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert "wrote" in shown
    assert contents(out) == expected


def test_a_scheduler_that_does_not_answer_is_a_paragraph(model: Path, dask: Server, tmp_path: Path) -> None:
    code = (
        "import sys; from ckptconv.cli import main; from ckptconv.features.cluster import executor; "
        "executor.PATIENCE = 1; main.main(sys.argv[1:])"
    )
    done = dask.run(code, "pt2safetensors", model, tmp_path / "out", "--dask", "tcp://127.0.0.1:9")
    assert done.returncode == 1
    assert "does not answer" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_without_dask_it_says_what_to_install(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    run = ckptconv_here("pt2safetensors", model, tmp_path / "out", "--dask", "tcp://127.0.0.1:9")
    assert run.code == 2
    assert "ckptconv[dask]" in run.err


@pytest.mark.skipif("part" not in OPTIONS, reason="there are no parts")
def test_a_part_is_not_spread(model: Path, tmp_path: Path) -> None:
    run = ckptconv_here("pt2safetensors", model, tmp_path / "out", "--part", "0/2", "--dask", "tcp://127.0.0.1:1")
    run.refused(2, "--part and --dask both distribute the work")
    assert not (tmp_path / "out").exists()
