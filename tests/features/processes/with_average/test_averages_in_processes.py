"""What is computed is computed in processes: the same files, reports and errors as in threads, whatever ends them."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ckptconv, ckptconv_forked, ckptconv_here
from processes import COUNTED, Process, prepared, shown_on
from safetensors.torch import load_file, save_file

from ckptconv.options.table import OPTIONS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
MIB = 1 << 20
# Whoever has written something says who it is, and goes on when its stdin ends.
HELD = """
import os
from ckptconv.__main__ import main
from ckptconv.storage import writing
write_at = writing.LocalWriter.write_at
parent = os.getpid()
def held(self, offset, data):
    write_at(self, offset, data)
    if os.getpid() != parent:
        os.write(1, b"%d\\n" % os.getpid())
        os.read(0, 1)
writing.LocalWriter.write_at = held
main()
"""


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two steps of 6 MiB, with a number that float16 does not have."""
    directory = tmp_path_factory.mktemp("steps")
    for n in range(2):
        torch.manual_seed(n)
        state = {f"w{i}": torch.randn(512, 1024) for i in range(3)}
        state["w1"][7, 7] = 1e6
        save_file(state, directory / f"{n}.safetensors")
    return sorted(directory.iterdir())


def started(code: str, *arguments: object, **options: Any) -> Process:
    return prepared().python(code, *arguments, stdin=subprocess.PIPE, **options)


def forks_of(*arguments: object, before: str = "pass") -> int:
    """How many processes a run has that succeeds."""
    process = started(COUNTED.format(before=before), *arguments, "-q")
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return int(err)


def is_average(output: Path, steps: list[Path]) -> bool:
    one, other = map(load_file, steps)
    made = load_file(output)
    return made.keys() == one.keys() and all(
        torch.equal(made[name], ((one[name].double() + other[name].double()) / 2).float()) for name in one
    )


# ------------------------------------------------------------------------------------------------------------- files


def test_as_many_processes_as_jobs_compute_what_threads_do(steps: list[Path], tmp_path: Path) -> None:
    assert forks_of("average", *steps, tmp_path / "three.safetensors", "--jobs", 3) == 3
    assert forks_of("average", *steps, tmp_path / "one.safetensors", "--jobs", 1) == 0
    assert ckptconv_here("average", *steps, tmp_path / "threads.safetensors", "--jobs", 3).code == 0
    assert is_average(tmp_path / "three.safetensors", steps)
    made = {path.read_bytes() for path in tmp_path.iterdir()}
    assert len(made) == 1


def test_each_shard_is_made_by_all_processes_one_after_another(steps: list[Path], tmp_path: Path) -> None:
    options = ["--max-shard-size", "2100KB", "--jobs", 2]
    assert forks_of("average", *steps, tmp_path / "forked", *options) == 2 * 3
    assert ckptconv_here("average", *steps, tmp_path / "threads", *options).code == 0
    names = sorted(os.listdir(tmp_path / "threads"))
    assert sorted(os.listdir(tmp_path / "forked")) == names
    for name in names:
        assert (tmp_path / "forked" / name).read_bytes() == (tmp_path / "threads" / name).read_bytes()


def test_what_is_only_copied_or_cast_needs_none(steps: list[Path], tmp_path: Path) -> None:
    assert forks_of("convert", steps[0], tmp_path / "out.safetensors", "--dtype", "bfloat16", "--jobs", 2) == 0


def test_a_bar_on_a_terminal_has_no_thread_that_would_forbid_it(steps: list[Path], tmp_path: Path) -> None:
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    streams = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    arguments = ("average", *steps, tmp_path / "out.safetensors", "--jobs", 2)
    process = prepared().python(COUNTED.format(before="pass"), *arguments, **streams)
    os.close(terminal)
    shown = shown_on(master)
    assert "%|" in shown
    assert shown.split()[-1] == "2"
    assert process.wait() == 0


def test_the_report_and_the_checksums_are_those_of_threads(steps: list[Path], tmp_path: Path) -> None:
    reports, manifests = [], []
    for place, run in (("forked", ckptconv_forked), ("threads", ckptconv_here)):
        (tmp_path / place).mkdir()
        output, manifest = tmp_path / place / "out.safetensors", tmp_path / place / "manifest.json"
        options = ["--dtype", "float16", "--jobs", 2, "--manifest", manifest, "--json"]
        report = run("average", *steps, output, *options).json
        assert report["warnings"]
        assert report["beside"] == {str(manifest): "--manifest"}
        for name in ("seconds", "peak_rss_bytes", "outputs", "beside"):
            report.pop(name)
        reports.append(report)
        manifests.append(json.loads(manifest.read_text()))
    assert reports[0] == reports[1]
    assert manifests[0] == manifests[1]


def test_the_memory_that_is_told_is_that_of_all(steps: list[Path], tmp_path: Path) -> None:
    peaks = [
        ckptconv("average", *steps, tmp_path / f"{jobs}.safetensors", "--jobs", jobs, "--json").json["peak_rss_bytes"]
        for jobs in (2, 8)
    ]
    assert peaks[0] + 6 * MIB < peaks[1] < 2 * 64 * MIB
    assert peaks[0] < 64 * MIB


# ---------------------------------------------------------------------------------------------- where it may not fork


@pytest.mark.parametrize("allowed", [0, 1])
def test_with_fewer_processes_than_it_asks_for_it_takes_those_or_threads(
    allowed: int, steps: list[Path], tmp_path: Path
) -> None:
    full = f"if len(forks) == {allowed}: raise BlockingIOError(11, 'Resource temporarily unavailable')"
    assert forks_of("average", *steps, tmp_path / "out.safetensors", "--jobs", 3, before=full) == allowed
    assert is_average(tmp_path / "out.safetensors", steps)


def test_a_program_that_uses_the_library_is_never_forked(steps: list[Path], tmp_path: Path) -> None:
    code = "import os, sys, ckptconv\nos.fork = None\nckptconv.average(sys.argv[1:3], sys.argv[3], jobs=2)"
    process = started(code, *steps, tmp_path / "out.safetensors")
    assert process.communicate(timeout=600)[1] == ""
    assert is_average(tmp_path / "out.safetensors", steps)


def test_digests_follow_what_is_written_in_the_process_that_writes(steps: list[Path], tmp_path: Path) -> None:
    options = ["--digest", "sha256", "--manifest", tmp_path / "manifest.json", "--jobs", 2]
    assert forks_of("average", *steps, tmp_path / "out.safetensors", *options) == 0


def test_nothing_is_forked_while_another_thread_may_hold_a_lock(steps: list[Path], tmp_path: Path) -> None:
    thread = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    process = started(thread + COUNTED.format(before="pass"), "average", *steps, tmp_path / "out.safetensors", "-q")
    assert process.communicate(timeout=600)[1] == "0\n"
    assert is_average(tmp_path / "out.safetensors", steps)


# ------------------------------------------------------------------------------------------------------------- errors


def quantized(directory: Path, scale: float) -> Path:
    directory.mkdir()
    codes = torch.randint(0, 126, (1024, 2048), dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.ones(8, 16)
    scales[7, 15] = scale
    save_file({"a.weight": codes, "a.weight_scale_inv": scales}, directory / "model.safetensors")
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.skipif("dequantize" not in OPTIONS, reason="there are no quantized weights")
def test_an_error_is_that_of_a_thread(tmp_path: Path) -> None:
    source = quantized(tmp_path / "source", float("nan"))
    command = ["convert", source, tmp_path / "out.safetensors", "--dequantize", "--jobs", 2]
    forked, threads = ckptconv_forked(*command), ckptconv_here(*command)
    assert forked.code == threads.code == 4
    assert "is NaN or infinite" in forked.err
    assert forked.err == threads.err
    assert sorted(os.listdir(tmp_path)) == ["source"]


def test_an_error_of_the_system_keeps_its_cause(steps: list[Path], tmp_path: Path) -> None:
    """A full disk: the shard that is finished goes too, which only the number of the system's error tells."""
    full = """
import errno, os, sys
pwrite = os.pwrite
def full(fd, data, offset):
    if "00002-of" in os.readlink(f"/proc/self/fd/{fd}"):
        raise OSError(errno.ENOSPC, "No space left on device")
    return pwrite(fd, data, offset)
os.pwrite = full
from ckptconv.__main__ import main
main()
"""
    process = started(full, "average", *steps, tmp_path / "out", "--max-shard-size", "2100KB", "--jobs", "2")
    _, err = process.communicate(timeout=600)
    assert process.returncode == 1
    assert "no space left on device" in err
    assert "Free some space" in err
    assert len(err.splitlines()) == 1
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_a_mistake_tells_where_it_was_made(steps: list[Path], tmp_path: Path) -> None:
    wrong = """
from ckptconv.__main__ import main
from ckptconv.engine import worker
class Odd(Exception):
    def __init__(self, one, two): super().__init__(one)
def wrong(self, task): raise Odd("mended by nobody", 2)
worker.Worker.run = wrong
main()
"""
    environment = {**os.environ, "CKPTCONV_DEBUG": "1"}
    process = started(wrong, "average", *steps, tmp_path / "out.safetensors", "--jobs", "2", env=environment)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 1
    assert "This is a bug in ckptconv itself: " in err
    assert "Odd: mended by nobody" in err
    assert "in wrong" in err


# ---------------------------------------------------------------------------------------------- signals, and the worst


def held(steps: list[Path], output: Path) -> tuple[Process, list[int]]:
    """A run of two processes that have both written something, and these."""
    process = started(HELD, "average", *steps, output, "--jobs", 2)
    assert process.stdout is not None
    return process, [int(process.stdout.readline()) for _ in range(2)]


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def wait_until_gone(pids: list[int]) -> None:
    while not all(map(is_gone, pids)):
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_with_nothing_left(number: signal.Signals, steps: list[Path], tmp_path: Path) -> None:
    process, pids = held(steps, tmp_path / "out.safetensors")
    for pid in (*pids, process.pid):
        os.kill(pid, number)  # as a terminal does
    _, err = process.communicate(timeout=600)  # by which they go on
    assert process.returncode == 128 + number
    assert err == f"ckptconv: Stopped by {number.name}. No output was published.\n"
    assert all(map(is_gone, pids))
    assert os.listdir(tmp_path) == []


def test_a_process_that_is_killed_is_one_sentence(steps: list[Path], tmp_path: Path) -> None:
    process, pids = held(steps, tmp_path / "out.safetensors")
    os.kill(pids[0], signal.SIGKILL)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 1
    assert err.startswith("ckptconv: A worker process was killed")
    assert len(err.splitlines()) == 1
    assert all(map(is_gone, pids))
    assert not (tmp_path / "out.safetensors").exists()


def test_after_a_kill_the_rest_end_and_until_then_nobody_else_writes(steps: list[Path], tmp_path: Path) -> None:
    output = tmp_path / "out.safetensors"
    process, pids = held(steps, output)
    process.kill()
    process.wait()
    assert not any(map(is_gone, pids))
    busy = ckptconv_forked("average", *steps, output)
    assert busy.code == 1
    assert "is being written by another process" in busy.err
    assert process.stdin is not None
    process.stdin.close()
    wait_until_gone(pids)
    assert ckptconv_forked("average", *steps, output).code == 0
    assert is_average(output, steps)
    assert os.listdir(tmp_path) == ["out.safetensors"]


def test_nobody_waits_for_a_task_of_others_after_an_error() -> None:
    """Whoever has the second task never ends with it."""
    code = """
import os
from ckptconv.features.processes.forking import in_processes
class Worker:
    def run(self, task):
        return os.read(os.pipe()[0], 1) if task else 7
    def done(self):
        return None
def heard(size):
    raise RuntimeError(f"{size} bytes")
try:
    in_processes(lambda: iter(range(2)), [Worker] * 2, heard)
except RuntimeError as error:
    print(error)
"""
    process = started(code)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out.strip()) == (0, "7 bytes"), err
