"""Checkpoints on stores: read by ranges, written as uploads, over links that break."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from checkpoints import ZERO, ckptconv, ckptconv_here
from remote import CREDENTIALS, S3, Asked, Proxy, proxy_to, s3_server
from safetensors.torch import load_file

from ckptconv import convert, remote
from ckptconv.errors import CorruptError, FailedError, UsageError

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with s3_server() as server:
        yield server


@pytest.fixture
def proxy(s3: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A link to the server that can be broken, to one that does not wait long before it tries again."""
    monkeypatch.setattr(remote, "WAITS", (0.01,) * 4)
    with proxy_to(s3.endpoint) as made:
        yield made


def impatient(s3: S3, proxy: Proxy) -> dict[str, Any]:
    """Options for the proxy, without the attempts that botocore makes by itself."""
    return {**s3.through(proxy.endpoint), "config_kwargs": {"retries": {"max_attempts": 0}}}


def a_model(seed: int = 0) -> dict[str, torch.Tensor]:
    """Some 21 MB in tensors of all kinds: plain, tied, transposed, scalar, empty, of other dtypes."""
    generator = torch.Generator().manual_seed(seed)
    model = {f"layers.{i}.weight": torch.randn(512, 700, generator=generator) for i in range(10)}
    model["transposed"] = torch.randn(900, 1500, generator=generator).t()
    model["half"] = torch.randn(333, 77, generator=generator).to(torch.bfloat16)
    model["scalar"] = torch.tensor(3.5)
    model["empty"] = torch.empty(0, 4)
    model["tied"] = model["layers.0.weight"]
    return model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.pt"
    torch.save(a_model(), path)
    return path


@pytest.fixture(scope="module")
def plain(model: Path) -> Path:
    """What a local conversion makes of it, for those from and to elsewhere to equal."""
    convert(model, model.parent / "plain.safetensors")
    convert(model, model.parent / "plain", max_shard_size=5_000_000)
    loaded = load_file(model.parent / "plain.safetensors")
    for name, tensor in a_model().items():
        assert name == "tied" or torch.equal(loaded[name], tensor)
    return model.parent


def fresh(prefix: str = "out") -> str:
    """A name that nothing was written under."""
    return f"{prefix}-{uuid.uuid4().hex[:12]}"


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


# -------------------------------------------------------------------------------------------------------- anywhere


@pytest.mark.parametrize("source", ["local", "s3", "memory"])
@pytest.mark.parametrize("target", ["local", "s3", "memory"])
def test_any_mix_of_places_gives_the_same_files(
    source: str, target: str, model: Path, plain: Path, s3: S3, tmp_path: Path
) -> None:
    name = fresh()
    if source == "memory":
        fsspec.filesystem("memory").pipe_file(f"/{name}/model.pt", model.read_bytes())
    path = {"local": str(model), "s3": f"s3://models/{name}/model.pt", "memory": f"memory://{name}/model.pt"}[source]
    if source == "s3":
        s3.put(model, f"{name}/model.pt")
    base = {"local": str(tmp_path), "s3": f"s3://models/{name}", "memory": f"memory://{name}"}[target]
    options = s3.options if "s3" in (source, target) else {}
    report = convert(path, f"{base}/one.safetensors", storage_options=options)
    convert(path, f"{base}/dir", max_shard_size=5_000_000, storage_options=options)
    assert report.bytes_written == (plain / "plain.safetensors").stat().st_size
    if target == "s3":
        s3.fetch(f"{name}/", tmp_path)
    if target == "memory":
        memory = fsspec.filesystem("memory")
        memory.get(f"/{name}/", str(tmp_path), recursive=True)
    assert (tmp_path / "one.safetensors").read_bytes() == (plain / "plain.safetensors").read_bytes()
    assert files_of(tmp_path / "dir") == files_of(plain / "plain")
    assert not s3.uploads()


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


def test_the_command_line_takes_urls_storage_options_and_the_environment(
    model: Path, plain: Path, s3: S3, tmp_path: Path
) -> None:
    name = fresh()
    url = s3.put(model, f"{name}/model.pt")
    by_option = ckptconv(
        "pt2safetensors",
        url,
        f"s3://models/{name}/a.safetensors",
        "--json",
        "--storage-options",
        json.dumps(s3.options),
    )
    assert by_option.code == 0, by_option.err
    assert by_option.json["outputs"][0]["path"] == f"s3://models/{name}/a.safetensors"
    environment = {**os.environ, **CREDENTIALS, "AWS_ENDPOINT_URL": s3.endpoint}
    by_environment = ckptconv("pt2safetensors", url, f"s3://models/{name}/b.safetensors", env=environment)
    assert by_environment.code == 0, by_environment.err
    expected = (plain / "plain.safetensors").read_bytes()
    assert s3.get(f"{name}/a.safetensors") == s3.get(f"{name}/b.safetensors") == expected


# -------------------------------------------------------------------------------------------------- uploads, commit


def test_a_new_output_replaces_an_old_one_whole(model: Path, plain: Path, s3: S3, tmp_path: Path) -> None:
    name = fresh()
    other = tmp_path / "other.pt"
    torch.save({f"w{i}": torch.full((1000,), float(i)) for i in range(9)}, other)
    convert(other, f"s3://models/{name}", max_shard_size=4000, storage_options=s3.options)
    assert f"{name}/model-00009-of-00009.safetensors" in s3.keys(name)
    s3.client.put_object(Bucket="models", Key=f"{name}/README.md", Body=b"mine")
    convert(model, f"s3://models/{name}", max_shard_size=5_000_000, storage_options=s3.options)
    files = files_of(s3.fetch(f"{name}/", tmp_path / "got"))
    assert files.pop("README.md") == b"mine"
    assert files == files_of(plain / "plain")
    with pytest.raises(FailedError, match="--no-clobber"):
        convert(model, f"s3://models/{name}", clobber=False, storage_options=s3.options)


def test_nothing_appears_before_everything_is_sent_and_the_index_appears_last(
    model: Path, s3: S3, proxy: Proxy
) -> None:
    name = fresh()
    convert(model, f"s3://models/{name}", max_shard_size=5_000_000, storage_options=impatient(s3, proxy))
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
        convert(model, f"s3://models/{name}/out.safetensors", storage_options=impatient(s3, proxy))
    assert not s3.keys(name)
    assert not s3.uploads()


def test_a_killed_upload_leaves_nothing_under_the_name_and_the_next_run_completes(
    model: Path, plain: Path, s3: S3, proxy: Proxy
) -> None:
    name = fresh()
    proxy.rule = lambda asked: "slow" if asked.method == "PUT" else ""
    command = [sys.executable, "-m", "ckptconv", "pt2safetensors", str(model), f"s3://models/{name}/out.safetensors"]
    process = subprocess.Popen(
        [*command, "--storage-options", json.dumps(impatient(s3, proxy))], stderr=subprocess.DEVNULL
    )
    while process.poll() is None and not any("partNumber" in asked.path for asked in proxy.asked):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not s3.keys(name)
    proxy.rule = lambda asked: ""
    convert(model, f"s3://models/{name}/out.safetensors", storage_options=impatient(s3, proxy))
    assert s3.get(f"{name}/out.safetensors") == (plain / "plain.safetensors").read_bytes()


def test_an_interrupted_upload_is_taken_back(model: Path, s3: S3, proxy: Proxy) -> None:
    name = fresh()
    proxy.rule = lambda asked: "slow" if asked.method == "PUT" else ""
    command = [sys.executable, "-m", "ckptconv", "pt2safetensors", str(model), f"s3://models/{name}/out.safetensors"]
    process = subprocess.Popen(
        [*command, "--storage-options", json.dumps(impatient(s3, proxy))], stderr=subprocess.PIPE
    )
    while process.poll() is None and not any("partNumber" in asked.path for asked in proxy.asked):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate()
    assert process.returncode == 143, said
    assert not s3.keys(name)
    assert not [key for key in s3.uploads() if key.startswith(name)]


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
    convert(url, f"s3://models/{name}/out.safetensors", storage_options=s3.through(proxy.endpoint))
    assert s3.get(f"{name}/out.safetensors") == (plain / "plain.safetensors").read_bytes()


@pytest.mark.parametrize("fault", ["drop", "503", "cut", "short", "long"])
def test_a_fault_that_stays_is_a_clear_error(fault: str, model: Path, s3: S3, proxy: Proxy) -> None:
    name = fresh()
    url = s3.put(model, f"{name}/model.pt")
    proxy.rule = lambda asked: fault if asked.reads_range and asked.range[0] > MIB else ""
    with pytest.raises(FailedError, match=f"{name}/model.pt cannot be read"):
        convert(url, f"s3://models/{name}/out.safetensors", storage_options=impatient(s3, proxy))
    assert s3.keys(name) == [f"{name}/model.pt"]
    assert not s3.uploads()


def test_what_may_not_be_read_is_not_asked_for_again(model: Path, s3: S3, proxy: Proxy) -> None:
    url = s3.put(model, f"{fresh()}/model.pt")
    proxy.rule = lambda asked: "403" if asked.reads_range else ""
    with pytest.raises(FailedError, match=r"(?i)forbidden|denied|403"):
        convert(url, "memory://never/out.safetensors", storage_options=impatient(s3, proxy))
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
        convert(url, tmp_path / "out.safetensors", storage_options=impatient(s3, proxy))
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
