"""Repositories of the Hugging Face hub: what is found in them, at which commit, with how many requests, and what is
said of those that cannot be read. The hub is a server of the tests, in a process of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import VERIFIED, looking, of_features, verified, verify, verifying
from checkpoints import ZERO, ckptconv_forked, ckptconv_here, done
from features.hub.server import TOKEN, Hub, hub_server
from huggingface_hub import HfFileSystem, constants
from processes import prepared
from safetensors.torch import load_file, save
from samples import saved

from ckptconv import CorruptError, FailedError, Report, UsageError, convert
from ckptconv.features.hub import store as hub_paths
from ckptconv.features.remote import access
from ckptconv.options.table import OPTIONS
from ckptconv.process import has_feature
from ckptconv.storage import stores
from ckptconv.text import parse_path

CONFIG = b'{"model_type": "tiny", "torch_dtype": "float32"}'
TOKENIZER = b'{"version": "1.0", "model": {' + b" " * 5000 + b"}}"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with hub_server(tmp_path_factory.mktemp("hub") / "root") as served:
        yield served


@pytest.fixture(autouse=True)
def _online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests see to it that nothing is asked of the real hub."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


@pytest.fixture
def repository(request: pytest.FixtureRequest, hub: Hub) -> str:
    """The name of a repository that no other test uses."""
    hub.asked()
    return f"org/{request.node.name.partition('[')[0][5:90].replace('_', '-')}-{abs(hash(request.node.name)) % 10**5}"


def model(seed: int = 0, layers: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layers.{number}.weight": torch.randn(60, 70, generator=generator) for number in range(layers)}


def sharded(state: Mapping[str, torch.Tensor], stem: str = "model", suffix: str = "safetensors") -> dict[str, bytes]:
    """The files of a set with an index, one tensor in each."""
    names = {name: f"{stem}-{at:05d}-of-{len(state):05d}.{suffix}" for at, name in enumerate(state, 1)}
    index = json.dumps({"metadata": {"total_size": 1}, "weight_map": names}).encode()
    write = saved if suffix == "bin" else save
    return {f"{stem}.{suffix}.index.json": index, **{names[name]: write({name: state[name]}) for name in state}}


def of_torch(state: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    return sharded(state, "pytorch_model", "bin")


SETS: dict[str, tuple[Callable[[Any], dict[str, bytes]], str]] = {
    "shards": (of_torch, "3 torch files"),
    "shards beside those of other programs": (
        lambda state: {**of_torch(state), "flax_model.msgpack.index.json": b"{}", "tf_model.h5.index.json": b"{}"},
        "3 torch files",
    ),
}
FILES: dict[str, tuple[Callable[[Any], dict[str, bytes]], str]] = {
    "one file": (lambda state: {"pytorch_model.bin": saved(state)}, "torch zip archive"),
    "safetensors": (lambda state: {"model.safetensors": save(state, {"format": "pt"})}, "safetensors"),
    **(SETS if has_feature("torch_shards") else {}),
}


def files_below(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def is_model(directory: Path, state: Mapping[str, torch.Tensor]) -> bool:
    index = directory / "model.safetensors.index.json"
    files = set(json.loads(index.read_bytes())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    loaded = {name: tensor for file in files for name, tensor in load_file(directory / file).items()}
    return loaded.keys() == state.keys() and all(torch.equal(loaded[name], state[name]) for name in state)


def is_copied(path: Path, data: bytes) -> bool:
    """Whether an output has the small file if a feature copies such files, and does not have it otherwise."""
    return path.read_bytes() == data if "copy_config" in OPTIONS else not path.exists()


def noted(report: Report, words: str) -> bool:
    return any(words in note for note in report.notes)


# -------------------------------------------------------------------------------------------------- what is found there


@pytest.mark.parametrize(("files", "read"), FILES.values(), ids=FILES)
def test_the_checkpoint_of_a_repository_is_found_and_its_output_can_be_loaded(
    files: Callable[[Any], dict[str, bytes]], read: str, hub: Hub, repository: str, tmp_path: Path
) -> None:
    commit = hub.commit(repository, {**files(model()), "config.json": CONFIG, "tokenizer.json": TOKENIZER})
    report = convert(f"hf://{repository}", tmp_path / "out", storage_options=hub.options, **VERIFIED)
    assert report.format == read
    assert report.input == f"hf://{repository}@{commit}"
    assert is_model(tmp_path / "out", model())
    assert is_copied(tmp_path / "out" / "config.json", CONFIG)
    assert is_copied(tmp_path / "out" / "tokenizer.json", TOKENIZER)
    assert noted(report, commit)
    if read != "safetensors":
        verified(f"hf://{repository}", tmp_path / "out", storage_options=hub.options)


def test_a_deepspeed_checkpoint_in_a_repository(hub: Hub, repository: str, tmp_path: Path) -> None:
    checkpoint = ZERO / "z0_bf16_w2" / "checkpoint"
    hub.commit(repository, {**files_below(checkpoint), "config.json": CONFIG})
    convert(checkpoint, tmp_path / "local")
    convert(f"hf://{repository}", tmp_path / "out", storage_options=hub.options)
    shards = [path.name for path in (tmp_path / "local").glob("*.safetensors")]
    assert shards
    for name in shards:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "local" / name).read_bytes()
    assert is_copied(tmp_path / "out" / "config.json", CONFIG)


def test_a_directory_or_a_file_in_a_repository(hub: Hub, repository: str, tmp_path: Path) -> None:
    inner = {"runs/last/pytorch_model.bin": saved(model(1)), "runs/last/config.json": b"{}"}
    hub.commit(repository, {"pytorch_model.bin": saved(model()), "config.json": CONFIG, **inner})
    convert(f"hf://{repository}/runs/last", tmp_path / "a", storage_options=hub.options)
    assert is_model(tmp_path / "a", model(1))
    assert is_copied(tmp_path / "a" / "config.json", b"{}")
    convert(f"hf://{repository}/pytorch_model.bin", tmp_path / "b", storage_options=hub.options)
    assert is_model(tmp_path / "b", model())
    assert is_copied(tmp_path / "b" / "config.json", CONFIG)
    convert(f"hf://{repository}/pytorch_model.bin", tmp_path / "c.safetensors", storage_options=hub.options)
    assert [path.name for path in tmp_path.glob("c*")] == ["c.safetensors"]


@pytest.mark.parametrize("revision", ["", "@main"])
def test_without_an_output_it_is_made_in_the_current_directory(
    hub: Hub, repository: str, revision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hub.commit(repository, {**sharded(model()), "config.json": CONFIG, "sub/other.bin": saved(model(1))})
    convert(f"hf://{repository}{revision}", storage_options=hub.options)
    made = Path(repository.rpartition("/")[2])
    assert is_model(made, model())
    assert is_copied(made / "config.json", CONFIG)
    convert(f"hf://{repository}{revision}/sub/other.bin", storage_options=hub.options)
    assert torch.equal(load_file("other.safetensors")["layers.0.weight"], model(1)["layers.0.weight"])


def test_a_hub_is_read_by_every_command_and_not_written(hub: Hub, repository: str, tmp_path: Path) -> None:
    hub.commit(repository, {"model.safetensors": save(model(), {"format": "pt"})})
    options = json.dumps(hub.options)
    for command in looking():
        done(ckptconv_here(command, f"hf://{repository}", "--json", "--storage-options", options))
    back = tmp_path / "back.safetensors"
    done(ckptconv_here("convert", f"hf://{repository}", back, "--storage-options", options))
    loaded = load_file(back)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model().items())
    with pytest.raises(UsageError, match="hf upload"):
        convert(back, f"hf://{repository}/out.safetensors", storage_options=hub.options)


def test_which_of_several_was_read_is_said(hub: Hub, repository: str, tmp_path: Path) -> None:
    both = {"pytorch_model.bin": saved(model()), "model.safetensors": save(model(1), {"format": "pt"})}
    hub.commit(repository, {**both, "training_args.bin": saved({"lr": 1})})
    one = convert(f"hf://{repository}", tmp_path / "one", storage_options=hub.options, family="torch")
    assert is_model(tmp_path / "one", model())
    assert noted(one, "were not read: model.safetensors. To convert one of these files, specify its name")
    other = convert(f"hf://{repository}/model.safetensors", tmp_path / "two", storage_options=hub.options)
    assert is_model(tmp_path / "two", model(1))
    assert not noted(other, "not read")


# ----------------------------------------------------------------------------------------------------------- revisions


def test_branches_tags_and_commits(hub: Hub, repository: str, tmp_path: Path) -> None:
    first = hub.commit(repository, {"pytorch_model.bin": saved(model(1))}, "main")
    hub.commit(repository, {"pytorch_model.bin": saved(model(2))}, "refs/pr/7")
    hub.commit(repository, {"pytorch_model.bin": saved(model(3))}, "a/branch")
    hub.commit(repository, {"pytorch_model.bin": saved(model(4))}, "main")
    for revision, seed in {"@refs/pr/7": 2, "@a%2Fbranch": 3, "": 4, "@main": 4, f"@{first}": 1}.items():
        out = tmp_path / f"out{seed}"
        convert(f"hf://{repository}{revision}/pytorch_model.bin", out, storage_options=hub.options)
        assert is_model(out, model(seed))


def test_a_branch_that_moves_while_it_is_read_is_read_as_it_was(hub: Hub, repository: str, tmp_path: Path) -> None:
    hub.commit(repository, {**sharded(model()), "config.json": CONFIG})

    class Moving:
        """Moves the branch when the first file is begun, and is told of progress otherwise."""

        moved = False

        def __call__(self, count: int) -> None:
            pass

        def on_file(self, name: str) -> None:
            if not self.moved:
                hub.commit(repository, {**sharded(model(9)), "config.json": b'{"other": 1}'})
            self.moved = True

    moving = Moving()
    convert(f"hf://{repository}", tmp_path / "out", storage_options=hub.options, progress=moving)
    assert moving.moved
    assert is_model(tmp_path / "out", model())
    assert is_copied(tmp_path / "out" / "config.json", CONFIG)
    convert(f"hf://{repository}", tmp_path / "out", storage_options=hub.options)
    assert is_model(tmp_path / "out", model(9))
    assert is_copied(tmp_path / "out" / "config.json", b'{"other": 1}')


def test_paths_at_a_commit_are_taken_for_unchangeable_and_no_others() -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    for path in ("hf://org/model@{}", "org/model@{}/a/b.bin", "hf://datasets/org/data@{}/x"):
        assert hub_paths.is_pinned(path.format(commit))
    for path in ("hf://org/model", "hf://org/model@main/x", f"hf://org/model@{commit}0", f"hf://org/model/x@{commit}"):
        assert not hub_paths.is_pinned(path)
    assert hub_paths.pinned(f"hf://org/model@{commit}/x", {}) == f"hf://org/model@{commit}/x"
    assert stores.pinned("/tmp/x", {}) == "/tmp/x"


# ------------------------------------------------------------------------------------------------- requests and bytes


def test_what_is_needed_is_read_once_by_ranges(hub: Hub, repository: str, tmp_path: Path) -> None:
    state = {f"layers.{number}": torch.randn(700, 800) for number in range(4)}  # 9 MB
    hub.commit(
        repository, {"pytorch_model.bin": saved(state), "config.json": CONFIG, "unused.safetensors": b"x" * 10**6}
    )
    report = convert(f"hf://{repository}", tmp_path / "out", storage_options=hub.options, family="torch")
    asked = hub.asked()
    files = [each for each in asked if "/resolve/" in each.path or each.path.startswith("/lfs/")]
    assert all(each.range for each in files)
    assert sum(each.bytes for each in files) < 1.04 * report.bytes_written + 200_000
    assert len([each for each in files if each.status == 206]) < 12
    # To resolve the branch, to look at its commit, and its one listing.
    assert len([each for each in asked if each.path.startswith("/api/")]) == 4
    assert not any("unused" in each.path for each in asked)


@verifying
@pytest.mark.skipif("like" not in OPTIONS, reason="there are no references")
def test_a_reference_is_read_by_its_headers_and_at_one_commit(hub: Hub, repository: str, tmp_path: Path) -> None:
    state = {f"layers.{number}": torch.randn(400, 500) for number in range(3)}
    files = {f"model-{at:05d}-of-00003.safetensors": name for at, name in enumerate(state, 1)}
    index = json.dumps({"metadata": {}, "weight_map": {name: file for file, name in files.items()}}).encode()
    held = {file: save({name: state[name].half()}, {"format": "pt"}) for file, name in files.items()}
    held |= {"model.safetensors.index.json": index, "config.json": CONFIG, "tokenizer.json": TOKENIZER}
    commit = hub.commit(repository, held)
    torch.save({name: state[name] for name in list(state)[:2]}, tmp_path / "less.pt")
    reach: dict[str, Any] = {"storage_options": hub.options}
    # A thread has a file system of its own, which may be that of an ended thread, with what it listed long ago.
    HfFileSystem.clear_instance_cache()
    report = convert(tmp_path / "less.pt", tmp_path / "out", like=f"hf://{repository}", fill=True, **reach)
    assert report.like is not None
    assert report.like.reference == f"hf://{repository}@{commit}"
    assert {name: (tmp_path / "out" / name).read_bytes() for name in held if "index" not in name} == {
        name: data for name, data in held.items() if "index" not in name
    }
    asked = hub.asked()
    read = [each for each in asked if each.status == 206 and each.path.endswith(".safetensors")]
    # Of each file its beginning, which is 256 KiB at most, and of one the rest, with what is read again for it.
    assert len(read) <= len(files) + 2
    assert sum(each.bytes for each in read) < len(files) * (256 << 10) + state["layers.2"].half().nbytes + 1000
    assert len([each for each in asked if each.path.startswith("/api/")]) <= 6
    hub.commit(repository, {**held, "config.json": b"{}"})
    assert verify(tmp_path / "less.pt", tmp_path / "out", **reach).options["like"] == f"hf://{repository}@{commit}"


# ----------------------------------------------------------------------------------------------------------- refusals


def refused(url: str, options: Mapping[str, Any], tmp_path: Path, error: type[Exception] = UsageError) -> str:
    with pytest.raises(error) as caught:
        convert(url, tmp_path / "out", storage_options=options)
    assert list(tmp_path.iterdir()) == []
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    return text


def test_what_is_not_there(hub: Hub, repository: str, tmp_path: Path) -> None:
    hub.commit(repository, {"pytorch_model.bin": saved(model())})
    text = refused("hf://org/none", hub.options, tmp_path)
    assert "no such repository, or it is private" in text
    assert "HF_TOKEN" in text
    assert "no such revision" in refused(f"hf://{repository}@none", hub.options, tmp_path)
    assert "none.bin does not exist" in refused(f"hf://{repository}/none.bin", hub.options, tmp_path)
    assert "hf://organization/model" in refused("hf://gpt2", hub.options, tmp_path)
    assert "hf://organization/model" in refused("hf://org/..", hub.options, tmp_path)


def test_a_private_repository_needs_a_token(hub: Hub, repository: str, tmp_path: Path) -> None:
    hub.commit(repository, {"pytorch_model.bin": saved(model())}, private=True)
    assert "HF_TOKEN" in refused(f"hf://{repository}", hub.options, tmp_path)
    unknown = {**hub.options, "token": "hf_ofnobody"}
    assert "rejected the token." in refused(f"hf://{repository}", unknown, tmp_path)
    convert(f"hf://{repository}", tmp_path / "out", storage_options=hub.known)
    assert is_model(tmp_path / "out", model())


def test_a_gated_repository_needs_access(hub: Hub, repository: str, tmp_path: Path) -> None:
    hub.commit(repository, {"pytorch_model.bin": saved(model())}, gated="manual")
    text = refused(f"hf://{repository}", hub.options, tmp_path, FailedError)
    assert "gated" in text
    assert "Request access" in text
    convert(f"hf://{repository}", tmp_path / "out", storage_options=hub.known)
    assert is_model(tmp_path / "out", model())


def test_no_network(hub: Hub, repository: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.commit(repository, {"pytorch_model.bin": saved(model())})
    with monkeypatch.context() as patched:
        patched.setattr(constants, "HF_HUB_OFFLINE", True)
        assert "HF_HUB_OFFLINE is set" in refused(f"hf://{repository}", hub.options, tmp_path)
    monkeypatch.setattr(access, "WAITS", (0.01,))
    nowhere = {**hub.options, "endpoint": "http://127.0.0.1:9"}
    assert "cannot be accessed:" in refused(f"hf://{repository}", nowhere, tmp_path, FailedError)


def test_without_its_package_it_says_what_to_install() -> None:
    code = """
import sys
sys.modules["huggingface_hub"] = None
from ckptconv import UsageError, convert
try:
    convert("hf://org/model", "out")
except UsageError as error:
    print(error)
"""
    done = prepared().run(code)
    assert "pip install 'ckptconv[hub]'" in done.stdout


def test_the_command_line_takes_endpoint_and_token_from_the_environment(
    hub: Hub, repository: str, tmp_path: Path
) -> None:
    hub.commit(repository, {"pytorch_model.bin": saved(model()), "config.json": CONFIG}, private=True)
    there = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "home")}
    run = ckptconv_forked("pt2safetensors", f"hf://{repository}", tmp_path / "out", "--json", env=there)
    assert run.code == 0, run.err
    assert is_model(tmp_path / "out", model())
    names = [Path(each["path"]).name for each in run.json["outputs"]]
    assert names == [*(["config.json"] if "copy_config" in OPTIONS else []), "model.safetensors"]
    bare = ["--no-copy-config"] if "copy_config" in OPTIONS else []
    run = ckptconv_forked("pt2safetensors", f"hf://{repository}", tmp_path / "bare", *bare, env=there)
    assert run.code == 0, run.err
    assert not (tmp_path / "bare" / "config.json").exists()


def test_a_file_that_is_not_what_the_listing_says_is_an_error(hub: Hub, repository: str, tmp_path: Path) -> None:
    commit = hub.commit(repository, {"pytorch_model.bin": saved(model())})
    place = hub.root / repository / commit / "pytorch_model.bin"

    class Cutting:
        def __call__(self, count: int) -> None:
            pass

        def on_file(self, name: str) -> None:
            place.write_bytes(place.read_bytes()[:2000])

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(access, "WAITS", (0.01,))
        with pytest.raises((FailedError, CorruptError)):
            convert(f"hf://{repository}", tmp_path / "out", storage_options=hub.options, progress=Cutting())
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.skipif("dequantize" not in OPTIONS, reason="there are no quantized weights")
def test_quantized_weights_of_a_repository_become_weights_with_its_configuration(hub: Hub, tmp_path: Path) -> None:
    (dialects,) = of_features("DIALECTS")
    case = dialects.QUANTIZED / "block-fp8-bf16"
    hub.commit("org/quantized", {path.name: path.read_bytes() for path in case.iterdir() if path.suffix != ".md"})
    convert("hf://org/quantized", tmp_path / "out", dequantize=True, storage_options=hub.options)
    made, expected = load_file(tmp_path / "out" / "model.safetensors"), load_file(case / "expected.safetensors")
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[name], tensor) for name, tensor in expected.items())
    told = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in told
    assert told["dtype"] == "bfloat16"


def test_a_repository_of_the_hub_is_told_how_it_is_written(place: Path) -> None:
    for given, meant in (
        ("org/model", "hf://org/model."),
        ("org/Model-1.5_b@v2", "hf://org/Model-1.5_b@v2."),
        ("gpt2", "hf://ORGANIZATION/gpt2."),
    ):
        for command in (("convert", given, "x.safetensors"), *((each, given) for each in looking())):
            ckptconv_here(*command).refused(2, given, "Hugging Face hub", meant)
    for given in ("a/b/c", Path.cwd() / "a/b", "none.pt", "./org/model"):
        assert "Hugging Face" not in ckptconv_here("convert", given, "x.safetensors").refused(2, "does not exist")


def test_the_hub_s_address_without_a_scheme_is_a_repository(place: Path) -> None:
    assert parse_path("hf.co/org/model@v2") == "hf://org/model@v2"
    assert parse_path("huggingface.co/org/model/x.bin") == "hf://org/model/x.bin"
    Path("hf.co/org").mkdir(parents=True)
    assert parse_path("hf.co/org") == "hf.co/org"
