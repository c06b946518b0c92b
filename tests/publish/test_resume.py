"""A conversion that was interrupted goes on where it was; the manifest says what was made of what."""

from __future__ import annotations

import json
import os
import shutil
import signal
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import verified_here
from checkpoints import Run, ckptconv_here, done
from processes import AT_SHARD, contents, dying
from safetensors.torch import load_file

from ckptconv.options.table import OPTIONS
from ckptconv.publish import jobs as making

SHARDED = ("--max-shard-size", "1MB")
COUNT = 5
INDEX = "model.safetensors.index.json"
MANIFEST = ".ckptconv-manifest.json"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that is converted to five shards of two tensors."""
    path = tmp_path / "model.pt"
    torch.save({f"layer{n}": torch.full((125, 1000), float(n)) for n in range(2 * COUNT)}, path)
    return path


def is_model(output: Path) -> bool:
    index = json.loads((output / INDEX).read_text())["weight_map"]
    return len(index) == 2 * COUNT and all(
        bool((load_file(output / file)[name] == float(name[5:])).all()) for name, file in index.items()
    )


def convert(model: Path, output: Path, *options: object) -> Run:
    return ckptconv_here("pt2safetensors", model, output, *SHARDED, *options)


def staging(output: Path) -> list[Path]:
    return [path for path in output.iterdir() if path.is_dir() and path.name.startswith(".ckptconv-")]


# Is killed at its n-th rename.
AT_RENAME = """
replace = os.replace
left = [{}]
def dying(*arguments, **options):
    if not os.path.basename(arguments[1]).startswith(".record-"):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
    replace(*arguments, **options)
os.replace = dying
"""


# -------------------------------------------------------------------------------------------------------- going on


def test_after_a_kill_only_what_is_left_is_done(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "expected")
    for options in ("", "--no-fsync", "--jobs 2"):
        out, words = tmp_path / f"out{options}", options.split()
        done = dying(AT_SHARD.format("00004-", "SIGKILL"), "pt2safetensors", model, out, *SHARDED, *words)
        assert done.returncode == -signal.SIGKILL, options
        assert [path.name for path in out.iterdir()] == [staging(out)[0].name], options
        report = convert(model, out, "--json", *words).json
        assert report["reused"] == 3, options
        assert report["bytes_written"] < sum(output["bytes"] for output in report["outputs"]) - 3_000_000, options
        assert contents(out) == contents(tmp_path / "expected"), options
        assert not staging(out), options


@pytest.mark.skipif("like" not in OPTIONS, reason="there are no references")
def test_after_a_kill_files_that_are_like_a_reference_are_taken_over(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "reference")
    state = torch.load(model)
    torch.save({name: tensor for name, tensor in state.items() if name != "layer8"}, model)
    like = ("--like", tmp_path / "reference", "--fill")
    done = dying(AT_SHARD.format("00004-", "SIGKILL"), "pt2safetensors", model, tmp_path / "out", *like)
    assert done.returncode == -signal.SIGKILL
    run = ckptconv_here("pt2safetensors", model, tmp_path / "out", *like, "--json")
    assert (run.code, run.json["reused"]) == (0, 3)
    assert is_model(tmp_path / "out")
    verified_here(model, tmp_path / "out")


def test_a_signal_keeps_what_is_finished_and_says_where(model: Path, tmp_path: Path) -> None:
    for name, code in (("SIGTERM", 143), ("SIGINT", 130)):
        out = tmp_path / name
        done = dying(AT_SHARD.format("00004-", name), "pt2safetensors", model, out, *SHARDED)
        assert done.returncode == code
        (kept,) = staging(out)
        assert f"kept in {kept}: run the same command again to continue" in done.stderr
        assert {path.name for path in out.iterdir()} == {kept.name}
        shards = [path for path in kept.iterdir() if path.suffix == ".safetensors"]
        assert all(load_file(shard) for shard in shards)
        run = convert(model, out)
        assert f"{len(shards)} files reused from an interrupted run" in run.out
        assert len(shards) > 1
        assert is_model(out)


def test_a_signal_before_anything_is_finished_leaves_nothing(model: Path, tmp_path: Path) -> None:
    done = dying(AT_SHARD.format("00001-", "SIGTERM"), "pt2safetensors", model, tmp_path / "out", *SHARDED)
    assert done.returncode == 143
    assert "kept" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_kill_in_the_commit_is_completed_without_doing_the_work_again(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "expected")
    torch.save({"old": torch.ones(2), "older": torch.ones(2)}, tmp_path / "old.pt")
    for at in (0, 1, COUNT, COUNT + 1):
        out = tmp_path / f"out{at}"
        done(ckptconv_here("pt2safetensors", tmp_path / "old.pt", out, "--max-shard-size", "8B"))
        (out / "old").mkdir()
        assert (out / INDEX).exists()
        assert dying(AT_RENAME.format(at), "pt2safetensors", model, out, *SHARDED).returncode == -signal.SIGKILL, at
        assert not (out / INDEX).exists(), at
        assert convert(model, out, "--json").json["reused"] == COUNT, at
        assert contents(out) == contents(tmp_path / "expected"), at
        assert not staging(out), at


def test_a_record_decides_and_not_that_a_file_is_there(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(model, tmp_path / "expected")
    spoilings: list[tuple[str, Callable[[Path], Any]]] = [
        (".record-*", lambda path: path.unlink()),
        (".record-*", lambda path: path.write_bytes(path.read_bytes()[:100])),
        (".record-*", lambda path: path.write_bytes(b"\0" * path.stat().st_size)),
        (".record-*", lambda path: path.write_bytes(b"[]")),
        ("model-00001-*", lambda path: os.truncate(path, 100)),
    ]
    for kind, spoil in spoilings:
        dying(AT_SHARD.format("00004-", "SIGTERM"), "pt2safetensors", model, out, *SHARDED, "--no-fsync")
        assert len([*staging(out)[0].glob(".record-*")]) == 3
        spoil(min(staging(out)[0].glob(kind)))
        assert convert(model, out, "--json").json["reused"] == 2
        assert contents(out) == contents(tmp_path / "expected")
        shutil.rmtree(out)


def test_what_was_not_synced_is_read_again_before_it_counts(model: Path, tmp_path: Path) -> None:
    """A crash of the machine leaves zeros in a file that no fsync was waited for."""
    for options, reused in (((), 3), (("--no-fsync",), 2)):
        out = tmp_path / f"out{reused}"
        dying(AT_SHARD.format("00004-", "SIGKILL"), "pt2safetensors", model, out, *SHARDED, *options)
        shard = staging(out)[0] / "model-00002-of-00005.safetensors"
        found = shard.stat()
        shard.write_bytes(shard.read_bytes()[:-4096] + bytes(4096))
        os.utime(shard, ns=(found.st_atime_ns, found.st_mtime_ns))
        assert convert(model, out, "--json").json["reused"] == reused
        assert is_model(out) == bool(options)


def test_leftovers_of_another_plan_are_removed_and_never_used(model: Path, tmp_path: Path) -> None:
    for number, other in enumerate(("--dtype bfloat16", "--exclude layer9", "")):
        out = tmp_path / str(number)
        dying(AT_SHARD.format("00004-", "SIGTERM"), "pt2safetensors", model, out, *SHARDED)
        assert staging(out)
        if not other:  # an input that was written anew
            torch.save({f"layer{n}": torch.full((125, 1000), float(n + 1)) for n in range(2 * COUNT)}, model)
        assert convert(model, out, "--json", *other.split()).json["reused"] == 0, other
        assert not staging(out), other
    index = json.loads((out / INDEX).read_text())["weight_map"]
    assert load_file(out / index["layer0"])["layer0"][0, 0] == 1


def test_names_that_are_swapped_make_another_plan(tmp_path: Path) -> None:
    """The headers are the same to the byte, and the data is not."""
    path = tmp_path / "model.pt"
    torch.save({"a": torch.zeros(1000), "b": torch.ones(1000), "c": torch.full((1000,), 2.0)}, path)
    swap = ["--rename", "^a$=x", "--rename", "^b$=a", "--rename", "^x$=b"]
    shards = ["--max-shard-size", "4000B"]
    dying(AT_SHARD.format("00003-", "SIGTERM"), "pt2safetensors", path, tmp_path / "out", *shards, "--no-fsync")
    assert staging(tmp_path / "out")
    run = ckptconv_here("pt2safetensors", path, tmp_path / "out", *shards, *swap, "--json")
    assert run.json["reused"] == 0
    stored = {k: v for file in (tmp_path / "out").glob("*.safetensors") for k, v in load_file(file).items()}
    assert (stored["a"][0], stored["b"][0], stored["c"][0]) == (1, 0, 2)


# --------------------------------------------------------------------------------------------------------- manifest


def test_the_manifest_says_what_was_made_of_what(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run = convert(model, out, "--exclude", "layer9", "--dtype", "float16", "--manifest", tmp_path / "m.json")
    assert run.code == 0, run.err
    assert (tmp_path / "m.json").read_bytes() == (out / MANIFEST).read_bytes()
    found = json.loads((out / MANIFEST).read_text())
    assert found["kind"] == "weights"
    assert found["options"] == {"dtype": "float16", "exclude": ["layer9"], "max_shard_size": 1_000_000}
    assert found["source"]["inputs"]["model.pt"]["size"] == model.stat().st_size
    assert set(found["files"]) == set(contents(out)) - {MANIFEST}
    for name, entry in found["files"].items():
        assert entry["size"] == (out / name).stat().st_size
        tensors = load_file(out / name) if name.endswith(".safetensors") else {}
        assert entry["tensors"] == {
            key: f"{zlib.crc32(value.view(torch.uint8).numpy().tobytes()):08x}" for key, value in tensors.items()
        }


def test_the_manifest_of_one_file_is_written_where_it_is_asked_for(model: Path, tmp_path: Path) -> None:
    run = ckptconv_here("pt2safetensors", model, tmp_path / "a.safetensors", "--manifest", tmp_path / "a.json")
    assert run.code == 0, run.err
    (entry,) = json.loads((tmp_path / "a.json").read_text())["files"].values()
    assert set(entry["tensors"]) == {f"layer{n}" for n in range(2 * COUNT)}
    assert all(entry["tensors"].values())


def test_manifests_are_the_same_for_the_same_input_wherever_it_lies_and_however_it_went(
    model: Path, tmp_path: Path
) -> None:
    convert(model, tmp_path / "one", "--jobs", "1")
    (tmp_path / "elsewhere").mkdir()
    copied = Path(shutil.copyfile(model, tmp_path / "elsewhere" / "model.pt"))
    dying(AT_SHARD.format("00003-", "SIGKILL"), "pt2safetensors", copied, tmp_path / "two", *SHARDED)
    convert(copied, tmp_path / "two", "--jobs", "2", "--memory", "256KiB")
    assert (tmp_path / "one" / MANIFEST).read_bytes() == (tmp_path / "two" / MANIFEST).read_bytes()
    assert str(tmp_path) not in (tmp_path / "one" / MANIFEST).read_text()


def test_a_manifest_never_replaces_what_it_is_about(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.safetensors"
    for place in (model, out):
        assert ckptconv_here("pt2safetensors", model, out, "--manifest", place).code == 2
    assert not out.exists()
    assert torch.load(model)


def test_transposed_tensors_have_their_checksum_too(tmp_path: Path) -> None:
    """They are moved in tiles, and never are in order in memory."""
    wide = torch.arange(1500 * 1100, dtype=torch.int32).reshape(1500, 1100).t()
    torch.save({"wide": wide, "small": torch.ones(3)}, tmp_path / "model.pt")
    ckptconv_here("pt2safetensors", tmp_path / "model.pt", tmp_path / "a.safetensors", "--manifest", tmp_path / "m")
    (entry,) = json.loads((tmp_path / "m").read_text())["files"].values()
    assert int(entry["tensors"]["wide"], 16) == zlib.crc32(wide.contiguous().numpy().tobytes())


def test_one_file_without_a_manifest_costs_no_checksums(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    usual = making.carry_out

    def carry_out(*arguments: Any, digests: Any, **options: Any) -> Any:
        asked.append(digests is not None)
        return usual(*arguments, digests=digests, **options)

    monkeypatch.setattr(making, "carry_out", carry_out)
    ckptconv_here("pt2safetensors", model, tmp_path / "a.safetensors")
    ckptconv_here("pt2safetensors", model, tmp_path / "a.safetensors", "--manifest", tmp_path / "m")
    assert asked == [False, True]
