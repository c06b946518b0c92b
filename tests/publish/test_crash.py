"""kill -9 at any moment: no bad file under a final name, never a wrong index, and the next run completes the work.

`PYTHONPATH=tests python tests/publish/test_crash.py 200` kills two hundred conversions, at random
calls and times.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import TIMES
from processes import before_call, contents, failing, in_child, stepped

import ckptconv
from ckptconv.errors import CkptconvError, CorruptError, FailedError
from ckptconv.options.table import OPTIONS
from ckptconv.publish.staging.local import LocalStaging
from ckptconv.storage.handles import Handle
from ckptconv.text import format_size

SHARDS = 8
INDEX = "model.safetensors.index.json"
MANIFEST = ".ckptconv-manifest.json"


@dataclass
class Crashing:
    """A conversion to eight shards, the output that was there before, and what is to be there in the end."""

    model: Path
    old: dict[str, bytes]
    new: dict[str, bytes]
    options: dict[str, Any]

    def convert(self, output: Path, **options: Any) -> Any:
        return ckptconv.convert(self.model, output, **{**self.options, **options})

    def output(self, place: Path) -> Path:
        """A place where the old output is."""
        if place.exists():
            shutil.rmtree(place)
        place.mkdir()
        for name, data in sorted(self.old.items(), key=lambda each: each[0] == MANIFEST):
            (place / name).write_bytes(data)
        return place


def prepared(place: Path) -> Crashing:
    options = {"max_shard_size": 256_000, **({"copy_config": True} if "copy_config" in OPTIONS else {})}
    brought = {"old": ("config.json", "merges.txt"), "new": ("config.json", "tokenizer.json")}
    for name, sign, count in (("old", -1, SHARDS + 1), ("new", 1, SHARDS)):
        source = place / f"of-{name}"
        source.mkdir()
        torch.save({f"layer{n}": torch.full((64, 1000), float(sign * n)) for n in range(count)}, source / "model.pt")
        for each in brought[name]:
            (source / each).write_text(json.dumps({"of": f"{each} that is {name}" * 1000}))
        ckptconv.convert(source / "model.pt", place / name, **options)
    return Crashing(place / "of-new" / "model.pt", contents(place / "old"), contents(place / "new"), options)


@pytest.fixture(scope="module")
def crashing(tmp_path_factory: pytest.TempPathFactory) -> Crashing:
    return prepared(tmp_path_factory.mktemp("crashing"))


def check(crashing: Crashing, found: dict[str, bytes]) -> None:
    """Whatever is under a final name is whole, and an index belongs to all that is there."""
    for name, data in found.items():
        assert data in (crashing.old.get(name), crashing.new.get(name)), f"{name} is neither old nor new"
    if INDEX in found:
        shown = {name: data for name, data in found.items() if name != MANIFEST}
        whole = crashing.old if found[INDEX] == crashing.old[INDEX] else crashing.new
        assert shown == {name: data for name, data in whole.items() if name != MANIFEST}


def kill_again_and_again(crashing: Crashing, place: Path, kills: int, seed: int) -> tuple[int, int]:
    """How often a conversion was killed before it was done, and how often the next run had less to do."""
    chance = random.Random(seed)
    killed = reused = 0
    report = place / "calls"

    def count() -> None:
        made, steps = before_call(-1, lambda: None), stepped(-1)
        crashing.convert(place / "out")
        report.write_text(f"{len(made)} {steps[0]}")

    crashing.output(place / "out")
    assert in_child(count) == 0
    calls, steps = map(int, report.read_text().split())
    for number in range(kills):
        output = crashing.output(place / "out")
        options = {"jobs": chance.choice([1, 2]), "fsync": chance.random() < 0.7}
        # Before something changes on the disk, or in between.
        is_step = not number % 4
        at = chance.randint(1, steps if is_step else calls)

        def work(
            at: int = at, is_step: bool = is_step, options: dict[str, Any] = options, output: Path = output
        ) -> None:
            if is_step:
                stepped(at)
            else:
                before_call(at, lambda: os.kill(os.getpid(), signal.SIGKILL))
            crashing.convert(output, **options)

        ended = in_child(work)
        assert ended in (0, -signal.SIGKILL), (seed, number, at, ended)
        found = contents(output)
        try:
            check(crashing, found)
            again = crashing.convert(output, **options)
            assert contents(output) == crashing.new
            assert not [path for path in output.iterdir() if path.is_dir()]
        except (AssertionError, CkptconvError) as error:
            raise AssertionError(f"seed {seed}, kill {number}, at {at}: {error}") from error
        if ended and found.get(INDEX) != crashing.new[INDEX]:
            killed += 1
            reused += again.reused > 0
    return killed, reused


def test_a_kill_at_any_moment_leaves_nothing_bad_and_the_next_run_goes_on(crashing: Crashing, tmp_path: Path) -> None:
    killed, reused = kill_again_and_again(crashing, tmp_path, kills=16 * TIMES, seed=0)
    assert killed >= 8 * TIMES
    assert reused >= killed / 2


def test_killed_again_and_again_it_gets_done_in_the_end(crashing: Crashing, tmp_path: Path) -> None:
    """Each run is killed after 60 calls, of the 150 that all the work takes: none has to do everything."""
    output = crashing.output(tmp_path / "out")
    for _ in range(100):
        ended = in_child(lambda: (before_call(60, lambda: os.kill(os.getpid(), 9)), crashing.convert(output)))
        check(crashing, contents(output))
        # What is killed once all is published has left its staging directory, and the next run would begin anew.
        if contents(output) == crashing.new:
            break
        assert ended == -signal.SIGKILL
    assert contents(output) == crashing.new
    crashing.convert(output)
    assert not [path for path in output.iterdir() if path.is_dir()]


# ------------------------------------------------------------------------------------- full disks, and changed inputs


def test_a_disk_that_gets_full_is_not_left_full(
    crashing: Crashing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = crashing.output(tmp_path / "out")
    full = OSError(28, "No space left on device")
    with failing(monkeypatch, "pwrite", 5, full), pytest.raises(FailedError, match="no space left"):
        crashing.convert(output)
    assert contents(output) == crashing.old
    assert not [path for path in output.iterdir() if path.is_dir()]


def test_a_disk_that_fails_for_a_while_costs_only_what_was_not_finished(
    crashing: Crashing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = crashing.output(tmp_path / "out")
    stale = OSError(116, "Stale file handle")
    with (
        failing(monkeypatch, "pwrite", 7, stale),
        pytest.raises(FailedError, match="run the same command again to continue"),
    ):
        crashing.convert(output)
    assert contents(output) == crashing.old
    assert crashing.convert(output).reused >= 3
    assert contents(output) == crashing.new


def test_files_that_may_not_grow_so_large_are_refused_whole(crashing: Crashing, tmp_path: Path) -> None:
    output = crashing.output(tmp_path / "out")

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        with pytest.raises(FailedError, match="ulimit -f"):
            crashing.convert(output)

    assert in_child(limited) == 0
    assert contents(output) == crashing.old


def test_all_of_an_output_has_to_fit_before_the_first_byte_is_written(
    crashing: Crashing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its files would fit, and all of them do not; what is finished already needs no more room."""
    output = crashing.output(tmp_path / "out")
    usual = os.statvfs
    room = [sum(len(data) for data in crashing.new.values()) // 2]

    def small(path: Any) -> Any:
        found = usual(path)
        fields = {name: getattr(found, name) for name in dir(found) if name.startswith("f_")}
        return type("Found", (), {**fields, "f_bavail": room[0], "f_frsize": 1})()

    assert crashing.convert(output, dry_run=True).warnings == []
    monkeypatch.setattr(os, "statvfs", small)
    writes = counted_writes(monkeypatch)
    # A dry run warns of it.
    needed = sum(len(data) for name, data in crashing.new.items() if name != MANIFEST)
    [warning] = crashing.convert(output, dry_run=True).warnings
    assert warning.startswith(f"{output} needs {format_size(needed)}, {format_size(needed - room[0])} more than ")
    with pytest.raises(FailedError, match=f"{format_size(needed - room[0])} more than"):
        crashing.convert(output)
    assert not writes
    assert contents(output) == crashing.old


def counted_writes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    usual = os.pwrite

    def counting(fd: int, data: Any, offset: int) -> int:
        found.append(len(data))
        return usual(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", counting)
    return found


def test_an_input_that_changes_while_it_is_read_spoils_all_of_it(crashing: Crashing, tmp_path: Path) -> None:
    model, output = tmp_path / "model.pt", crashing.output(tmp_path / "out")
    changes: list[Callable[[], object]] = [
        lambda: model.write_bytes(model.read_bytes() + b"more"),
        lambda: os.utime(model, (1, 1)),
        model.unlink,
    ]
    for change in changes:
        shutil.copyfile(crashing.model, model)
        done: list[int] = []

        def progress(size: int, done: list[int] = done, change: Callable[[], object] = change) -> None:
            if not done:
                change()
            done.append(size)

        with pytest.raises(CorruptError, match=r"model\.pt changed while it was read"):
            ckptconv.convert(model, output, progress=progress, **crashing.options)
        assert contents(output) == crashing.old
        assert not [path for path in output.iterdir() if path.is_dir()]


def test_an_interruption_while_the_staging_directory_is_made_leaves_none(tmp_path: Path) -> None:
    """An interruption can come between any two steps; here it comes right after one."""
    for step in ("make_private", "private", "names", "open_or_create", "stat"):
        inner, reached = getattr(Handle, step), []

        def interrupted(
            self: Handle, *args: Any, inner: Any = inner, reached: list[bool] = reached, **options: Any
        ) -> Any:
            found = inner(self, *args, **options)
            if list(tmp_path.iterdir()) and not reached:
                reached.append(True)
                raise KeyboardInterrupt
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Handle, step, interrupted)
            with pytest.raises(KeyboardInterrupt), LocalStaging(str(tmp_path / "model.safetensors"), "plan"):
                pass
        assert reached, step
        assert not list(tmp_path.iterdir()), step


if __name__ == "__main__":
    wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "made").mkdir()
        ends = kill_again_and_again(prepared(Path(directory) / "made"), Path(directory), wanted, first)
    print(json.dumps({"killed": ends[0], "reused": ends[1]}))
