"""Checkpoints on stores: read by ranges, written as uploads, over links that break."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import signal
import socket
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from botocore.exceptions import ClientError
from checkpoints import ZERO, ckptconv, ckptconv_here, contents
from effort import examples
from huggingface_hub import save_torch_state_dict
from hypothesis import given
from hypothesis import strategies as st
from prepared import Process, prepared
from remote import (
    BUCKET,
    CREDENTIALS,
    KIB,
    MIB,
    S3,
    SHARD,
    Asked,
    Proxy,
    a_model,
    converted_here,
    fresh,
    http_server,
    proxy_to,
    tried_once,
)
from safetensors.torch import load_file

import ckptconv as library
from ckptconv import convert
from ckptconv.errors import CorruptError, DifferenceError, FailedError, UsageError
from ckptconv.publish.staging.remote import notes
from ckptconv.storage import prefetch, remote
from ckptconv.storage.prefetch import Range, coalesce
from ckptconv.storage.spool import Spool
from ckptconv.storage.uploads import part_size
from ckptconv.tensors.moves import File
from ckptconv.verification import pairs, verify

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import make_example


@pytest.fixture
def proxy(s3: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A link to the server that can be broken, to one that does not wait long before it tries again."""
    monkeypatch.setattr(remote, "WAITS", (0.01,) * 2)
    with proxy_to(s3) as made:
        yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.pt"
    torch.save(a_model(), path)
    return path


@pytest.fixture(scope="module")
def plain(model: Path) -> Path:
    return converted_here(model)


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


@pytest.mark.parametrize(
    ("source", "target"), [*itertools.permutations(["local", "s3", "memory"], 2), ("s3", "s3"), ("memory", "memory")]
)
def test_any_mix_of_places_gives_the_same_files(
    source: str, target: str, model: Path, plain: Path, s3: S3, moto: S3, tmp_path: Path
) -> None:
    name = fresh()
    s3 = moto if source == target else s3
    if source == "memory":
        fsspec.filesystem("memory").pipe_file(f"/{name}/model.pt", model.read_bytes())
    path = {"local": str(model), "s3": f"s3://models/{name}/model.pt", "memory": f"memory://{name}/model.pt"}[source]
    if source == "s3":
        s3.put(model, f"{name}/model.pt")
    base = {"local": str(tmp_path), "s3": f"s3://models/{name}", "memory": f"memory://{name}"}[target]
    options = s3.options if "s3" in (source, target) else {}
    report = convert(path, f"{base}/one.safetensors", storage_options=options)
    convert(path, f"{base}/dir", max_shard_size=SHARD, storage_options=options)
    assert report.bytes_written == (plain / "plain.safetensors").stat().st_size
    if target == "s3":
        s3.fetch(f"{name}/", tmp_path)
    if target == "memory":
        memory = fsspec.filesystem("memory")
        memory.get(f"/{name}/", str(tmp_path), recursive=True)
    assert (tmp_path / "one.safetensors").read_bytes() == (plain / "plain.safetensors").read_bytes()
    assert contents(tmp_path / "dir") == contents(plain / "plain")
    assert not s3.uploads(name)


@pytest.mark.parametrize("case", ["z3_bf16_w2", "z1_bf16_w2", "z2_bf16_frozen_w2"])
def test_a_zero_checkpoint_on_a_store_is_found_through_latest_and_converted(case: str, s3: S3, tmp_path: Path) -> None:
    name = fresh()
    url = s3.put(ZERO / case / "checkpoint", f"{name}/checkpoint")
    convert(url, f"s3://models/{name}/out.safetensors", family="deepspeed", storage_options=s3.options)
    convert(ZERO / case / "checkpoint", tmp_path / "out.safetensors", family="deepspeed")
    assert s3.get(f"{name}/out.safetensors") == (tmp_path / "out.safetensors").read_bytes()


def test_a_torch_file_is_written_to_a_store_although_its_checksums_come_late(
    plain: Path, s3: S3, tmp_path: Path
) -> None:
    name = fresh()
    convert(plain / "plain.safetensors", f"s3://models/{name}/back.pt", storage_options=s3.options)
    (tmp_path / "back.pt").write_bytes(s3.get(f"{name}/back.pt"))
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    model = a_model()
    assert back.keys() == model.keys()
    for key, tensor in model.items():
        assert torch.equal(back[key], tensor)
    assert back["tied"].data_ptr() == back["layers.0.weight"].data_ptr()


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


def test_without_an_output_it_goes_beside_the_input(model: Path, plain: Path, s3: S3) -> None:
    name = fresh()
    convert(s3.put(model, f"{name}/model.pt"), storage_options=s3.options)
    assert s3.get(f"{name}/model.safetensors") == (plain / "plain.safetensors").read_bytes()


# -------------------------------------------------------------------------------------------------- uploads, commit


def test_a_new_output_replaces_an_old_one_whole(model: Path, plain: Path, s3: S3, tmp_path: Path) -> None:
    name = fresh()
    other = tmp_path / "other.pt"
    torch.save({f"w{i}": torch.full((1000,), float(i)) for i in range(9)}, other)
    convert(other, f"s3://models/{name}", max_shard_size=4000, storage_options=s3.options)
    assert f"{name}/model-00009-of-00009.safetensors" in s3.keys(name)
    s3.ask("PUT", f"{name}/README.md", b"mine")
    convert(model, f"s3://models/{name}", max_shard_size=SHARD, storage_options=s3.options)
    files = contents(s3.fetch(f"{name}/", tmp_path / "got"))
    assert files.pop("README.md") == b"mine"
    assert files == contents(plain / "plain")
    with pytest.raises(FailedError, match="--no-clobber"):
        convert(model, f"s3://models/{name}", clobber=False, storage_options=s3.options)


def test_nothing_appears_before_everything_is_sent_and_the_index_appears_last(
    model: Path, s3: S3, proxy: Proxy
) -> None:
    name = fresh()
    convert(model, f"s3://models/{name}", max_shard_size=SHARD, storage_options=tried_once(s3, proxy))
    steps = [(each.method, each.path) for each in proxy.asked if each.method in ("PUT", "POST")]
    parts = [i for i, (method, path) in enumerate(steps) if method == "PUT" and "partNumber" in path]
    commits = [
        i
        for i, (method, path) in enumerate(steps)
        if (method == "POST" and "uploadId" in path) or (method == "PUT" and "partNumber" not in path)
    ]
    assert parts
    assert max(parts) < min(commits)
    assert len(commits) == len(s3.keys(name))
    assert "model.safetensors.index.json" in steps[commits[-1]][1]


def test_what_fails_halfway_leaves_nothing_behind(model: Path, s3: S3, proxy: Proxy) -> None:
    name = fresh()
    proxy.rule = lambda asked: "403" if "partNumber=2" in asked.path else ""
    with pytest.raises(FailedError, match=name):
        convert(model, f"s3://models/{name}/out.safetensors", storage_options=tried_once(s3, proxy))
    assert not s3.keys(name)
    assert not s3.uploads(name)


# Says "!" on stdout when a signal has come.
HEARING = """
import os, sys
from ckptconv.cli import main, signals
stop = signals.stop
def stopped(number, frame):
    os.write(1, b"!")
    stop(number, frame)
signals.stop = stopped
main.main(sys.argv[1:])
"""


def uploading(model: Path, name: str, s3: S3, proxy: Proxy) -> Process:
    """A conversion in a process of its own whose second part does not arrive."""
    proxy.rule = lambda asked: "held" if "partNumber=2" in asked.path else ""
    words = ("pt2safetensors", model, f"s3://models/{name}/out.safetensors")
    process = prepared().python(HEARING, *words, "--storage-options", json.dumps(tried_once(s3, proxy)))
    while process.poll() is None and not any("partNumber=2" in asked.path for asked in proxy.asked):
        time.sleep(0.01)
    return process


def test_a_killed_upload_leaves_nothing_under_the_name_and_the_next_run_completes(
    model: Path, plain: Path, s3: S3, proxy: Proxy
) -> None:
    name = fresh()
    process = uploading(model, name, s3, proxy)
    process.kill()
    process.communicate()
    proxy.release()
    assert not s3.keys(name)
    convert(model, f"s3://models/{name}/out.safetensors", storage_options=tried_once(s3, proxy))
    assert s3.get(f"{name}/out.safetensors") == (plain / "plain.safetensors").read_bytes()


def test_an_interrupted_upload_is_taken_back(model: Path, s3: S3, proxy: Proxy) -> None:
    name = fresh()
    process = uploading(model, name, s3, proxy)
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert process.stdout.read(1) == "!"
    proxy.release()
    _, said = process.communicate()
    assert process.wait() == 143, said
    assert not s3.keys(name)
    assert not s3.uploads(name)


# ---------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("fault", ["drop", "503", "cut", "short", "long"])
def test_a_fault_that_passes_is_tried_again(fault: str, model: Path, plain: Path, s3: S3, proxy: Proxy) -> None:
    name = fresh()
    url = s3.put(model, f"{name}/model.pt")
    answers = ("short", "long")

    def at_first(asked: Asked) -> str:
        """Every range is spoiled once, and once every third of what else there is."""
        spoiled = asked.reads_range or (fault not in answers and len(proxy.asked) % 3 == 0)
        return fault if spoiled and not asked.before else ""

    proxy.rule = at_first
    convert(url, f"s3://models/{name}/out.safetensors", storage_options=tried_once(s3, proxy))
    assert s3.get(f"{name}/out.safetensors") == (plain / "plain.safetensors").read_bytes()


@pytest.mark.parametrize("fault", ["drop", "503", "cut", "short", "long"])
def test_a_fault_that_stays_is_a_clear_error(fault: str, model: Path, s3: S3, proxy: Proxy) -> None:
    name = fresh()
    url = s3.put(model, f"{name}/model.pt")
    proxy.rule = lambda asked: fault if asked.reads_range and asked.range[0] > MIB else ""
    with pytest.raises(FailedError, match=f"{name}/model.pt cannot be read"):
        convert(url, f"s3://models/{name}/out.safetensors", storage_options=tried_once(s3, proxy))
    assert s3.keys(name) == [f"{name}/model.pt"]
    assert not s3.uploads(name)


def test_what_may_not_be_read_is_not_asked_for_again(model: Path, s3: S3, proxy: Proxy) -> None:
    url = s3.put(model, f"{fresh()}/model.pt")
    proxy.rule = lambda asked: "403" if asked.reads_range else ""
    with pytest.raises(FailedError, match=r"(?i)forbidden|denied|403"):
        convert(url, "memory://never/out.safetensors", storage_options=tried_once(s3, proxy))
    assert sum(asked.reads_range for asked in proxy.asked) == 1


def test_an_object_that_changes_meanwhile_is_found_out(model: Path, s3: S3, proxy: Proxy, tmp_path: Path) -> None:
    name = fresh()
    url = s3.put(model, f"{name}/model.pt")
    torch.save(a_model(seed=1), tmp_path / "other.pt")
    assert (tmp_path / "other.pt").stat().st_size == model.stat().st_size
    replaced = []

    def replace(asked: Any) -> str:
        if asked.reads_range and asked.range[0] > MIB and not replaced:
            replaced.append(s3.put(tmp_path / "other.pt", f"{name}/model.pt"))
        return ""

    proxy.rule = replace
    with pytest.raises(CorruptError, match="changed while it was read"):
        convert(url, tmp_path / "out.safetensors", storage_options=tried_once(s3, proxy))
    assert replaced
    assert not (tmp_path / "out.safetensors").exists()


def test_missing_things_are_named(s3: S3, model: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        convert("s3://models/nowhere/x.pt", "memory://x/out.safetensors", storage_options=s3.options)
    with pytest.raises(FailedError, match=r"no-such-bucket.*bucket"):
        convert(model, "s3://no-such-bucket/out.safetensors", storage_options=s3.options)
    run = ckptconv_here("pt2safetensors", model, "nosuchscheme://x/out.safetensors")
    assert run.code == 2
    assert "nosuchscheme" in run.err


# ------------------------------------------------------------------------------------------------- what is asked for


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
    verify.verify(tmp_path / "less.pt", tmp_path / "filled", storage_options=s3.options)
    with pytest.raises(UsageError, match="a file of the reference"):
        convert(tmp_path / "less.pt", url, fill=True, **settings)

    target = f"s3://models/{fresh()}"
    for part in ("0/2", "1/2"):
        convert(tmp_path / "less.pt", target, like=url, fill=True, part=part, storage_options=s3.options)
    library.finish(target, storage_options=s3.options)
    verify.verify(tmp_path / "less.pt", target, storage_options=s3.options)
    assert contents(s3.fetch(target.removeprefix("s3://models/"), tmp_path / "parts")) == found


def test_a_zero_3_checkpoint_is_fetched_in_large_ranges_and_no_more_of_it_than_the_weights(
    s3: S3, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As with 2 GB on many ranks: what a rank holds of a window is a small piece.
    monkeypatch.setattr(prefetch, "REQUEST", 256 * KIB)
    directory = tmp_path / "zero"
    make_example.write(make_example.Example(params=4_000_000, ranks=8, stage=3, sparse=True), directory)
    name = fresh()
    url = s3.put(directory, f"{name}/zero")
    options = tried_once(s3, proxy)
    source = library.open(url, family="deepspeed", storage_options=options)
    described, before = proxy.bytes_asked, len(proxy.asked)
    assert described < 16 * 160 * KIB  # a rank has two files
    report = convert(source, f"s3://models/{name}/out.safetensors", memory=2 * MIB, storage_options=options)
    ranges = [asked for asked in proxy.asked[before:] if asked.reads_range]
    assert proxy.bytes_asked - described <= 1.05 * report.bytes_written
    assert len(ranges) <= report.bytes_written / (256 * KIB)
    assert report.bytes_read <= proxy.bytes_asked
    convert(directory, tmp_path / "local.safetensors", family="deepspeed")
    assert s3.get(f"{name}/out.safetensors") == (tmp_path / "local.safetensors").read_bytes()


def test_a_process_that_reads_and_writes_s3_stays_small(s3: S3, tmp_path: Path) -> None:
    directory = tmp_path / "zero"
    make_example.write(make_example.Example(params=12_000_000, ranks=6, stage=3, sparse=True), directory)
    name = fresh()
    url = s3.put(directory, f"{name}/zero")
    run = ckptconv(
        "zero-to-fp32", url, f"s3://models/{name}/out", "--json", "--storage-options", json.dumps(s3.options)
    )
    assert run.code == 0, run.err
    assert run.json["bytes_written"] > 48_000_000
    assert run.json["peak_rss_bytes"] < 96 * MIB


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
        run = ckptconv_here("inspect", f"{counted.endpoint}/huge", "--json")
        assert run.code == 0, run.err
        assert counted.bytes_asked < 400 * KIB
        assert sum(asked.reads_range for asked in counted.asked) <= 5


def test_inspecting_a_file_of_many_storages_reads_a_few_bytes_for_each(tmp_path: Path) -> None:
    count = 300
    with torch.serialization.skip_data():
        torch.save({f"layer.{n}": torch.empty(10**6) for n in range(count)}, tmp_path / "model.pt")
    with http_server(tmp_path) as counted:
        run = ckptconv_here("inspect", f"{counted.endpoint}/model.pt", "--json")
        assert run.code == 0, run.err
        assert len(run.json["tensors"]) == count
        assert counted.bytes_asked < 400 * KIB
        assert sum(asked.reads_range for asked in counted.asked) <= count + 10


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


# ---------------------------------------------------------------------------------------------------- verification


@pytest.mark.parametrize("memory", [pairs.PREFETCH_MEMORY, 256 * KIB], ids=["in memory", "spooled"])
def test_a_transposed_tensor_is_verified_with_few_requests(
    memory: int, s3: S3, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "PREFETCH_MEMORY", memory)
    torch.save({"a": torch.arange(9.0), "t": torch.randn(2048, 1536).t(), "z": torch.ones(9)}, tmp_path / "model.pt")
    name = fresh()
    convert(tmp_path / "model.pt", tmp_path / "model.safetensors")
    urls = [s3.put(tmp_path / file, f"{name}/{file}") for file in ("model.pt", "model.safetensors")]
    options = tried_once(s3, proxy)
    done = library.verify(*urls, storage_options=options)
    size = 2 * 2048 * 1536 * 4
    asked = [each for each in proxy.asked if each.reads_range]
    assert proxy.bytes_asked < size + MIB
    assert len(asked) < size / (4 * MIB) + 12  # of which some are for descriptions
    assert done.bytes_compared == size / 2 + 72
    assert size < done.bytes_read < size + MIB
    spoiled = bytearray(s3.get(f"{name}/model.safetensors"))
    spoiled[-(1536 * 2048 - (700 * 2048 + 99)) * 4 - 36] ^= 1
    s3.ask("PUT", f"{name}/model.safetensors", bytes(spoiled))
    with pytest.raises(DifferenceError) as caught:
        library.verify(*urls, storage_options=options)
    assert caught.value.difference["tensor"] == "t"
    assert caught.value.difference["index"] == [700, 99]


def test_small_tensors_and_those_of_many_ranks_are_verified_with_few_requests(
    s3: S3, proxy: Proxy, tmp_path: Path
) -> None:
    torch.save({f"w{i:04}": torch.full((50,), float(i)) for i in range(2000)}, tmp_path / "small.pt")
    directory = tmp_path / "zero"
    make_example.write(make_example.Example(params=4_000_000, ranks=8, stage=3, sparse=True), directory)
    name = fresh()
    small = s3.put(tmp_path / "small.pt", f"{name}/small.pt")
    ranks = s3.put(directory, f"{name}/zero")
    options = tried_once(s3, proxy)
    for url in (small, ranks):
        output = f"{url}.safetensors"
        convert(url, output, storage_options=s3.options)
        source = library.open(url, storage_options=options)
        before = len(proxy.asked)
        done = library.verify(source, output, storage_options=options)
        asked = [each for each in proxy.asked[before:] if each.reads_range]
        assert done.bytes_compared > 0.99 * 16_000_000 if url == ranks else done.tensors == 2000
        assert len(asked) < 60
        assert sum(last - first for first, last in (each.range for each in asked)) < 1.2 * done.bytes_read


def test_files_of_many_ranks_are_described_by_a_request_each_and_read_several_at_once(
    s3: S3, proxy: Proxy, tmp_path: Path
) -> None:
    ranks = 12
    (tmp_path / "run").mkdir()
    for rank in range(ranks):
        torch.save({"weight": torch.arange(9.0)}, tmp_path / "run" / f"model_rank{rank}.pt")
    url = s3.put(tmp_path / "run", f"{fresh()}/run")
    before = len(proxy.asked)
    together = threading.Barrier(4)

    def held(asked: Asked) -> str:
        if asked.method == "GET" and ".pt" in asked.path:
            with contextlib.suppress(threading.BrokenBarrierError):
                together.wait(600)
        return ""

    proxy.rule = held
    source = library.open(url, storage_options=tried_once(s3, proxy))
    proxy.rule = lambda asked: ""
    assert not together.broken
    assert list(source.source.weights) == ["weight"]
    assert len(proxy.asked) - before <= ranks + 4


def test_what_there_is_no_room_for_is_verified_all_the_same(
    s3: S3, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "PREFETCH_MEMORY", 2 * KIB)
    monkeypatch.setattr(pairs, "BLOCK", 64 * KIB)
    torch.save({"t": torch.randn(40, 1000).t(), "w": torch.randn(500)}, tmp_path / "model.pt")
    name = fresh()
    url = s3.put(tmp_path / "model.pt", f"{name}/model.pt")
    convert(url, f"s3://models/{name}/out.safetensors", storage_options=s3.options)

    def requests() -> int:
        before = len(proxy.asked)
        done = library.verify(url, f"s3://models/{name}/out.safetensors", storage_options=tried_once(s3, proxy))
        assert done.bytes_compared == 4 * (40 * 1000 + 500)
        return len(proxy.asked) - before

    with_room = requests()
    monkeypatch.setattr(Spool, "check_space", lambda spool, size: (_ for _ in ()).throw(FailedError("It is full.")))
    assert requests() > with_room


def test_a_process_that_verifies_from_s3_stays_small(s3: S3, tmp_path: Path) -> None:
    torch.save({"t": torch.randn(4000, 2000).t(), "w": torch.randn(4000, 3000)}, tmp_path / "model.pt")
    name = fresh()
    convert(tmp_path / "model.pt", tmp_path / "out.safetensors")
    url, output = (s3.put(tmp_path / file, f"{name}/{file}") for file in ("model.pt", "out.safetensors"))
    run = ckptconv("verify", url, output, "--json", "--storage-options", json.dumps(s3.options))
    assert run.code == 0, run.err
    assert run.json["bytes_compared"] == 80_000_000
    assert run.json["peak_rss_bytes"] < 128 * MIB


@pytest.mark.parametrize("fault", ["drop", "cut"])
def test_a_link_that_stays_broken_ends_a_verification(fault: str, model: Path, s3: S3, proxy: Proxy) -> None:
    name = fresh()
    url = s3.put(model, f"{name}/model.pt")
    convert(url, f"s3://models/{name}/out.safetensors", storage_options=s3.options)
    proxy.rule = lambda asked: fault if asked.reads_range and asked.range[0] > MIB else ""
    with pytest.raises(FailedError, match="cannot be read"):
        library.verify(url, f"s3://models/{name}/out.safetensors", storage_options=tried_once(s3, proxy))


# ------------------------------------------------------------------------------------------------------------ HTTP


def test_a_server_of_files_is_read_by_ranges(model: Path, plain: Path, tmp_path: Path) -> None:
    with http_server(model.parent) as counted:
        report = convert(f"{counted.endpoint}/model.pt?version=1", tmp_path / "out.safetensors")
        assert counted.bytes_asked < 1.05 * report.bytes_written
    assert (tmp_path / "out.safetensors").read_bytes() == (plain / "plain.safetensors").read_bytes()


def test_a_server_without_ranges_is_read_once_from_beginning_to_end(model: Path, plain: Path, tmp_path: Path) -> None:
    with http_server(model.parent, ranges=False) as counted:
        convert(f"{counted.endpoint}/model.pt", tmp_path / "out.safetensors")
        whole = [asked for asked in counted.asked if asked.method == "GET" and not asked.reads_range]
        assert len(whole) == 1
    assert (tmp_path / "out.safetensors").read_bytes() == (plain / "plain.safetensors").read_bytes()


def test_a_server_without_ranges_cannot_give_a_set_of_files(plain: Path, tmp_path: Path) -> None:
    with http_server(plain, ranges=False) as files, pytest.raises(FailedError, match="whole files only"):
        convert(f"{files.endpoint}/plain/model.safetensors.index.json", tmp_path / "out.pt")


def test_a_file_that_is_not_served_and_a_server_that_is_not_there(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "WAITS", (0.01,))
    with http_server(model.parent) as files:
        with pytest.raises(UsageError, match="does not exist"):
            convert(f"{files.endpoint}/nothing.pt", tmp_path / "out.safetensors")
        with pytest.raises(UsageError, match="cannot be written to http"):
            convert(model, f"{files.endpoint}/out.safetensors")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        with pytest.raises(FailedError, match="cannot be looked at"):
            convert(f"http://127.0.0.1:{taken.getsockname()[1]}/model.pt", tmp_path / "out.safetensors")


# ------------------------------------------------------------------------------------------------------ other places


@pytest.mark.parametrize("chain", ["simplecache::{}", "blockcache::{}"])
def test_file_systems_may_be_stacked(chain: str, model: Path, plain: Path, s3: S3, tmp_path: Path) -> None:
    url = s3.put(model, f"{fresh()}/model.pt")
    convert(chain.format(url), tmp_path / "out.safetensors", storage_options={"s3": s3.options})
    assert (tmp_path / "out.safetensors").read_bytes() == (plain / "plain.safetensors").read_bytes()
    with pytest.raises(UsageError, match="cannot be written"):
        convert(model, chain.format("s3://models/out.safetensors"), storage_options={"s3": s3.options})


def test_a_checkpoint_inside_an_archive_is_read_where_it_is(model: Path, plain: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.write(model, "run/model.pt")
    convert(f"zip://run/model.pt::file://{tmp_path}/all.zip", tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").read_bytes() == (plain / "plain.safetensors").read_bytes()


# ------------------------------------------------------------------------------------------------ ranges, part sizes


FILES = [File(f"s3://bucket/{name}", 1 << 40) for name in "ab"]


@given(
    st.lists(
        st.tuples(st.sampled_from(FILES), st.integers(0, 1 << 22), st.integers(1, 1 << 16)).map(
            lambda drawn: Range(drawn[0], drawn[1], drawn[1] + drawn[2])
        ),
        min_size=1,
        max_size=60,
    ),
    st.sampled_from([1 << 12, 1 << 16, 1 << 22]),
)
@examples(80)
def test_requests_cover_every_range_without_overlap_and_with_little_waste(ranges: list[Range], request: int) -> None:
    extents = coalesce(ranges, request)
    for file in FILES:
        covered = sorted((each.start, each.stop) for each in extents if each.file == file)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(covered))
        for start, stop in merged(ranges, file):
            assert sum(max(min(stop, last) - max(start, first), 0) for first, last in covered) == stop - start
    assert all(0 < each.nbytes < 2 * request or each.nbytes < 2 * request + prefetch.GAP for each in extents)
    # Little more than is wanted is fetched, unless the requests would be tiny.
    wanted = sum(stop - start for file in FILES for start, stop in merged(ranges, file))
    fetched = sum(each.nbytes for each in extents)
    assert fetched <= 1.04 * wanted + prefetch.GAP * len(ranges) or wanted < prefetch.SMALL_REQUEST * len(ranges)


def merged(ranges: list[Range], file: File) -> list[tuple[int, int]]:
    """The bytes of a file that are wanted, each once."""
    found: list[tuple[int, int]] = []
    for _, start, stop in sorted(each for each in ranges if each.file == file):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


@given(st.integers(0, 4 << 40), st.integers(1, 1 << 31))
def test_parts_are_as_many_and_as_large_as_a_store_takes(size: int, memory: int) -> None:
    part = part_size(size, memory)
    assert 5 * MIB <= part <= 5 << 30
    assert -(-size // part) <= 10_000
    if size < 40 << 30:
        assert part <= max(memory // 2, 5 * MIB)


def test_parts_that_are_larger_than_memory_allows_are_told() -> None:
    assert notes([("small", 40 << 30)], 12 * MIB) == []
    (note,) = notes([("small", 40 << 30), ("large", 100 << 30)], 12 * MIB)
    assert note.startswith("large is sent in parts of 11")


def test_a_file_that_no_store_takes_is_refused() -> None:
    with pytest.raises(UsageError, match="--max-shard-size"):
        part_size(1 << 50, 8 * MIB)
