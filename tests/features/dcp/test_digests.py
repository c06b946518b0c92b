"""Digests of the files of a checkpoint, and of the tensors in its entries."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

import pytest
import torch

from ckptconv import DifferenceError, convert, verify
from ckptconv.outputs.targets import MANIFEST


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tensors larger and smaller than what is read at a time, transposed, tied, empty, scalar."""
    path = tmp_path_factory.mktemp("mixed") / "mixed.pt"
    state = {f"small{n}": torch.full((n,), float(n)) for n in range(1, 40)}
    state |= {"large": torch.randn(700, 1100), "transposed": torch.randn(900, 1500).t(), "tied": state["small9"]}
    state |= {"empty": torch.empty(0, 4), "also empty": torch.empty(0), "scalar": torch.tensor(2.5)}
    torch.save({**state, "epoch": 3}, path)
    return path


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def written(directory: Path) -> dict[str, bytes]:
    names = (path for path in directory.iterdir() if path.is_file() and path.name != MANIFEST)
    return {path.name: path.read_bytes() for path in names}


def test_a_checkpoint_of_torch_has_them(mixed: Path, tmp_path: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    out = tmp_path / "out"
    convert(mixed, out, to="dcp", digest="sha256")
    told, files = json.loads((out / MANIFEST).read_text())["files"], written(out)
    assert {name: entry["digests"]["file"] for name, entry in told.items()} == {
        name: sha256(data) for name, data in files.items()
    }
    entries = FileSystemReader(out).read_metadata().storage_data
    of_place: dict[tuple[str, int], list[str]] = {}
    for key, place in entries.items():
        of_place.setdefault((place.relative_path, place.offset), []).append(key.fqn)
    for place in entries.values():
        record = files[place.relative_path][place.offset : place.offset + place.length]
        found = torch.load(io.BytesIO(record), weights_only=False)
        if isinstance(found, torch.Tensor) and found.numel():
            expected = sha256(found.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            # Of keys that are tied, one has the data, and the digest.
            names = [f"{name} {[0] * found.dim()}" for name in of_place[place.relative_path, place.offset]]
            digests = told[place.relative_path]["digests"]["tensors"]
            assert [digests[name] for name in names if name in digests] == [expected]
    verify(mixed, out, to="dcp")


def test_optimizer_states_have_them(tmp_path: Path) -> None:
    convert(RUN, tmp_path / "out", digest="sha256", optimizer=tmp_path / "states")
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


def test_parts_give_what_a_whole_run_gives(mixed: Path, tmp_path: Path) -> None:
    options: Any = {"max_shard_size": 4_000_000}
    convert(mixed, tmp_path / "out", digest="sha256", **options)
    for first in ("", "sha256"):
        parts = tmp_path / f"parts{first}" / "out"
        for number, digest in enumerate((first, "sha256")):
            convert(mixed, parts, part=(number, 2), digest=digest, **options)
        finish(parts)
        assert (parts / MANIFEST).read_bytes() == (tmp_path / "out" / MANIFEST).read_bytes()


def test_the_process_that_writes_a_file_digests_it(shards: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as executor:
        convert(shards, tmp_path / "out", executor=executor, max_shard_size=SHARD, digest="sha256")
    assert_digested((tmp_path / "out" / MANIFEST).read_text(), written(tmp_path / "out"))


@pytest.mark.parametrize("kind", PLACES)
def test_what_is_sent_to_a_store_is_digested_on_its_way(kind: str, shards: Path, mixed: Path) -> None:
    for source, size, part in ((mixed, 4_000_000, None), (shards, SHARD, (0, 1))):
        place = PLACES[kind]()
        known: Any = {"storage_options": place.options}
        convert(source, place.url, digest="sha256", max_shard_size=size, part=part, **known)
        if part:
            finish(place.url, **known)
        files = place.contents()
        assert_digested(files.pop(MANIFEST), files)
        verify(source, place.url, **known)


def test_a_conversion_that_fails_leaves_no_thread(mixed: Path, tmp_path: Path) -> None:
    def full(count: int) -> None:
        raise FailedError("The disk is full.")

    before = set(threading.enumerate())  # those of earlier tests may end meanwhile
    with pytest.raises(FailedError, match="full"):
        convert(mixed, tmp_path / "out", digest="sha256", progress=full)
    assert not set(threading.enumerate()) - before
    assert not (tmp_path / "out").exists()


# -------------------------------------------------------------------------------------------------------- verifying


def test_verify_finds_a_digest_that_is_not_so(mixed: Path, tmp_path: Path) -> None:
    convert(mixed, tmp_path / "out", digest="sha256", to="dcp")
    manifest = tmp_path / "out" / MANIFEST
    sound = manifest.read_text()
    for what in ("file", "tensor"):
        told = json.loads(sound)
        for entry in told["files"].values():
            digests = entry["digests"]
            for first in [*digests["tensors"]][:1]:
                target, key = (digests, "file") if what == "file" else (digests["tensors"], first)
                target[key] = "0" * 64
        manifest.write_text(json.dumps(told))
        with pytest.raises(DifferenceError, match=r"the sha256 of .* is wrong"):
            verify(mixed, tmp_path / "out")
