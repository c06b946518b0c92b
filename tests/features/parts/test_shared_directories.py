"""Parts that are staged in directories that others can write to: descriptions and records are checked, links and pipes
not followed, and whatever ends `finish`, the next one completes it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import SHARDS, ckptconv_here, contents, done
from processes import before_call, failing, in_child, moments
from strangers import NOBODY, SHARDED, a_link_to_a_file, a_pipe, as_root, convert_sharded, is_untouched

import ckptconv
from ckptconv.errors import FailedError
from ckptconv.publish.staging.local import LocalStaging

INDEX = "model.safetensors.index.json"


def staged(sharded: Path, output: Path, *options: object) -> Path:
    """The staging directory of an output of which all parts are made."""
    done(convert_sharded(sharded, output, "--part", "0/1", *options))
    (place,) = (path for path in output.glob(".ckptconv-*") if path.is_dir())
    return place


def test_what_is_staged_is_private_and_what_is_published_follows_the_umask(sharded: Path, tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        place = staged(sharded, tmp_path / "out")
        assert stat.S_IMODE(place.stat().st_mode) == 0o700
        done(ckptconv_here("finish", tmp_path / "out"))
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()} == {0o644}


@as_root
def test_parts_of_another_user_are_not_put_together(sharded: Path, tmp_path: Path) -> None:
    place = staged(sharded, tmp_path / "out")
    os.chown(place, NOBODY, NOBODY)
    for command in (("finish", tmp_path / "out"), ("pt2safetensors", sharded, tmp_path / "out", *SHARDED)):
        run = ckptconv_here(*command)
        assert run.code == 1
        assert "another user" in run.err
    os.chown(place, os.geteuid(), -1)
    done(ckptconv_here("finish", tmp_path / "out"))


def test_names_that_only_begin_as_ours_do_stay(sharded: Path, tmp_path: Path) -> None:
    """The staging of another output, and of one whose long name begins alike."""
    long = "x" * 230
    done(ckptconv_here("pt2safetensors", sharded, tmp_path / "m.ckptconv-y.safetensors", "--part", "0/1"))
    done(ckptconv_here("pt2safetensors", sharded, tmp_path / f"{long}1.safetensors", "--part", "0/1"))
    before = {path.name for path in tmp_path.glob(".*")}
    assert len(before) == 2
    done(ckptconv_here("pt2safetensors", sharded, tmp_path / "m"))
    done(ckptconv_here("pt2safetensors", sharded, tmp_path / f"{long}2.safetensors"))
    assert {path.name for path in tmp_path.glob(".*")} == before


def changed(path: Path, change: Callable[[Any], Any]) -> None:
    told = json.loads(path.read_text())
    new = change(told)
    path.write_text(json.dumps(told if new is None else new))


def renamed_to(name: object) -> Callable[[Any], Any]:
    return lambda told: told["files"][0].__setitem__(0, name)


DESCRIPTIONS: list[Callable[[Any], Any]] = [
    *map(
        renamed_to, ["../home/precious", "/etc/precious", "..", ".", "", "a/b", "x\0", ".lock", "config.json", 3, None]
    ),
    renamed_to("model-00002-of-00007.safetensors"),
    renamed_to("model-00009-of-00007.safetensors"),
    lambda told: told.update(plan="../../home"),
    lambda told: told.update(plan="0" * 16),
    lambda told: told.update(kind="tree"),
    lambda told: told.update(kind=["directory"]),
    lambda told: told.update(parts=10**18),
    lambda told: told.update(parts=0),
    lambda told: told.update(parts="2"),
    lambda told: told.update(shift=-1),
    lambda told: told.update(heading=None),
    lambda told: told["heading"].update(plan="0" * 16),
    lambda told: told["heading"].update(aliases=[]),
    lambda told: told["heading"].update(aliases={"a": 3}),
    lambda told: told["heading"]["source"].update(inputs=[]),
    lambda told: told["heading"]["source"].pop("format"),
    lambda told: told.update(files={}),
    lambda told: told.update(files=[]),
    lambda told: told.update(files=[[]]),
    lambda told: told["files"][0].__setitem__(1, float("nan")),
    lambda told: told["files"][0].__setitem__(1, -1),
    lambda told: told["files"][0].__setitem__(1, True),
    lambda told: told["files"][0].__setitem__(2, 10**30),
    lambda told: told["files"].append(told["files"][0]),
    lambda told: told["files"].pop(),
    lambda told: told.update(more=1),
    lambda told: [told],
]


def test_a_description_that_is_none_is_refused_and_nothing_touched(sharded: Path, tmp_path: Path, home: Path) -> None:
    out = tmp_path / "out"
    description = staged(sharded, out) / ".plan.json"
    sound = description.read_bytes()
    for number, change in enumerate(DESCRIPTIONS):
        description.write_bytes(sound)
        changed(description, change)
        before = contents(out)
        said = ckptconv_here("finish", out).refused(4)
        assert len(said.splitlines()) == 1, number
        assert contents(out) == before, number
    for text in NO_JSON:
        description.write_bytes(text.encode("latin-1"))
        assert len(ckptconv_here("finish", out).refused(4)) < 1000, text[:9]
    assert is_untouched(home)


NO_JSON = ["", "{", "[" * 100_000, "[]," * 6_000_000, '{"plan": 1, "plan": 2}', "9" * 10_000, " " * (33 << 20), "\xff"]


def test_the_most_parts_there_can_be_take_no_longer_than_one(sharded: Path, tmp_path: Path) -> None:
    """Nobody is to wait for a list of them."""
    done(convert_sharded(sharded, tmp_path / "out", "--part", "0/999999999"))
    assert ckptconv_here("finish", tmp_path / "out").code == 1


RECORDS: list[Callable[[Any], Any]] = [
    lambda told: told.update(name="../../home/precious"),
    lambda told: told.update(size=-1),
    lambda told: told.update(size=None),
    lambda told: told.update(plan=[]),
    lambda told: told.update(spans=3),
    lambda told: told.update(spans=[[0, 1]]),
    lambda told: told["spans"][1].__setitem__(0, -5),
    lambda told: told["spans"][1].__setitem__(1, 1 << 80),
    lambda told: told["spans"][1].__setitem__(2, "crc"),
    lambda told: told["spans"][1].__setitem__(3, ["name"]),
    lambda told: told["spans"].append(told["spans"][1]),
    lambda told: told["spans"].pop(),
    lambda told: told.update(mtime="now"),
    lambda told: told.pop("inode"),
    lambda told: [told],
]


def test_a_record_that_is_none_is_refused_and_its_file_made_again(sharded: Path, tmp_path: Path, home: Path) -> None:
    out = tmp_path / "out"
    place = staged(sharded, out)
    record = next(path for path in place.glob(".record-*") if "00003-" in path.read_text())
    for number, change in enumerate(RECORDS):
        sound = record.read_bytes()
        changed(record, change)
        said = ckptconv_here("finish", out).refused(4)
        assert len(said.splitlines()) == 1, number
        assert not list(out.glob("*.safetensors")), number
        if number == 11:  # one that lacks a tensor shows only where the plan is known
            record.write_bytes(sound)
        else:
            assert convert_sharded(sharded, out, "--part", "0/1", "--json").json["reused"] == SHARDS, number
    done(ckptconv_here("finish", out))
    assert is_untouched(home)


def test_links_and_pipes_in_a_staging_directory_are_not_followed(sharded: Path, tmp_path: Path, home: Path) -> None:
    """As a download can bring them."""
    out = tmp_path / "out"
    place = staged(sharded, out)
    for what in (".plan.json", ".record-*", "model-00003-of-00007.safetensors"):
        for leave in (a_link_to_a_file, a_pipe):
            path = next(place.glob(what))
            path.unlink()
            leave(path, home)
            assert ckptconv_here("finish", out).code in (1, 4), (what, leave)
            assert not list(out.glob("*.safetensors")), (what, leave)
            done(convert_sharded(sharded, out, "--part", "0/1"))
    done(ckptconv_here("finish", out))
    assert all(path.is_file() and not path.is_symlink() for path in out.iterdir())
    assert is_untouched(home)


def test_what_another_conversion_has_replaced_meanwhile_is_not_counted_as_there(sharded: Path, tmp_path: Path) -> None:
    """A commit that was killed has put shards under their names, and another conversion puts its own there."""
    out = tmp_path / "out"
    place = staged(sharded, out)
    os.rename(place / "model-00001-of-00007.safetensors", out / "model-00001-of-00007.safetensors")
    plan = LocalStaging(str(out), place.name.removeprefix(".ckptconv-"), index=INDEX, is_ours=lambda name: False)
    with plan:
        size = (out / "model-00001-of-00007.safetensors").stat().st_size
        assert plan.finished("model-00001-of-00007.safetensors", size)
        (out / "theirs").write_bytes(bytes(size))
        os.rename(out / "theirs", out / "model-00001-of-00007.safetensors")
        with pytest.raises(FailedError, match="another conversion"):
            plan.commit([])


def test_finish_that_is_killed_at_any_call_is_completed_by_the_next(sharded: Path, tmp_path: Path) -> None:
    expected = tmp_path / "expected"
    done(convert_sharded(sharded, expected))
    made = tmp_path / "made"
    staged(sharded, made)
    report = tmp_path / "calls"

    def count() -> None:
        found = before_call(-1, lambda: None)
        ckptconv.finish([tmp_path / "counted"])
        report.write_text(" ".join(found))

    shutil.copytree(made, tmp_path / "counted")
    assert in_child(count) == 0
    calls = report.read_text().split()
    assert len(calls) > 2 * SHARDS
    for at in moments(calls):
        out = Path(shutil.copytree(made, tmp_path / "out"))

        def work(at: int = at, out: Path = out) -> None:
            before_call(at, lambda: os.kill(os.getpid(), signal.SIGKILL))
            ckptconv.finish([out])

        ended = in_child(work)
        is_complete = (out / INDEX).exists() and not list(out.glob(".ckptconv-[0-9a-f]*/*.json"))
        run = ckptconv_here("finish", out)
        # Where nothing is left of it, it was finished.
        assert run.code == 0 or (run.code == 2 and is_complete), (at, ended, run.err)
        assert shown(out) == contents(expected), at
        done(convert_sharded(sharded, out))
        assert not [path for path in out.iterdir() if path.is_dir()], at
        shutil.rmtree(out)


def shown(out: Path) -> dict[str, bytes]:
    """What is there under final names."""
    return {name: data for name, data in contents(out).items() if "/" not in name}


def test_errors_in_the_clean_up_leave_what_the_next_run_removes(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    staged(sharded, out)
    with failing(monkeypatch, "unlink", 3, OSError(5, "Input/output error")):
        done(ckptconv_here("finish", out))
    assert list(out.glob(".ckptconv-*/*")) or list(out.glob(".ckptconv-*"))
    before = shown(out)
    run = ckptconv_here("finish", out)
    assert run.code == 0 or "nothing to publish. There is a" in run.err
    assert shown(out) == before
    done(convert_sharded(sharded, out))
    assert not [path for path in out.iterdir() if path.is_dir()]


def test_finish_puts_on_the_disk_what_was_made_without(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[str] = set()
    usual = os.fsync

    def fsync(fd: int) -> None:
        synced.add(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        usual(fd)

    for name, options in (("without", ["--no-fsync"]), ("with", [])):
        staged(sharded, tmp_path / name, "--no-fsync")
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", fsync)
            done(ckptconv_here("finish", tmp_path / name, *options))
        assert bool(synced) == (not options)
    assert {f"model-0000{n + 1}-of-00007.safetensors" for n in range(SHARDS)} <= synced
