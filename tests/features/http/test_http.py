"""Checkpoints on servers of HTTP, with ranges and without."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import torch
from checkpoints import ckptconv_here, done
from features.http.server import http_server
from remote import KIB, a_model, converted_here

from ckptconv import convert
from ckptconv.errors import FailedError, UsageError
from ckptconv.features.remote import access
from ckptconv.formats.detect import open_source


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.pt"
    torch.save(a_model(), path)
    return path


@pytest.fixture(scope="module")
def plain(model: Path) -> Path:
    return converted_here(model)


@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_inspecting_a_huge_file_reads_kilobytes(kind: str, tmp_path: Path) -> None:
    huge = {"first": torch.empty(10**9), "second": torch.empty(10**9)}  # 8 GB, never touched
    if kind == "torch":
        with torch.serialization.skip_data():
            torch.save(huge, tmp_path / "huge")
    else:
        header = {
            key: {"dtype": "F32", "shape": [10**9], "data_offsets": [at * 4 * 10**9, (at + 1) * 4 * 10**9]}
            for at, key in enumerate(huge)
        }
        text = json.dumps(header).encode()
        with (tmp_path / "huge").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + 8 * 10**9)
    with http_server(tmp_path) as counted:
        assert len(open_source(f"{counted.endpoint}/huge").weights) == len(huge)
        assert counted.bytes_asked < 400 * KIB
        assert sum(asked.reads_range for asked in counted.asked) <= 5


def test_opening_a_file_of_many_storages_reads_a_few_bytes_for_each(tmp_path: Path) -> None:
    count = 300
    with torch.serialization.skip_data():
        torch.save({f"layer.{n}": torch.empty(10**6) for n in range(count)}, tmp_path / "model.pt")
    with http_server(tmp_path) as counted:
        assert len(open_source(f"{counted.endpoint}/model.pt").weights) == count
        assert counted.bytes_asked < 400 * KIB
        assert sum(asked.reads_range for asked in counted.asked) <= count + 10


def test_a_server_of_files_is_read_by_ranges(model: Path, plain: Path, tmp_path: Path) -> None:
    with http_server(model.parent) as counted:
        report = convert(f"{counted.endpoint}/model.pt?version=1", tmp_path / "out.safetensors")
        assert counted.bytes_asked < 1.05 * report.bytes_written
    assert (tmp_path / "out.safetensors").read_bytes() == (plain / "plain.safetensors").read_bytes()


def test_what_is_written_names_a_file_without_the_query_of_its_url(model: Path, tmp_path: Path) -> None:
    with http_server(model.parent) as served:
        for at in range(2):
            url = served.endpoint.replace("//", "//me:SECRET@") + f"/{model.name}?sig=SECRET/{at}&expires=1"
            words = ["--manifest", tmp_path / f"{at}.json", "--digest", "sha256", "--overwrite"]
            run = done(ckptconv_here("convert", url, tmp_path / "out", *words, "--json"))
            assert "SECRET" not in run.out + run.err
            assert ckptconv_here("convert", url.replace(model.name, "none"), tmp_path / "x").err.count("SECRET") == 0
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if b"SECRET" in path.read_bytes()]
    # A new signature is of the same file.
    first, second = (json.loads((tmp_path / f"{at}.json").read_text()) for at in range(2))
    assert [*first["source"]["inputs"]] == [model.name]
    assert first["plan"] == second["plan"]


def test_the_address_of_a_server_alone_is_its_first_directory(plain: Path, tmp_path: Path) -> None:
    with http_server(plain / "plain", lists=True) as files:
        for number, end in enumerate(("", "/")):
            convert(f"{files.endpoint}{end}", tmp_path / str(number))
            shards = [*(plain / "plain").glob("*.safetensors")]
            assert len(shards) > 1
            for shard in shards:
                assert (tmp_path / str(number) / shard.name).read_bytes() == shard.read_bytes()


def test_a_name_like_one_in_the_listing_of_a_server_is_suggested(model: Path, tmp_path: Path) -> None:
    with http_server(model.parent, lists=True) as files:
        told = ckptconv_here("convert", f"{files.endpoint}/modle.pt", tmp_path / "x").refused(2, "does not exist")
        assert f"Did you mean {files.endpoint}/model.pt?" in told
        # The server's name is not the file's.
        for other in ("x.pt", "other/model.pt", "modle.pt?sig=SECRET"):
            told = ckptconv_here("convert", f"{files.endpoint}/{other}", tmp_path / "x").refused(2, "does not exist")
            assert "Did you mean" not in told
        secret = files.endpoint.replace("//", "//me:SECRET@")
        assert "SECRET" not in ckptconv_here("convert", f"{secret}/modle.pt", tmp_path / "x").refused(2)


def test_a_server_without_ranges_is_read_once_from_beginning_to_end(model: Path, plain: Path, tmp_path: Path) -> None:
    with http_server(model.parent, ranges=False) as counted:
        convert(f"{counted.endpoint}/model.pt", tmp_path / "out.safetensors")
        whole = [asked for asked in counted.asked if asked.method == "GET" and not asked.reads_range]
        assert len(whole) == 1
    assert (tmp_path / "out.safetensors").read_bytes() == (plain / "plain.safetensors").read_bytes()


def test_a_server_without_ranges_cannot_give_a_set_of_files(plain: Path, tmp_path: Path) -> None:
    said = r"only whole files.*Download its directory\. .* reads only a single file by its own URL"
    with http_server(plain, ranges=False) as files, pytest.raises(FailedError, match=said):
        convert(f"{files.endpoint}/plain/model.safetensors.index.json", tmp_path / "out.safetensors")


def test_a_file_that_is_not_served_and_a_server_that_is_not_there(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "WAITS", (0.01,))
    with http_server(model.parent) as files:
        with pytest.raises(UsageError, match="does not exist"):
            convert(f"{files.endpoint}/nothing.pt", tmp_path / "out.safetensors")
        with pytest.raises(UsageError, match="cannot be written to http"):
            convert(model, f"{files.endpoint}/out.safetensors")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        with pytest.raises(FailedError, match="cannot be accessed:"):
            convert(f"http://127.0.0.1:{taken.getsockname()[1]}/model.pt", tmp_path / "out.safetensors")


def test_an_address_without_http_is_told_its_scheme() -> None:
    run = ckptconv_here("convert", "127.0.0.1:8719/v1.pt", "x.safetensors")
    run.refused(2, "If it is the address of a server, specify http://127.0.0.1:8719/v1.pt.")
    # A port is a number.
    assert "http://" not in ckptconv_here("convert", "step:last/v1.pt", "x.safetensors").refused(2)
