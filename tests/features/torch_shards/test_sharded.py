"""Sharded sets of torch files: by their index, by their directory; converted as one, or refused in words."""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from cells import naming_attacks, torch_containers, verifying
from checkpoints import Run, assert_same, ckptconv_here, contents, done, load_with_aliases
from compare import Attack, numbers
from effort import every, examples
from hypothesis import given
from hypothesis import strategies as st
from reading import state_in
from safetensors.torch import load_file
from stores import FAR
from torch import nn

import ckptconv as library
from ckptconv.formats.detect import open_source

INDEX = "pytorch_model.bin.index.json"


def state_dict() -> dict[str, torch.Tensor]:
    made = {f"layers.{n}.weight": numbers(torch.float32, 4, n + 1) for n in range(6)}
    made |= {f"layers.{n}.scale": numbers(torch.bfloat16, n + 1) for n in range(6)}
    return {**made, "head": numbers(torch.float16, 7), "count": torch.tensor(3)}


def sharded(
    tensors: dict[str, Any], directory: Path, parts: int = 3, *, index: bool = True, stem: str = "pytorch_model"
) -> Path:
    """`tensors` in so many files of a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    names, weight_map = list(tensors), {}
    for part in range(parts):
        file = f"{stem}-{part + 1:05d}-of-{parts:05d}.bin"
        chosen = names[part * len(names) // parts : (part + 1) * len(names) // parts]
        torch.save({name: tensors[name] for name in chosen}, directory / file)
        weight_map |= dict.fromkeys(chosen, file)
    if index:
        total = sum(tensor.nbytes for tensor in tensors.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
        (directory / f"{stem}.bin.index.json").write_text(text)
    return directory


def converted(*arguments: object) -> Run:
    return done(ckptconv_here("pt2safetensors", *arguments))


def refused(code: int, *words: str, path: Path) -> None:
    before = sorted(os.listdir(path if path.is_dir() else path.parent))
    ckptconv_here("pt2safetensors", path).refused(code, *words)
    assert sorted(os.listdir(path if path.is_dir() else path.parent)) == before


# ------------------------------------------------------------------------------------------------------- what comes out


def test_the_output_keeps_the_shards_of_the_input(tmp_path: Path) -> None:
    tensors = state_dict()
    directory = sharded(tensors, tmp_path / "in")
    converted(directory / INDEX, tmp_path / "out")
    assert_same(load_with_aliases(tmp_path / "out"), tensors)
    for part in (1, 2, 3):
        theirs = torch.load(directory / f"pytorch_model-0000{part}-of-00003.bin")
        assert_same(load_file(tmp_path / f"out/model-0000{part}-of-00003.safetensors"), theirs)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    given = json.loads((directory / INDEX).read_text())
    assert index["metadata"]["total_size"] == given["metadata"]["total_size"]
    renamed = {k: v.replace("pytorch_", "").replace(".bin", ".safetensors") for k, v in given["weight_map"].items()}
    assert index["weight_map"] == renamed


@every("index", [True, False])
def test_a_directory_with_or_without_an_index(index: bool, tmp_path: Path) -> None:
    tensors = state_dict()
    directory = sharded(tensors, tmp_path / "in", index=index)
    (directory / "config.json").write_text("{}")
    (directory / "training_args.bin").write_bytes(b"something else")
    converted(directory, tmp_path / "out")
    assert_same(load_with_aliases(tmp_path / "out"), tensors)
    assert len(list((tmp_path / "out").glob("model-0000?-of-00003.safetensors"))) == 3


def test_one_file_where_one_is_asked_for_keeps_the_order_of_the_state_dict(tmp_path: Path) -> None:
    tensors = state_dict()
    converted(sharded(tensors, tmp_path / "in"), tmp_path / "out.safetensors")
    assert_same(load_with_aliases(tmp_path / "out.safetensors"), tensors)
    assert list(state_in(tmp_path / "out.safetensors")) == list(tensors)


def test_other_shards_where_a_size_is_asked_for(tmp_path: Path) -> None:
    tensors = {str(n): numbers(torch.uint8, 100) for n in range(9)}
    directory = sharded(tensors, tmp_path / "in")
    converted(directory, tmp_path / "out", "--max-shard-size", "250B")
    assert_same(load_with_aliases(tmp_path / "out"), tensors)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 5


def test_without_an_output_it_stands_beside_the_input(tmp_path: Path) -> None:
    tensors = state_dict()
    by_directory, by_index = sharded(tensors, tmp_path / "a"), sharded(tensors, tmp_path / "b")
    converted(by_directory)
    converted(by_index / INDEX)
    for directory in (by_directory, by_index):
        assert_same(load_with_aliases(directory), tensors)
        assert (directory / "pytorch_model-00002-of-00003.bin").exists()


def test_one_file_of_a_set_is_converted_alone_if_that_is_asked_for(tmp_path: Path) -> None:
    directory = sharded(state_dict(), tmp_path / "in")
    run = converted(directory / "pytorch_model-00002-of-00003.bin", "--alone")
    assert (
        "is one file of a sharded set: its tensors are complete, but other files contain the rest of the model."
        in run.err + run.out
    )
    assert "Only this file was converted." in run.err + run.out
    theirs = torch.load(directory / "pytorch_model-00002-of-00003.bin")
    assert_same(load_file(directory / "model-00002-of-00003.safetensors"), theirs)


def test_selection_and_names_work_across_the_shards(tmp_path: Path) -> None:
    tensors = state_dict()
    directory = sharded(tensors, tmp_path / "in")
    options = ["--include", "layers.*", "--exclude", "layers.[01].*", "--strip-prefix", "layers.", "--dtype", "float32"]
    converted(directory, tmp_path / "out", *options)
    kept = {name: value for name, value in tensors.items() if name.startswith("layers.") and name[7] not in "01"}
    assert_same(load_with_aliases(tmp_path / "out"), {name[7:]: value.float() for name, value in kept.items()})


def test_a_shard_of_which_nothing_is_left_is_left_out(tmp_path: Path) -> None:
    tensors = {name: numbers(torch.uint8, 10) for name in "abc"}
    converted(sharded(tensors, tmp_path / "in"), tmp_path / "out", "--exclude", "b")
    assert sorted(path.name for path in (tmp_path / "out").glob("*.safetensors")) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def test_ties_within_a_shard(tmp_path: Path) -> None:
    tensors = state_dict()
    tensors["tied"] = tensors["head"]
    run = converted(sharded(tensors, tmp_path / "in"), tmp_path / "out", "--json")
    assert run.json["aliases"] == {"tied": "head"}
    assert_same(load_with_aliases(tmp_path / "out"), tensors)


def test_a_state_dict_of_a_module_keeps_its_metadata(tmp_path: Path) -> None:
    whole = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).state_dict()
    directory = tmp_path / "in"
    directory.mkdir()
    for part, prefix in enumerate(("0.", "1.")):
        shard = OrderedDict((name, value) for name, value in whole.items() if name.startswith(prefix))
        shard._metadata = OrderedDict(  # type: ignore[attr-defined]
            (name, value) for name, value in whole._metadata.items() if f"{name}." in ("", prefix) or name == prefix[0]
        )
        torch.save(shard, directory / f"pytorch_model-0000{part + 1}-of-00002.bin")
    tree = open_source(directory).weights
    assert list(tree) == list(whole)
    assert vars(tree)["_metadata"] == {"0": {"version": 1}, "1": {"version": 2}}


def test_links_are_followed_as_the_cache_of_a_hub_has_them(tmp_path: Path) -> None:
    tensors = state_dict()
    blobs = sharded(tensors, tmp_path / "blobs")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for number, path in enumerate(sorted(blobs.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(Path("../blobs") / str(number))
    converted(snapshot / INDEX, tmp_path / "out")
    assert_same(load_with_aliases(tmp_path / "out"), tensors)


def test_shards_in_a_directory_below(tmp_path: Path) -> None:
    tensors = state_dict()
    directory = sharded(tensors, tmp_path / "in")
    (directory / "below").mkdir()
    for path in directory.glob("*.bin"):
        path.rename(directory / "below" / path.name)
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"] = {name: f"below/{file}" for name, file in index["weight_map"].items()}
    (directory / INDEX).write_text(json.dumps(index))
    converted(directory, tmp_path / "out")
    assert_same(load_with_aliases(tmp_path / "out"), tensors)


@every("called", ["part-{:05d}-of-00002.pt", "part-{:05d}-of-000002.pt", "part-{:06d}-of-000002.pt"])
@every("first", [0, 1])
def test_sets_are_counted_from_one_or_from_nought(first: int, called: str, tmp_path: Path) -> None:
    tensors = {name: numbers(torch.uint8, 10) for name in "ab"}
    for number, (name, tensor) in enumerate(tensors.items(), first):
        torch.save({name: tensor}, tmp_path / called.format(number))
    converted(tmp_path, tmp_path / "out")
    assert_same(load_with_aliases(tmp_path / "out"), tensors)


@every("options", torch_containers().values(), ids=torch_containers())
def test_shards_in_every_container(options: dict[str, Any], tmp_path: Path) -> None:
    tensors = {name: numbers(torch.float32, 10) for name in "ab"}
    for number, (name, tensor) in enumerate(tensors.items(), 1):
        path = tmp_path / f"pytorch_model-0000{number}-of-00002.bin"
        torch.save({name: tensor}, path, **options)
    converted(tmp_path, tmp_path / "out")
    assert_same(load_with_aliases(tmp_path / "out"), tensors)


def test_the_set_is_opened_as_one(tmp_path: Path) -> None:
    tensors = state_dict()
    directory = sharded(tensors, tmp_path / "in")
    for path in (directory, directory / INDEX):
        source = open_source(path)
        assert set(source.weights) == set(tensors)
        assert source.facts["files"] == 3


@given(sizes=st.lists(st.integers(0, 300), min_size=1, max_size=12), parts=st.integers(1, 5))
@examples(25)
def test_any_set(sizes: list[int], parts: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("set")
    tensors = {f"t{number}": numbers(torch.uint8, size) for number, size in enumerate(sizes)}
    converted(sharded(tensors, directory / "in", parts), directory / "out")
    assert_same(load_with_aliases(directory / "out"), tensors)


# ------------------------------------------------------------------------------------------------------ what is refused


def changed(directory: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """The directory, with another index."""
    index = json.loads((directory / INDEX).read_text())
    change(index)
    (directory / INDEX).write_text(json.dumps(index))
    return directory


OUTSIDE = ["../other.bin", "/etc/passwd", "below/../../other.bin", "..", "file:///etc/passwd", "s3://bucket/x", "..\\x"]


@every("file", OUTSIDE)
def test_an_index_may_not_lead_out_of_its_directory(file: str, tmp_path: Path) -> None:
    directory = sharded(state_dict(), tmp_path / "in")
    torch.save({"head": torch.ones(1)}, tmp_path / "other.bin")
    changed(directory, lambda index: index["weight_map"].update(head=file))
    refused(3, "is outside its directory", INDEX, path=directory)
    refused(3, "is outside its directory", INDEX, path=directory / INDEX)


def test_missing_files_are_named(tmp_path: Path) -> None:
    directory = sharded(state_dict(), tmp_path / "in")
    (directory / "pytorch_model-00002-of-00003.bin").unlink()
    refused(4, "cannot be found (1 of 3): pytorch_model-00002-of-00003.bin", path=directory)
    (directory / INDEX).unlink()
    refused(4, "2 of 3 shards; missing: pytorch_model-00002-of-00003.bin", path=directory)


def test_tensors_that_a_file_lacks_are_named(tmp_path: Path) -> None:
    directory = sharded(state_dict(), tmp_path / "in")
    changed(directory, lambda index: index["weight_map"].update(new="pytorch_model-00001-of-00003.bin"))
    refused(4, "1 tensor in pytorch_model-00001-of-00003.bin that the file does not contain: new", path=directory)


def test_tensors_that_the_index_lacks_are_named(tmp_path: Path) -> None:
    directory = sharded(state_dict(), tmp_path / "in")
    changed(directory, lambda index: index["weight_map"].pop("head"))
    refused(4, "pytorch_model-00003-of-00003.bin contains 1 tensor", "does not list: head", path=directory)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    directory = sharded(state_dict(), tmp_path / "in", index=False)
    torch.save({"layers.0.weight": torch.ones(1)}, directory / "pytorch_model-00003-of-00003.bin")
    files = "pytorch_model-00001-of-00003.bin and pytorch_model-00003-of-00003.bin"
    refused(4, f"'layers.0.weight' is in two files, {files}", path=directory)


def test_an_entry_twice_in_an_index_is_refused(tmp_path: Path) -> None:
    directory = sharded(state_dict(), tmp_path / "in")
    text = (directory / INDEX).read_text().replace('"head":', '"count":')
    (directory / INDEX).write_text(text)
    refused(4, "it has 'count' twice", path=directory)


INDEXES: dict[str, tuple[str, int, str]] = {
    "no JSON": ("{", 4, "is not JSON"),
    "nothing": ("", 4, "is not JSON"),
    "too deep": ("[" * 100_000, 4, "nested too deep"),
    "a list": ("[]", 5, "no weight_map"),
    "no map": ('{"metadata": {}}', 5, "no weight_map"),
    "a map of another kind": ('{"weight_map": ["a"]}', 5, "no weight_map"),
    "no names of files": ('{"weight_map": {"a": 1}}', 5, "no weight_map"),
    "empty names of files": ('{"weight_map": {"a": ""}}', 3, "is outside its directory"),
    "no tensors": ('{"weight_map": {}}', 2, "lists no tensors"),
    "safetensors": ('{"weight_map": {"a": "model-00001-of-00001.safetensors"}}', 5, "safetensors files already"),
    "a directory": ('{"weight_map": {"a": "."}}', 4, "cannot be found (1 of 1): .."),
    "half a character": ('{"weight_map": {"a": "\\ud800"}}', 4, "half of a surrogate pair"),
}


@every("text, code, words", INDEXES.values(), ids=INDEXES)
def test_what_is_no_index(text: str, code: int, words: str, tmp_path: Path) -> None:
    path = tmp_path / INDEX
    path.write_text(text)
    refused(code, words, path=path)


def test_an_index_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(b'{"weight_map": {"\xff": "a"}}')
    refused(4, "not UTF-8", path=tmp_path)


def test_several_sets_in_a_directory_are_not_mixed(tmp_path: Path) -> None:
    directory = sharded(state_dict(), tmp_path / "in")
    sharded(state_dict(), directory, stem="other")
    refused(2, "several indexes", "other.bin.index.json", path=directory)
    for path in directory.glob("*.json"):
        path.unlink()
    refused(2, "several sets", path=directory)
    sharded(state_dict(), directory, parts=2)
    (directory / "pytorch_model.bin.index.json").unlink()
    refused(2, "several sets", path=directory)


def test_a_shard_that_is_no_state_dict(tmp_path: Path) -> None:
    directory = sharded(state_dict(), tmp_path / "in", index=False)
    torch.save([torch.ones(1)], directory / "pytorch_model-00003-of-00003.bin")
    refused(5, "pytorch_model-00003-of-00003.bin", "of type list", path=directory)


@naming_attacks
def test_an_attack_in_one_shard_is_an_attack(tmp_path: Path) -> None:
    directory = sharded(state_dict(), tmp_path / "in", index=False)
    torch.save({"x": Attack(tmp_path / "canary")}, directory / "pytorch_model-00002-of-00003.bin")
    refused(3, "pytorch_model-00002-of-00003.bin", path=directory)
    assert not (tmp_path / "canary").exists()


def test_a_directory_without_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    refused(2, "but not a known checkpoint", path=tmp_path)


def test_the_index_of_a_set_stands_for_the_set(tmp_path: Path) -> None:
    directory = sharded(state_dict(), tmp_path / "in")
    converted(directory / INDEX, tmp_path / "special")
    done(ckptconv_here("convert", directory / INDEX, tmp_path / "obvious"))
    assert contents(tmp_path / "special") == contents(tmp_path / "obvious")


@verifying
def test_an_output_beside_its_sharded_source(tmp_path: Path) -> None:
    directory = sharded({name: torch.randn(3) for name in "abcd"}, tmp_path / "in", 2)
    converted(directory)
    assert ckptconv_here("verify", directory, directory, "--json").json["tensors"] == 4
    path = directory / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(library.DifferenceError) as caught:
        library.verify(directory, directory)
    assert caught.value.difference["tensor"] == "d"


# ------------------------------------------------------------------------------------------------------------ on stores


@FAR
@every("kind", ["torch", "safetensors"])
def test_the_files_of_a_set_on_a_store_are_read_side_by_side(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read of one waits until those of all have begun."""
    from ckptconv.features.torch_shards import read as torch_set
    from ckptconv.formats import safetensors

    directory, index = sharded(state_dict(), tmp_path / "in"), INDEX
    if kind == "safetensors":
        converted(directory, tmp_path / "out")
        directory, index = tmp_path / "out", "model.safetensors.index.json"
    store, place = fsspec.filesystem("memory"), f"/set-of-{kind}"
    store.put(f"{directory}/", place, recursive=True)
    begun = threading.Barrier(3, timeout=600)

    def together(read: Callable[..., Any]) -> Callable[..., Any]:
        def waiting(*given: Any) -> Any:
            begun.wait()
            return read(*given)

        return waiting

    module, name = (torch_set, "read_torch") if kind == "torch" else (safetensors, "header_of")
    monkeypatch.setattr(module, name, together(getattr(module, name)))
    assert len(open_source(f"memory:/{place}/{index}").weights) == len(state_dict())
    store.rm(place, recursive=True)


def test_a_configuration_in_the_place_of_a_checkpoint_is_told_its_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    run = ckptconv_here("convert", tmp_path / "config.json", tmp_path / "out")
    run.refused(5, f"their index, or their directory: {tmp_path}")


def test_a_set_with_an_index_is_read_though_shards_were_converted_beside_it(tmp_path: Path) -> None:
    index = {"metadata": {}, "weight_map": {}}
    for number in (1, 2):
        torch.save({f"w{number}": torch.ones(2)}, tmp_path / f"pytorch_model-0000{number}-of-00002.bin")
        index["weight_map"][f"w{number}"] = f"pytorch_model-0000{number}-of-00002.bin"
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    for left in (2, 1):
        shard = tmp_path / f"pytorch_model-0000{left}-of-00002.bin"
        (warned,) = done(ckptconv_here("pt2safetensors", shard, "--json")).json["warnings"]
        assert warned.startswith(f"{shard} is one file of a sharded set: ")
        assert warned.endswith(f" Give the directory of the set, {tmp_path}, or its index.")
        run = done(ckptconv_here("convert", tmp_path, tmp_path.parent / "o.safetensors", "--overwrite", "--json"))
        (warning,) = run.json["warnings"]
        assert f"model-0000{left}-of-00002.safetensors" in warning
        assert warning.endswith(" not read: pytorch_model.bin.index.json lists other files.")
        assert load_file(tmp_path.parent / "o.safetensors").keys() == {"w1", "w2"}
