"""Checkpoints on S3: read by ranges, written as uploads, over links that break."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from botocore.exceptions import ClientError
from cells import verified, verifying
from checkpoints import ckptconv_here, contents
from features.s3.server import BUCKET, CREDENTIALS, S3, OnS3, tried_once
from huggingface_hub import save_torch_state_dict
from remote import KIB, MIB, Proxy, a_model, converted_here, fresh
from safetensors.torch import load_file
from stores import ServedSuite

import ckptconv as library
from ckptconv import convert
from ckptconv.errors import FailedError, UsageError
from ckptconv.features.s3.store import of_s3
from ckptconv.options.table import OPTIONS

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.pt"
    torch.save(a_model(), path)
    return path


@pytest.fixture(scope="module")
def plain(model: Path) -> Path:
    return converted_here(model)


class TestS3(ServedSuite):
    @pytest.fixture
    def place(self, s3: S3) -> OnS3:
        return OnS3(s3)

    @pytest.mark.parametrize("url", ["s3://", "s3:///out.safetensors"])
    def test_a_url_without_a_bucket_is_told_from_missing_credentials(self, url: str, model: Path) -> None:
        with pytest.raises(UsageError, match=f"{url} specifies no bucket.*Add its name after s3://"):
            convert(model, url)

    def test_a_bucket_that_is_not_there_is_named(self, s3: S3, model: Path) -> None:
        with pytest.raises(FailedError, match=r"no-such-bucket.*bucket"):
            convert(model, "s3://no-such-bucket/out.safetensors", storage_options=s3.options)
        with pytest.raises(FailedError, match=r"no-such-bucket.*bucket") as error:
            convert(model, "s3://no-such-bucket/out", storage_options=s3.options)
        assert "replaced" not in str(error.value)
        with pytest.raises(UsageError, match=r"x\.pt does not exist.*There is no bucket no-such-bucket"):
            convert("s3://no-such-bucket/x.pt", "memory://x/out.safetensors", storage_options=s3.options)
        with pytest.raises(UsageError, match=r"x\.pt does not exist") as error:
            convert(f"s3://{BUCKET}/x.pt", "memory://x/out.safetensors", storage_options=s3.options)
        assert "bucket" not in str(error.value).replace(BUCKET, "")

    def test_a_name_like_one_that_is_there_is_suggested(self, small: Path, place: OnS3) -> None:
        convert(small, f"{place.url}/model.safetensors", storage_options=place.options)
        with pytest.raises(UsageError, match="does not exist") as error:
            convert(f"{place.url}/modle.safetensors", "memory://x/out", storage_options=place.options)
        assert f"Did you mean {place.url}/model.safetensors?" in str(error.value)

    def test_what_stops_between_two_names_says_what_was_replaced(self, small: Path, place: OnS3, link: Proxy) -> None:
        options = place.through(link).options
        convert(small, f"{place.url}/old", storage_options=place.options)
        # The manifest comes last: then the other file has its name.
        link.rule = lambda asked: "403" if place.shows(asked) and "manifest" in asked.path else ""
        for output in ("new", "old"):
            with pytest.raises(FailedError, match=r"1 of 2 files have their .*json does not") as error:
                convert(small, f"{place.url}/{output}", storage_options=options, dtype="bf16")
            assert ("the earlier output is replaced in part" in str(error.value)) == (output == "old")

    def test_from_one_place_to_another_as_moto_serves_them(self, moto: S3, model: Path, plain: Path) -> None:
        place = OnS3(moto)
        convert(place.put(model, "model.pt"), f"{place.url}/out.safetensors", storage_options=place.options)
        assert place.contents()["out.safetensors"] == (plain / "plain.safetensors").read_bytes()
        assert not place.unfinished()


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


# -------------------------------------------------------------------------------------------------------- anywhere


def answered(s3: S3) -> Iterator[Any]:
    """What a store answers to all that a client may ask, but for times, and names that it makes up."""
    name, upload = fresh(), ""
    made_up = {name: "NAME", "binary/octet-stream": "application/octet-stream"}
    told = ("ETag", "ContentLength", "ContentRange", "Contents", "CommonPrefixes", "KeyCount", "IsTruncated", "Body")

    def asked(method: str, **given: Any) -> Any:
        nonlocal upload
        given = {key: value.replace("UPLOAD", upload) if key == "UploadId" else value for key, value in given.items()}
        try:
            answer = getattr(s3.client, method)(Bucket=given.pop("Bucket", BUCKET), **given)
        except ClientError as error:
            found = error.response
            return (method, found["ResponseMetadata"]["HTTPStatusCode"], found["Error"]["Code"])
        upload = answer.get("UploadId", upload)
        if "Body" in answer:
            answer["Body"] = answer["Body"].read()
        for row in answer.get("Contents", ()):
            assert row.pop("LastModified")
        kept = [
            {key: value for key, value in each.items() if key in ("Key", "Size", "ETag", "Prefix")}
            for rows in ("Contents", "CommonPrefixes", "Uploads", "Deleted")
            for each in answer.get(rows, ())
        ]
        simple = {key: answer.get(key) for key in told if not isinstance(answer.get(key), list)}
        text = repr((method, answer["ResponseMetadata"]["HTTPStatusCode"], simple, kept))
        for each, known in made_up.items():
            text = text.replace(each, known)
        return text

    small, large = f"{name}/a b/sm\u00e4ll&<.bin", f"{name}/large.bin"
    parts = [bytes(5 * MIB), b"the end"]
    tags = [f'"{hashlib.md5(part).hexdigest()}"' for part in parts]
    numbered = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]
    yield asked("head_object", Key=small)
    yield asked("get_object", Key=small)
    yield asked("put_object", Key=small, Body=b"0123456789")
    yield asked("put_object", Key=small, Body=b"0123456789", IfNoneMatch="*")
    yield asked("head_object", Key=small)
    yield asked("get_object", Key=small)
    for wanted in ("bytes=2-4", "bytes=7-99", "bytes=3-", "bytes=10-12"):
        yield asked("get_object", Key=small, Range=wanted)
    tag = hashlib.md5(b"0123456789").hexdigest()
    yield asked("get_object", Key=small, IfMatch=f'"{tag}"', Range="bytes=0-1")
    yield asked("get_object", Key=small, IfMatch='"other"', Range="bytes=0-1")
    yield asked("copy_object", Key=f"{name}/copy", CopySource={"Bucket": BUCKET, "Key": small})
    yield asked("create_multipart_upload", Key=large)
    for number, part in enumerate(parts, 1):
        yield asked("upload_part", Key=large, UploadId="UPLOAD", PartNumber=number, Body=part)
    yield asked("list_multipart_uploads", Prefix=f"{name}/")
    yield asked("head_object", Key=large)
    wrong = [{**numbered[0], "ETag": tags[1]}, numbered[1]]
    yield asked("complete_multipart_upload", Key=large, UploadId="UPLOAD", MultipartUpload={"Parts": wrong})
    yield asked("complete_multipart_upload", Key=large, UploadId="UPLOAD", MultipartUpload={"Parts": numbered})
    yield asked("complete_multipart_upload", Key=large, UploadId="UPLOAD", MultipartUpload={"Parts": numbered})
    yield asked("head_object", Key=large)
    yield asked("get_object", Key=large, Range="bytes=5242878-5242883")
    yield asked("create_multipart_upload", Key=large)
    yield asked("abort_multipart_upload", Key=large, UploadId="UPLOAD")
    yield asked("abort_multipart_upload", Key=large, UploadId="UPLOAD")
    yield asked("list_multipart_uploads", Prefix=f"{name}/")
    for options in ({}, {"Delimiter": "/"}, {"MaxKeys": 2}, {"StartAfter": f"{name}/copy"}):
        yield asked("list_objects_v2", Prefix=f"{name}/", **options)
    yield asked("list_objects_v2", Prefix=f"{name}/nothing")
    yield asked("delete_object", Key=f"{name}/copy")
    yield asked("delete_object", Key=f"{name}/copy")
    yield asked("delete_objects", Delete={"Objects": [{"Key": small}, {"Key": large}]})
    yield asked("list_objects_v2", Prefix=name)
    yield asked("head_bucket")
    yield asked("head_bucket", Bucket="no-such-bucket")
    yield asked("list_objects_v2", Bucket="no-such-bucket")
    yield asked("put_object", Bucket="no-such-bucket", Key="x", Body=b"")
    yield asked("create_multipart_upload", Bucket="no-such-bucket", Key="x")


def test_the_small_store_of_the_tests_answers_as_moto_does(s3: S3, moto: S3) -> None:
    assert list(answered(s3)) == list(answered(moto))


def test_what_is_sent_is_read_by_the_thread_that_sends_it(model: Path, s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else aiohttp has another thread read each 64 KiB, and both wait for each other most of the time."""
    handed_over: list[str] = []
    usual = asyncio.base_events.BaseEventLoop.run_in_executor

    def noted(self: Any, executor: Any, function: Any, *args: Any) -> Any:
        handed_over.append(getattr(function, "__name__", ""))
        return usual(self, executor, function, *args)

    monkeypatch.setattr(asyncio.base_events.BaseEventLoop, "run_in_executor", noted)
    convert(model, f"s3://models/{fresh()}/sent.safetensors", storage_options=s3.options)
    assert not [name for name in handed_over if "read" in name]


def test_the_command_line_takes_urls_storage_options_and_the_environment(
    model: Path, plain: Path, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = fresh()
    url = s3.put(model, f"{name}/model.pt")
    by_option = ckptconv_here(
        "pt2safetensors",
        url,
        f"s3://models/{name}/a.safetensors",
        "--json",
        "--storage-options",
        json.dumps(s3.options),
    )
    assert by_option.code == 0, by_option.err
    assert by_option.json["outputs"][0]["path"] == f"s3://models/{name}/a.safetensors"
    for variable, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": s3.endpoint}.items():
        monkeypatch.setenv(variable, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    by_environment = ckptconv_here("pt2safetensors", url, f"s3://models/{name}/b.safetensors")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    assert by_environment.code == 0, by_environment.err
    expected = (plain / "plain.safetensors").read_bytes()
    assert s3.get(f"{name}/a.safetensors") == s3.get(f"{name}/b.safetensors") == expected


# ------------------------------------------------------------------------------------------------- what is asked for


def test_a_dry_run_says_that_a_store_was_not_tried(s3: S3, proxy: Proxy, model: Path) -> None:
    settings = {"storage_options": s3.through(proxy.endpoint), "dry_run": True}
    (note,) = convert(model, f"s3://{BUCKET}/dry.safetensors", **settings).notes
    assert note == f"s3://{BUCKET}/dry.safetensors: a dry run does not test writing to its store."
    assert {asked.method for asked in proxy.asked} == {"HEAD", "GET"}


@pytest.mark.skipif("like" not in OPTIONS, reason="there are no references")
@verifying
def test_of_a_reference_headers_are_read_and_what_is_filled_in(s3: S3, proxy: Proxy, tmp_path: Path) -> None:
    state = {f"layers.{number}": torch.randn(500, 1000) for number in range(8)}  # 16 MB
    (tmp_path / "reference").mkdir()
    save_torch_state_dict(state, tmp_path / "reference", max_shard_size="5MB")
    (tmp_path / "reference" / "config.json").write_text("{}")
    url = s3.put(tmp_path / "reference", fresh("reference"))
    torch.save({name: tensor for name, tensor in state.items() if name != "layers.3"}, tmp_path / "less.pt")
    settings: dict[str, Any] = {"like": url, "storage_options": tried_once(s3, proxy)}
    shards = len(list((tmp_path / "reference").glob("*.safetensors")))
    convert(tmp_path / "less.pt", tmp_path / "partial", partial=True, **settings)
    # The first request for a file is for 256 KiB at most, which hold its header.
    assert proxy.bytes_asked < (shards + 1) * 300 * KIB
    assert len([asked for asked in proxy.asked if asked.reads_range]) <= shards + 2
    assert (tmp_path / "partial" / "config.json").read_text() == "{}"

    before = proxy.bytes_asked
    convert(tmp_path / "less.pt", tmp_path / "filled", fill=True, **settings)
    filled = state["layers.3"].nbytes
    assert filled <= proxy.bytes_asked - before < filled + (shards + 1) * 300 * KIB
    expected = contents(tmp_path / "reference")
    found = contents(tmp_path / "filled")
    assert {name: found[name] for name in expected if name.endswith(".safetensors")} == {
        name: data for name, data in expected.items() if name.endswith(".safetensors")
    }
    verified(tmp_path / "less.pt", tmp_path / "filled", storage_options=s3.options)
    with pytest.raises(UsageError, match="a file of the reference"):
        convert(tmp_path / "less.pt", url, fill=True, **settings)

    target = f"s3://models/{fresh()}"
    if "part" in OPTIONS:
        for part in ("0/2", "1/2"):
            convert(tmp_path / "less.pt", target, like=url, fill=True, part=part, storage_options=s3.options)
        library.finish(target, storage_options=s3.options)
        verified(tmp_path / "less.pt", target, storage_options=s3.options)
        assert contents(s3.fetch(target.removeprefix("s3://models/"), tmp_path / "parts")) == found


def test_a_transposed_matrix_is_fetched_once_however_it_is_written(s3: S3, proxy: Proxy, tmp_path: Path) -> None:
    torch.save({"t": torch.randn(1280, 1024).t()}, tmp_path / "model.pt")
    name = fresh()
    url = s3.put(tmp_path / "model.pt", f"{name}/model.pt")
    options = tried_once(s3, proxy)
    convert(url, f"s3://models/{name}/out.safetensors", memory=2 * MIB, storage_options=options)
    convert(url, tmp_path / "out.safetensors", memory=2 * MIB, storage_options=options)
    size = (tmp_path / "model.pt").stat().st_size
    assert proxy.bytes_asked < 2 * (size + 300 * KIB)
    assert s3.get(f"{name}/out.safetensors") == (tmp_path / "out.safetensors").read_bytes()
    expected = torch.load(tmp_path / "model.pt")["t"]
    assert torch.equal(load_file(tmp_path / "out.safetensors")["t"], expected)


# ------------------------------------------------------------------------------------------------------ other places


@pytest.mark.parametrize("chain", ["simplecache::{}", "blockcache::{}"])
def test_file_systems_may_be_stacked(chain: str, model: Path, plain: Path, s3: S3, tmp_path: Path) -> None:
    url = s3.put(model, f"{fresh()}/model.pt")
    convert(chain.format(url), tmp_path / "out.safetensors", storage_options={"s3": s3.options})
    assert (tmp_path / "out.safetensors").read_bytes() == (plain / "plain.safetensors").read_bytes()
    with pytest.raises(UsageError, match="cannot be written"):
        convert(model, chain.format("s3://models/out.safetensors"), storage_options={"s3": s3.options})


def spoiled(change: Callable[[dict[str, str], bytes], tuple[dict[str, str], bytes]]) -> Callable[..., Any]:
    """A change to every answer to a GET of a file."""
    return lambda asked, headers, data: (
        change(headers, data) if asked.method == "GET" and asked.path.endswith(".pt") else (headers, data)
    )


def test_what_s3_gives_whole_has_its_checksum(s3: S3, proxy: Proxy, small: Path, tmp_path: Path) -> None:
    url, other = s3.put(small, f"{fresh()}/model.pt"), s3.put(small, f"{fresh()}/model.pt")
    options = tried_once(s3, proxy)
    convert(url, tmp_path / "sound.safetensors", storage_options=options)
    proxy.change = spoiled(lambda headers, data: (headers, data[:-1] + bytes([data[-1] ^ 1])))
    with pytest.raises(FailedError, match=r"(?i)checksum"):
        convert(other, tmp_path / "out.safetensors", storage_options=options)


def test_a_range_of_s3_is_the_one_that_was_asked_for(s3: S3, proxy: Proxy, large: Path, tmp_path: Path) -> None:
    options = tried_once(s3, proxy)
    proxy.change = spoiled(lambda headers, data: ({**headers, "Content-Range": "bytes 1-2/3"}, data))
    with pytest.raises(FailedError, match="answered with 'bytes 1-2/3'"):
        convert(s3.put(large, f"{fresh()}/model.pt"), tmp_path / "out.safetensors", storage_options=options)


def test_what_is_no_checksum_of_the_whole_object_is_not_one() -> None:
    tag = {"ETag": '"25f9e794323b453885f5181f1b624d0b"'}
    assert [name for name, _ in of_s3(tag, "b")] == ["md5"]
    for answer, bucket in (
        (tag, "b--use1-az4--x-s3"),
        ({**tag, "ServerSideEncryption": "aws:kms"}, "b"),
        ({**tag, "SSECustomerAlgorithm": "AES256"}, "b"),
        ({"ETag": '"25f9e794323b453885f5181f1b624d0b-2"'}, "b"),
        ({"ChecksumCRC32": "y/Q5Jg==", "ChecksumType": "COMPOSITE"}, "b"),
    ):
        assert list(of_s3(answer, bucket)) == [], answer
