"""Directories that others can write to: what they leave there is neither used, nor followed, nor removed."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import of_features
from checkpoints import SHARDS, ZERO, ckptconv_here, contents, done, seven_shards
from processes import failing
from safetensors.torch import save_file
from strangers import ANY, NOBODY, SHARDED, as_root, convert_sharded, is_untouched, seen

import ckptconv
from ckptconv.errors import CkptconvError, UnsafeError
from ckptconv.options.table import OPTIONS
from ckptconv.outputs.targets import MANIFEST
from ckptconv.publish.staging import area
from ckptconv.publish.staging.local import LocalStaging
from ckptconv.storage import handles
from ckptconv.storage.files import LocalReader, look

# Whether outputs can be made in parts.
IN_PARTS = "part" in OPTIONS
# Words of commands that write a page, the name of which comes next, of what is named then.
PAGES: list[tuple[str, ...]] = list(itertools.chain(*of_features("PAGES")))
# Options for a file beside the output.
BESIDE = ("--manifest", *itertools.chain(*of_features("BESIDE")))
INDEX = "model.safetensors.index.json"


# ------------------------------------------------------------------------------------------- what a stranger has left


def test_leftovers_that_are_not_ours_stay_as_they_are(sharded: Path, tmp_path: Path, home: Path) -> None:
    for leave in ANY:
        place = tmp_path / leave.__name__
        out, file = place / "out", place / "out.safetensors"
        out.mkdir(parents=True)
        planted = (out / ".ckptconv-0123456789abcdef", place / ".out.safetensors.ckptconv-0123456789abcdef")
        for path in planted:
            leave(path, home)
        before = [seen(path) for path in planted]
        done(convert_sharded(sharded, out))
        done(ckptconv_here("pt2safetensors", sharded, file))
        assert [seen(path) for path in planted] == before, leave
    assert is_untouched(home)


def test_a_staging_directory_that_is_not_ours_is_not_used(sharded: Path, tmp_path: Path, home: Path) -> None:
    done(convert_sharded(sharded, tmp_path / "plan"))
    plan = f".ckptconv-{json.loads((tmp_path / 'plan' / MANIFEST).read_text())['plan']}"
    for leave in ANY:
        out = tmp_path / leave.__name__
        out.mkdir()
        planted = out / plan
        leave(planted, home)
        before = seen(planted)
        for options in ((), *([("--part", "0/1")] if IN_PARTS else [])):
            convert_sharded(sharded, out, *options).refused(1, "neither used nor removed")
            assert seen(planted) == before, leave
        assert not IN_PARTS or ckptconv_here("finish", out).code in (1, 2), leave
        assert [path.name for path in out.iterdir()] == [plan], leave
    assert is_untouched(home)


@pytest.mark.skipif(not PAGES, reason="no command writes a page")
def test_a_page_gets_another_hidden_name_where_its_own_is_taken(sharded: Path, tmp_path: Path, home: Path) -> None:
    for leave in ANY:
        place = tmp_path / leave.__name__
        place.mkdir()
        page = place / "page.html"
        planted = [place / f".page.html.ckptconv-{taken}" for taken in ("page", "publishing")]
        for path in planted:
            leave(path, home)
        before = [seen(path) for path in planted]
        done(ckptconv_here(*PAGES[0], page, sharded))
        assert page.read_text().startswith("<!"), leave
        assert [seen(path) for path in planted] == before, leave
        assert {*place.iterdir()} == {page, *planted}, leave
    assert is_untouched(home)


# For each output: the name of the file or directory, and the command that writes it.
WRITTEN: dict[str, tuple[str, tuple[object, ...]]] = {
    "file": ("x.safetensors", ("convert", "MODEL", "PATH")),
    "directory": ("x", ("convert", "MODEL", "PATH", *SHARDED)),
    "below": ("x", ("convert", "MODEL", "PATH/sub/y.safetensors")),
    "manifest": ("x.json", ("convert", "MODEL", "OWN", "--manifest", "PATH")),
    "spool-dir": ("x", ("convert", "PACKED", "OWN", "--spool-dir", "PATH")),
    **{output: written for each in of_features("WRITTEN") for output, written in each.items()},
}


@as_root
def test_a_stranger_s_link_is_followed_by_no_output(sharded: Path, tmp_path: Path) -> None:
    given = {
        "MODEL": sharded,
        "WEIGHTS": tmp_path / "weights.safetensors",
        "OTHER": tmp_path / "other.safetensors",
        "PACKED": tmp_path / "packed.pt",
        "OWN": tmp_path / "own.safetensors",
    }
    save_file({"w": torch.zeros(3)}, given["WEIGHTS"])
    save_file({"w": torch.ones(3)}, given["OTHER"])
    torch.save({"w": torch.zeros(3)}, given["PACKED"])
    for output, (name, words) in WRITTEN.items():
        # What a directory's mode says is asked in one place, whatever is written to it.
        for mode in (0o1777, 0o777, 0o2775) if output == "file" else (0o1777,):
            place = tmp_path / f"{output} {mode:o}"
            shared, home = place / "shared", place / "home"
            shared.mkdir(parents=True)
            home.mkdir()
            link, goal = shared / name, home / name
            command = [given.get(str(word), str(word).replace("PATH", str(link))) for word in words]
            if goal.suffix:
                goal.write_bytes(b"precious")
            else:
                goal.mkdir()
            if output == "below":
                (goal / "sub").mkdir()
            before = contents(home)
            link.symlink_to(goal)
            shared.chmod(mode)
            os.lchown(link, NOBODY, NOBODY)
            run = ckptconv_here(*command)
            run.refused(UnsafeError.exit_code, link, "another user", goal, "Nothing was written")
            assert contents(home) == before, (output, mode)
            assert not given["OWN"].exists(), (output, mode)


@as_root
def test_a_link_that_no_stranger_can_have_put_there_is_followed(sharded: Path, tmp_path: Path) -> None:
    for owner, of_directory, mode in ((0, NOBODY, 0o777), (NOBODY, NOBODY, 0o2775), (NOBODY, 0, 0o755)):
        shared, goal = tmp_path / f"{mode:o}", tmp_path / f"{mode:o}.safetensors"
        shared.mkdir()
        link = shared / "x.safetensors"
        link.symlink_to(f"../{goal.name}")
        os.lchown(link, owner, owner)
        os.chown(shared, of_directory, of_directory)
        shared.chmod(mode)
        done(ckptconv_here("convert", sharded, link))
        assert link.is_symlink(), (owner, of_directory)
        assert goal.is_file(), (owner, of_directory)


def test_where_a_file_system_knows_no_owners_what_is_made_tells_whose_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a share of Windows has it: all belongs to one user, and anybody may open it."""
    usual = os.fstat

    def mapped(fd: int) -> os.stat_result:
        found = list(usual(fd))
        found[0] |= 0o077
        found[4] = 1234
        return os.stat_result(found)

    (tmp_path / "private").mkdir(mode=0o700)
    with handles.Handle.open(str(tmp_path)) as here:
        monkeypatch.setattr(os, "fstat", mapped)
        here.private("private").close()
        monkeypatch.setattr(os, "geteuid", lambda: 77)
        here.private("private").close()
    monkeypatch.undo()
    (tmp_path / "private").chmod(0o777)
    with handles.Handle.open(str(tmp_path)) as here, pytest.raises(handles.ForeignError):
        here.private("private")


def test_a_pipe_in_the_place_of_an_input_does_not_hold_the_work_up(sharded: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    shutil.copyfile(sharded, path)
    file = look(str(path)).file
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CkptconvError, match="no longer the file that was opened"):
        LocalReader(file)
    run = ckptconv_here("pt2safetensors", path, tmp_path / "out")
    assert run.code != 0
    assert not (tmp_path / "out").exists()


# --------------------------------------------------------------------------------------------------------- publishing


def test_two_conversions_into_one_directory_publish_one_after_the_other(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is held up in the middle of its shards; the second waits, and then replaces all of them."""
    out = tmp_path / "out"
    expected = ckptconv.convert(sharded, tmp_path / "expected", max_shard_size=2_000_000)
    usual = LocalStaging.publish
    events: list[str] = []
    held, go_on = threading.Event(), threading.Event()

    def publish(self: Any, names: Any) -> None:
        events.append(f"begin {len(names)}")
        if not held.is_set():
            held.set()
            assert go_on.wait(600)
        usual(self, names)
        events.append(f"end {len(names)}")

    monkeypatch.setattr(LocalStaging, "publish", publish)
    monkeypatch.setattr(area, "PATIENCE", 600.0)
    first = threading.Thread(target=ckptconv.convert, args=(sharded, out), kwargs={"max_shard_size": 100_000})
    first.start()
    assert held.wait(600)
    second = threading.Thread(target=ckptconv.convert, args=(sharded, out), kwargs={"max_shard_size": 2_000_000})
    second.start()
    # Where it did not wait, it would be done by then.
    time.sleep(0.5)
    go_on.set()
    first.join()
    second.join()
    assert [event.split()[0] for event in events] == ["begin", "end", "begin", "end"]
    assert contents(out) == contents(tmp_path / "expected")
    assert len(expected.outputs) < SHARDS


def test_who_has_waited_too_long_says_so(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr(area, "PATIENCE", 0.0)
    with handles.Handle.open(str(out)) as here:
        place, guard = area.enter(here, ".ckptconv-publishing", str(out), shared=False)
        run = convert_sharded(sharded, out)
        place.close()
        os.close(guard)
    assert run.code == 1
    assert "another process" in run.err
    assert not list(out.glob("model*"))
    # What is made is not lost.
    assert done(convert_sharded(sharded, out, "--json")).json["reused"] == SHARDS
    assert not list(out.glob(".ckptconv-[!m]*"))


def test_a_rename_that_fails_is_told_as_it_is_and_the_next_run_completes_it(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done(convert_sharded(sharded, tmp_path / "expected"))
    publish = LocalStaging.publish
    for after, parts in itertools.product((0, 1, 3, SHARDS), (False, True) if IN_PARTS else (False,)):
        out = tmp_path / f"{after} {parts}"
        done(convert_sharded(sharded, out, "--exclude", "layer0"))
        if parts:
            done(convert_sharded(sharded, out, "--part", "0/1"))

        def failing_at(self: Any, names: Any, after: int = after) -> None:
            with failing(monkeypatch, "replace", after, OSError(28, "No space left on device")):
                publish(self, names)

        again = ("finish", out) if parts else ("pt2safetensors", sharded, out, *SHARDED, "--json")
        with monkeypatch.context() as patched:
            patched.setattr(LocalStaging, "publish", failing_at)
            ckptconv_here(*again).refused(1, f"{after} have their final names", out / ".ckptconv-")
        assert not (out / INDEX).exists(), out
        run = done(ckptconv_here(*again))
        assert parts or run.json["reused"] == SHARDS, out
        assert contents(out) == contents(tmp_path / "expected"), out


def test_only_what_is_still_to_be_written_has_to_fit(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that was begun, and a file whose writing was killed, have their room already."""
    usual = os.statvfs
    room = [1 << 40]

    def small(path: Any) -> Any:
        found = usual(path)
        fields = {name: getattr(found, name) for name in dir(found) if name.startswith("f_")}
        return type("Found", (), {**fields, "f_bavail": room[0], "f_frsize": 1})()

    monkeypatch.setattr(os, "statvfs", small)
    if IN_PARTS:
        done(convert_sharded(sharded, tmp_path / "out", "--part", "0/1"))
        room[0] = 10_000
        done(convert_sharded(sharded, tmp_path / "out", "--part", "0/1"))
        done(ckptconv_here("finish", tmp_path / "out"))
    path = str(tmp_path / "one")
    with LocalStaging(path, "plan") as begun:
        room[0] = 1 << 40
        begun.create("", 1_000_000).write_at(0, memoryview(bytes(1_000_000)))
        hidden = begun.staged("")
        shutil.copyfile(hidden, tmp_path / "kept")
    os.replace(tmp_path / "kept", hidden)
    room[0] = 10_000
    with LocalStaging(path, "plan") as again:
        again.create("", 1_000_000)
        again.commit([""])
    assert os.path.getsize(path) == 1_000_000


# ------------------------------------------------------------------------------- what is written beside the outputs


def named_otherwise(path: Path, place: Path) -> list[Path]:
    """A file by its own name, by links to it, and by a detour."""
    (place / "link").symlink_to(path)
    os.link(path, place / "name")
    return [path, place / "link", place / "name", path.parent / ".." / path.parent.name / path.name]


def test_no_output_replaces_a_file_of_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(ZERO / "z2_bf16_w2/checkpoint", tmp_path / "checkpoint"))
    before = contents(checkpoint)
    out = tmp_path / "out"
    files = [path for path in checkpoint.rglob("*") if path.is_file() and path.suffix in ("", ".pt")]
    assert len(files) > 3
    for number, path in enumerate(files):
        place = tmp_path / f"place{number}"
        place.mkdir()
        commands: list[tuple[object, ...]] = []
        # How a file is recognised is asked of one, and of all others whether they are known.
        for goal in named_otherwise(path, place) if number < 2 else [path]:
            commands += [(*words, goal, checkpoint) for words in PAGES]
            commands += [("zero-to-fp32", checkpoint, out, option, goal) for option in BESIDE]
        # Such an output has a name of its own, under which a file of the checkpoint may be too.
        os.link(path, place / "hard.safetensors")
        (place / "soft.safetensors").symlink_to(path)
        for goal in (place / "hard.safetensors", place / "soft.safetensors"):
            commands += [("zero-to-fp32", checkpoint, goal), ("zero-to-fp32", checkpoint, out, "--optimizer", goal)]
        for command in commands:
            ckptconv_here(*command).refused(2, "would replace")
            assert contents(checkpoint) == before, command
            assert not out.exists(), command


def test_the_index_of_shards_and_the_pointer_past_a_tag_are_of_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(ZERO / "z2_bf16_w2/checkpoint", tmp_path / "checkpoint"))
    tag = (checkpoint / "latest").read_text()
    run = ckptconv_here("zero-to-fp32", checkpoint, tmp_path / "o", "-t", tag, "--manifest", checkpoint / "latest")
    assert run.code == 2
    ckptconv.convert(seven_shards(tmp_path / "model.pt"), tmp_path / "shards", max_shard_size=1_000_000)
    for source in (tmp_path / "shards", tmp_path / "shards" / INDEX):
        for option in BESIDE:
            run = ckptconv_here("convert", source, tmp_path / "back", option, tmp_path / "shards" / INDEX)
            assert run.code == 2, run.err
        for words in PAGES:
            ckptconv_here(*words, tmp_path / "shards" / INDEX, source).refused(2)
