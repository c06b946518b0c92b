"""Checkpoints for torch.distributed.checkpoint: torch reads them, and they hold what the source has."""

from __future__ import annotations

import argparse
import io
import json
import pickle
import pickletools
import random
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from cells import VERIFIED, VERIFY, verified_here, verifying
from checkpoints import ZERO, assert_same, ckptconv_here, contents, done, load_with_aliases
from effort import every, spread
from features.dcp.cases import CASES, DCP, checkpoint_of
from features.dcp.writer import one, shards
from hypothesis import given
from hypothesis import strategies as st
from optimizer_files import by_names
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader, HuggingFaceStorageReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.format_utils import torch_save_to_dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import ckptconv
from ckptconv.errors import CkptconvError, DifferenceError, UnsupportedError, UsageError
from ckptconv.features.dcp_output.contents import boxes
from ckptconv.options.table import OPTIONS

NESTED = checkpoint_of("fsdp2_w2_nested")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def loaded(directory: Path) -> dict[str, Any]:
    """The whole state dict, as torch rebuilds it without knowing what is in it."""
    found: dict[str, Any] = {}
    reader = FileSystemReader(directory)
    _load_state_dict(found, reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return found


def described(directory: Path) -> Any:
    return pickle.loads((directory / ".metadata").read_bytes())


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(tree, (dict, list)) and tree:
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(value, (*path, key))
    else:
        yield path, tree


def assert_equal(one: Any, other: Any) -> None:
    """Two state dicts with the same paths, types, dtypes and bits."""
    mine, theirs = dict(leaves(one)), dict(leaves(other))
    assert mine.keys() == theirs.keys()
    tensors = {path for path, value in mine.items() if isinstance(value, torch.Tensor)}
    assert_same({str(path): mine[path] for path in tensors}, {str(path): theirs[path] for path in tensors})
    for path in mine.keys() - tensors:
        assert type(mine[path]) is type(theirs[path]), path
        assert mine[path] == theirs[path], path


def made(source: object, output: Path, *options: object) -> Path:
    done(ckptconv_here("safetensors2dcp", source, output, *options, "--no-fsync"))
    return output


def a_model(path: Path) -> dict[str, torch.Tensor]:
    tensors = {
        "emb.weight": torch.randn(13, 4),
        "emb.bias": torch.randn(3).bfloat16(),
        "norm.count": torch.tensor(7),
        "empty": torch.zeros(0, 5),
        "mask": torch.tensor([True, False]),
        "low": torch.randn(6, 2).to(torch.float8_e4m3fn),
    }
    save_file(tensors, path)
    return tensors


# ------------------------------------------------------------------------------------------------------- tied tensors


def a_tied_state(path: Path) -> dict[str, Any]:
    weight, rows = torch.randn(8, 4), torch.randn(5)
    state = {"m": {"emb": weight, "bias": torch.ones(3), "head": weight}, "n": [rows, weight, rows[:2]], "epoch": 3}
    torch.save(state, path)
    return state


@every("renamed", [(), ("--rename", "emb=low", "--rename", r"n\.=z.")], ids=["same", "renamed"])
@every("source", ["t.pt", "kept", "renamed"])
def test_every_place_of_a_tied_tensor_has_its_own_key(source: str, renamed: tuple[str, ...], tmp_path: Path) -> None:
    state = a_tied_state(tmp_path / "t.pt")
    ckptconv.convert(tmp_path / "t.pt", tmp_path / "kept")
    ckptconv.convert(tmp_path / "t.pt", tmp_path / "renamed", rename="head=top")
    expected = {f"m.{name}": tensor for name, tensor in state["m"].items()}
    expected.update((f"n.{number}", tensor) for number, tensor in enumerate(state["n"]))
    if source == "renamed":
        expected["m.top"] = expected.pop("m.head")
    if renamed:
        expected = {name.replace("emb", "low").replace("n.", "z."): tensor for name, tensor in expected.items()}
    out = made(tmp_path / source, tmp_path / "out", *renamed, *VERIFY)
    found = {".".join(map(str, path)): value for path, value in leaves(loaded(out))}
    assert found.pop("epoch") == 3
    assert_same(found, expected)


@every("dtype", ["keep", "bf16"])
@every("chunks", [1, 3])
def test_tied_tensors_are_stored_once_and_stay_tied(chunks: int, dtype: str, tmp_path: Path) -> None:
    source = ZERO / "z2_bf16_w2" / "checkpoint"
    once = made(source, tmp_path / "once", "--chunks", chunks, "--dtype", dtype, *VERIFY)
    twice = made(source, tmp_path / "twice", "--chunks", chunks, "--dtype", dtype, "--tied", "duplicate", *VERIFY)
    assert_same(loaded(once), loaded(twice))
    size, apart = (sum(path.stat().st_size for path in out.glob("*.distcp")) for out in (once, twice))
    assert apart - size > loaded(once)["head.weight"].nbytes
    assert ckptconv.convert(once, tmp_path / "m.safetensors").aliases == {"head.weight": "emb.weight"}
    assert ckptconv.convert(twice, tmp_path / "apart.safetensors").aliases == {}


# --------------------------------------------------------------------------------------------------------- the layout


@every("chunks", [1, 2, 5, 40])
def test_dcp_load_fills_a_state_dict(chunks: int, tmp_path: Path) -> None:
    tensors = a_model(tmp_path / "m.safetensors")
    made(tmp_path / "m.safetensors", tmp_path / "out", "--model-key", "model", "--chunks", chunks, *VERIFY)
    found = {"model": {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}}
    dcp.load(found, checkpoint_id=tmp_path / "out")
    assert_same(found["model"], tensors)


def test_without_a_key_names_are_at_the_top(tmp_path: Path) -> None:
    tensors = a_model(tmp_path / "m.safetensors")
    out = made(tmp_path / "m.safetensors", tmp_path / "out")
    assert described(out).planner_data == {name: (name,) for name in tensors}
    assert_same(loaded(out), tensors)


@given(st.integers(0, 40), st.integers(1, 50))
def test_chunks_are_those_of_ranks(extent: int, ranks: int) -> None:
    if extent:
        kept = [box for box in shards((extent, 3), 0, ranks) if 0 not in box[1]]
        assert list(boxes((extent, 3), ranks)) == kept
    else:
        assert list(boxes((extent, 3), ranks)) == [((0, 0), (0, 3))]


def test_every_rank_has_files_and_none_is_larger_than_asked(tmp_path: Path) -> None:
    save_file({f"w{n}": torch.randn(8, 500) for n in range(4)}, tmp_path / "m.safetensors")
    out = made(tmp_path / "m.safetensors", tmp_path / "out", "--chunks", 2, "--max-shard-size", "20KB")
    sizes = {path.name: path.stat().st_size for path in out.glob("*.distcp")}
    assert sizes.keys() == {"__0_0.distcp", "__0_1.distcp", "__1_0.distcp", "__1_1.distcp"}
    assert max(sizes.values()) <= 20_000
    assert_same(loaded(out), load_file(tmp_path / "m.safetensors"))


LIKE = ["fsdp2_w2_nested", "fsdp2_w4_bf16", "tp_fsdp_2x2", "hsdp_2x2", "torch2.3.1_dtensor_w2", "file_per_item_w2"]


@pytest.mark.skipif("like" not in OPTIONS, reason="there are no references")
@every("case", LIKE)
def test_like_another_checkpoint_it_has_the_same_keys_chunks_and_files(case: str, tmp_path: Path) -> None:
    like = checkpoint_of(case)
    with_states = ["--states", like] if any("optim" in key for key in described(like).state_dict_metadata) else []
    out = made(like, tmp_path / "out", "--like", like, *with_states, *VERIFY)
    theirs, ours = described(like), described(out)
    for key, saved in ours.state_dict_metadata.items():
        if hasattr(saved, "size"):
            other = theirs.state_dict_metadata[key]
            full = sorted((tuple(c.offsets), tuple(c.sizes)) for c in other.chunks if 0 not in c.sizes)
            assert sorted((tuple(c.offsets), tuple(c.sizes)) for c in saved.chunks) == full
    # Until 2.3, torch saved the groups as one value.
    for index in ours.storage_data.keys() & theirs.storage_data.keys():
        assert ours.storage_data[index].relative_path == theirs.storage_data[index].relative_path
    verified_here(like, out, *with_states)


@pytest.mark.skipif("like" not in OPTIONS, reason="there are no references")
def test_what_the_other_checkpoint_lacks_is_written_whole_and_told(tmp_path: Path) -> None:
    tensors = a_model(tmp_path / "m.safetensors")
    run = ckptconv_here("safetensors2dcp", tmp_path / "m.safetensors", tmp_path / "out", "--like", NESTED, *VERIFY)
    assert run.code == 0
    assert "written whole" in run.err
    assert_same(loaded(tmp_path / "out")["model"], tensors)


@pytest.mark.skipif("like" not in OPTIONS, reason="there are no references")
def test_other_names_other_shapes_and_weights_that_only_the_other_checkpoint_has_are_told_apart(tmp_path: Path) -> None:
    for name, state in (("new", {"a": 4, "b": 4, "renamed": 4}), ("run", {"a": 4, "b": 6, "old": 4})):
        torch.save({key: torch.zeros(size) for key, size in state.items()}, tmp_path / f"{name}.pt")
    like = made(tmp_path / "run.pt", tmp_path / "run")
    words = ("safetensors2dcp", tmp_path / "new.pt", tmp_path / "out", "--like", like)
    said = done(ckptconv_here(*words)).err
    assert f"written whole, because {like} has no tensors of these names: 'renamed'\n" in said
    assert f"written whole, because their shapes differ from those in {like}: 'b'\n" in said
    assert f"{like} has weights that the output lacks: 'old'\n" in said
    # Nothing differs, and states alone are no weights that lack others.
    for source, options in ((tmp_path / "run.pt", ()), (NESTED, ("--model-key", "none", "--states", NESTED))):
        reference = NESTED if options else like
        same = ckptconv_here("safetensors2dcp", source, tmp_path / "same", "--like", reference, *options, "--dry-run")
        assert not any(word in done(same).err for word in ("written whole", "lacks"))


@pytest.mark.skipif("like" not in OPTIONS, reason="there are no references")
def test_like_safetensors_shards_files_have_the_names_of_torch(tmp_path: Path) -> None:
    like = checkpoint_of("hf_sharded_w2")
    out = made(like, tmp_path / "out", "--like", like, *VERIFY)
    count = len(list(like.glob("shard-*")))
    assert {path.name for path in out.glob("*.distcp")} == {f"__{rank}_0.distcp" for rank in range(count)}
    again = made(like, tmp_path / "shards", "--like", like, "--to", "dcp-hf", *VERIFY)
    assert len(list(again.glob("shard-*"))) == count


@pytest.mark.skipif("like" not in OPTIONS, reason="there are no references")
@every("to", ["dcp", "dcp-hf"])
def test_the_checkpoint_that_it_is_like_is_not_replaced(to: str, tmp_path: Path) -> None:
    """A run that was killed while it replaced it would have nothing to be like."""
    a_model(tmp_path / "m.safetensors")
    there = made(tmp_path / "m.safetensors", tmp_path / "there", "--to", to, "--chunks", 2)
    before = contents(there)
    run = ckptconv_here("safetensors2dcp", tmp_path / "m.safetensors", there, "--to", to, "--like", there)
    run.refused(2, "a file of the reference")
    assert contents(there) == before


@pytest.mark.skipif("like" not in OPTIONS, reason="there are no references")
def test_a_checkpoint_that_lacks_a_chunk_is_no_example(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(6, 2)}}, tmp_path / "m.pt")
    like = one(torch.ones(6, 2), shards((6, 2), 0, 3)[:2]).write(tmp_path / "like")
    run = ckptconv_here("safetensors2dcp", tmp_path / "m.pt", tmp_path / "out", "--like", like)
    run.refused(4, "4 fewer: chunks are missing")
    assert not (tmp_path / "out").exists()


# --------------------------------------------------------------------------------------------------------- the format


def test_each_entry_is_a_file_of_torch_save(tmp_path: Path) -> None:
    out = made(NESTED, tmp_path / "out", "--states", NESTED, "--chunks", 2)
    told = described(out)
    for index, info in told.storage_data.items():
        data = (out / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        found = torch.load(io.BytesIO(data), weights_only=True)
        assert isinstance(found, torch.Tensor) is (index.offset is not None)
    places = sorted((info.relative_path, info.offset, info.length) for info in told.storage_data.values())
    ends: dict[str, int] = {}
    for name, offset, length in places:
        assert offset == ends.get(name, 0)
        ends[name] = offset + length
    assert ends == {path.name: path.stat().st_size for path in out.glob("*.distcp")}


def names_in(data: bytes) -> set[str]:
    """The classes and functions that a pickle names."""
    found, texts = set(), []
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name == "GLOBAL":
            found.add(argument.replace(" ", "."))
        elif opcode.name == "STACK_GLOBAL":
            found.add(".".join(texts[-2:]))
        elif "UNICODE" in opcode.name:
            texts.append(argument)
        elif opcode.name in ("BINGET", "LONG_BINGET"):
            texts.append("torch.distributed.checkpoint.metadata")  # all that comes again as a module's name
    return found


@every("case", ["fsdp2_w2_nested", "torch2.3.1_dtensor_w2", "torch2.15src_fsdp2_w2"])
def test_the_description_names_only_what_every_release_names(case: str, tmp_path: Path) -> None:
    like = checkpoint_of(case)
    out = made(like, tmp_path / "out", "--key", ".")
    ours = {name.rpartition(".")[2] for name in names_in((out / ".metadata").read_bytes())}
    theirs = {name.rpartition(".")[2] for name in names_in((like / ".metadata").read_bytes())}
    assert ours <= theirs | {"BytesStorageMetadata"}


def test_the_description_has_the_fields_of_torch_2_4(tmp_path: Path) -> None:
    told = described(made(NESTED, tmp_path / "out", "--key", "."))
    assert vars(told).keys() == {"state_dict_metadata", "planner_data", "storage_data"}
    assert {frozenset(vars(info)) for info in told.storage_data.values()} == {
        frozenset({"relative_path", "offset", "length"})
    }
    assert {frozenset(vars(index)) for index in told.storage_data} == {
        frozenset({"fqn", "index", "offset"}),
        frozenset({"fqn", "index"}),
    }


# -------------------------------------------------------------------------------------------------- values and states


def test_a_nested_state_is_what_torch_makes_of_it(tmp_path: Path) -> None:
    state = {
        "model": OrderedDict({"a.weight": torch.randn(4, 3), "a.bias": torch.randn(4)}),
        "epoch": 3,
        "losses": [0.5, float("inf"), -0.0],
        "mixed": [{"x": torch.ones(2)}, "text", None],
        "pair": (torch.arange(3), "kept together"),
        "numbered": {0: {"step": torch.tensor(2.0)}, 10: "ten"},
        "array": np.arange(3),
    }
    torch.save(state, tmp_path / "state.pt")
    torch_save_to_dcp(tmp_path / "state.pt", tmp_path / "theirs")
    out = made(tmp_path / "state.pt", tmp_path / "ours", *VERIFY)
    theirs, ours = described(tmp_path / "theirs"), described(out)
    assert ours.planner_data == theirs.planner_data
    for key, saved in theirs.state_dict_metadata.items():
        assert ours.state_dict_metadata[key] == saved
    found, wanted = loaded(out), loaded(tmp_path / "theirs")
    pairs = found.pop("pair"), wanted.pop("pair")
    assert torch.equal(pairs[0][0], pairs[1][0])
    assert np.array_equal(found.pop("array"), wanted.pop("array"))
    assert_equal(found, wanted)


def test_through_safetensors_and_back_torch_has_the_same_state(tmp_path: Path) -> None:
    states = tmp_path / "optimizer"
    assert ckptconv_here("dcp2safetensors", NESTED, tmp_path / "model", "--optimizer", states).code == 0
    keys = "--model-key", "model", "--optimizer-key", "optim"
    out = made(tmp_path / "model", tmp_path / "out", "--states", states, *keys, "--chunks", 3, *VERIFY)
    assert_equal(loaded(out), loaded(NESTED))
    assert ckptconv_here("dcp2safetensors", out, tmp_path / "again", "--optimizer", tmp_path / "states").code == 0
    assert_same(load_with_aliases(tmp_path / "again"), load_with_aliases(tmp_path / "model"))
    assert_same(load_with_aliases(tmp_path / "states"), load_with_aliases(states))


def test_a_flat_optimizer_has_a_key_for_each_setting_of_a_parameter(tmp_path: Path) -> None:
    out = made(NESTED, tmp_path / "out", "--states", NESTED, "--flat-optimizer")
    found, nested = loaded(out)["optimizer"], loaded(NESTED)["optim"]
    (group,) = nested["param_groups"]
    wanted = {f"state.{name}.{key}": value for name, state in nested["state"].items() for key, value in state.items()}
    settings = {key: value for key, value in group.items() if key != "params"}
    wanted |= {f"param_groups.{name}.{key}": value for name in group["params"] for key, value in settings.items()}
    assert_equal(found, wanted)


def test_states_of_other_optimizers_get_what_torch_asks_for(tmp_path: Path) -> None:
    group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "params": ["w"]}
    state = {"w": {"step": 4, "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}}
    torch.save({"w": torch.zeros(2)}, tmp_path / "model.pt")
    torch.save({"state": state, "param_groups": [group]}, tmp_path / "optimizer.pt")
    out = made(tmp_path / "model.pt", tmp_path / "out", "--states", tmp_path / "optimizer.pt", *VERIFY)
    found = loaded(out)["optimizer"]
    step = found["state"]["w"]["step"]
    assert (step.dtype, step.shape, step.item()) == (torch.float32, (), 4.0)
    weights = [torch.nn.Parameter(torch.zeros(2))]
    asked = torch.optim.AdamW(weights).state_dict()["param_groups"][0]
    assert found["param_groups"][0].keys() == asked.keys()
    assert found["param_groups"][0]["betas"] == (0.9, 0.99)


@every("wrapped", ["module.", "_orig_mod.module."])
def test_states_of_a_wrapped_model_have_the_names_of_its_weights(wrapped: str, tmp_path: Path) -> None:
    """An optimizer is made of DistributedDataParallel's parameters, and the file has the weights of what is in it."""
    weights = {"a.weight": torch.rand(3, 2), "module.b": torch.rand(2)}
    held = {wrapped + name: {"exp_avg": torch.ones_like(each)} for name, each in weights.items()}
    optimizer = {"state": held, "param_groups": [{"lr": 0.1, "params": [*held]}]}
    train = tmp_path / "train.pt"
    torch.save({"model": weights, "optimizer": optimizer}, train)
    out = made(train, tmp_path / "out", "--key", "model", "--states", train)
    assert loaded(out)["optimizer"]["state"].keys() == weights.keys()


@every("states", [{"exp_avg": 2}, {"state1": 2, "absmax1": 1, "qmap1": 256}], ids=["torch", "8 bits"])
def test_a_step_stays_a_number_beside_states_that_torch_does_not_have(states: dict[str, int], tmp_path: Path) -> None:
    """bitsandbytes keeps its step as a number, and dcp.load refuses a tensor in its place."""
    state = {"step": 7, **{name: torch.rand(size) for name, size in states.items()}}
    optimizer = {"state": {"w": state}, "param_groups": [{"lr": 0.5, "params": ["w"]}]}
    dcp.save({"model": {"w": torch.rand(2)}, "optim": optimizer}, checkpoint_id=tmp_path / "saved", no_dist=True)
    both = [tmp_path / "m", "--optimizer", tmp_path / "o"]
    assert ckptconv_here("dcp2safetensors", tmp_path / "saved", *both).code == 0
    keys = "--model-key", "model", "--optimizer-key", "optim"
    found = loaded(made(both[0], tmp_path / "out", *both[1:], *keys))["optim"]["state"]["w"]
    assert type(found["step"]) is (torch.Tensor if "exp_avg" in states else int)
    assert found["step"] == 7


def an_unused(tmp_path: Path, optimizer: Callable[[Any], torch.optim.Optimizer]) -> tuple[torch.nn.Module, Path]:
    """A model of which one part has had no gradient, and its checkpoint with the optimizer's states; in `own.pt` are
    these as torch has them."""
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(3, 2), "unused": torch.nn.Linear(4, 5)})
    own = optimizer(model.named_parameters())
    model["used"](torch.ones(3)).sum().backward()
    own.step()
    torch.save(own.state_dict(), tmp_path / "own.pt")
    torch.save({"model": model.state_dict(), "optimizer": by_names(model, own)[0]}, tmp_path / "train.pt")
    return model, tmp_path / "train.pt"


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, momentum=0.1, centered=True),
    "Adamax": torch.optim.Adamax,
    "Adadelta": torch.optim.Adadelta,
}


@every("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_unused_parameters_get_on_request_the_states_that_torch_loads_and_goes_on_from(
    optimizer: Callable[[Any], torch.optim.Optimizer], tmp_path: Path
) -> None:
    model, path = an_unused(tmp_path, optimizer)
    options = "--optimizer", path, "--key", "model", "--model-key", "model"
    out = made(path, tmp_path / "out", *options, "--fill-states", *VERIFY)
    found = torch.nn.ModuleDict({"used": torch.nn.Linear(3, 2), "unused": torch.nn.Linear(4, 5)})
    loaded_into = optimizer(found.named_parameters())
    whole = {"model": get_model_state_dict(found), "optimizer": get_optimizer_state_dict(found, loaded_into)}
    dcp.load(whole, checkpoint_id=str(out))
    set_state_dict(found, loaded_into, model_state_dict=whole["model"], optim_state_dict=whole["optimizer"])
    own = optimizer(model.named_parameters())
    own.load_state_dict(torch.load(tmp_path / "own.pt"))
    for _ in range(2):
        for each, its in ((model, own), (found, loaded_into)):
            its.zero_grad()
            (each["used"](torch.ones(3)).sum() * each["unused"](torch.ones(4)).square().sum()).backward()
            its.step()
    assert_equal(found.state_dict(), model.state_dict())


@every("saved", ["nested", "alone", "dcp"])
def test_plain_sgd_has_groups_and_no_states(saved: str, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    own = torch.optim.SGD(model.parameters(), lr=0.25)
    whole = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, own)}
    path, states = tmp_path / "model", tmp_path / "optimizer.pt"
    if saved == "dcp":
        dcp.save(whole, checkpoint_id=str(path))
    else:
        (named,) = by_names(model, own)
        torch.save({"model": model.state_dict(), "optimizer": named}, path)
        torch.save(named, states)
    report = ckptconv.convert(
        path,
        tmp_path / "out",
        to="dcp",
        key="" if saved == "dcp" else "model",
        model_key="model",
        states=states if saved == "alone" else path,
        **VERIFIED,
    )
    assert not any("--fill-states" in each for each in report.warnings)
    again = torch.optim.SGD(model.parameters(), lr=0.5)
    asked = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, again)}
    dcp.load(asked, checkpoint_id=str(tmp_path / "out"))
    assert_equal(asked, whole)


def test_unused_parameters_are_named_where_they_get_no_states(tmp_path: Path) -> None:
    _, path = an_unused(tmp_path, torch.optim.AdamW)
    report = ckptconv.convert(path, tmp_path / "out", to="dcp", key="model", states=str(path))
    assert any("unused.weight" in each and "--fill-states" in each for each in report.warnings)
    assert "unused.weight" not in loaded(tmp_path / "out")["optimizer"]["state"]


@every(
    "optimizer, why",
    [
        (torch.optim.Rprop, "'step_size'|'prev'"),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.1), "'momentum_buffer'"),
    ],
    ids=["Rprop", "dampening"],
)
def test_states_that_do_not_begin_with_zeros_are_not_made_up(
    optimizer: Callable[[Any], torch.optim.Optimizer], why: str, tmp_path: Path
) -> None:
    _, path = an_unused(tmp_path, optimizer)
    with pytest.raises(UnsupportedError, match=why):
        ckptconv.convert(path, tmp_path / "out", to="dcp", key="model", states=str(path), fill_states=True)
    assert not (tmp_path / "out").exists()


@every("case", ["z3_fp32_w4", "z2_bf16_frozen_w2", "z1_bf16_w2"])
def test_from_deepspeed_it_is_what_becomes_safetensors(case: str, tmp_path: Path) -> None:
    source = ZERO / case / "checkpoint"
    assert ckptconv_here("zero-to-fp32", source, tmp_path / "direct", "--optimizer", tmp_path / "states").code == 0
    out = made(source, tmp_path / "out", "--states", source, "--chunks", 2, *VERIFY)
    assert ckptconv_here("dcp2safetensors", out, tmp_path / "through", "--optimizer", tmp_path / "again").code == 0
    assert_same(load_with_aliases(tmp_path / "through"), load_with_aliases(tmp_path / "direct"))
    assert_same(load_with_aliases(tmp_path / "again"), load_with_aliases(tmp_path / "states"))


@every("case", spread((case for case in CASES if case != "olmocore_fsdp2_w2"), 12))
def test_cut_in_another_way_it_is_the_same(case: str, tmp_path: Path) -> None:
    source = checkpoint_of(case)
    left = "--exclude", "*float4*", "--exclude", "*complex32*"
    out = made(source, tmp_path / "out", "--chunks", 3, *left, "--opaque", "drop")
    flags = *left, "--no-structure"
    for name, place in (("one", source), ("other", out)):
        assert ckptconv_here("dcp2safetensors", place, tmp_path / name, *flags).code == 0
    assert_same(load_with_aliases(tmp_path / "one"), load_with_aliases(tmp_path / "other"))


def test_names_and_dtypes_are_changed_as_elsewhere(tmp_path: Path) -> None:
    torch.save({"net": {"module.w": torch.ones(2), "b": torch.ones(1)}, "epoch": 1}, tmp_path / "m.pt")
    options = "--rename", r"^net\.(module\.)?=", "--dtype", "bf16", "--exclude", "*.b"
    done(ckptconv_here("safetensors2dcp", tmp_path / "m.pt", tmp_path / "out", *options, *VERIFY, "--no-fsync"))
    assert_equal(loaded(tmp_path / "out"), {"w": torch.ones(2).bfloat16(), "epoch": 1})
    made(tmp_path / "m.pt", tmp_path / "bare", "--no-structure")
    assert loaded(tmp_path / "bare").keys() == {"net.module.w", "net.b"}


# ------------------------------------------------------------------------------------------------- safetensors shards


@every("chunks", [1, 3])
def test_safetensors_shards_are_read_by_torch_and_by_us(chunks: int, tmp_path: Path) -> None:
    tensors = {name: each for name, each in a_model(tmp_path / "m.safetensors").items() if name != "empty"}
    options = "--to", "dcp-hf", "--chunks", chunks, "--exclude", "empty", *VERIFY
    out = made(tmp_path / "m.safetensors", tmp_path / "out", *options)
    assert len(list(out.glob("shard-*-model-00001-of-00001.safetensors"))) == chunks
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(out)))
    assert_same(found, tensors)
    assert ckptconv_here("dcp2safetensors", out, tmp_path / "again.safetensors").code == 0
    assert_same(load_file(tmp_path / "again.safetensors"), tensors)


# ------------------------------------------------------------------------------------------ publishing and verifying


@pytest.mark.skipif("part" not in OPTIONS, reason="there are no parts")
def test_in_parts_it_is_the_same(tmp_path: Path) -> None:
    whole = made(NESTED, tmp_path / "whole", "--chunks", 3, "--key", ".")
    for part in ("0/2", "1/2"):
        made(NESTED, tmp_path / "parts", "--chunks", 3, "--key", ".", "--part", part)
        assert not (tmp_path / "parts" / ".metadata").exists()
    assert ckptconv_here("finish", tmp_path / "parts", "--checksum").code == 0
    assert contents(tmp_path / "parts") == contents(whole)


def for_accelerate(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A model and its optimizer's states, as safetensors, and what accelerate loads of them."""
    model, states, step = (tmp_path / name for name in ("model", "states", "step"))
    ckptconv.convert(NESTED, model, optimizer=states, fsync=False)
    made(model, step, "--to", "accelerate", "--states", states, "--chunks", 2, *VERIFY)
    return model, states, step


def test_accelerate_finds_weights_and_states_where_it_looks_for_them(tmp_path: Path) -> None:
    _, _, step = for_accelerate(tmp_path)
    whole = loaded(NESTED)
    weights, states = loaded(step / "pytorch_model_fsdp_0"), loaded(step / "optimizer_0")
    assert (weights.keys(), states.keys()) == ({"model"}, {"optimizer"})
    assert_equal(weights["model"], whole["model"])
    assert_equal(states["optimizer"]["state"], whole["optim"]["state"])


@verifying
def test_what_accelerate_loads_is_verified_as_a_whole_and_each_directory_by_itself(tmp_path: Path) -> None:
    model, states, step = for_accelerate(tmp_path)
    files = {str(path) for path in step.rglob("*") if path.name.endswith((".distcp", ".metadata"))}
    assert {file.path for file in ckptconv.verify(model, step, states=states).outputs} == files
    assert ckptconv.verify(model, step / "pytorch_model_fsdp_0").bytes_compared
    assert ckptconv.verify(model, step / "optimizer_0", states=states).bytes_compared
    with pytest.raises(UsageError, match="optimizer_0 contains optimizer states"):
        ckptconv.verify(model, step)
    other = {name: tensor + 1 if "exp_avg" in name else tensor for name, tensor in load_with_aliases(states).items()}
    save_file(other, states / "model.safetensors", {"format": "pt"})
    with pytest.raises(DifferenceError, match="optimizer_0"):
        ckptconv.verify(model, step, states=states)


@pytest.mark.skipif("part" not in OPTIONS, reason="there are no parts")
def test_what_accelerate_loads_is_made_in_parts(tmp_path: Path) -> None:
    model, states, step = for_accelerate(tmp_path)
    for part in ("0/2", "1/2"):
        made(model, tmp_path / "parts", "--to", "accelerate", "--states", states, "--chunks", 2, "--part", part)
    ckptconv.finish([tmp_path / "parts" / path.name for path in step.iterdir()])
    assert contents(tmp_path / "parts") == contents(step)


def test_what_accelerate_reads_beside_is_left_to_the_run_and_named(tmp_path: Path) -> None:
    a_model(tmp_path / "model.safetensors")
    report = ckptconv.convert(tmp_path / "model.safetensors", tmp_path / "step", to="accelerate")
    assert [path.name for path in (tmp_path / "step").iterdir()] == ["pytorch_model_fsdp_0"]
    assert any("scheduler.pt" in note and str(tmp_path / "step") in note for note in report.notes)
    assert any("--states" in note and "optimizer_0" in note for note in report.notes)


def test_settings_by_parameter_are_kept_by_the_option_that_a_note_names(tmp_path: Path) -> None:
    flat = made(NESTED, tmp_path / "flat", "--states", NESTED, "--flat-optimizer", "--model-key", "model")
    weights = tmp_path / "m.safetensors"
    ckptconv.convert(flat, weights)
    note = f"{flat} stores the optimizer settings by parameter, as torchtitan loads them; the output stores "
    note += "them by group. "
    for source in (flat, weights):
        words = ("convert", source, tmp_path / "out", "--to", "dcp", "--states", flat, "--dry-run")
        assert f"{note}--flat-optimizer keeps them" in done(ckptconv_here(*words)).out
        for chosen in (("--flat-optimizer",), *([("--like", flat)] if "like" in OPTIONS else ())):
            assert note not in done(ckptconv_here(*words, *chosen)).out
    # All of a state has its optimizer as it is, and needs no states.
    words = ("convert", flat, tmp_path / "out", "--to", "dcp", "--key", ".", "--dry-run")
    ckptconv_here(*words, "--states", flat).refused(
        2, "Leave out --states: --key . already selects the optimizer states"
    )
    done(ckptconv_here(*words))
    # Without an option for it, or without settings, there is no choice.
    for kind in ("accelerate", "dcp-hf"):
        words = ("convert", flat, tmp_path / "out", "--to", kind, "--states", flat, "--dry-run")
        assert note not in done(ckptconv_here(*words)).out
    assert note not in done(ckptconv_here("convert", NESTED, tmp_path / "out", "--to", "dcp", "--states", NESTED)).out


def test_other_keys_than_those_of_the_input_are_named_with_the_options_that_keep_them(tmp_path: Path) -> None:
    keys = ("--model-key", "app.model", "--optimizer-key", "app.optim")
    step = made(NESTED, tmp_path / "step", "--states", NESTED, *keys)
    words = ("convert", step, tmp_path / "out", "--to", "dcp", "--dry-run")
    states = ("--states", step)
    assert (
        f"app.model, app.optim. To keep these keys, use {' '.join(keys)}." in done(ckptconv_here(*words, *states)).out
    )
    assert "keep these keys" not in done(ckptconv_here(*words, *states, *keys)).out
    # Without states, that of the weights alone.
    assert f": app.model. To keep these keys, use {' '.join(keys[:2])}." in done(ckptconv_here(*words)).out
    for chosen in (keys[:2], ("--key", "."), ("--key", "app.model")):
        assert "keep these keys" not in done(ckptconv_here(*words, *chosen)).out
    made(step, tmp_path / "kept", *keys[:2])
    assert loaded(tmp_path / "kept").keys() == {"app"}
    assert_equal(loaded(tmp_path / "kept")["app"]["model"], loaded(step)["app"]["model"])


def test_the_key_of_a_part_of_the_input_is_named_where_the_output_has_none(tmp_path: Path) -> None:
    torch.save({"ema": {"w": torch.ones(3)}, "model": {"w": torch.zeros(3)}}, tmp_path / "m.pt")
    words = ("convert", tmp_path / "m.pt", tmp_path / "m.safetensors")
    ckptconv_here(*words, "--model-key", "ema").refused(2, "Add --to", "--key PATH takes a part of INPUT.")
    done(ckptconv_here(*words, "--key", "ema"))
    assert_same(load_file(tmp_path / "m.safetensors"), {"w": torch.ones(3)})


@pytest.mark.skipif("fresh_optimizer" not in OPTIONS, reason="there are no universal checkpoints")
def test_a_new_optimizer_needs_no_option(tmp_path: Path) -> None:
    words = ("convert", NESTED, tmp_path / "out", "--to", "dcp")
    ckptconv_here(*words, "--fresh-optimizer").refused(2, "Leave it out: only --states writes optimizer states.")
    done(ckptconv_here(*words))
    assert not any("optim" in key for key in described(tmp_path / "out").state_dict_metadata)


def test_states_are_written_without_weights(tmp_path: Path) -> None:
    states = made(NESTED, tmp_path / "out", "--model-key", "none", "--states", NESTED)
    assert_equal(loaded(states)["optimizer"]["state"], loaded(NESTED)["optim"]["state"])
    assert loaded(states).keys() == {"optimizer"}


def test_a_second_run_replaces_the_first(tmp_path: Path) -> None:
    out = made(NESTED, tmp_path / "out", "--chunks", 4)
    made(NESTED, out, "--chunks", 2)
    assert sorted(path.name for path in out.glob("*.distcp")) == ["__0_0.distcp", "__1_0.distcp"]
    verified_here(NESTED, out)
    ckptconv_here("safetensors2dcp", NESTED, out, "--no-clobber").refused(1, "--no-clobber")


@verifying
@every("to", ["dcp", "dcp-hf"])
def test_no_changed_byte_goes_unnoticed(to: str, tmp_path: Path) -> None:
    states = str(NESTED) if to == "dcp" else ""
    settings: dict[str, Any] = {"to": to, "optimizer": states}
    ckptconv.convert(NESTED, tmp_path / "out", chunks=2, fsync=False, **settings)
    dice = random.Random(1)
    for path in sorted((tmp_path / "out").iterdir()):
        data = path.read_bytes()
        for at in dice.sample(range(len(data)), 3):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << dice.randrange(8)]) + data[at + 1 :])
            with pytest.raises(CkptconvError) as error:
                ckptconv.verify(NESTED, tmp_path / "out", **settings)
            assert isinstance(error.value, (DifferenceError, UsageError)), (path.name, at)
        path.write_bytes(data)
    assert ckptconv.verify(NESTED, tmp_path / "out", **settings).tensors == (40 if states else 16)


@verifying
def test_verify_says_what_differs(tmp_path: Path) -> None:
    out = made(NESTED, tmp_path / "out", "--states", NESTED)
    ckptconv_here("verify", NESTED, out).refused(1, "--states", "which the source lacks.")
    verified_here(NESTED, out, "--states", NESTED)
    (out / "__9_0.distcp").write_bytes(b"")
    ckptconv_here("verify", NESTED, out, "--states", NESTED).refused(1, "__9_0.distcp", "not part of the output")


def test_a_dry_run_tells_the_files_and_writes_none(tmp_path: Path) -> None:
    run = ckptconv_here("safetensors2dcp", NESTED, tmp_path / "out", "--chunks", 2, "--dry-run", "--json")
    names = [Path(each["path"]).name for each in json.loads(run.out)["outputs"]]
    assert names == ["__0_0.distcp", "__1_0.distcp", ".metadata"]
    assert json.loads(run.out)["tensors"] == 16
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------------- the refusals


def test_a_checkpoint_of_training_is_never_replaced(tmp_path: Path) -> None:
    there = Path(shutil.copytree(NESTED, tmp_path / "step-1"))
    before = contents(there)
    a_model(tmp_path / "m.safetensors")
    ckptconv_here("safetensors2dcp", tmp_path / "m.safetensors", there).refused(2, "not recognised as an output")
    ckptconv_here("dcp2safetensors", there, there).refused(2, "not recognised as an output")
    done(ckptconv_here("dcp2safetensors", there, tmp_path / "out"))
    shutil.copytree(tmp_path / "out", there, dirs_exist_ok=True)  # with a manifest of ours
    ckptconv_here("safetensors2dcp", tmp_path / "m.safetensors", there).refused(2, "not recognised as an output")
    assert contents(there).items() >= before.items()


REFUSED_REFERENCES: list[tuple[list[object], str]] = [
    (["--chunks", "2", "--like", NESTED], "--chunks and --like"),
    (["--like", DCP], "is not a checkpoint of torch.distributed.checkpoint"),
]


@every(
    "options, words",
    [
        *(REFUSED_REFERENCES if "like" in OPTIONS else []),
        (["--to", "dcp-hf", "--max-shard-size", "1GB"], "--max-shard-size"),
        (["--states", DCP / "nowhere"], "does not exist"),
        (["--to", "safetensors"], "dcp"),
    ],
)
def test_options_that_cannot_be_met_are_refused(options: list[object], words: str, tmp_path: Path) -> None:
    ckptconv_here("safetensors2dcp", NESTED, tmp_path / "out", *options).refused(2, words)
    assert not (tmp_path / "out").exists()


def test_a_path_without_states_has_none_to_give(tmp_path: Path) -> None:
    a_model(tmp_path / "m.safetensors")
    model = tmp_path / "m.safetensors"
    ckptconv_here("safetensors2dcp", model, tmp_path / "out", "--states", model).refused(2, "no optimizer states")


def test_what_is_no_directory_is_no_output(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for name in ("file", "out.pt", "out.safetensors"):
        ckptconv_here("safetensors2dcp", NESTED, tmp_path / name).refused(2, "is a directory")


def test_lightning_names_its_directories_as_files(tmp_path: Path) -> None:
    """Lightning reads `meta.pt` beside a checkpoint of torch, whose name ends in .ckpt."""
    output = tmp_path / "epoch=0-step=2.ckpt"
    output.mkdir()
    torch.save({"global_step": 2}, output / "meta.pt")
    made(NESTED, output, *VERIFY)
    assert loaded(output).keys() == loaded(made(NESTED, tmp_path / "out")).keys()
    verified_here(NESTED, output)
    assert torch.load(output / "meta.pt") == {"global_step": 2}


def test_objects_known_by_name_only_are_left_out_on_request(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "args": argparse.Namespace(lr=1), "odd": random.Random()}
    torch.save(state, tmp_path / "m.pt")
    ckptconv_here("safetensors2dcp", tmp_path / "m.pt", tmp_path / "out").refused(3, "Random", "--opaque drop")
    out = made(tmp_path / "m.pt", tmp_path / "out", "--opaque", "drop", *VERIFY)
    assert_equal(loaded(out), {"w": torch.ones(2), "args": argparse.Namespace(lr=1)})


def test_what_a_checkpoint_cannot_hold_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.eye(2).to_sparse()}, tmp_path / "m.pt")
    with pytest.raises(UnsupportedError, match="only dense tensors"):
        ckptconv.convert(tmp_path / "m.pt", tmp_path / "out", to="dcp")
    torch.save({"a.b": torch.ones(1), "a": {"b": 2}}, tmp_path / "m.pt")
    with pytest.raises(UsageError, match="would have the key"):
        ckptconv.convert(tmp_path / "m.pt", tmp_path / "out", to="dcp")
    with pytest.raises(UsageError, match="requires a directory as OUTPUT"):
        ckptconv.convert(tmp_path / "m.pt", to="dcp")
    with pytest.raises(UsageError, match="--chunks applies only to a checkpoint"):
        ckptconv.convert(tmp_path / "m.pt", tmp_path / "out", chunks=3)
    assert not (tmp_path / "out").exists()
