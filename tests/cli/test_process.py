"""What a conversion is as a process: its memory, its signals, what it reads and imports, and what it says where."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import pty
import random
import re
import signal
import stat
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import VERIFY, looking
from checkpoints import ZERO, ckptconv, ckptconv_forked, ckptconv_here, done
from effort import TIMES
from processes import PROGRAM, Process, failing, prepared, shown_on
from safetensors.torch import load_file, save_file

from ckptconv.cli import progress as report
from ckptconv.formats.registered import COPYING, LONE
from ckptconv.options import registered

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import make_example

MIB = 1 << 20
RUN = "import sys; from ckptconv.cli.main import main; main(sys.argv[1:])"
# Sets a limit of its own before it begins.
LIMITED = "import resource; resource.setrlimit(resource.{}, ({limit}, {limit}))\n" + RUN
# Says at its end how many KiB of memory it has held, as the system sees it.
MEASURED = """
import atexit, sys
def tell():
    with open("/proc/self/status") as status:
        print(next(line for line in status if line.startswith("VmHWM")).split()[1], file=sys.stderr)
atexit.register(tell)
"""
# Shows progress whenever there is some.
EAGER = """
import os, sys
os.environ["TQDM_MININTERVAL"] = "0"
from ckptconv.cli import main, progress
progress.INTERVAL = 0.0
main.main(sys.argv[1:])
"""
# Says "!" on stdout when something is written, and goes on when its stdin ends.
HELD = """
import os, sys, threading
from ckptconv.cli import main, progress
from ckptconv.storage import writing
progress.INTERVAL = 0.0
begun = threading.Lock()
write_at = writing.LocalWriter.write_at
def held(self, offset, data):
    write_at(self, offset, data)
    if begun.acquire(blocking=False):
        os.write(1, b"!")
    os.read(0, 1)
writing.LocalWriter.write_at = held
main.main(sys.argv[1:])
"""
# The same, but goes on when a signal has come.
UNTIL_A_SIGNAL = """
import time
from ckptconv.cli import signals
came, stop = [], signals.stop
def stopped(number, frame):
    came.append(number)
    stop(number, frame)
signals.stop, signals.PATIENCE = stopped, 600.0
def wait():
    while not came:
        time.sleep(0.02)
""" + HELD.replace("os.read(0, 1)", "wait()")


EXAMPLE = make_example.Example(params=20_000_000, ranks=4, stage=3, sparse=True)


@pytest.fixture(scope="module")
def zero3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ZeRO-3 checkpoint of 240 MB, of which the optimizer's 160 take no room on the disk."""
    ZERO.needed()
    directory = tmp_path_factory.mktemp("zero3")
    make_example.write(EXAMPLE, directory)
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 100 MB."""
    path = tmp_path_factory.mktemp("model") / "model.pt"
    make_example.write_model(path, 100_000_000)
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 30 MB, in 40 windows."""
    path = tmp_path_factory.mktemp("small") / "model.pt"
    torch.save({f"layer{n}.weight": torch.full((750, 1000), float(n)) for n in range(10)}, path)
    return path


def weights(output: Path) -> dict[str, torch.Tensor]:
    """The tensors of an output of one file, in a directory or not."""
    return load_file(output / "model.safetensors" if output.is_dir() else output)


def is_small(output: Path) -> bool:
    tensors = weights(output)
    return len(tensors) == 10 and all(
        tensor.shape == (750, 1000) and bool((tensor == float(name[5])).all()) for name, tensor in tensors.items()
    )


def interpreter(*arguments: object) -> subprocess.Popen[str]:
    """A new interpreter, for what only that tells: its memory, what it has imported, how it begins."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def python(code: str, *arguments: object, **options: Any) -> Process:
    """A process that runs `code`, and starts at once."""
    return prepared().python(code, *arguments, **options)


def ended(process: subprocess.Popen[str] | Process, timeout: float = 600) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=timeout)
    assert "Traceback" not in (err or ""), err
    assert "mistake in ckptconv" not in (err or ""), err
    return process.wait(), out, err


def begun(process: Process) -> Process:
    """`process`, as soon as it says "!"."""
    assert process.stdout is not None
    assert process.stdout.read(1) == "!"
    return process


# ------------------------------------------------------------------------------------------------------------ memory


ZERO_TO_ONE_FILE = ("zero-to-fp32", "zero3", "out.safetensors")
ZERO_TO_SHARDS = ("zero-to-fp32", "zero3", "out", "--max-shard-size", "20MB")
MODEL_TO_ONE_FILE = ("pt2safetensors", "model", "out.safetensors")
MODEL_TO_SHARDS = ("pt2safetensors", "model", "out", "--max-shard-size", "50MB")
MODEL_CAST = ("pt2safetensors", "model", "out.safetensors", "--dtype", "float16")
LARGE = [ZERO_TO_ONE_FILE, ZERO_TO_SHARDS, MODEL_TO_ONE_FILE, MODEL_TO_SHARDS, MODEL_CAST]


def filled_in(request: pytest.FixtureRequest, tmp_path: Path, task: Sequence[str]) -> list[str]:
    """`task` with the input's fixture made, and the output put into `tmp_path`."""
    command, source, output, *options = task
    return [command, str(request.getfixturevalue(source)), str(tmp_path / output), *options]


@pytest.mark.parametrize("task", LARGE, ids=" ".join)
def test_memory_stays_below_64_mib_whatever_the_size_and_128_are_enough_for_all_it_asks_for(
    task: Sequence[str], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    limited = MEASURED + LIMITED.format("RLIMIT_DATA", limit=128 * MIB)
    code, out, err = ended(interpreter("-c", limited, *filled_in(request, tmp_path, task), "--json", "--no-fsync"))
    assert code == 0, err
    claimed, seen = json.loads(out)["peak_rss_bytes"], int(err.splitlines()[-1]) << 10
    assert 20 * MIB < claimed < 64 * MIB
    assert 20 * MIB < seen < 64 * MIB
    assert seen <= claimed + 2 * MIB
    output = Path(json.loads(out)["outputs"][0]["path"])
    if task[1] == "zero3":
        assert make_example.differences(EXAMPLE, tmp_path / task[2]) == []
    elif task is MODEL_TO_ONE_FILE:
        expected = torch.load(request.getfixturevalue("model"), mmap=True)
        for name, tensor in load_file(output).items():
            assert torch.equal(tensor, expected[name])


def test_memory_is_bounded_for_any_number_of_threads(small: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.safetensors"
    for memory, bound in (("1MiB", 64), ("64MiB", 128)):
        report = ckptconv("pt2safetensors", small, output, "--jobs", 32, "--memory", memory, "--json").json
        assert report["peak_rss_bytes"] < bound * MIB, memory
        assert is_small(output)


def test_too_little_memory_ends_in_a_paragraph(small: Path, tmp_path: Path) -> None:
    """Everything is imported and has run once; then there is no room for the buffers."""
    code = """
import resource, sys
from ckptconv.cli.main import main
try:
    main(["pt2safetensors", sys.argv[2], "-q", "--dry-run"])
except SystemExit as ended:
    assert ended.code == 0
with open("/proc/self/statm") as file:
    used = int(file.read().split()[5]) * 4096
resource.setrlimit(resource.RLIMIT_DATA, (used + (512 << 10), used + (512 << 10)))
main(sys.argv[1:])
"""
    options = [tmp_path / "out.safetensors", "--memory", "4GiB", "--jobs", 1]
    found, _, err = ended(interpreter("-c", code, "pt2safetensors", small, *options))
    assert found == 1
    assert err.startswith("ckptconv: Out of memory.")
    assert len(err.splitlines()) == 1
    assert os.listdir(tmp_path) == []


def test_without_room_for_threads_it_works_in_one(small: Path, tmp_path: Path) -> None:
    code = "import threading\ndef start(self): raise RuntimeError\nthreading.Thread.start = start\n" + RUN
    found, _, err = ended(python(code, "pt2safetensors", small, tmp_path / "out.safetensors", "--jobs", 4))
    assert found == 0, err
    assert is_small(tmp_path / "out.safetensors")


# ----------------------------------------------------------------------------------------------- what is not touched

# Runs several commands, and says after each what has been imported so far.
IMPORTED = """
import json, sys
from ckptconv.cli.main import main
for command in json.loads(sys.argv[1]):
    try:
        main(command)
    except SystemExit as ended:
        assert ended.code == 0, command
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


# What a plain conversion has no use for.
HEAVY = {"torch", "numpy", "safetensors", "fsspec", "rich", "tqdm", "asyncio", "multiprocessing", "pickle"}
HEAVY |= {"concurrent.futures", "logging", "ssl", "pydantic", "importlib.metadata"}


def imported(*commands: Sequence[object]) -> list[set[str]]:
    """What a new interpreter has imported after each of the commands."""
    words = json.dumps([list(map(str, command)) for command in commands])
    code, _, err = ended(interpreter("-c", IMPORTED, words))
    assert code == 0, err
    return [set(json.loads(line)) for line in err.splitlines() if line.startswith("[")]


def test_plain_paths_import_neither_torch_nor_numpy_nor_anything_heavy(
    zero3: Path, small: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.safetensors"
    commands: list[list[object]] = [
        ["--help"],
        ["--version"],
        ["pt2safetensors", "--help"],
        *([command, path] for command in looking() for path in (small, zero3)),
        ["pt2safetensors", small, output],
        ["pt2safetensors", small, output, "--json", "--strip-prefix", "layer", "--jobs", 2, "--tied", "duplicate"],
        ["convert", zero3, tmp_path / "shards", "--max-shard-size", "50MB"],
    ]
    found = imported(*commands)
    for command, modules in zip(commands, found, strict=True):
        assert not modules & HEAVY, command
    assert not {"ckptconv.conversion", "ckptconv.formats"} & found[0]


def test_a_directory_imports_its_format_and_a_cast_numpy_and_not_torch(
    zero3: Path, small: Path, tmp_path: Path
) -> None:
    of_directory, of_cast = imported(
        ["convert", zero3, tmp_path / "zero.safetensors"],
        ["pt2safetensors", small, tmp_path / "out.safetensors", "--dtype", "bfloat16"],
    )
    assert any(module.endswith(".deepspeed.read") for module in of_directory)
    assert "numpy" in of_cast
    assert not {"ckptconv.features.dcp.read", "torch"} & of_cast


OTHERS = "tensors.kernels tensors.computing"
# What takes an opened checkpoint longer to import than to read its header, and what only pickles need.
SLOW = {"dataclasses", "inspect", "signal", "queue", "hashlib", "difflib", "tempfile", "subprocess", "random", "numpy"}
OF_PICKLES = {"ckptconv.pickles.machine", "ckptconv.pickles.vocabulary"}
# Files are shown to what tells that they are one of many, and to what copies the small files beside them.
_ASKED = [*(kind.module for kind in LONE), *COPYING.values()]
_PLACES = [module.removeprefix("ckptconv.") for module in _ASKED]
OF_ONE = {"features", *_PLACES, *(place.rpartition(".")[0] for place in _PLACES)}
ABOVE = {"engine", "publish", "conversion", "cli", "result"}
OPENED = (
    "import json, sys; from ckptconv.formats.detect import open_source; open_source(sys.argv[1]).check_weights(); "
    "print(json.dumps([*sys.modules]), file=sys.stderr)"
)


def test_a_file_imports_the_rooms_on_its_way_and_no_format_but_its_own(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    for name, output, reader, slow in (
        ("a.pt", "b.safetensors", "formats.torch.file", SLOW),
        ("a.safetensors", "c.safetensors", "formats.safetensors", SLOW | OF_PICKLES),
    ):
        code, _, err = ended(interpreter("-c", OPENED, tmp_path / name))
        assert code == 0, err
        of_opening = set(json.loads(err))
        (of_conversion,) = imported(["convert", tmp_path / name, tmp_path / output])
        for found, needless in ((of_opening, ABOVE), (of_conversion, set())):
            modules = {module.removeprefix("ckptconv.") for module in found if module.startswith("ckptconv.")}
            assert not {module.partition(".")[0] for module in modules} & needless, name
            assert {module for module in modules if module.startswith("features")} <= OF_ONE, name
            assert not {module for module in modules if module.startswith(tuple(OTHERS.split()))}, name
            assert {"formats.torch.file", "formats.safetensors"} & modules == {reader}
        assert not of_opening & slow, name


@pytest.mark.parametrize(
    ("option", "words"),
    [("attest", ["--digest=sha256", "--attest=s.json"]), ("output_dir", ["--output_dir", "out"])],
)
def test_of_features_only_the_options_are_imported_that_are_given(
    option: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if registered.missing(option):
        pytest.skip(f"there is no {option}")
    monkeypatch.chdir(tmp_path)
    torch.save({"a": torch.ones(3)}, "a.pt")
    (modules,) = imported(["convert", "a.pt", *words])
    every = {f"ckptconv.features.{feature}.options": names.split() for feature, names in registered.FEATURES.items()}
    assert [names for module, names in every.items() if module in modules] == [
        every[module] for module in every if option in every[module]
    ]


def test_a_part_of_a_large_file_costs_what_it_weighs(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.safetensors"
    report = ckptconv_here("pt2safetensors", model, output, "--include", "*.h.3.*", "--json").json
    size = sum(tensor.nbytes for tensor in load_file(output).values())
    assert size > 5_000_000
    assert size < report["bytes_read"] < size + 200_000


# ------------------------------------------------------------------------------------------------------ interruption


def test_a_signal_ends_it_with_nothing_left(small: Path, tmp_path: Path) -> None:
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        for jobs, output in ((1, "out.safetensors"), (4, "out")):
            process = begun(python(UNTIL_A_SIGNAL, "pt2safetensors", small, tmp_path / output, "--jobs", jobs))
            process.send_signal(number)
            found, out, err = ended(process)
            assert (found, out) == (code, ""), output
            assert err.splitlines()[-1] == f"ckptconv: Stopped by {number.name}. No output was published."
            assert os.listdir(tmp_path) == [], output


def test_a_signal_leaves_the_old_output_as_it_was(small: Path, tmp_path: Path) -> None:
    torch.save({"old": torch.ones(3)}, tmp_path / "old.pt")
    for output in (tmp_path / "out.safetensors", tmp_path / "out"):
        done(ckptconv_here("pt2safetensors", tmp_path / "old.pt", output))
        before = sorted(tmp_path.rglob("*"))
        process = begun(python(UNTIL_A_SIGNAL, "pt2safetensors", small, output, "--max-shard-size", "50MB"))
        process.send_signal(signal.SIGTERM)
        assert ended(process)[0] == 143
        assert sorted(tmp_path.rglob("*")) == before
        assert list(weights(output)) == ["old"]


def test_with_json_an_interruption_is_one_object_too(small: Path, tmp_path: Path) -> None:
    process = begun(python(UNTIL_A_SIGNAL, "pt2safetensors", small, tmp_path / "out", "--json"))
    process.send_signal(signal.SIGINT)
    code, out, _ = ended(process)
    error = json.loads(out)["error"]
    assert code == error["exit_code"] == 130
    assert error["kind"] == "interrupted"


@pytest.mark.parametrize("output", ["out.safetensors", "out"])
def test_a_signal_at_any_time_leaves_all_or_nothing_and_the_code_says_which(
    output: str, small: Path, tmp_path: Path
) -> None:
    """Of a new interpreter in every fourth attempt: most of its time it has not begun."""
    chance = random.Random(0)
    usual: dict[bool, float] = {}
    for attempt in range(-2, 8 * TIMES):
        is_new = not attempt % 4 or attempt == -1
        directory = tmp_path / str(attempt)
        directory.mkdir()
        words = ("pt2safetensors", small, directory / output)
        started = time.monotonic()
        process = interpreter("-m", "ckptconv", *words) if is_new else python(PROGRAM, *words)
        if attempt < 0:
            assert ended(process)[0] == 0
            usual[is_new] = time.monotonic() - started
            continue
        time.sleep(usual[is_new] * chance.uniform(0, 1.2))
        process.send_signal(signal.SIGTERM)
        code, _, err = ended(process)
        if code == 0:
            assert is_small(directory / output)
        else:
            # Python itself is ended before it can say a word.
            assert code in (143, -signal.SIGTERM), err
            assert os.listdir(directory) == []


# What is sent a signal as soon as Python lets it know of one, and says so.
READY = """
from ckptconv.cli import signals
signals.leave_at_once()
print("!", flush=True)
from ckptconv.__main__ import main
main()
"""
# Is sent signals while it finds out what went wrong, or tells it.
MEANWHILE = """
import os, signal, sys
from ckptconv.cli import console, failures, main
def disturbed(*arguments):
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    return {function}(*arguments)
{function}, {place} = {place}, disturbed
main.main(sys.argv[1:])
"""
ENDED = r"ckptconv: Stopped by SIG(INT|TERM)\. No output was published\."


def test_two_signals_at_any_time_are_one_end(small: Path, tmp_path: Path) -> None:
    chance = random.Random(1)
    started = time.monotonic()
    assert ckptconv_forked("pt2safetensors", small, tmp_path / "usual.safetensors").code == 0
    usual = time.monotonic() - started
    for attempt in range(12 * TIMES):
        output = tmp_path / str(attempt) / "out.safetensors"
        output.parent.mkdir()
        process = begun(python(READY, "pt2safetensors", small, output, "--quiet"))
        time.sleep(chance.uniform(0, [0.06, usual][attempt % 2]))
        for number in chance.choices([signal.SIGTERM, signal.SIGINT], k=2):
            process.send_signal(number)
        code, _, err = ended(process)
        if code == 0:
            assert is_small(output)
        else:
            assert code in (130, 143), err
            assert re.fullmatch(ENDED, err.splitlines()[-1])
            assert os.listdir(output.parent) == []


def test_signals_while_something_went_wrong_are_an_end_too_and_while_it_is_told_too_late(tmp_path: Path) -> None:
    for place, codes, said in (
        ("failures.failure_of", (130, 143), ENDED),
        ("failures.report", (2,), ".* does not exist.*"),
    ):
        for options in ([], ["--json"]):
            disturbed = MEANWHILE.format(function="usual", place=place)
            code, out, err = ended(python(disturbed, "pt2safetensors", tmp_path / "missing.pt", *options))
            assert code in codes, place
            assert re.fullmatch(said, err.splitlines()[-1]), place
            assert [json.loads(line)["error"]["exit_code"] for line in out.splitlines()] == [code] * len(options)


def test_signals_while_it_is_cleaned_up_change_nothing(small: Path, tmp_path: Path) -> None:
    for first, second in ((signal.SIGINT, signal.SIGTERM), (signal.SIGTERM, signal.SIGTERM)):
        process = begun(python(UNTIL_A_SIGNAL, "pt2safetensors", small, tmp_path / "out", "--jobs", 4))
        process.send_signal(first)
        for _ in range(100):
            process.send_signal(second)
            time.sleep(0.001)
        code, _, err = ended(process)
        assert code in (128 + first, 128 + second)
        assert re.fullmatch(ENDED, err.splitlines()[-1])
        assert os.listdir(tmp_path) == []


def test_a_kill_leaves_no_output_and_the_next_run_succeeds_and_cleans_up(small: Path, tmp_path: Path) -> None:
    for name, options in itertools.product(("out.safetensors", "out"), ([], ["--exclude", "layer0.*"])):
        place = tmp_path / f"{name} {len(options)}"
        place.mkdir()
        output = place / name
        process = begun(python(HELD, "pt2safetensors", small, output, stdin=subprocess.PIPE))
        process.kill()
        process.communicate()
        left = [path for path in place.rglob("*") if path.is_file()]
        assert left, place
        assert all(".ckptconv-" in str(path.relative_to(place)) for path in left), place
        done(ckptconv_here("pt2safetensors", small, output, *options))
        assert len(weights(output)) == (9 if options else 10), place
        names = {path.name for path in place.rglob("*") if path.is_file()}
        assert names <= {"out.safetensors", "model.safetensors", "ckptconv.structure.json", ".ckptconv-manifest.json"}


def test_of_two_at_once_one_is_told_to_wait_and_the_other_is_not_disturbed(small: Path, tmp_path: Path) -> None:
    for output in (tmp_path / "out.safetensors", tmp_path / "out"):
        first = begun(python(HELD, "pt2safetensors", small, output, stdin=subprocess.PIPE))
        ckptconv_forked("pt2safetensors", small, output).refused(1, "another process")
        assert ended(first)[0] == 0
        assert is_small(output)
        hidden = {path.name for path in tmp_path.rglob("*") if path.name.startswith(".")}
        assert hidden <= {".ckptconv-manifest.json"}, output


def refusing(monkeypatch: pytest.MonkeyPatch, call: str, number: int, after: int) -> AbstractContextManager[None]:
    """The system refuses `call` once it has been made `after` times."""
    return failing(monkeypatch, call, after, OSError(number, os.strerror(number)))


FAILING = [
    ("pwrite", errno.ENOSPC, 5, ["cannot be written", "no space left", "Free some space"]),
    ("pwrite", errno.EDQUOT, 0, ["quota"]),
    ("pwrite", errno.EIO, 20, ["input/output error"]),
    ("ftruncate", errno.EFBIG, 0, ["ulimit -f"]),
    ("fsync", errno.EIO, 0, ["cannot be written", "input/output error"]),
    ("preadv", errno.EIO, 7, ["model.pt cannot be read", "input/output error"]),
    ("pread", errno.ESTALE, 1, ["model.pt cannot be read", "stale"]),
    ("replace", errno.EACCES, 0, ["permission denied"]),
]


def test_a_disk_that_fails_ends_in_a_paragraph_with_nothing_left(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for output in ("out.safetensors", "out"):
        for call, number, after, words in FAILING:
            with refusing(monkeypatch, call, number, after):
                run = ckptconv_here("pt2safetensors", small, tmp_path / output)
            said = run.refused(1, *words)
            assert len(said.splitlines()) == 1, (call, output)
            assert os.listdir(tmp_path) == [], (call, output)


def test_a_file_system_that_cannot_sync_is_none_the_worse(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for output in ("out.safetensors", "out"):
        for number in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            with refusing(monkeypatch, "fsync", number, 0):
                done(ckptconv_here("pt2safetensors", small, tmp_path / output))


def test_what_has_its_name_is_done_even_if_its_directory_cannot_be_synced(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = os.fsync

    def of_files_only(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        usual(fd)

    monkeypatch.setattr(os, "fsync", of_files_only)
    for output in (tmp_path / "out.safetensors", tmp_path / "out"):
        done(ckptconv_here("pt2safetensors", small, output))
        assert is_small(output)


# ------------------------------------------------------------------------------------------------- what is said where


LINE = r"ckptconv: (\d+)%, [\d.]+ [kM]?B of 30\.0 MB at [\d.]+ [kMG]?B/s, .+ left, out"


def test_long_runs_say_how_far_they_are_on_stderr(small: Path, tmp_path: Path) -> None:
    code, out, err = ended(python(EAGER, "pt2safetensors", small, tmp_path / "out.safetensors", "--jobs", 1))
    assert code == 0
    assert out.startswith("wrote ")
    found = [re.fullmatch(LINE, line) for line in err.splitlines()]
    assert all(found), err
    done = [int(line[1]) for line in found if line]
    assert len(done) > 3
    assert done == sorted(done)
    assert done[-1] <= 100


def test_names_of_files_do_not_steer_the_terminal() -> None:
    """A universal checkpoint has a file for every parameter, whose name may hold anything."""
    for shown in (report.Counting(), report.OneBar(), report.Lines()):
        shown.on_file("zero/\x1b[2J\x07\r\u202egpj/fp32.pt")
        assert shown.current.isprintable()


def test_the_bar_says_which_file_is_being_made(small: Path, tmp_path: Path) -> None:
    code, _, shown = on_a_terminal(EAGER, "pt2safetensors", small, tmp_path / "out", "--max-shard-size", "12MB")
    assert code == 0
    places = [shown.find(f"model-0000{number}-of-00003") for number in (1, 2, 3)]
    assert -1 < places[0] < places[1] < places[2]


def test_progress_can_be_had_off(small: Path, tmp_path: Path) -> None:
    for option in ("--quiet", "--no-progress"):
        code, out, err = ended(python(EAGER, "pt2safetensors", small, tmp_path / "out.safetensors", option))
        assert (code, err) == (0, ""), option
        assert bool(out) == (option == "--no-progress")


def test_short_runs_say_nothing_on_stderr(small: Path, tmp_path: Path) -> None:
    run = ckptconv_forked("pt2safetensors", small, tmp_path / "out.safetensors")
    assert run.code == 0
    assert not run.err
    assert len(run.out.splitlines()) == 3


def on_a_terminal(
    code: str, *arguments: object, size: tuple[int, int] = (24, 80), **environment: str
) -> tuple[int, str, str]:
    """Run `code` with a terminal as its stderr: exit code, stdout, and what the terminal was sent."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", *size, 0, 0))
    process = python(code, *arguments, stderr=slave, env=os.environ | environment)
    os.close(slave)
    shown = shown_on(master)
    out, _ = process.communicate(timeout=600)
    return process.returncode, out, shown


def test_on_a_terminal_there_is_a_bar_that_goes_away(small: Path, tmp_path: Path) -> None:
    code, out, shown = on_a_terminal(EAGER, "pt2safetensors", small, tmp_path / "out.safetensors")
    assert code == 0
    assert out.startswith("wrote ")
    assert "%|" in shown
    assert "B/s" in shown
    assert "/30.0M" in shown
    # The last thing it shows is an empty line.
    assert not shown.rstrip("\r").rpartition("\r")[2].strip()


@pytest.mark.skipif(bool(registered.missing("output_dir")), reason="convert takes one input")
def test_over_several_inputs_there_is_one_bar(small: Path, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "other.pt")
    words = (small, tmp_path / "none.pt", tmp_path / "other.pt")
    code, out, shown = on_a_terminal(EAGER, "convert", *words, "--output-dir", tmp_path / "out")
    assert code == 2
    assert "2 of 3 inputs converted, 1 failed" in out
    assert "1/3 " in shown
    assert "/30.0M" in shown


def test_a_terminal_that_cannot_have_a_bar_gets_lines(small: Path, tmp_path: Path) -> None:
    """Emacs has such, and containers and servers that run jobs do; nothing at all would be shown there."""
    arguments = ["pt2safetensors", small, tmp_path / "out.safetensors", "--jobs", 1]
    for size, term in (((24, 80), "dumb"), ((0, 0), "xterm"), ((0, 80), "xterm")):
        code, _, shown = on_a_terminal(EAGER, *arguments, size=size, TERM=term)
        assert code == 0, size
        lines = shown.split("\r\n")[:-1]
        assert len(lines) > 3, size
        assert all(re.fullmatch(LINE, line) for line in lines), size


def test_a_bar_has_room_for_figures_at_every_width(small: Path, tmp_path: Path) -> None:
    arguments = ["pt2safetensors", small, tmp_path / "out", "--max-shard-size", "12MB", *VERIFY]
    for columns in (48, 60, 71, 72, 200):
        code, _, shown = on_a_terminal(EAGER, *arguments, size=(24, columns))
        assert code == 0, columns
        drawn = [line for line in shown.split("\r") if "%|" in line]
        assert all(len(line.rstrip()) < columns and line.rstrip().endswith("B/s]") for line in drawn), columns
        assert ("model-00002-of-00003" in shown) == (columns >= 72), columns
        assert ("verifying" in shown) == (columns >= 72 and bool(VERIFY)), columns


def test_on_a_terminal_quiet_is_quiet_too(small: Path, tmp_path: Path) -> None:
    assert on_a_terminal(EAGER, "pt2safetensors", small, tmp_path / "out.safetensors", "-q") == (0, "", "")


def in_bash(place: Path, command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command line of bash in a directory."""
    words = ["bash", "-c", f"set -o pipefail; {command}"]
    return subprocess.run(
        words, cwd=place, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def test_whatever_becomes_of_the_report_0_means_that_the_output_is_there(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "model.pt")
    output = tmp_path / "model.safetensors"
    for number, redirection in enumerate(
        ("| true", ">&-", ">&- 2>&-", ">/dev/full", "2>&-", "<&- >&- 2>&-", "2>/dev/full")
    ):
        for json_ in ("", "--json") if number < 4 else ("",):
            command = f"{sys.executable} -m ckptconv pt2safetensors {json_} model.pt {redirection}"
            done = in_bash(tmp_path, command, PYTHONUNBUFFERED="1" if json_ else "")
            assert done.returncode == 0, command
            assert "Traceback" not in done.stderr, command
            assert "Exception ignored" not in done.stderr, command
            assert list(load_file(output)) == ["a"], command
            output.unlink()
            if redirection == ">/dev/full":
                assert "no space left" in done.stderr, command
            elif redirection == "2>/dev/full":
                assert done.stdout, command
            else:
                assert not done.stderr, command


def test_a_reader_of_the_log_that_goes_away_does_not_end_the_work(small: Path, tmp_path: Path) -> None:
    process = begun(python(HELD, "pt2safetensors", small, tmp_path / "out.safetensors", stdin=subprocess.PIPE))
    assert process.stdin is not None
    assert process.stderr is not None
    process.stderr.close()
    process.stdin.close()
    assert process.wait(600) == 0
    assert is_small(tmp_path / "out.safetensors")


# ---------------------------------------------------------------------------------------------------------- start-up


def test_what_is_only_told_needs_no_command_line_library() -> None:
    code = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); " + RUN
    needless = {"typer", "click", "dataclasses", "inspect", "typing", "shutil", "ckptconv.options.table"}
    completing = {"_CKPTCONV_COMPLETE": "complete_bash", "COMP_WORDS": "x con", "COMP_CWORD": "1"}
    asked: list[tuple[list[str], dict[str, str]]] = [
        *((words.split(), {}) for words in ("--version", "-h", "convert --help", "help convert", "")),
        ([], completing),
    ]
    for arguments, environment in asked:
        command = [sys.executable, "-c", code, *arguments]
        env = {**os.environ, **environment}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        assert done.stdout, (arguments, done.stderr)
        assert (HEAVY | needless).isdisjoint(done.stderr.split()), arguments


def test_the_version_tells_what_else_has_a_part() -> None:
    printed = ckptconv_forked("--version").out.splitlines()
    assert printed[0] == f"ckptconv {version('ckptconv')}"
    assert {f"{name} {version(name)}" for name in ("torch", "safetensors", "numpy", "fsspec")} <= set(printed)


def test_a_path_where_a_command_should_be_is_met_with_the_right_one(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"a": torch.ones(3)}, path)
    done = ckptconv_forked(path)
    assert done.code == 2
    assert f"ckptconv convert {path} OUTPUT converts it" in done.err
    for command in looking():
        assert f"ckptconv {command} {path} shows its contents" in done.err
