"""Times ckptconv beside `cp` of its output and beside the other ways to convert, as whole processes.

    bench.py [--rounds 3] [--only zero|pt] [--cold] [--write]

The inputs are made once, under build/bench: a ZeRO-3 checkpoint of 400 M parameters from 4 ranks (4.8 GB), and a model
`.pt` of 2 GB. Every round runs every case once, in turn; the disk is idle when a case begins, and no two ever run at
the same time. Shown are medians, their ratio to `cp`, and peak memory.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "scripts" / "make_example.py"
REPORT = ROOT / "docs" / "benchmarks.md"
PYTHON = sys.executable

# Runs a command and prints what it took. A process starts with the peak memory of the one that it was forked from:
# so that launcher has to be small.
LAUNCHER = """
import json, os, sys, time
start = time.monotonic()
pid = os.spawnvp(os.P_NOWAIT, sys.argv[1], sys.argv[1:])
os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
seconds = time.monotonic() - start
try:
    with open(f"/proc/{pid}/io") as file:
        read = int(file.readline().split()[1])
except OSError:
    read = None
_, status, usage = os.wait4(pid, 0)
print(json.dumps([os.waitstatus_to_exitcode(status), seconds, usage.ru_maxrss * 1024, read]), file=sys.stderr)
"""

TORCH = """
import sys, torch
from safetensors.torch import save_file
state = torch.load(sys.argv[1], weights_only=True, mmap={mmap})
kept = {{tensor.untyped_storage().data_ptr(): name for name, tensor in reversed(state.items())}}
save_file({{name: state[name] for name in reversed(kept.values())}}, sys.argv[2], {{"format": "pt"}})
"""
IMPORTS = "import torch, safetensors.torch"
# Its own safetensors output fails on tied weights.
DEEPSPEED = """
import sys
from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as convert
convert(sys.argv[1], sys.argv[2], max_shard_size="100GB", safe_serialization=False)
"""


@dataclass
class Run:
    """What one run of a case took; `read` is None where it cannot be known (memory-mapped files)."""

    seconds: float
    peak: int
    read: int | None


@dataclass
class Case:
    """A way to make `output` out of `inputs`. The first of a task is what the others are compared with."""

    name: str
    command: list[str]
    inputs: list[Path]
    output: Path
    mapped: bool = False
    runs: list[Run] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return statistics.median(run.seconds for run in self.runs)


@dataclass
class Task:
    """Cases that do the same; what ckptconv makes, and how to see that it is right."""

    title: str
    result: Path
    cases: list[Case]
    check: Callable[[], object]


def measure(case: Case) -> Run:
    """Run `case` once. Raises RuntimeError, with what it printed, when it fails."""
    remove(case.output)
    os.sync()
    launcher = [PYTHON, "-I", "-S", "-c", LAUNCHER, *case.command]
    with tempfile.TemporaryFile("w+") as stdout:
        done = subprocess.run(launcher, stdout=stdout, stderr=subprocess.PIPE, text=True, check=True)
        stdout.seek(0)
        printed = stdout.read()
    *errors, report = done.stderr.splitlines()
    code, seconds, peak, read = json.loads(report)
    if code != 0:
        raise RuntimeError("\n".join([f"{case.name} failed with {code}:", printed, *errors]))
    if "--json" in case.command:
        own = json.loads(printed)
        peak, read = own["peak_rss_bytes"], own["bytes_read"]
    return Run(seconds, peak, None if case.mapped else read)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def prepare(paths: Iterable[Path], cold: bool) -> None:
    """Bring `paths` into the page cache, or have them leave it."""
    for path in paths:
        with path.open("rb", buffering=0) as file:
            if cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                continue
            while file.read(1 << 20):
                pass


def make(path: Path, options: Sequence[str]) -> None:
    """Make an example at `path`, unless it is there; an interrupted one is not."""
    if path.exists():
        return
    print(f"making {path} ...", file=sys.stderr)
    unfinished = path.with_name(f"unfinished-{path.name}")
    remove(unfinished)
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([PYTHON, str(EXAMPLES), *options, str(unfinished)], check=True)
    unfinished.rename(path)


def python(program: str, *arguments: Path) -> list[str]:
    return [PYTHON, "-c", program, *map(str, arguments)]


def copies(result: Path, copy: Path) -> list[Case]:
    synced = ["sh", "-c", 'cp "$0" "$1" && sync "$1"', str(result), str(copy)]
    return [
        Case("cp of the result", ["cp", str(result), str(copy)], [result], copy),
        Case("cp, then sync", synced, [result], copy),
    ]


def conversions(command: str, source: Path, inputs: list[Path], result: Path) -> list[Case]:
    usual = [PYTHON, "-m", "ckptconv", command, str(source), str(result), "--json", "--no-progress"]
    return [
        Case(f"ckptconv {command} --no-fsync", [*usual, "--no-fsync"], inputs, result),
        Case(f"ckptconv {command}", usual, inputs, result),
    ]


def zero_task(directory: Path) -> Task:
    source, result = directory / "zero3", directory / "zero3.safetensors"
    make(source, ["--params", "400e6", "--ranks", "4"])
    inputs = sorted(source.glob("*/*.pt"))
    cases = [*copies(result, directory / "copy"), *conversions("zero-to-fp32", source, inputs, result)]
    if importlib.util.find_spec("deepspeed"):
        output = directory / "deepspeed"
        cases.append(Case("DeepSpeed's zero_to_fp32, to .bin", python(DEEPSPEED, source, output), inputs, output))
    check = [PYTHON, str(EXAMPLES), "--check", str(result), str(source)]
    return Task(
        f"ZeRO-3, 4 ranks, 400 M parameters, {size(inputs)} on disk",
        result,
        cases,
        lambda: subprocess.run(check, check=True, stdout=sys.stderr),
    )


def pt_task(directory: Path) -> Task:
    source, result = directory / "model.pt", directory / "model.safetensors"
    make(source, ["--size", "2e9", "--pt"])
    theirs = directory / "torch.safetensors"
    load, load_mapped = (python(TORCH.format(mmap=mapped), source, theirs) for mapped in (False, True))
    cases = [
        *copies(result, directory / "copy"),
        *conversions("pt2safetensors", source, [source], result),
        Case("import torch, safetensors; nothing else", python(IMPORTS), [], directory / "none"),
        Case("torch.load + save_file", load, [source], theirs),
        Case("torch.load(mmap=True) + save_file", load_mapped, [source], theirs, mapped=True),
    ]
    return Task(f".pt of {size([source])}", result, cases, lambda: check_same(result, theirs))


def check_same(ours: Path, theirs: Path) -> None:
    """Raise RuntimeError unless two safetensors files hold the same, byte for byte, whatever their metadata."""
    headers = []
    with ours.open("rb") as one, theirs.open("rb") as other:
        for file in (one, other):
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            header.pop("__metadata__", None)
            headers.append(header)
        same = headers[0] == headers[1]
        while same and (part := one.read(1 << 20)):
            same = part == other.read(1 << 20)
        if not same or other.read(1):
            raise RuntimeError(f"{ours} and {theirs} differ")


def size(paths: Iterable[Path]) -> str:
    return f"{sum(path.stat().st_size for path in paths) / 1e9:.1f} GB"


def run(task: Task, rounds: int, cold: bool) -> None:
    """Run every case of `task` in turn, `rounds` times.

    Before that, unmeasured, a conversion makes what `cp` copies, and a copy makes the machine find its memory.
    """
    converter = next(case for case in reversed(task.cases) if case.output == task.result)
    for case in (converter, task.cases[0]):
        measure(case)
    for number in range(rounds):
        for case in task.cases:
            prepare(case.inputs, cold)
            case.runs.append(measure(case))
            print(f"round {number + 1}: {case.name}: {case.runs[-1].seconds:.2f} s", file=sys.stderr)
        if number == 0:
            task.check()
        for output in {case.output for case in task.cases} - {task.result}:
            remove(output)


def table(task: Task) -> list[str]:
    yardstick = task.cases[0].seconds
    lines = [
        f"## {task.title}; result {size([task.result])}",
        "",
        "| | seconds (median) | each round | ÷ cp | peak RSS, MiB | read, GB |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for case in task.cases:
        each = " ".join(f"{run.seconds:.1f}" for run in case.runs)
        peak = max(run.peak for run in case.runs) / (1 << 20)
        reads = [run.read for run in case.runs if run.read is not None]
        read = f"{max(reads) / 1e9:.2f}" if reads else "–"
        lines.append(
            f"| {case.name} | {case.seconds:.2f} | {each} | {case.seconds / yardstick:.2f} | {peak:.0f} | {read} |"
        )
    return [*lines, ""]


def heading(rounds: int, cold: bool) -> list[str]:
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "safetensors", "ckptconv"))
    return [
        "# Benchmarks",
        "",
        f"By `make bench`: whole processes, {rounds} rounds in turn, {'cold' if cold else 'warm'} page cache,",
        f"{os.cpu_count()} CPUs ({platform.machine()}), Python {platform.python_version()}, {libraries}.",
        "Peak RSS of ckptconv is its own VmHWM; of the others ru_maxrss, from a launcher of about 9 MiB.",
        "Bytes read are those of read calls, libraries included; of memory-mapped files they cannot be known.",
        "",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--only", choices=("zero", "pt"), help="one of the two tasks")
    parser.add_argument("--cold", action="store_true", help="drop the input from the page cache before every case")
    parser.add_argument("--write", action="store_true", help=f"write the tables to {REPORT.relative_to(ROOT)}")
    parser.add_argument(
        "--directory", type=Path, default=ROOT / "build" / "bench", help="where inputs are made and kept"
    )
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds has to be at least 1")
    lines = heading(options.rounds, options.cold)
    for name, make_task in (("zero", zero_task), ("pt", pt_task)):
        if options.only in (None, name):
            task = make_task(options.directory.resolve())
            run(task, options.rounds, options.cold)
            lines += table(task)
    print("\n".join(lines))
    if options.write:
        REPORT.parent.mkdir(exist_ok=True)
        REPORT.write_text("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
