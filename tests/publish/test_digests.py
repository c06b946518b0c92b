"""`--digest`: content digests of every file and tensor, in the manifest."""

from __future__ import annotations

import hashlib
import io
import json
import struct
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cells import trained, verified, verify, verifying
from checkpoints import ZERO, ckptconv_here, seven_shards
from digested import mixed_model, sha256, with_wrong_digests, written
from stores import PLACES

import ckptconv
from ckptconv import convert
from ckptconv.errors import DifferenceError, FailedError, UsageError
from ckptconv.options.table import OPTIONS
from ckptconv.outputs.kinds import NAMED
from ckptconv.outputs.schema import check_manifest, file_record
from ckptconv.storage import digests

MANIFEST = ".ckptconv-manifest.json"
INDEX = "model.safetensors.index.json"
SHARD = 100_000
# What safetensors are converted to.
BACK = "back.pt" if "pt" in NAMED else "back.safetensors"


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seven_shards(tmp_path_factory.mktemp("model") / "model.pt", rows=25)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixed_model(tmp_path_factory.mktemp("mixed") / "mixed.pt")


def of_safetensors(data: bytes) -> dict[str, bytes]:
    """The bytes of each tensor."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    return {
        name: data[8 + length + told["data_offsets"][0] : 8 + length + told["data_offsets"][1]]
        for name, told in header.items()
    }


def of_archive(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {
            each.filename: archive.read(each)
            for each in archive.infolist()
            if "/data/" in each.filename and each.file_size
        }


def tensors_in(name: str, data: bytes) -> dict[str, bytes]:
    if name.endswith(".safetensors"):
        return of_safetensors(data)
    return of_archive(data) if name.endswith(".pt") else {}


def assert_digested(manifest: bytes | str, files: dict[str, bytes]) -> None:
    """The manifest has the sha256 of each of these files, and of all tensors in them."""
    told = json.loads(manifest)
    check_manifest(told)
    assert told["digest"] == "sha256"
    assert told["files"].keys() == files.keys()
    for name, data in files.items():
        expected = {tensor: sha256(each) for tensor, each in tensors_in(name, data).items()}
        assert told["files"][name]["digests"] == {"file": sha256(data), "tensors": expected}


# ------------------------------------------------------------------------------------------------- of every output


def test_every_file_and_tensor_has_the_digest_of_its_bytes(shards: Path, mixed: Path, tmp_path: Path) -> None:
    conversions: list[tuple[Path, dict[str, Any]]] = [
        *((path, {}) for path in trained()),
        (mixed, {"jobs": 4}),
        (mixed, {"dtype": "bf16", "jobs": 1}),
        (mixed, {"max_shard_size": 4_000_000, "jobs": 2}),
        (shards, {"max_shard_size": SHARD, "fsync": False}),
    ]
    for number, (source, options) in enumerate(conversions):
        out = tmp_path / str(number)
        convert(source, out, digest="sha256", **options)
        assert_digested((out / MANIFEST).read_text(), written(out))
        verified(source, out)


def test_a_single_file_has_them_in_its_manifest(mixed: Path, tmp_path: Path) -> None:
    out, back = tmp_path / "out.safetensors", tmp_path / BACK
    convert(mixed, out, digest="sha256", manifest=tmp_path / "out.json", structure=False)
    assert_digested((tmp_path / "out.json").read_text(), {out.name: out.read_bytes()})
    convert(out, back, digest="sha256", manifest=tmp_path / "back.json")
    assert_digested((tmp_path / "back.json").read_text(), {back.name: back.read_bytes()})
    verified(mixed, out, manifest=tmp_path / "out.json")
    verified(out, back, manifest=tmp_path / "back.json")


def test_optimizer_states_have_them(tmp_path: Path) -> None:
    convert(ZERO / "z3_bf16_w2/checkpoint", tmp_path / "out", digest="sha256", optimizer=tmp_path / "states")
    assert_digested((tmp_path / "states" / MANIFEST).read_text(), written(tmp_path / "states"))


# ---------------------------------------------------------------------------------------------- however it was made


def test_a_conversion_that_goes_on_gives_the_same_manifest(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop() -> None:
        raise FailedError("It was stopped.")

    read: list[int] = []
    digests_of = digests.digests_of
    monkeypatch.setattr(digests, "digests_of", lambda *args: read.append(args[1]) or digests_of(*args))
    options: Any = {"max_shard_size": SHARD}
    convert(shards, tmp_path / "whole", digest="sha256", **options)
    # What has no digest in its record is read once.
    for before, count in (("sha256", 0), ("", 7)):
        out = tmp_path / f"out{before}"
        with pytest.raises(FailedError, match="stopped"):
            convert(shards, out, digest=before, before_commit=stop, **options)
        assert convert(shards, out, digest="sha256", **options).reused == 7
        assert_digested((out / MANIFEST).read_text(), written(out))
        assert len(read) == count
        assert (out / MANIFEST).read_bytes() == (tmp_path / "whole" / MANIFEST).read_bytes()


@pytest.mark.skipif("part" not in OPTIONS, reason="there are no parts")
def test_parts_give_what_a_whole_run_gives(mixed: Path, tmp_path: Path) -> None:
    options: Any = {"max_shard_size": 4_000_000}
    convert(mixed, tmp_path / "out", digest="sha256", **options)
    for first in ("", "sha256"):
        parts = tmp_path / f"parts{first}" / "out"
        for number, digest in enumerate((first, "sha256")):
            convert(mixed, parts, part=(number, 2), digest=digest, **options)
        ckptconv.finish(parts)
        assert (parts / MANIFEST).read_bytes() == (tmp_path / "out" / MANIFEST).read_bytes()


@pytest.mark.parametrize("kind", PLACES)
def test_what_is_sent_to_a_store_is_digested_on_its_way(kind: str, shards: Path, mixed: Path) -> None:
    for source, size, part in ((mixed, 4_000_000, None), (shards, SHARD, (0, 1) if "part" in OPTIONS else None)):
        place = PLACES[kind]()
        known: Any = {"storage_options": place.options}
        convert(source, place.url, digest="sha256", max_shard_size=size, **({"part": part} if part else {}), **known)
        if part:
            ckptconv.finish(place.url, **known)
        files = place.contents()
        assert_digested(files.pop(MANIFEST), files)
        verified(source, place.url, **known)


def test_a_conversion_that_fails_leaves_no_thread(mixed: Path, tmp_path: Path) -> None:
    def full(count: int) -> None:
        raise FailedError("The disk is full.")

    before = set(threading.enumerate())  # those of earlier tests may end meanwhile
    with pytest.raises(FailedError, match="full"):
        convert(mixed, tmp_path / "out", digest="sha256", progress=full)
    assert not set(threading.enumerate()) - before
    assert not (tmp_path / "out").exists()


# -------------------------------------------------------------------------------------------------------- verifying


@verifying
def test_verify_finds_a_byte_that_only_a_digest_tells(shards: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(shards, out, max_shard_size=SHARD, digest="sha256")
    # The same index in other words, as long as before.
    text = (out / INDEX).read_text()
    (out / INDEX).write_text(text.replace('"metadata": {', ' "metadata":{', 1))
    assert len((out / INDEX).read_text()) == len(text)
    with pytest.raises(DifferenceError, match=f"the sha256 of {INDEX}"):
        verify(shards, out)


@verifying
def test_verify_finds_a_digest_that_is_not_so(mixed: Path, tmp_path: Path) -> None:
    convert(mixed, tmp_path / "m.safetensors", structure=False)
    convert(mixed, tmp_path / "out", digest="sha256")
    convert(tmp_path / "m.safetensors", tmp_path / BACK, digest="sha256", manifest=tmp_path / "m.json")
    outputs: list[tuple[Path, str, Path, dict[str, Any]]] = [
        (mixed, "out", tmp_path / "out" / MANIFEST, {}),
        (tmp_path / "m.safetensors", BACK, tmp_path / "m.json", {"manifest": tmp_path / "m.json"}),
    ]
    for source, output, manifest, asked in outputs:
        for _ in with_wrong_digests(manifest):
            with pytest.raises(DifferenceError, match=r"mismatch in the sha256 of"):
                verify(source, tmp_path / output, **asked)


UNSOUND: list[Callable[[dict[str, Any], dict[str, Any]], object]] = [
    lambda told, entry: told.update(digest="md5"),
    lambda told, entry: told.update(digest=["sha256"]),
    lambda told, entry: told.pop("digest"),
    lambda told, entry: entry.pop("digests"),
    lambda told, entry: entry["digests"].pop("file"),
    lambda told, entry: entry["digests"].update(file="0" * 63),
    lambda told, entry: entry["digests"].update(tensors=[]),
    lambda told, entry: entry["digests"]["tensors"].update(more="0" * 64),
    lambda told, entry: entry["digests"]["tensors"].update(large=3),
    lambda told, entry: entry["digests"].update(sha512="0" * 64),
]


@verifying
def test_digests_that_nothing_writes_are_refused(mixed: Path, tmp_path: Path) -> None:
    convert(mixed, tmp_path / "out", digest="sha256")
    sound = (tmp_path / "out" / MANIFEST).read_text()
    for change in UNSOUND:
        told = json.loads(sound)
        change(told, told["files"]["model.safetensors"])
        (tmp_path / "out" / MANIFEST).write_text(json.dumps(told))
        with pytest.raises(DifferenceError, match="is not a valid manifest"):
            verify(mixed, tmp_path / "out")


def test_a_record_with_unknown_digests_is_refused() -> None:
    told: dict[str, Any] = {"name": "a", "size": 0, "plan": "p", "spans": [], "inode": 1, "mtime": 1, "synced": True}
    told["digests"] = {"algorithm": "sha256", "file": sha256(b""), "tensors": {}}
    assert file_record(json.dumps(told).encode()) == told
    for algorithm in ("md5", 3, ["sha256"]):
        told["digests"]["algorithm"] = algorithm
        with pytest.raises(ValueError, match="'algorithm' of 'digests'"):
            file_record(json.dumps(told).encode())


# ------------------------------------------------------------------------------------------------- what is refused


def test_without_the_package_blake3_nothing_is_written(
    mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "blake3", None)
    run = ckptconv_here("pt2safetensors", mixed, tmp_path / "out", "--digest", "blake3")
    run.refused(2, "need the package blake3", "pip install 'ckptconv[blake3]'")
    assert not (tmp_path / "out").exists()


def test_the_package_blake3_gives_the_digests(mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Another function with digests as long, as the package need not be there.
    monkeypatch.setitem(sys.modules, "blake3", SimpleNamespace(blake3=hashlib.blake2s))
    convert(mixed, tmp_path / "out", digest="blake3")
    told = json.loads((tmp_path / "out" / MANIFEST).read_text())
    data = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert told["digest"] == "blake3"
    assert told["files"]["model.safetensors"]["digests"] == {
        "file": hashlib.blake2s(data).hexdigest(),
        "tensors": {name: hashlib.blake2s(each).hexdigest() for name, each in of_safetensors(data).items()},
    }
    verified(mixed, tmp_path / "out")


def test_digests_that_would_be_kept_nowhere_are_refused(mixed: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no manifest to store the digests"):
        convert(mixed, tmp_path / "out.safetensors", digest="sha256")
    assert not list(tmp_path.iterdir())
