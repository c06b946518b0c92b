"""pt2safetensors on files that torch wrote: every tensor, bit for bit, the tree around them, and what is refused."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import stat
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from cells import VERIFY, looking
from checkpoints import (
    Run,
    assert_same,
    bits,
    ckptconv,
    ckptconv_here,
    done,
    load_with_aliases,
    metadata_of,
    torch_file,
    torch_loaded,
)
from compare import assert_same as assert_same_tree
from effort import every, examples
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st
from reading import state_in
from safetensors.torch import load_file, save_file

from ckptconv.cli.reports import duration
from ckptconv.tensors.dtypes import DTYPES

INDEX = "model.safetensors.index.json"
MANIFEST = ".ckptconv-manifest.json"
STRUCTURE = "ckptconv.structure"
STRUCTURE_FILE = "ckptconv.structure.json"


def converted(*arguments: object) -> Run:
    return done(ckptconv_here("pt2safetensors", *arguments))


def model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        OrderedDict(
            conv=torch.nn.Conv2d(3, 4, 3),
            norm=torch.nn.BatchNorm2d(4),
            head=torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 2, bias=False)),
        )
    )


def trained(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> tuple[torch.nn.Module, Any]:
    """A model and its optimizer after a step."""
    net = model()
    optimizer = kind(net.parameters(), **options)
    net.norm(net.conv(torch.randn(2, 3, 8, 8))).sum().backward()
    net.head(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    return net, optimizer


# ------------------------------------------------------------------------------------------- whatever torch can save

CHECKPOINTS: dict[str, Callable[[], Any]] = {}


def checkpoint(make: Callable[[], Any]) -> Callable[[], Any]:
    CHECKPOINTS[make.__name__] = make
    return make


@checkpoint
def a_state_dict() -> Any:
    return model().state_dict()


@checkpoint
def a_training_checkpoint() -> Any:
    net, optimizer = trained(torch.optim.AdamW, lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    return {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": schedule.state_dict(),
        "epoch": 3,
        "best": float("inf"),
        "rng": {"torch": torch.get_rng_state(), "cuda": [], "python": random.Random(0).getstate()},
        "args": {"lr": 1e-3, "name": "größe", "betas": (0.9, 0.999), "resume": None, "amp": True},
    }


@checkpoint
def a_lightning_checkpoint() -> Any:
    net, optimizer = trained(torch.optim.SGD, lr=0.1, momentum=0.9)
    return {
        "epoch": 1,
        "global_step": 100,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": OrderedDict((f"net.{name}", tensor) for name, tensor in net.state_dict().items()),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 2}, "current": {"ready": 2}}}},
        "callbacks": {"ModelCheckpoint{'monitor': 'loss', 'mode': 'min'}": {"best": torch.tensor(0.25), "kth": {}}},
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [],
        "hparams_name": "kwargs",
        "hyper_parameters": {"width": 8, "layers": [4, 5]},
    }


@checkpoint
def every_dtype() -> Any:
    return {
        name: torch.arange(48, dtype=torch.uint8).repeat(dtype.itemsize).view(getattr(torch, name)).reshape(2, 3, 8)
        for name, dtype in DTYPES.items()
        if dtype.code and dtype.name != "bool"
    } | {"bool": torch.arange(12).reshape(3, 4) % 3 == 0}


@checkpoint
def special_values() -> Any:
    return {
        "float32": torch.tensor([float("nan"), -0.0, float("inf"), -float("inf"), 1e-45]),
        "payload": torch.tensor([0x7FC00001, -0x3FFFFF, 0x7F800001], dtype=torch.int32).view(torch.float32),
        "complex": torch.tensor([complex(0.0, -0.0), complex(float("nan"), float("inf"))]),
    }


@checkpoint
def shapes() -> Any:
    return {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0),
        "empty matrix": torch.empty(3, 0, 2, dtype=torch.int16),
        "ones": torch.ones(1, 1, 1, 1, 1),
        "eight": torch.arange(256).reshape([2] * 8),
    }


@checkpoint
def views_into_one_large_storage() -> Any:
    """What the parameters of a fused optimizer look like."""
    flat = torch.arange(1_000_000, dtype=torch.float32)
    return {f"part{number}": flat[start : start + 125_000] for number, start in enumerate(range(0, 1_000_000, 125_000))}


@checkpoint
def a_small_view_of_a_large_storage() -> Any:
    return {"view": torch.arange(2_000_000, dtype=torch.int32)[1_999_000:1_999_010]}


@checkpoint
def strided_views() -> Any:
    square = torch.arange(600.0).reshape(20, 30)
    return {
        "transposed": square.clone().t(),
        "column": square.clone()[:, 3],
        "columns": square.clone()[:, 5:9],
        "every other": square.clone()[::2, ::3],
        "permuted": torch.arange(210).reshape(5, 6, 7).permute(2, 0, 1),
        "channels last": torch.arange(480.0).reshape(2, 4, 6, 10).to(memory_format=torch.channels_last),
        "expanded": torch.arange(3).expand(5, 3),
        "expanded scalar": torch.tensor(7.0).expand(2, 3, 4),
        "diagonal": square.clone().diagonal(),
        "windows": torch.arange(10).unfold(0, 4, 2),
        "large transposed": torch.arange(700 * 900, dtype=torch.float32).reshape(700, 900).t(),
    }


@checkpoint
def overlapping_views() -> Any:
    flat = torch.arange(100.0)
    return {"low": flat[:60], "high": flat[40:], "all": flat, "all parts again": flat, "matrix": flat.view(10, 10).t()}


@checkpoint
def tied_weights() -> Any:
    embedding, head = torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10, bias=False)
    head.weight = embedding.weight
    return torch.nn.ModuleDict({"embedding": embedding, "head": head}).state_dict()


@checkpoint
def negated() -> Any:
    return {"neg": torch._neg_view(torch.arange(6.0)), "imag": torch.tensor([1 + 2j, 3 - 4j]).conj().imag}


@checkpoint
def conjugated() -> Any:
    return {"conj": torch.tensor([[1 + 2j, 3 - 4j], [5j, 6]]).conj(), "adjoint": torch.tensor([[1 + 2j, 3 - 4j]]).mH}


@checkpoint
def names_of_all_sorts() -> Any:
    names = ["", "a.b", "a", "größe", "重み", "a b", 'quote"', "back\\slash", "tab\t", "new\nline", "\x7f", "x" * 300]
    return {name: torch.full((2,), float(number)) for number, name in enumerate(names)}


@checkpoint
def four_thousand_tensors() -> Any:
    return {f"layer.{number}.weight": torch.full((3,), number) for number in range(4000)}


def check(path: Path, output: Path) -> None:
    """`output` is exactly what `path` holds: each tensor under its name, and the tree with them put back."""
    expected = torch_loaded(path)
    if is_state_dict(expected):
        got = load_with_aliases(output)
        assert_same(got, {name: tensor.resolve_conj().resolve_neg() for name, tensor in expected.items()})
    assert_same_tree(expected, state_in(output))


def is_state_dict(tree: Any) -> bool:
    return isinstance(tree, dict) and all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in tree.items()
    )


@every("name", CHECKPOINTS)
def test_what_is_written_is_what_torch_would_load(name: str, tmp_path: Path) -> None:
    path = torch_file(tmp_path, CHECKPOINTS[name]())
    converted(path)
    check(path, tmp_path / "model.safetensors")
    assert sorted(os.listdir(tmp_path)) == ["model.pt", "model.safetensors"]


@every("name", ["a_training_checkpoint", "every_dtype", "strided_views", "shapes"])
def test_a_directory_holds_the_same_and_so_do_shards(name: str, tmp_path: Path) -> None:
    path = torch_file(tmp_path, CHECKPOINTS[name]())
    converted(path, tmp_path / "whole")
    check(path, tmp_path / "whole")
    converted(path, tmp_path / "shards", "--max-shard-size", "1kB")
    check(path, tmp_path / "shards")
    assert (tmp_path / "shards" / INDEX).exists()


def resaved(path: Path, change: Callable[[str, bytes], bytes], method: int = zipfile.ZIP_STORED) -> None:
    """The archive packed again, each member changed on the way."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, change(name.partition("/")[2], data))


def test_tied_weights_of_a_big_endian_machine_are_stored_once(tmp_path: Path) -> None:
    path = torch_file(tmp_path, tied_weights())
    resaved(path, lambda member, data: b"big" if member == "byteorder" else data)
    assert converted(path, "--json").json["aliases"] == {"head.weight": "embedding.weight"}
    assert_same(load_with_aliases(tmp_path / "model.safetensors"), torch_loaded(path))


@every("location", ["cuda:0", "cuda:7", "mps", "xpu:1", "hpu"])
def test_tensors_that_were_on_another_device(location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: location)
    path = torch_file(tmp_path, a_training_checkpoint())
    monkeypatch.undo()
    assert location.encode() in path.read_bytes()
    converted(path)
    check(path, tmp_path / "model.safetensors")


def test_an_archive_packed_again_without_alignment(tmp_path: Path) -> None:
    path = torch_file(tmp_path, a_training_checkpoint())
    resaved(path, lambda member, data: data)
    converted(path)
    check(path, tmp_path / "model.safetensors")


def test_members_in_another_order_and_storages_that_nothing_uses(tmp_path: Path) -> None:
    path = torch_file(tmp_path, a_training_checkpoint())
    expected = torch_loaded(path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    names = list(members)
    random.Random(0).shuffle(names)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/data/99999", b"unused")
        for name in names:
            archive.writestr(name, members[name])
    converted(path)
    assert_same_tree(expected, state_in(tmp_path / "model.safetensors"))


def test_classes_of_other_packages_are_named_and_stay_data(tmp_path: Path) -> None:
    path = torch_file(tmp_path, {"weights": torch.ones(2), "path": Path("/a/b"), "args": Arguments(lr=torch.zeros(1))})
    report = converted(path, "--json").json
    assert sorted(report["opaque"]) == ["pathlib.PosixPath", f"{__name__}.Arguments"]
    words = ("convert", path, tmp_path / "other.safetensors")
    assert "--no-structure omits these" in done(ckptconv_here(*words, "--drop-opaque")).err
    assert "PosixPath" in str(metadata_of(tmp_path / "other.safetensors"))
    done(ckptconv_here(*words, "--no-structure"))
    assert "PosixPath" not in str(metadata_of(tmp_path / "other.safetensors"))
    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(stored.pop("weights"), torch.ones(2))
    ((name, tensor),) = stored.items()
    assert name.startswith("args.")
    assert torch.equal(tensor, torch.zeros(1))
    assert f"{__name__}.Arguments" in converted(path).out


class Arguments:
    """An object as training scripts save them."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


def test_a_file_is_byte_for_byte_what_safetensors_writes(tmp_path: Path) -> None:
    """Of a plain dict in the order in which a file holds it, nothing needs a record."""
    tensors = {"a": torch.ones(2, 3), "b": torch.zeros(4), "c": torch.ones(3, dtype=torch.int8)}
    path = torch_file(tmp_path, tensors)
    converted(path)
    save_file(tensors, tmp_path / "theirs.safetensors", {"format": "pt"})
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


def test_the_same_input_gives_the_same_bytes_whatever_the_threads(tmp_path: Path) -> None:
    path = torch_file(tmp_path, {**views_into_one_large_storage(), **strided_views(), **every_dtype()})
    outputs = []
    for options in (["--jobs", "1"], ["--jobs", "8"], ["--memory", "256KiB"], ["--memory", "64MiB", "--no-fsync"]):
        converted(path, tmp_path / "out.safetensors", *options)
        outputs.append((tmp_path / "out.safetensors").read_bytes())
    assert len(set(outputs)) == 1


# --------------------------------------------------------------------------------------------- what is chosen of it


def test_key_takes_a_subtree_with_its_structure(tmp_path: Path) -> None:
    path = torch_file(tmp_path, a_training_checkpoint())
    expected = torch_loaded(path)
    for key, part in [
        ("model", expected["model"]),
        ("optimizer.state", expected["optimizer"]["state"]),
        ("optimizer.state.0", expected["optimizer"]["state"][0]),
        ("rng.torch", expected["rng"]["torch"]),
    ]:
        converted(path, tmp_path / "out.safetensors", "--key", key)
        assert_same_tree(part, state_in(tmp_path / "out.safetensors"))
    converted(path, tmp_path / "out.safetensors", "--key", "model")
    assert_same(load_file(tmp_path / "out.safetensors"), dict(expected["model"]))


def test_key_takes_the_longest_match_and_indices_of_lists(tmp_path: Path) -> None:
    tree = {"a": {"b": torch.ones(1)}, "a.b": {"c": torch.zeros(2)}, "list": [0, {"x": torch.ones(3)}]}
    path = torch_file(tmp_path, tree)
    converted(path, tmp_path / "out.safetensors", "--key", "a.b")
    assert_same(load_file(tmp_path / "out.safetensors"), {"c": torch.zeros(2)})
    converted(path, tmp_path / "out.safetensors", "--key", "list.1")
    assert_same(load_file(tmp_path / "out.safetensors"), {"x": torch.ones(3)})


def test_include_and_exclude_are_globs_over_the_names(tmp_path: Path) -> None:
    path = torch_file(tmp_path, a_state_dict())
    expected = torch_loaded(path)
    converted(path, tmp_path / "out.safetensors", "--include", "head.*", "--include", "conv.*", "--exclude", "*.bias")
    names = {"head.0.weight", "head.1.weight", "conv.weight"}
    assert_same(load_file(tmp_path / "out.safetensors"), {name: expected[name] for name in names})
    tree = state_in(tmp_path / "out.safetensors")
    assert list(tree) == [name for name in expected if name in names]


def test_names_are_stripped_then_renamed_in_turn(tmp_path: Path) -> None:
    state = {f"module.{name}": tensor for name, tensor in a_state_dict().items()}
    path = torch_file(tmp_path, state)
    converted(
        path, tmp_path / "out.safetensors", "--strip_prefix", "module.",
        "--rename", r"^head\.(\d)=mlp.layer\1", "--rename", "^mlp=ff",
    )  # fmt: skip
    names = {name: name.removeprefix("module.").replace("head.", "ff.layer") for name in state}
    expected = {new: state[old] for old, new in names.items()}
    assert_same(load_file(tmp_path / "out.safetensors"), expected)
    assert_same_tree(expected, state_in(tmp_path / "out.safetensors"))


def test_the_order_of_a_plain_dict_is_kept_through_casts_and_shards(tmp_path: Path) -> None:
    """In one file as they are, these lie in the order of the dict."""
    path = torch_file(tmp_path, {"b": torch.ones(300), "c": torch.ones(2), "a": torch.ones(5, dtype=torch.bfloat16)})
    for output, *options in (["out.safetensors"], ["out.safetensors", "--dtype", "float32"], ["out"], ["shards"]):
        shards = ["--max-shard-size", "1kB"] if output == "shards" else []
        converted(path, tmp_path / output, *options, *shards)
        assert list(state_in(tmp_path / output)) == ["b", "c", "a"]


@every("order", ["ab", "ba"])
def test_renamed_tensors_of_a_plain_dict_keep_their_order(order: str, tmp_path: Path) -> None:
    path = torch_file(tmp_path, {f"x.{key}": torch.ones(ord(key)) for key in order})
    converted(path, "--strip-prefix", "x.")
    state = state_in(tmp_path / "model.safetensors")
    assert_same_tree({key: torch.ones(ord(key)) for key in order}, state)
    assert list(state) == list(order)


def test_what_renames_nothing_is_said_and_no_error(tmp_path: Path) -> None:
    path = torch_file(tmp_path, {"model.a": torch.ones(2), "model.b": torch.ones(3), "head": torch.ones(4)})
    options = ["--strip-prefix", "model", "--rename", r"^\.=", "--rename", "head=out", "--rename", "tail=end"]
    report = converted(path, tmp_path / "out.safetensors", *options, "--json").json
    assert report["warnings"] == ["--rename 'tail=end' changes no name; the first name is 'a'."]
    assert sorted(load_file(tmp_path / "out.safetensors")) == ["a", "b", "out"]
    run = converted(path, tmp_path / "out.safetensors", "--quiet", "--strip-prefix", "modle.", "--rename", "x=y")
    assert run.out == ""
    assert run.err.splitlines() == [
        "ckptconv: warning: --strip-prefix 'modle.' changes no name; the first name is 'model.a'.",
        "ckptconv: warning: --rename 'x=y' changes no name; the first name is 'model.a'.",
    ]
    wrapped = torch_file(tmp_path, {"module.a": torch.ones(2), "module.b": torch.ones(3)}, name="wrapped.pt")
    run = converted(wrapped, tmp_path / "wrapped.safetensors", "--strip-prefix", "model.")
    assert "--strip-prefix 'model.' changes no name" in run.err
    assert "--strip-prefix module. removes it." in run.out
    # What is left out has no name to be changed.
    run = converted(path, tmp_path / "out.safetensors", "--rename", "head=out", "--exclude", "head")
    assert "--rename 'head=out' changes no name" in run.err
    whole = torch_file(tmp_path, {"state_dict": {"module.a": torch.ones(1)}, "step": 1})
    for prefix in ("module.", "module"):
        run = converted(whole, "--strip-prefix", prefix)
        assert "the first name is 'state_dict.module.a': give --key state_dict --strip-prefix 'module.'.\n" in run.err
    converted(whole, tmp_path / "whole.safetensors", "--strip-prefix", "state_dict.module.")
    assert list(load_file(tmp_path / "whole.safetensors")) == ["a"]


def test_advice_on_a_training_checkpoint_agrees_and_does_what_it_says(tmp_path: Path) -> None:
    """Each case has the options that are given, and those that the only advice on the prefix names; with them, the
    names of the output begin as the user wants."""
    optimizer = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    weights = {"model.model.a": torch.ones(2), "model.head": torch.ones(3)}
    path = torch_file(tmp_path, {"epoch": 1, "state_dict": weights, "optimizer_states": [optimizer]})
    output = tmp_path / "model.safetensors"
    part, rest = ["--include", "state_dict.model.*"], ["--exclude", "state_dict.model.head"]
    by_key, whole = ["--key", "state_dict", "--strip-prefix", "model."], ["--strip-prefix", "state_dict.model."]
    for options, prefix, advised in (
        ([], [], by_key),
        ([], ["--strip-prefix", "model."], by_key),
        (["--dtype", "bf16"], ["--strip-prefix", "model."], by_key),
        (["--include", "*model.*"], ["--strip-prefix", "model."], by_key),
        (part, [], whole),
        (part, ["--strip-prefix", "model."], whole),
        (rest, [], whole),
    ):
        run = converted(path, *options, *prefix)
        said = (run.err + run.out).replace("give the whole beginning, ", "--strip-prefix ").replace("'", "")
        assert said.count(" ".join(advised)) == 1, said
        assert said.count("--strip-prefix ") == 1 + said.count("--strip-prefix model. changes no name"), said
        # With the key, a glob that begins with it would match nothing.
        assert ("--key state_dict converts only the weights" in said) == (options in ([], ["--dtype", "bf16"])), said
        converted(path, *options, *advised)
        assert {"model.a", "head"} - {"head" if options == rest else ""} <= {*load_file(output)}
    # The key would strip the prefix from the names below it.
    path = torch_file(tmp_path, {"epoch": 1, "model": {"model.a": torch.ones(2)}})
    assert "--key" not in converted(path, "--strip-prefix", "model.").out
    assert list(load_file(output)) == ["model.a"]
    # A prefix that is stripped, and a rule that changes nothing.
    run = converted(path, "--strip-prefix", "model.", "--rename", "x=y")
    assert run.err == "ckptconv: warning: --rename 'x=y' changes no name; the first name is 'model.a'.\n"


def test_a_replacement_is_split_at_the_last_equals_sign(tmp_path: Path) -> None:
    path = torch_file(tmp_path, {"a=b": torch.ones(1)})
    converted(path, "--rename", "a=b=c")
    assert list(load_file(tmp_path / "model.safetensors")) == ["c"]


@every(
    "options, words",
    [
        (["--key", "modle"], ["The key 'modle' does not exist", "'model'"]),
        (["--key", "model.nope"], ["under 'model'", "conv.weight"]),
        (["--key", "epoch"], ["No tensor to convert"]),
        (["--include", "*.wieght"], ["--include '*.wieght'", "matches none"]),
        (["--exclude", "*"], ["excluded"]),
        (["--rename", r"\d=0"], ["the same name"]),
        (["--rename", ".*="], ["leaves an empty name"]),
        (["--rename", r"model=\9"], [r"model=\9"]),
        (["--rename", "^.*$=__metadata__", "--include", "rng.torch"], ["__metadata__"]),
        (["--max-shard-size", "1kB"], ["--max-shard-size", "directory"]),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(options: list[str], words: list[str], tmp_path: Path) -> None:
    path = torch_file(tmp_path, a_training_checkpoint())
    refused(2, *words, path, *options)


def test_the_longest_error_is_still_one_paragraph(tmp_path: Path) -> None:
    path = torch_file(tmp_path, four_thousand_tensors())
    error = refused(2, "layer.0.weight", "more", path, "--key", "zzz")
    assert len(error) < 1000


# -------------------------------------------------------------------------------------------------------- what it is


@every("dtype", ["float32", "float16", "bfloat16"])
def test_floats_are_cast_and_nothing_else(dtype: str, tmp_path: Path) -> None:
    target = getattr(torch, dtype)
    kept = {"i": torch.arange(5), "b": torch.tensor([True, False]), "c": torch.tensor([1 + 2j])}
    floats = {
        name: torch.randn(7, 9).to(getattr(torch, name)) for name in ("float32", "bfloat16", "float16", "float64")
    }
    path = torch_file(tmp_path, {**kept, **floats, "strided": torch.randn(40, 50).t()[::3]})
    converted(path, "--dtype", dtype)
    expected = {name: t if name in kept else t.to(target) for name, t in torch_loaded(path).items()}
    if dtype == "float16":
        # torch narrows a double through float32: two roundings, where one is right.
        expected["float64"] = torch.from_numpy(floats["float64"].numpy().astype("f2"))
    assert_same(load_file(tmp_path / "model.safetensors"), expected)


def test_values_too_large_for_the_dtype_become_infinite_and_are_counted(tmp_path: Path) -> None:
    values = torch.tensor([1.0, 65504.0, 65519.9, 65520.0, -1e30, float("inf"), float("nan")])
    path = torch_file(tmp_path, {"w": values, "x": values.clone()})
    run = converted(path, "--dtype", "float16", "--json")
    (warning,) = run.json["warnings"]
    assert "4 values" in warning
    assert "float16" in warning
    assert warning in run.err
    assert torch.equal(bits(load_file(tmp_path / "model.safetensors")["w"]), bits(values.half()))
    assert not converted(path, "--dtype", "bfloat16", "--json").json["warnings"]
    assert "1 value was" in converted(torch_file(tmp_path, {"w": torch.tensor([1e9])}), "--dtype", "float16").err


def test_values_too_small_for_the_dtype_become_zero_and_are_counted(tmp_path: Path) -> None:
    values = torch.tensor([1e-9, 2.0**-24, -1e-12, 0.0, -0.0, 1.0])
    transposed = torch.full((300, 200), 1e-20).t()
    path = torch_file(tmp_path, {"a": values, "fine": torch.ones(9), "t": transposed, "w": values.clone()})
    (warning,) = converted(path, "--dtype", "float16", "--json").json["warnings"]
    assert warning == "60,004 values were too small for float16 and became zero, in 't', 'a', 'w'."
    assert not converted(path, "--dtype", "bfloat16", "--json").json["warnings"]


def test_tied_names_are_stored_once_or_each(tmp_path: Path) -> None:
    path = torch_file(tmp_path, tied_weights())
    expected = dict(torch_loaded(path))
    report = converted(path, "--json").json
    assert report["aliases"] == {"head.weight": "embedding.weight"}
    assert report["tensors"] == 1
    assert list(load_file(tmp_path / "model.safetensors")) == ["embedding.weight"]
    assert metadata_of(tmp_path / "model.safetensors")["head.weight"] == "embedding.weight"
    assert converted(path, "--tied", "duplicate", "--json").json["aliases"] == {}
    assert_same(load_file(tmp_path / "model.safetensors"), expected)
    assert_same_tree(torch_loaded(path), state_in(tmp_path / "model.safetensors"))


def test_floats_of_8_bits_without_scales_are_cast_in_silence(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2).to(torch.float8_e5m2), "v_scale": torch.ones(1)}, tmp_path / "x.pt")
    assert ckptconv_here("pt2safetensors", "--dtype", "float32", tmp_path / "x.pt").err == ""


def test_tied_names_stay_tied_through_names_and_casts(tmp_path: Path) -> None:
    path = torch_file(tmp_path, tied_weights())
    report = converted(path, "--rename", "weight=w", "--dtype", "bfloat16", "--json").json
    assert report["aliases"] == {"head.w": "embedding.w"}
    tree = state_in(tmp_path / "model.safetensors")
    assert tree["head.w"].data_ptr() == tree["embedding.w"].data_ptr()
    assert torch.equal(tree["head.w"], torch_loaded(path)["head.weight"].bfloat16())
    converted(path, tmp_path / "head.safetensors", "--exclude", "embedding.*")
    assert_same(load_file(tmp_path / "head.safetensors"), {"head.weight": torch_loaded(path)["head.weight"]})


def test_views_of_the_same_memory_that_are_not_the_same_tensor_are_not_tied(tmp_path: Path) -> None:
    flat = torch.arange(16.0)
    path = torch_file(
        tmp_path, {"flat": flat, "square": flat.view(4, 4), "turned": flat.view(4, 4).t(), "half": flat[:8]}
    )
    assert converted(path, "--json").json["aliases"] == {}
    assert len(load_file(tmp_path / "model.safetensors")) == 4


# ------------------------------------------------------------------------------------------------------------ shards


def shards(output: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {path.name: load_file(path) for path in sorted(output.glob("*.safetensors"))}


def test_shards_keep_to_the_size_and_the_order_and_the_index_says_where_all_is(tmp_path: Path) -> None:
    state = {f"layer{n}.w": torch.full((10 + n % 7,), float(n)) for n in range(50)} | {"big": torch.ones(1000)}
    path = torch_file(tmp_path, state)
    report = converted(path, tmp_path / "out", "--max_shard_size", "500B", "--json").json
    files = shards(tmp_path / "out")
    count = len(files)
    assert list(files) == [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    for tensors in files.values():
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 500
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in state.values())
    places = [int(index["weight_map"][name][6:11]) for name in state if name != "big"]
    assert places == sorted(places)
    assert [Path(output["path"]).name for output in report["outputs"]] == [*files, STRUCTURE_FILE, INDEX]
    for output in report["outputs"]:
        assert os.path.getsize(output["path"]) == output["bytes"]
    assert_same_tree(torch_loaded(path), state_in(tmp_path / "out"))


def test_the_index_is_that_of_huggingface_hub(tmp_path: Path) -> None:
    state = {f"layer{n}.w": torch.full((10 + n % 7,), float(n)) for n in range(50)} | {"big": torch.ones(1000)}
    path = torch_file(tmp_path, state)
    converted(path, tmp_path / "ours", "--max-shard-size", "500B")
    (tmp_path / "theirs").mkdir()
    huggingface_hub.save_torch_state_dict(state, tmp_path / "theirs", max_shard_size=500)
    assert json.loads((tmp_path / "ours" / INDEX).read_text()) == json.loads((tmp_path / "theirs" / INDEX).read_text())
    for name, tensors in shards(tmp_path / "theirs").items():
        assert_same(load_file(tmp_path / "ours" / name), tensors)


def test_a_directory_of_one_shard_has_no_index(tmp_path: Path) -> None:
    path = torch_file(tmp_path, {"a": torch.ones(3), "b": torch.ones(2)})
    converted(path, tmp_path / "a" / "b" / "out")
    assert sorted(os.listdir(tmp_path / "a" / "b" / "out")) == [MANIFEST, "model.safetensors"]


def test_a_new_output_replaces_the_whole_of_an_old_one_and_nothing_else(tmp_path: Path) -> None:
    path, out = torch_file(tmp_path, a_training_checkpoint()), tmp_path / "out"
    converted(path, out, "--max-shard-size", "1kB")
    (out / "config.json").write_text("{}")
    (out / "tokenizer.model").write_text("")
    converted(path, out, "--key", "model")
    assert sorted(os.listdir(out)) == [
        MANIFEST, "ckptconv.structure.json", "config.json", "model.safetensors", "tokenizer.model",
    ]  # fmt: skip
    converted(path, out, "--key", "model", "--max-shard-size", "300B")
    assert not (out / "model.safetensors").exists()
    assert_same(load_with_aliases(out), dict(torch_loaded(path)["model"]))


def test_a_file_larger_than_the_shard_size_asks_for_a_directory(tmp_path: Path) -> None:
    path = torch_file(tmp_path, {"a": torch.ones(1000)})
    converted(path, tmp_path / "out.safetensors", "--max-shard-size", "5GB")
    (tmp_path / "out.safetensors").unlink()
    refused(2, "--max-shard-size", "directory", path, tmp_path / "out.safetensors", "--max-shard-size", "1kB")


# ----------------------------------------------------------------------------------------------- where it is written


@every(
    "name, output",
    [
        ("model.pt", "model.safetensors"),
        ("model.pth", "model.safetensors"),
        ("pytorch_model.bin", "pytorch_model.safetensors"),
        ("epoch=3-step=100.ckpt", "epoch=3-step=100.safetensors"),
        ("model.v1.2.pt", "model.v1.2.safetensors"),
        ("model", "model.safetensors"),
        (".hidden", ".hidden.safetensors"),
        ("größe.pt", "größe.safetensors"),
        (os.fsdecode(b"\xff.pt"), os.fsdecode(b"\xff.safetensors")),
        ("-q.pt", "-q.safetensors"),
    ],
)
def test_without_an_output_it_stands_beside_the_input(
    name: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch_file(tmp_path, {"a": torch.ones(1)}).rename(tmp_path / name)
    run = done(ckptconv_here("pt2safetensors", "--json", "--", name))
    assert [written["path"] for written in run.json["outputs"]] == [output]
    assert sorted(os.listdir(tmp_path)) == sorted([name, output])
    # What a terminal gets of a name depends on the process.
    shown = (ckptconv_here if name.isascii() else ckptconv)("pt2safetensors", "--", name)
    assert shown.code == 0
    assert f"wrote {output.encode(errors='backslashreplace').decode()} (" in shown.out


def test_a_directory_with_a_model_in_one_file(tmp_path: Path) -> None:
    state = {"b": torch.arange(4.0), "a": torch.ones(2, 3)}
    torch_file(tmp_path, state).rename(tmp_path / "pytorch_model.bin")
    run = done(ckptconv_here("pt2safetensors", tmp_path, *VERIFY, "--json"))
    assert str(tmp_path / "model.safetensors") in [written["path"] for written in run.json["outputs"]]
    assert_same(load_file(tmp_path / "model.safetensors"), state)


def test_beside_a_configuration_it_has_the_name_that_from_pretrained_looks_for(tmp_path: Path) -> None:
    torch_file(tmp_path, {"a": torch.ones(1)}).rename(tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text("{}")
    # A file that is there already is somebody's.
    for name in ("model.safetensors", "pytorch_model.safetensors"):
        run = ckptconv_here("pt2safetensors", "--json", tmp_path / "pytorch_model.bin")
        assert [written["path"] for written in run.json["outputs"]] == [str(tmp_path / name)]


@every("name", ["x" * 243, "ü" * 121])
def test_a_name_may_be_as_long_as_the_system_allows(name: str, tmp_path: Path) -> None:
    path = torch_file(tmp_path, {"a": torch.ones(1)})
    for output in (tmp_path / f"{name}.safetensors", tmp_path / name):
        converted(path, output)
        assert output.exists()


def test_an_output_is_replaced_and_follows_the_umask(tmp_path: Path) -> None:
    output = tmp_path / "out.safetensors"
    output.write_text("old")
    before = os.umask(0o027)
    try:
        converted(torch_file(tmp_path, {"a": torch.ones(1)}), output)
    finally:
        os.umask(before)
    assert_same(load_file(output), {"a": torch.ones(1)})
    assert stat.S_IMODE(output.stat().st_mode) == 0o640


def test_of_a_symbolic_link_the_target_is_replaced(tmp_path: Path) -> None:
    path = torch_file(tmp_path, {"a": torch.ones(1)})
    (tmp_path / "elsewhere").mkdir()
    for name in ("there.safetensors", "dangling.safetensors"):
        target, link = tmp_path / "elsewhere" / name, tmp_path / name
        link.symlink_to(target)
        if name.startswith("there"):
            target.write_text("old")
        converted(path, link)
        assert link.is_symlink()
        assert not target.is_symlink()
        assert_same(load_file(target), {"a": torch.ones(1)})
    (tmp_path / "directory").symlink_to(tmp_path / "elsewhere")
    converted(path, tmp_path / "directory")
    assert (tmp_path / "directory").is_symlink()
    assert sorted(os.listdir(tmp_path / "elsewhere")) == [
        MANIFEST, "dangling.safetensors", "model.safetensors", "there.safetensors",
    ]  # fmt: skip


def test_no_clobber_refuses_to_replace(tmp_path: Path) -> None:
    path, output = torch_file(tmp_path, {"a": torch.ones(1)}), tmp_path / "model.safetensors"
    converted(path, "--no-clobber")
    before = output.stat().st_mtime_ns
    for where in ([], [output], [tmp_path]):
        refused(1, str(output), "--no-clobber", path, *where, "--no_clobber")
    assert output.stat().st_mtime_ns == before
    converted(path, tmp_path / "new", "--no-clobber")


def test_a_dry_run_tells_the_plan_and_writes_nothing(tmp_path: Path) -> None:
    path = torch_file(tmp_path, a_training_checkpoint())
    asked = [path, tmp_path / "out", "--max-shard-size", "2kB"]
    assert "would write" in converted(*asked, "--dry-run").out
    planned = converted(*asked, "--dry-run", "--json").json
    assert os.listdir(tmp_path) == ["model.pt"]
    done = converted(*asked, "--json").json
    assert (planned["dry_run"], done["dry_run"]) == (True, False)
    for field in ("outputs", "tensors", "aliases", "opaque"):
        assert planned[field] == done[field]


def refused(code: int, *words_then_arguments: object) -> str:
    """The words are the strings before the input, which is the first path; the error, which has them, is returned."""
    first = next(i for i, argument in enumerate(words_then_arguments) if isinstance(argument, Path))
    words, arguments = words_then_arguments[:first], words_then_arguments[first:]
    directory = words_then_arguments[first].parent
    directory = Path("/nowhere") if directory == Path("/dev") else directory
    before = snapshot(directory)
    run = ckptconv_here("pt2safetensors", *arguments)
    assert run.refused(code, *words).startswith("ckptconv: ")
    assert not run.out
    assert len(run.err.strip().splitlines()) == 1, run.err
    assert snapshot(directory) == before
    run = ckptconv_here("pt2safetensors", "--json", *arguments)
    assert run.code == code
    assert run.json["ok"] is False
    assert run.json["error"]["exit_code"] == code
    assert run.json["error"]["message"]
    assert snapshot(directory) == before
    return run.err


def snapshot(directory: Path) -> dict[str, tuple[int, int]]:
    found = {str(path): path.lstat() for path in directory.rglob("*")}
    return {path: (stats.st_ino, stats.st_size) for path, stats in found.items()}


def test_outputs_that_cannot_be(tmp_path: Path) -> None:
    path = torch_file(tmp_path, {"a": torch.ones(1)})
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "dir.safetensors").mkdir()
    (tmp_path / "old.bin").mkdir()
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    refused(2, "pipe", path, tmp_path / "pipe.safetensors")
    refused(2, "device", path, Path("/dev/null"))
    refused(2, "is a directory", path, tmp_path / "dir.safetensors")
    refused(2, "out.safetensors?", path, tmp_path / "out.bin")
    refused(2, "old.safetensors?", path, tmp_path / "old.bin")
    refused(2, "notes.safetensors?", path, tmp_path / "notes.txt")
    refused(2, f"the directory {tmp_path / 'missing'} does not exist", path, tmp_path / "missing" / "out.safetensors")
    refused(2, "cannot be written", "notes.txt is not a directory", path, tmp_path / "notes.txt" / "out.safetensors")
    refused(1, "cannot be written", "not a directory", path, tmp_path / "notes.txt" / "out")
    refused(1, "/proc", path, Path("/proc/out.safetensors"))
    refused(1, "cannot be written", path, Path("/proc/out"))
    refused(1, "loop.safetensors", path, tmp_path / "loop.safetensors")
    refused(1, "too long", path, tmp_path / f"{'x' * 300}.safetensors")
    refused(2, "http", path, "http://127.0.0.1:9/model")
    refused(2, "OUTPUT is empty", path, "")


def test_a_directory_may_be_named_like_a_file_if_it_says_so(tmp_path: Path) -> None:
    converted(torch_file(tmp_path, {"a": torch.ones(1)}), f"{tmp_path}/out.bin/")
    assert sorted(os.listdir(tmp_path / "out.bin")) == [MANIFEST, "model.safetensors"]


# ---------------------------------------------------------------------------------------------------- what is shown


def test_the_report_is_on_stdout_and_is_short(tmp_path: Path) -> None:
    path = torch_file(tmp_path, a_training_checkpoint())
    run = converted(path)
    assert not run.err
    lines = run.out.splitlines()
    assert lines[0].startswith(f"wrote {tmp_path / 'model.safetensors'} (")
    assert len(lines) <= 4
    assert "peak memory" in lines[-1]


def test_the_report_never_claims_to_have_read_more_than_there_is(tmp_path: Path) -> None:
    path = torch_file(tmp_path, {f"t{n}": torch.ones(1) for n in range(1000)})
    last = converted(path).out.splitlines()[-1]
    assert last.startswith("read all ") or converted(path, "--json").json["bytes_read"] < path.stat().st_size
    large = torch_file(tmp_path, {"a": torch.ones(1_000_000)[:250_000]}, "large.pt")
    assert converted(large).out.splitlines()[-1].startswith("read 1.00 MB of 4.00 MB, wrote 1.00 MB in ")


def test_a_rate_is_said_of_what_took_a_second_or_more() -> None:
    assert duration(0.999, 10**6) == "1.00 s"
    assert duration(1.0, 10**6) == "1.0 s (1.00 MB/s)"


def test_quiet_shows_nothing_but_errors_and_verbose_shows_all(tmp_path: Path) -> None:
    path = torch_file(tmp_path, tied_weights())
    run = converted(path, "-q")
    assert (run.out, run.err) == ("", "")
    assert "head.weight is stored as embedding.weight" in converted(path, "-v").out
    assert "head.weight" not in converted(path).out
    run = converted(path, tmp_path / "out", "--max-shard-size", "1B", "--verbose", "--tied", "duplicate")
    for name in set(os.listdir(tmp_path / "out")) - {MANIFEST}:
        assert name in run.out
    assert ckptconv_here("pt2safetensors", tmp_path / "missing.pt", "-q").err


def test_json_is_one_object_and_nothing_else(tmp_path: Path) -> None:
    path = torch_file(tmp_path, a_training_checkpoint(), "größe.pt")
    run = converted(path, "--json")
    assert len(run.out.splitlines()) == 1
    report = run.json
    output = tmp_path / "größe.safetensors"
    assert report["ok"] is True
    assert report["command"] == "pt2safetensors"
    assert report["input"] == str(path)
    stored = load_file(output)
    assert report["outputs"] == [{"path": str(output), "bytes": output.stat().st_size, "tensors": len(stored)}]
    assert report["tensors"] == len(stored)
    assert report["bytes_written"] == output.stat().st_size
    assert report["bytes_read"] > 0
    assert report["seconds"] > 0
    assert report["aliases"] == {}
    assert report["opaque"] == []
    assert report["warnings"] == []


def test_names_cannot_steer_the_terminal(tmp_path: Path) -> None:
    path = torch_file(tmp_path, {"\x1b[2J\x07": torch.ones(1), "two\nlines\r": torch.zeros(1)})
    for command in looking():
        run = ckptconv_here(command, path)
        assert not set(run.out) & {"\x1b", "\x07", "\r"}
        assert r"\x1b[2J\x07" in run.out
        assert r"two\nlines\r" in run.out
    error = refused(2, path, "--key", "\x1b[2J")
    assert "\x1b" not in error


# ------------------------------------------------------------------------------------------- what is not a checkpoint


def tar_bytes() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("notes.txt"))
    return buffer.getvalue()


def zip_bytes() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("readme.txt", "hello")
    return buffer.getvalue()


NOT_CHECKPOINTS: dict[str, tuple[bytes | Callable[[], bytes], int, list[str]]] = {
    "text": (b"epoch 1: loss 0.5\n" * 100, 4, ["not a torch checkpoint"]),
    "one byte": (b"x", 4, ["not a torch checkpoint"]),
    "noise": (bytes(range(7, 200)), 4, ["not a torch checkpoint"]),
    "a tar archive": (tar_bytes, 5, ["tar"]),
    "another zip archive": (zip_bytes, 5, ["zip archive", "readme.txt"]),
    "a plain pickle": (pickle.dumps({"a": 1}), 5, ["plain pickle"]),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@every("name", NOT_CHECKPOINTS)
def test_what_is_not_a_checkpoint_is_told_by_what_it_is(name: str, tmp_path: Path) -> None:
    content, code, words = NOT_CHECKPOINTS[name]
    path = tmp_path / "model.pt"
    path.write_bytes(content if isinstance(content, bytes) else content())
    refused(code, "model.pt", *words, path)
    for command in looking():
        assert ckptconv_here(command, path).code == code, command


def test_inputs_that_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    refused(2, "does not exist", tmp_path / "model.pt")
    refused(2, "is a directory", tmp_path / "directory")
    refused(2, "is a pipe or a device", Path("/dev/full"))
    torch_file(tmp_path, {"a": torch.ones(1)})
    refused(2, "Did you mean", "model.pt", tmp_path / "modle.pt")
    refused(2, "does not exist", tmp_path / "model.pt" / "x")
    assert ckptconv_here("pt2safetensors", "").code == 2


@every("tree", [{}, {"epoch": 3}, [], None, 5, "text", {"a": {"b": [1, 2.5, None]}}])
@every("output", ["out.safetensors", "out"])
def test_a_state_without_a_tensor_is_kept_by_its_record(tree: Any, output: str, tmp_path: Path) -> None:
    run = converted(torch_file(tmp_path, tree), tmp_path / output)
    assert "contains no tensors" in run.err
    assert_same_tree(tree, state_in(tmp_path / output))


def test_a_part_without_a_tensor_or_one_of_which_all_is_excluded_is_a_slip(tmp_path: Path) -> None:
    tree = {"weight": torch.ones(1), "epoch": 3, "groups": [{"lr": 0.1}]}
    refused(2, "No tensor to convert is under 'epoch'", torch_file(tmp_path, tree), "--key", "epoch")
    refused(2, "No tensor to convert is under 'groups.0'", torch_file(tmp_path, tree), "--key", "groups.0")
    refused(2, "No tensors are left", torch_file(tmp_path, tree), "--exclude", "*")
    refused(2, "No tensors are left", torch_file(tmp_path, {"w": torch.empty(2, device="meta")}), "--exclude", "w")
    refused(2, "matches none of the 0 names", torch_file(tmp_path, {"epoch": 3}), tmp_path / "out", "--include", "*")
    refused(2, "model.pt contains no tensor to write next to it.", torch_file(tmp_path, {"epoch": 3}))


def test_members_compressed_in_uncommon_ways_are_refused_with_what_to_do(tmp_path: Path) -> None:
    path = torch_file(tmp_path, {"a": torch.zeros(1000)})
    resaved(path, lambda member, data: data, zipfile.ZIP_BZIP2)
    refused(5, "compressed", "zip -0", path)


@pytest.mark.filterwarnings("ignore::UserWarning")
@every("dtype", ["complex128", "complex32", "quint8", "qint32"])
def test_a_dtype_that_safetensors_lacks_comes_back_with_the_record(dtype: str, tmp_path: Path) -> None:
    target = getattr(torch, dtype)
    quantized = dtype.startswith("q")
    odd = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, target) if quantized else torch.ones(3, 4, dtype=target)
    path = torch_file(tmp_path, {"good": torch.ones(2), "odd": odd})
    converted(path)
    assert_same_tree(torch_loaded(path), state_in(tmp_path / "model.safetensors"))
    converted(path, "--exclude", "odd*")
    assert_same(load_file(tmp_path / "model.safetensors"), {"good": torch.ones(2)})


# --------------------------------------------------------------------------------------------------- anything at all


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of any dtype and any strides, somewhere in a storage of its own."""
    dtype = draw(st.sampled_from(["float32", "bfloat16", "int64", "uint8", "complex64", "float8_e4m3fn", "bool"]))
    shape = draw(st.lists(st.integers(0, 9), max_size=5))
    strides = draw(st.lists(st.integers(0, 40), min_size=len(shape), max_size=len(shape)))
    start, rest = draw(st.integers(0, 100)), draw(st.integers(0, 50))
    numel = start + rest + 1 + sum(stride * (size - 1) for size, stride in zip(shape, strides, strict=True) if size)
    storage = torch.randint(0, 2 if dtype == "bool" else 256, (numel * DTYPES[dtype].itemsize,), dtype=torch.uint8)
    return storage.view(getattr(torch, dtype)).as_strided(shape, strides, start)


@examples(25, HealthCheck.function_scoped_fixture)
@given(
    st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), views(), max_size=6),
    st.sampled_from(["1B", "1kB", "300kB", "8MiB"]),
    st.sampled_from(["1", "2", "5"]),
    st.sampled_from(["out.safetensors", "out"]),
)
def test_any_views_under_any_names_with_any_memory(
    tmp_path_factory: pytest.TempPathFactory, state: dict[str, torch.Tensor], memory: str, jobs: str, output: str
) -> None:
    assume(state and "__metadata__" not in state)
    # The library gives empty tensors in no particular order.
    assume(sum(not tensor.numel() for tensor in state.values()) < 2)
    directory = tmp_path_factory.mktemp("views")
    path = torch_file(directory, state)
    options = ["--memory", memory, "--jobs", jobs, "--no-fsync"]
    converted(path, directory / output, *options, *(["--max-shard-size", "2kB"] if output == "out" else []))
    assert_same(load_with_aliases(directory / output), state)
    assert_same_tree(torch_loaded(path), state_in(directory / output))


# ------------------------------------------------------------------------------------------------------------ damage


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return torch_file(tmp_path_factory.mktemp("whole"), a_training_checkpoint()).read_bytes()


def test_a_file_with_a_piece_missing_or_added_is_corrupt(whole: bytes, tmp_path: Path) -> None:
    chance = random.Random(1)
    path = tmp_path / "model.pt"
    for _ in range(40):
        at, size = chance.randrange(len(whole) - 1000), chance.randrange(1, 5000)
        for damaged in (whole[:at] + whole[at + size :], whole[:at] + bytes(size) + whole[at:]):
            path.write_bytes(damaged)
            run = ckptconv_here("pt2safetensors", path)
            assert run.code == 4, (at, size, run.err)
            assert os.listdir(tmp_path) == ["model.pt"]


def test_bytes_appended_to_a_file_are_corrupt(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    for more in (b"\0", b"x" * 70_000):
        path.write_bytes(whole + more)
        refused(4, path)
