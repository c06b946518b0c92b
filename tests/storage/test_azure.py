"""Checkpoints on Azure's blob storage, which Azurite stands for: `make test-azure` installs it, and runs these."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ZERO, ckptconv, ckptconv_here, contents
from remote import AZURITE, KIB, MIB, SHARD, Asked, Azure, Proxy, a_model, azure_server, converted_here, fresh, proxy_to

from ckptconv import convert
from ckptconv.errors import CorruptError, FailedError, UsageError
from ckptconv.storage import remote

pytestmark = pytest.mark.skipif(not AZURITE.exists(), reason="Azurite is not installed: `make test-azure` does it")


@pytest.fixture(scope="module")
def azure() -> Iterator[Azure]:
    pytest.importorskip("adlfs")
    with azure_server() as server:
        yield server


@pytest.fixture
def proxy(azure: Azure, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A link to the server that can be broken, to one that does not wait long before it tries again."""
    monkeypatch.setattr(remote, "WAITS", (0.01,) * 2)
    with proxy_to(azure.endpoint) as made:
        yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.pt"
    torch.save(a_model(), path)
    return path


@pytest.fixture(scope="module")
def plain(model: Path) -> Path:
    return converted_here(model)


def stages(asked: Asked) -> bool:
    """Whether a request sends a block, which nobody sees yet."""
    return asked.method == "PUT" and "comp=block&" in f"{asked.path}&"


def commits(asked: Asked) -> bool:
    """Whether a request names the blocks of a blob, which thereby is there."""
    return asked.method == "PUT" and "comp=blocklist" in asked.path


# ---------------------------------------------------------------------------------------------------- there and back


@pytest.mark.parametrize("source", ["local", "azure"])
@pytest.mark.parametrize("target", ["local", "azure"])
def test_any_mix_of_places_gives_the_same_files(
    source: str, target: str, model: Path, plain: Path, azure: Azure, tmp_path: Path
) -> None:
    name = fresh()
    path = azure.put(model, f"{name}/model.pt") if source == "azure" else str(model)
    base = f"az://models/{name}" if target == "azure" else str(tmp_path)
    convert(path, f"{base}/one.safetensors", storage_options=azure.options)
    convert(path, f"{base}/dir", max_shard_size=SHARD, storage_options=azure.options)
    if target == "azure":
        azure.fetch(f"{name}/", tmp_path)
    assert (tmp_path / "one.safetensors").read_bytes() == (plain / "plain.safetensors").read_bytes()
    assert contents(tmp_path / "dir") == contents(plain / "plain")


def test_shards_on_azure_are_read_by_their_index_and_written_as_a_torch_file(
    plain: Path, azure: Azure, tmp_path: Path
) -> None:
    name = fresh()
    url = azure.put(plain / "plain", f"{name}/plain")
    convert(url, f"abfs://models/{name}/back.pt", storage_options=azure.options)
    (tmp_path / "back.pt").write_bytes(azure.get(f"{name}/back.pt"))
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert all(torch.equal(back[key], tensor) for key, tensor in a_model().items())


def test_a_zero_3_checkpoint_becomes_shards_and_an_index(azure: Azure, tmp_path: Path) -> None:
    checkpoint = ZERO / "z3_bf16_w2" / "checkpoint"
    name = fresh()
    url = azure.put(checkpoint, f"{name}/checkpoint")
    run = ckptconv(
        "zero-to-fp32", url, f"az://models/{name}/out", "--max-shard-size", "300B", "--verify",
        "--storage-options", json.dumps(azure.options),
    )  # fmt: skip
    assert run.code == 0, run.err
    made = contents(azure.fetch(f"{name}/out/", tmp_path / "got"))
    convert(checkpoint, tmp_path / "local", family="deepspeed", max_shard_size=300)
    assert "model.safetensors.index.json" in made
    assert len(made) > 2
    assert made == contents(tmp_path / "local")


# -------------------------------------------------------------------------------------------------- uploads, commit


def test_a_new_output_replaces_an_old_one_whole(model: Path, plain: Path, azure: Azure, tmp_path: Path) -> None:
    name = fresh()
    torch.save({f"w{i}": torch.full((1000,), float(i)) for i in range(9)}, tmp_path / "other.pt")
    convert(tmp_path / "other.pt", f"az://models/{name}", max_shard_size=4000, storage_options=azure.options)
    assert f"{name}/model-00009-of-00009.safetensors" in azure.names(name)
    azure.client.upload_blob(f"{name}/README.md", b"mine")
    convert(model, f"az://models/{name}", max_shard_size=SHARD, storage_options=azure.options)
    files = contents(azure.fetch(f"{name}/", tmp_path / "got"))
    assert files.pop("README.md") == b"mine"
    assert files == contents(plain / "plain")
    with pytest.raises(FailedError, match="--no-clobber"):
        convert(model, f"az://models/{name}", clobber=False, storage_options=azure.options)


def test_nothing_appears_before_everything_is_sent_and_the_index_appears_last(
    model: Path, azure: Azure, proxy: Proxy
) -> None:
    name = fresh()
    options = azure.through(proxy.endpoint)
    convert(model, f"az://models/{name}", max_shard_size=SHARD, storage_options=options)
    sent = [i for i, asked in enumerate(proxy.asked) if stages(asked)]
    named = [i for i, asked in enumerate(proxy.asked) if commits(asked)]
    assert max(sent) < min(named)
    assert len(named) == len(azure.names(name))
    assert "model.safetensors.index.json" in proxy.asked[named[-1]].path


def test_what_fails_halfway_leaves_nothing_under_a_new_name_and_an_old_output_as_it_was(
    model: Path, azure: Azure, proxy: Proxy
) -> None:
    name = fresh()
    azure.client.upload_blob(f"{name}/old.safetensors", b"old")
    for output in ("new", "old"):
        proxy.asked.clear()
        proxy.rule = lambda asked: "403" if stages(asked) and sum(map(stages, proxy.asked)) > 1 else ""
        with pytest.raises(FailedError, match=f"{name}/{output}"):
            convert(model, f"az://models/{name}/{output}.safetensors", storage_options=azure.through(proxy.endpoint))
        assert sum(map(stages, proxy.asked)) > 1
    assert azure.names(name) == [f"{name}/old.safetensors"]
    assert azure.get(f"{name}/old.safetensors") == b"old"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_is_stopped_halfway_leaves_nothing_and_the_next_run_completes(
    number: signal.Signals, model: Path, plain: Path, azure: Azure, proxy: Proxy
) -> None:
    name = fresh()
    options = azure.through(proxy.endpoint)
    proxy.rule = lambda asked: "held" if stages(asked) else ""
    command = [sys.executable, "-m", "ckptconv", "pt2safetensors", str(model), f"az://models/{name}/out.safetensors"]
    process = subprocess.Popen([*command, "--storage-options", json.dumps(options)], stderr=subprocess.PIPE)
    while process.poll() is None and not any(map(stages, proxy.asked)):
        time.sleep(0.01)
    process.send_signal(number)
    proxy.release()
    _, said = process.communicate()
    assert process.returncode == {signal.SIGKILL: -9, signal.SIGTERM: 143}[number], said
    assert not azure.names(name)
    convert(model, f"az://models/{name}/out.safetensors", storage_options=options)
    assert azure.get(f"{name}/out.safetensors") == (plain / "plain.safetensors").read_bytes()


# ---------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("fault", ["drop", "lost", "503", "cut", "short"])
def test_a_fault_that_passes_is_tried_again(fault: str, model: Path, plain: Path, azure: Azure, proxy: Proxy) -> None:
    name = fresh()
    url = azure.put(model, f"{name}/model.pt")

    def at_first(asked: Asked) -> str:
        """Every range is spoiled once, and every block; their answers have no bodies that could break off."""
        spoiled = asked.reads_range or (fault not in ("cut", "short") and (stages(asked) or commits(asked)))
        return fault if spoiled and not asked.before else ""

    proxy.rule = at_first
    convert(url, f"az://models/{name}/out.safetensors", storage_options=azure.through(proxy.endpoint))
    assert azure.get(f"{name}/out.safetensors") == (plain / "plain.safetensors").read_bytes()


def test_a_lost_answer_to_the_last_request_does_no_harm(model: Path, plain: Path, azure: Azure, proxy: Proxy) -> None:
    """The list of blocks has arrived, and is sent once more."""
    name = fresh()
    proxy.rule = lambda asked: "lost" if commits(asked) and not asked.before else ""
    convert(model, f"az://models/{name}/out.safetensors", storage_options=azure.through(proxy.endpoint))
    assert azure.get(f"{name}/out.safetensors") == (plain / "plain.safetensors").read_bytes()


@pytest.mark.parametrize("fault", ["drop", "503", "short"])
def test_a_fault_that_stays_is_a_clear_error(fault: str, model: Path, azure: Azure, proxy: Proxy) -> None:
    name = fresh()
    url = azure.put(model, f"{name}/model.pt")
    proxy.rule = lambda asked: fault if asked.range is not None and asked.range[0] > MIB else ""
    with pytest.raises(FailedError, match=f"{name}/model.pt cannot be read"):
        convert(url, f"az://models/{name}/out.safetensors", storage_options=azure.through(proxy.endpoint))
    assert azure.names(name) == [f"{name}/model.pt"]


def test_a_blob_that_changes_meanwhile_is_found_out(model: Path, azure: Azure, proxy: Proxy, tmp_path: Path) -> None:
    name = fresh()
    url = azure.put(model, f"{name}/model.pt")
    torch.save(a_model(seed=1), tmp_path / "other.pt")
    replaced: list[Any] = []

    def replace(asked: Asked) -> str:
        if asked.range is not None and asked.range[0] > MIB and not replaced:
            replaced.append(azure.put(tmp_path / "other.pt", f"{name}/model.pt"))
        return ""

    proxy.rule = replace
    with pytest.raises(CorruptError, match="changed while it was read"):
        convert(url, tmp_path / "out.safetensors", storage_options=azure.through(proxy.endpoint))
    assert replaced
    assert not (tmp_path / "out.safetensors").exists()


def test_missing_things_are_named(azure: Azure, model: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        convert("az://models/nowhere/x.pt", "memory://x/out.safetensors", storage_options=azure.options)
    with pytest.raises(FailedError, match=r"no-such-container.*container"):
        convert(model, "az://no-such-container/out.safetensors", storage_options=azure.options)


# ------------------------------------------------------------------------------------------------- what is asked for


def test_inspecting_a_blob_reads_kilobytes_of_it(azure: Azure, proxy: Proxy, tmp_path: Path) -> None:
    torch.save({"first": torch.zeros(2_000_000), "second": torch.zeros(2_000_000)}, tmp_path / "model.pt")
    url = azure.put(tmp_path / "model.pt", f"{fresh()}/model.pt")
    run = ckptconv_here("inspect", url, "--json", "--storage-options", json.dumps(azure.through(proxy.endpoint)))
    assert run.code == 0, run.err
    read = [asked for asked in proxy.asked if asked.method == "GET" and "comp=" not in asked.path]
    assert read
    assert all(asked.reads_range for asked in read)
    assert proxy.bytes_asked < 400 * KIB


def test_a_conversion_reads_little_more_than_it_writes(model: Path, azure: Azure, proxy: Proxy, tmp_path: Path) -> None:
    url = azure.put(model, f"{fresh()}/model.pt")
    report = convert(url, tmp_path / "out.safetensors", storage_options=azure.through(proxy.endpoint))
    assert proxy.bytes_asked < 1.05 * report.bytes_written
