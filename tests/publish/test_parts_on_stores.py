"""Parts of an output on S3: sent by processes that know nothing of each other, completed by `finish`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ZERO
from remote import BUCKET, S3, Proxy, fresh, proxy_to, s3_server

from ckptconv import convert
from ckptconv.errors import CorruptError, FailedError, UsageError
from ckptconv.publish.finish import finish

MANIFEST = ".ckptconv-manifest.json"
COUNT = 6


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with s3_server() as server:
        yield server


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is converted to six shards, each sent in two parts."""
    path = tmp_path_factory.mktemp("model") / "model.pt"
    torch.save({f"layer{n}": torch.full((1500, 1000), float(n)) for n in range(COUNT)}, path)
    return path


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, bytes]:
    convert(model, model.parent / "whole", max_shard_size=6_000_000)
    return {path.name: path.read_bytes() for path in (model.parent / "whole").iterdir()}


@pytest.fixture
def output() -> str:
    return f"s3://{BUCKET}/{fresh()}"


def part(model: Path, output: str, s3: S3, number: int, count: int = 2, **options: Any) -> Any:
    settings = {"max_shard_size": 6_000_000, "storage_options": s3.options, **options}
    return convert(model, output, part=(number, count), **settings)


def contents(output: str, s3: S3) -> dict[str, bytes]:
    prefix = output.removeprefix(f"s3://{BUCKET}/") + "/"
    return {key[len(prefix) :]: s3.get(key) for key in s3.keys(prefix)}


def uploads(output: str, s3: S3) -> list[str]:
    prefix = output.removeprefix(f"s3://{BUCKET}/")
    return [key for key in s3.uploads() if key.startswith(prefix)]


def command(model: Path, output: str, which: str, options: dict[str, Any]) -> list[str]:
    return [
        sys.executable, "-m", "ckptconv", "pt2safetensors", str(model), output, "--json", "--max-shard-size", "6MB",
        "--part", which, "--storage-options", json.dumps(options),
    ]  # fmt: skip


def _records(proxy: Proxy) -> int:
    return sum(asked.method == "PUT" and "/.record-" in asked.path for asked in proxy.asked)


def test_two_processes_of_which_one_is_killed_and_finish_make_what_one_run_makes(
    model: Path, expected: dict[str, bytes], output: str, s3: S3
) -> None:
    with proxy_to(s3.endpoint) as proxy:
        # Two of its shards are finished, and the third is not.
        proxy.rule = lambda asked: "held" if asked.method == "PUT" and _records(proxy) > 2 else ""
        first = subprocess.Popen(command(model, output, "0/2", s3.options), stdout=subprocess.DEVNULL)
        second = subprocess.Popen(command(model, output, "1/2", s3.through(proxy.endpoint)), stdout=subprocess.DEVNULL)
        while second.poll() is None and _records(proxy) < 3:
            time.sleep(0.01)
        second.send_signal(signal.SIGKILL)
        assert second.wait() == -signal.SIGKILL
        proxy.release()
        assert first.wait() == 0
    assert not any(name.endswith((".safetensors", ".json")) and "/" not in name for name in contents(output, s3))
    with pytest.raises(FailedError, match=r"part 1/2 .*model-0000\d-of-00006"):
        finish([output], storage_options=s3.options)
    again = json.loads(
        subprocess.run(command(model, output, "1/2", s3.options), check=True, capture_output=True).stdout
    )
    assert 1 <= again["reused"] < len(again["outputs"])
    report = finish([output], storage_options=s3.options)
    assert report.tensors == COUNT
    assert contents(output, s3) == expected


def test_what_was_there_stays_until_it_is_finished_and_the_index_comes_last(
    model: Path, expected: dict[str, bytes], output: str, s3: S3, tmp_path: Path
) -> None:
    torch.save({f"layer{n}": torch.zeros(1500, 1000) for n in range(COUNT + 1)}, tmp_path / "old.pt")
    convert(tmp_path / "old.pt", output, max_shard_size=6_000_000, storage_options=s3.options)
    old = contents(output, s3)
    for number in range(2):
        part(model, output, s3, number)
        now = contents(output, s3)
        assert {name: data for name, data in now.items() if "/" not in name} == old
    with proxy_to(s3.endpoint) as proxy:
        finish([output], storage_options=s3.through(proxy.endpoint))
        done = [asked.path for asked in proxy.asked if asked.method == "POST" and "uploads" not in asked.path]
    assert "model.safetensors.index.json?" in [path for path in done if "uploadId" in path][-1]
    assert contents(output, s3) == expected
    assert not uploads(output, s3)


@pytest.mark.parametrize("completed", range(1, COUNT + 2))
def test_a_finish_that_is_killed_goes_on(
    completed: int, model: Path, expected: dict[str, bytes], output: str, s3: S3
) -> None:
    for number in range(2):
        part(model, output, s3, number)
    with proxy_to(s3.endpoint) as proxy:
        commits: list[str] = []

        def broken_after(asked: Any) -> str:
            if asked.method == "POST" and "uploadId" in asked.path:
                commits.append(asked.path)
            return "403" if len(commits) > completed else ""

        proxy.rule = broken_after
        with pytest.raises(FailedError, match=r"denied|403|orbidden"):
            finish([output], storage_options=s3.through(proxy.endpoint))
    present = contents(output, s3)
    assert sum("/" not in name for name in present) == completed
    assert "model.safetensors.index.json" not in present
    finish([output], storage_options=s3.options)
    assert contents(output, s3) == expected


def test_a_finish_that_is_killed_in_the_end_goes_on_too(
    model: Path, expected: dict[str, bytes], output: str, s3: S3
) -> None:
    for number in range(2):
        part(model, output, s3, number)
    with proxy_to(s3.endpoint) as proxy:
        proxy.rule = lambda asked: "403" if asked.method == "DELETE" and ".ckptconv-" in asked.path else ""
        finish([output], storage_options=s3.through(proxy.endpoint))
    assert any("/" in name for name in contents(output, s3))
    finish([output], storage_options=s3.options)
    assert contents(output, s3) == expected


def test_an_upload_that_is_gone_is_missed_before_anything_is_touched(
    model: Path, expected: dict[str, bytes], output: str, s3: S3
) -> None:
    """As a rule of the bucket's removes it after some days, while an older output has a shard of its name and size."""
    convert(model, output, max_shard_size=6_000_000, storage_options=s3.options)
    for number in range(2):
        part(model, output, s3, number)
    key = f"{output.removeprefix(f's3://{BUCKET}/')}/model-00003-of-00006.safetensors"
    lost = next(each for each in s3.client.list_multipart_uploads(Bucket=BUCKET)["Uploads"] if each["Key"] == key)
    s3.client.abort_multipart_upload(Bucket=BUCKET, Key=lost["Key"], UploadId=lost["UploadId"])
    with pytest.raises(FailedError, match="model-00003-of-00006"):
        finish([output], storage_options=s3.options)
    assert {name: data for name, data in contents(output, s3).items() if "/" not in name} == expected


@pytest.mark.parametrize("what", ["name", "plan", "parts", "upload", "number", "not JSON", "record of another"])
def test_what_is_read_back_is_checked_before_it_is_used(
    what: str, model: Path, expected: dict[str, bytes], output: str, s3: S3
) -> None:
    part(model, output, s3, 0, 1)
    prefix = output.removeprefix(f"s3://{BUCKET}/") + "/"
    description = next(key for key in s3.keys(prefix) if key.endswith("/.plan.json"))
    record = next(key for key in s3.keys(prefix) if "/.record-" in key)
    key = description if what in ("name", "plan", "parts", "not JSON") else record
    told = json.loads(s3.get(key))
    if what == "name":
        told["files"][0][0] = "../../elsewhere"
    elif what == "plan":
        told["plan"] = "../x"
    elif what == "parts":
        told["parts"] = 10**20
    elif what == "upload":
        told["upload"] = ["x"]
    elif what == "number":
        told["parts"][0]["PartNumber"] = "1"
    elif what == "record of another":
        told["name"] = "model-00099-of-00006.safetensors"
    s3.client.put_object(Bucket=BUCKET, Key=key, Body=b"[" * 9999 if what == "not JSON" else json.dumps(told).encode())
    with pytest.raises(CorruptError):
        finish([output], storage_options=s3.options)
    assert not any("/" not in name for name in contents(output, s3))
    part(model, output, s3, 0, 1)
    finish([output], storage_options=s3.options)
    assert contents(output, s3) == expected


def test_a_part_run_twice_sends_nothing_again(model: Path, output: str, s3: S3) -> None:
    part(model, output, s3, 0)
    before = sorted(uploads(output, s3))
    report = part(model, output, s3, 0)
    assert report.bytes_written == 0
    assert report.reused == len(report.outputs) == len(before)
    assert sorted(uploads(output, s3)) == before


def test_a_single_file_and_the_outputs_of_a_deepspeed_checkpoint(output: str, s3: S3, tmp_path: Path) -> None:
    source = ZERO / "z3_bf16_w2/checkpoint"
    convert(source, tmp_path / "w.safetensors", optimizer=str(tmp_path / "o"), family="deepspeed")
    outputs = [f"{output}/w.safetensors", f"{output}/o"]
    for number in range(3):
        convert(
            source, outputs[0], optimizer=outputs[1], family="deepspeed", part=(number, 3), storage_options=s3.options
        )
    finish(outputs, storage_options=s3.options)
    made = contents(output, s3)
    assert made.pop("w.safetensors") == (tmp_path / "w.safetensors").read_bytes()
    assert made == {f"o/{path.name}": path.read_bytes() for path in (tmp_path / "o").iterdir()}
    assert not uploads(output, s3)


def test_an_executor_sends_what_this_process_completes(
    model: Path, expected: dict[str, bytes], output: str, s3: S3
) -> None:
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        convert(model, output, max_shard_size=6_000_000, executor=pool, storage_options=s3.options)
    assert contents(output, s3) == expected
    assert not uploads(output, s3)


def test_what_fails_for_good_takes_its_uploads_back(model: Path, output: str, s3: S3, tmp_path: Path) -> None:
    short = tmp_path / "model.pt"
    short.write_bytes(model.read_bytes())
    with proxy_to(s3.endpoint) as proxy:

        def spoil(asked: Any) -> str:
            if "/.record-" in asked.path and asked.method == "PUT":
                short.write_bytes(b"")  # what is left to be read is not there
            return ""

        proxy.rule = spoil
        with pytest.raises(Exception, match=r"truncated|changed|expected"):
            part(short, output, s3, 0, 1, storage_options=s3.through(proxy.endpoint))
    assert not uploads(output, s3)
    assert not any(".record-" in name for name in contents(output, s3))


def test_other_stores_and_checksums_are_refused(model: Path, output: str, s3: S3) -> None:
    with pytest.raises(UsageError, match="only S3"):
        convert(model, "memory://parts/out", part=(0, 2))
    with pytest.raises(UsageError, match="nothing to finish"):
        finish([output], storage_options=s3.options)
    part(model, output, s3, 0, 1)
    with pytest.raises(UsageError, match="--checksum"):
        finish([output], checksum=True, storage_options=s3.options)
