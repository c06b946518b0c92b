"""Digests of the files of a checkpoint, and of the tensors in its entries."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from cells import verified, verify, verifying
from digested import mixed_model, sha256, with_wrong_digests, written

from ckptconv import DifferenceError, convert
from ckptconv.outputs.targets import MANIFEST


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixed_model(tmp_path_factory.mktemp("mixed") / "mixed.pt")


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
    verified(mixed, out, to="dcp")


@verifying
def test_verify_finds_a_digest_that_is_not_so(mixed: Path, tmp_path: Path) -> None:
    convert(mixed, tmp_path / "out", digest="sha256", to="dcp")
    for _ in with_wrong_digests(tmp_path / "out" / MANIFEST):
        with pytest.raises(DifferenceError, match=r"mismatch in the sha256 of"):
            verify(mixed, tmp_path / "out")
