"""Servers that answer wrongly, or not at all: they are not believed unchecked, and not waited for without end."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ckptconv_here
from features.http import misbehaving
from features.http.server import http_server
from remote import process_serving
from safetensors.torch import load_file, save_file

from ckptconv import convert
from ckptconv.errors import CorruptError, FailedError, UnsafeError
from ckptconv.features.http import answers, object_checksums
from ckptconv.features.http.object_checksums import Check
from ckptconv.features.http.store import of_headers
from ckptconv.features.remote import access


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "WAITS", (0.01,) * 3)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """For servers that do not answer. On a busy machine, another may take as long."""
    monkeypatch.setattr(answers, "NOTICE", 0.2)
    monkeypatch.setattr(answers, "PATIENCE", 0.5)


def serving(path: Path, fault: str) -> Any:
    return process_serving([sys.executable, misbehaving.__file__, str(path), fault], {"PYTHONPATH": ""})


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So small that it is read with one request."""
    path = tmp_path_factory.mktemp("small") / "model.pt"
    torch.save({"w": torch.arange(1000.0)}, path)
    return path


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "model.pt"
    torch.save({"w": torch.arange(100_000.0)}, path)
    return path


@pytest.mark.parametrize("fault", ["", "sound"])
def test_a_server_that_does_as_it_should_is_read(fault: str, small: Path, tmp_path: Path) -> None:
    with serving(small, fault) as url:
        convert(f"{url}/model.pt", tmp_path / "out.safetensors")
    assert torch.equal(load_file(tmp_path / "out.safetensors")["w"], torch.arange(1000.0))


FAULTS: dict[str, tuple[type[Exception], str]] = {
    "shifted": (FailedError, "answered with 'bytes "),
    "unlabelled": (FailedError, "answered with no range"),
    "parts": (FailedError, "answered with no range"),
    "packed": (FailedError, r"compressed \(gzip\)"),
    "other": (CorruptError, "changed while it was read"),
    "grown": (FailedError, "bytes"),
}


@pytest.mark.parametrize(("fault", "error", "words"), [(name, *each) for name, each in FAULTS.items()], ids=FAULTS)
def test_a_range_that_is_not_what_was_asked_for(
    fault: str, error: type[Exception], words: str, large: Path, tmp_path: Path
) -> None:
    with serving(large, fault) as url, pytest.raises(error, match=words):
        convert(f"{url}/model.pt", tmp_path / "out.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fault", ["silent", "stalled"])
@pytest.mark.usefixtures("impatient")
def test_a_range_that_does_not_come(fault: str, large: Path, tmp_path: Path) -> None:
    hung = "its server sent no data for 0.5 seconds"
    with serving(large, fault) as url, pytest.raises(FailedError, match=re.escape(hung)):
        convert(f"{url}/model.pt", tmp_path / "out.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_bytes_that_do_not_have_the_checksum_of_the_file(small: Path, tmp_path: Path) -> None:
    with serving(small, "flipped") as url, pytest.raises(FailedError, match=r"does not match the checksum \(md5\)"):
        convert(f"{url}/model.pt", tmp_path / "out.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("impatient")
def test_a_wait_is_told_of_while_it_lasts(large: Path, tmp_path: Path) -> None:
    with serving(large, "silent") as url:
        run = ckptconv_here("pt2safetensors", f"{url}/model.pt", tmp_path / "out.safetensors")
    assert run.code == 1
    assert f"Waiting for {url}/model.pt: its server sent no data for 0.2 seconds." in run.err
    assert f"{url}/model.pt cannot be read: its server sent no data for 0.5 seconds" in run.err


# -------------------------------------------------------------------------------------------------------- checksums

DATA = b"123456789"
TOLD = {
    "crc32": {"x-amz-checksum-crc32": "y/Q5Jg=="},
    "crc32c": {"x-amz-checksum-crc32c": "4waSgw=="},
    "crc64nvme": {"X-Amz-Checksum-CRC64NVME": "rosUhgp5mIg="},
    "sha256": {"Repr-Digest": "sha-256=:FeKw08M4keuw8e9gnsQZQgwg4yDOlMZfvIwzEkSOsiU=:"},
    "md5": {"x-goog-hash": "crc32c=4waSgw==,md5=JfnnlDI7RTiF9RgfG2JNCw=="},
}


@pytest.mark.parametrize(("name", "headers"), TOLD.items(), ids=TOLD)
def test_checksums_of_every_kind(name: str, headers: dict[str, str]) -> None:
    for data, wrong in ((DATA, False), (DATA[:-1] + b"8", True)):
        check = Check(of_headers({key.lower(): value for key, value in headers.items()}), len(data))
        check.update(data[:4])
        check.update(data[4:])
        assert bool(check.wrong) == wrong, name


def test_what_is_no_checksum_of_the_whole_is_not_one() -> None:
    assert list(of_headers({"x-amz-checksum-crc32": "y/Q5Jg==", "x-amz-checksum-type": "COMPOSITE"})) == []
    assert list(of_headers({"x-amz-checksum-crc32": "y/Q5Jg==-3", "content-md5": "none", "digest": "x=y"})) == []


def test_a_long_file_is_not_checked_where_that_would_take_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_checksums, "SLOW_MOST", 8)
    check = Check(of_headers({"x-amz-checksum-crc64nvme": "AAAAAAAAAAA="}), len(DATA))
    check.update(DATA)
    assert not check.wrong


# -------------------------------------------------------------------------------------------------- names in a URL

NAMES = ["%2e%2e/secret.safetensors", "..%2fsecret.safetensors", "%2E%2e%2Fsecret.safetensors", "a?b", "a#b", "%00"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_in_an_index_on_a_server_does_not_lead_out_of_its_directory(name: str, tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    save_file({"w": torch.ones(3)}, tmp_path / "secret.safetensors")
    (inside / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with http_server(tmp_path) as proxy:
        with pytest.raises(UnsafeError, match="is outside its directory"):
            convert(f"{proxy.endpoint}/inside/model.safetensors.index.json", tmp_path / "out.safetensors")
        assert all(asked.path.startswith("/inside/model.safetensors.index.json") for asked in proxy.asked)


def test_odd_names_that_mean_themselves_are_read_here_and_from_a_server(tmp_path: Path) -> None:
    for names, root in ((["a b+é.safetensors", "c&d=e;f.safetensors"], "both"), (["100%.safetensors", "#1?"], "here")):
        place = tmp_path / root
        place.mkdir()
        for number, name in enumerate(names):
            save_file({f"w{number}": torch.ones(3)}, place / name)
        index = {"weight_map": {f"w{number}": name for number, name in enumerate(names)}}
        (place / "model.safetensors.index.json").write_text(json.dumps(index))
        convert(place, tmp_path / f"{root}.safetensors")
        if root == "both":
            with http_server(tmp_path) as files:
                convert(f"{files.endpoint}/{root}/model.safetensors.index.json", tmp_path / "far.safetensors")
