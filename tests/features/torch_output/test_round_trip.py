"""There and back through files: torch.load gives what it gave before the state went to safetensors and came back."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import fractions
import itertools
import pathlib
import random
import tempfile
import types
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attacks.corpus import CASES
from cells import VERIFY, naming_attacks, torch_containers, torch_releases, verified_here
from checkpoints import DATA, Run, ckptconv, ckptconv_here, done, torch_loaded
from compare import assert_same
from effort import TIMES, every, examples
from huggingface_hub import save_torch_state_dict
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from states import (
    POOL,
    STATES,
    deep,
    with_objects,
)
from trees import containers, keys_with, tie_into_a_cycle

from ckptconv import convert
from ckptconv.errors import UnsafeError
from ckptconv.features.torch_files import writable


def saved(tmp_path: Path, state: Any, name: str = "x.pt", **options: Any) -> Path:
    with deep():
        torch.save(state, tmp_path / name, **options)
    return tmp_path / name


def run(*arguments: object) -> Run:
    return done(ckptconv_here(*arguments, "--no-fsync"))


def back(path: Path, *options: object, output: str = "x.safetensors", name: str = "back.pt") -> Path:
    """A `.pt` file that went to safetensors, and came back."""
    run("pt2safetensors", path, path.parent / output, *options)
    run("safetensors2pt", path.parent / output, path.parent / name)
    return path.parent / name


# ---------------------------------------------------------------------------------------------- what must hold, by name


def check(path: Path, again: Path) -> None:
    """What torch loads from two files is the same; and with weights_only too, where that is allowed."""
    assert_same(torch_loaded(path), torch_loaded(again))
    try:
        expected = torch_loaded(path, weights_only=True)
    except Exception:
        return
    assert_same(expected, torch_loaded(again, weights_only=True))


# One file, and several.
OUTPUTS = ("x.safetensors", "x")
SHARING = [name for name in STATES if any(word in name for word in ("storage", "tied", "twice", "cycle"))]


# In files that are split, what is shared may lie in another than what it is shared with.
@every(
    "name, output",
    [*((name, OUTPUTS[at % 2]) for at, name in enumerate(STATES)), *((name, OUTPUTS[1]) for name in SHARING)],
)
@pytest.mark.filterwarnings("ignore")  # of tensors that are in beta, or deprecated
def test_what_torch_loads_is_the_same_there_and_back(name: str, output: str, tmp_path: Path) -> None:
    path = saved(tmp_path, STATES[name]())
    check(path, back(path, *(["--max-shard-size", "1kB"] if output == "x" else []), output=output))


def test_many_entries(tmp_path: Path) -> None:
    path = saved(tmp_path, {f"e{number}": number for number in range(10_000)})
    check(path, back(path))


# At protocol 0, torch writes tensors that it cannot read.
WITHOUT_TENSORS = ["floats", "bytes, bytearray", "integers of any size", "set, frozenset", "Counter", "complex"]
WITH_TENSORS = ["numpy", "deque", "one storage under different views", "parameters, gradients, attributes", "a cycle"]


@every(
    "name, protocol",
    [*itertools.product(WITHOUT_TENSORS, range(6)), *itertools.product(WITH_TENSORS, range(1, 6))],
)
def test_every_pickle_protocol(name: str, protocol: int, tmp_path: Path) -> None:
    path = saved(tmp_path, STATES[name](), pickle_protocol=protocol)
    check(path, back(path))


@every("name", ["one storage under different views", "parameters, gradients, attributes", "a cycle"])
@every("options", torch_containers().values(), ids=torch_containers())
def test_every_container(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    path = saved(tmp_path, STATES[name](), **options)
    check(path, back(path))


# --------------------------------------------------------------------------------------------- states nobody thought of


@st.composite
def live_tensors(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of any shape, strides and kind, in a storage of its own or one that others share."""
    dtype = draw(st.sampled_from(list(POOL)))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    strides = [draw(st.integers(0, 7)) for _ in shape]
    base = draw(st.sampled_from([POOL[dtype], POOL[dtype].clone()]))
    tensor = base.as_strided(shape, strides, draw(st.integers(0, 10)))
    kind = draw(st.sampled_from(["plain", "plain", "parameter", "frozen", "buffer", "grad"]))
    # torch does not load 8-bit floats that require gradients.
    differentiable = tensor.dtype.itemsize > 1 and (tensor.is_floating_point() or tensor.is_complex())
    if kind == "parameter" and differentiable:
        return torch.nn.Parameter(tensor)
    if kind == "frozen":
        return torch.nn.Parameter(tensor, requires_grad=False)
    if kind == "buffer":
        return torch.nn.Buffer(tensor)
    return tensor.detach().requires_grad_(kind == "grad" and differentiable)


live_keys = keys_with(st.sampled_from([torch.float32, torch.int8, np.float64(0.5), torch.Size([1, 2])]))
live_leaves = (
    st.builds(slice, live_keys, live_keys, live_keys)
    | st.builds(range, st.integers(-9, 9))
    | st.binary().map(bytearray)
)
live_leaves |= st.sampled_from([torch.device("cuda:1"), torch.strided, np.arange(3), np.datetime64("2024-01-01")])
live_trees = st.recursive(
    live_keys | live_tensors() | live_tensors() | live_leaves, lambda inner: containers(inner, live_keys), max_leaves=25
)


@examples(25)
@given(live_trees, st.data())
def test_any_state(tree: Any, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        if data.draw(st.booleans()):
            tie_into_a_cycle(tree, data)
        path = saved(Path(directory), tree)
        check(path, back(path, output=data.draw(st.sampled_from(["x.safetensors", "x"]))))


# ------------------------------------------------------------------------------------------------ training that goes on


def a_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def trained(model: torch.nn.Module, optimizer: Any, scheduler: Any, steps: int) -> None:
    data = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))

    def closure() -> Any:
        optimizer.zero_grad()
        loss = (model(data) - data.sum(1, keepdim=True)).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        loss = optimizer.step(closure)
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            scheduler.step(loss)
        else:
            scheduler.step()


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "Adam, lr a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "AdamW, two groups": lambda p: torch.optim.AdamW([{"params": [next(p)], "lr": 0.1}, {"params": list(p)}], lr=0.01),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=5),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
}
rates = torch.optim.lr_scheduler
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "MultiStepLR": lambda o: rates.MultiStepLR(o, [2, 4, 4, 9]),
    "StepLR": lambda o: rates.StepLR(o, 2),
    "OneCycleLR": lambda o: rates.OneCycleLR(o, 0.1, 20, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda o: rates.CosineAnnealingWarmRestarts(o, 3),
    "ReduceLROnPlateau": lambda o: rates.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: rates.SequentialLR(o, [rates.ConstantLR(o), rates.ExponentialLR(o, 0.9)], [2]),
}
# Each optimizer once, and each scheduler; what saves one as a class of its own needs weights_only=False either way.
TRAININGS = [
    *itertools.product(OPTIMIZERS, ["MultiStepLR"]),
    *itertools.product(["SGD, momentum"], list(SCHEDULERS)[1:]),
]


# Half of them in one file, half in several.
@every("optimizer, scheduler, output", [(*each, OUTPUTS[at % 2]) for at, each in enumerate(TRAININGS)])
def test_a_training_goes_on_to_the_same_weights(optimizer: str, scheduler: str, output: str, tmp_path: Path) -> None:
    def parts() -> tuple[Any, Any, Any]:
        model = a_model()
        made = OPTIMIZERS[optimizer](model.parameters())
        return model, made, SCHEDULERS[scheduler](made)

    first = parts()
    trained(*first, steps=5)
    path = saved(tmp_path, [part.state_dict() for part in first])
    again = back(path, *(["--max-shard-size", "300B"] if output == "x" else []), output=output)
    check(path, again)
    resumed = parts()
    for part, state in zip(resumed, torch_loaded(again), strict=True):
        part.load_state_dict(state)
    trained(*first, steps=5)
    trained(*resumed, steps=5)
    for before, after in zip(first, resumed, strict=True):
        assert_same(before.state_dict(), after.state_dict())


# ------------------------------------------------------------------------------------------- what is known by name only


class Config:
    def __init__(self) -> None:
        self.lr = 0.1
        self.weight = torch.ones(2)


def test_objects_of_classes_that_only_hold_data_come_back(tmp_path: Path) -> None:
    """What Python's library, torch and numpy have for values, by a list; with all that is in them."""
    rng = np.random.default_rng(5)
    state = {
        "args": argparse.Namespace(lr=0.1, weight=torch.ones(2), where=pathlib.PurePosixPath("/a/b"), inner=[{}]),
        "space": types.SimpleNamespace(a=(1, 2)),
        "when": [
            datetime.datetime(2020, 1, 2, 3, tzinfo=datetime.timezone(datetime.timedelta(hours=2))),
            datetime.date(2020, 1, 2),
            datetime.time(1, 2, 3),
        ],
        "id": uuid.UUID(int=7),
        "numbers": [decimal.Decimal("1.10"), fractions.Fraction(-1, 3)],
        "chain": collections.ChainMap({"a": 1}, {"b": 2}),
        "user": [collections.UserDict(a=1), collections.UserList([1])],
        "torch": torch.__version__,
        "objects": np.array([1, "a", None], dtype=object),
        "records": np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        "dtype": np.dtype("f4"),
        "types": [int, np.float32, torch.Tensor],
        "spaces": collections.defaultdict(argparse.Namespace, a=argparse.Namespace(b=1)),
    }
    twice = argparse.Namespace(a=1)
    path = saved(tmp_path, {**state, "rng": rng, "twice": [twice, twice]})
    run("pt2safetensors", path)
    run("safetensors2pt", tmp_path / "x.safetensors", tmp_path / "back.pt", *VERIFY)
    again = torch_loaded(tmp_path / "back.pt")
    for name, value in state.items():
        assert type(again[name]) is type(value), name
        if name not in ("args", "objects", "records"):
            assert again[name] == value, name
    assert_same(vars(state["args"]), vars(again["args"]))
    for name in ("objects", "records"):
        np.testing.assert_array_equal(again[name], state[name], strict=True)
    assert again["twice"][0] is again["twice"][1]
    assert again["rng"].random() == rng.random()


def test_objects_of_other_classes_are_left_out_only_where_that_was_asked_for(tmp_path: Path) -> None:
    state = with_objects()
    path = saved(tmp_path, state)
    run("pt2safetensors", path)
    source, output = tmp_path / "x.safetensors", tmp_path / "back.pt"
    refused = ckptconv_here("safetensors2pt", source, output)
    assert refused.code == 3
    for words in ("4 objects", "'config'", "array.array", "random.Random", "--opaque drop", "--exclude"):
        assert words in refused.err
    assert not output.exists()
    expected = {"w": torch.ones(3), "when": [None, 2], "counts": {"a": 1, "b": torch.ones(2)}}
    for spelled in (["--opaque", "drop"], ["--drop-opaque"]):
        done = run("safetensors2pt", source, output, *VERIFY, *spelled)
        assert "left out" in done.err
        assert_same(expected, torch_loaded(output, weights_only=True))
    report = run("safetensors2pt", source, output, "--opaque", "drop", "--json").json
    assert report["dropped"]["when.0"] == "array.array"
    assert set(report["dropped"]) == {"when.0", "class", "config", "counts"}
    for glob, left in (("when.0", {"when": [None, 2]}), ("when.*", {"when": [None, None]}), ("when*", {})):
        run("safetensors2pt", source, output, *excluding(glob, "c*"), *VERIFY)
        assert_same({"w": torch.ones(3), **left}, torch_loaded(output))
    convert(source, output, opaque="drop")
    assert "config" not in torch_loaded(output)
    with pytest.raises(UnsafeError):
        convert(source, output)
    for wrong in (["--opaque", "run"], ["--opaque", "keep", "--drop-opaque"]):
        assert ckptconv_here("safetensors2pt", source, output, *wrong).code == 2


def test_without_scan_no_object_is_written_as_nobody_can_judge_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writable, "JUDGES", {})
    run("pt2safetensors", saved(tmp_path, {"w": torch.ones(3), "config": random.Random()}))
    words = "safetensors2pt", tmp_path / "x.safetensors", tmp_path / "back.pt"
    assert "--opaque keep" not in ckptconv_here(*words).refused(3, "random.Random", "--opaque drop")
    ckptconv_here(*words, "--opaque", "keep").refused(2, "--opaque keep", "scan", "not part of this installation")
    assert not (tmp_path / "back.pt").exists()


def test_only_objects_that_were_chosen_are_asked_about(tmp_path: Path) -> None:
    counts = collections.defaultdict(Config, a=1, b=torch.ones(2))
    state = {"w": torch.ones(3), "args": argparse.Namespace(lr=0.5), "config": Config(), "counts": counts}
    run("pt2safetensors", saved(tmp_path, state))
    source, output = tmp_path / "x.safetensors", tmp_path / "back.pt"
    args = {"args": state["args"]}
    plain = {"counts": {"b": torch.ones(2)}}
    for options, expected in (
        (["--include", "w"], {}),
        (["--include", "w", "--include", "args"], args),
        (excluding("config", "counts"), args),
        (["--include", "w", "--include", "counts.b", "--opaque", "drop"], plain),
    ):
        report = run("safetensors2pt", source, output, *VERIFY, "--json", *options).json
        assert list(report["dropped"]) == (["counts"] if expected is plain else [])
        assert not any("will run" in warning for warning in report["warnings"])
        again = torch_loaded(output)
        assert set(again) == {"w", *expected}
        assert again.get("args", args["args"]) == args["args"]
        assert_same(again.get("counts", {}), expected.get("counts", {}))
    for options in (["--include", "w", "--include", "counts.b"], excluding("config"), excluding("counts")):
        assert ckptconv_here("safetensors2pt", source, output, *options).code == 3


@naming_attacks
def test_an_attack_is_not_written_even_where_all_else_is(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(CASES["live_partial.pt"].make(str(tmp_path / "canary")))
    run("pt2safetensors", path, "--inert")
    run("safetensors2pt", tmp_path / "x.safetensors", tmp_path / "back.pt", "--opaque", "drop")
    assert not (tmp_path / "canary").exists()


def excluding(*globs: str) -> list[str]:
    return [part for glob in globs for part in ("--exclude", glob)]


class Subclass(torch.Tensor):
    pass


def test_a_tensor_of_a_subclass_comes_back_as_a_plain_one_only_where_that_was_asked_for(tmp_path: Path) -> None:
    path = saved(tmp_path, {"s": torch.arange(3.0).as_subclass(Subclass), "w": torch.ones(1)})
    run("pt2safetensors", path)
    refused = ckptconv_here("safetensors2pt", tmp_path / "x.safetensors", tmp_path / "back.pt")
    assert refused.code == 3
    assert "Subclass" in refused.err
    done = run("safetensors2pt", tmp_path / "x.safetensors", tmp_path / "back.pt", "--drop-opaque")
    assert "Subclass" in done.err
    assert_same({"s": torch.arange(3.0), "w": torch.ones(1)}, torch_loaded(tmp_path / "back.pt", weights_only=True))


def test_a_tensor_without_data_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": torch.ones(1), "m": [torch.empty(3, 4, device="meta")]})
    refused = ckptconv_here("pt2safetensors", path)
    assert refused.code == 5
    assert "'m.0'" in refused.err
    assert "meta" in refused.err
    assert_same({"a": torch.ones(1), "m": [None]}, torch_loaded(back(path, "--exclude", "m.*")))


# ---------------------------------------------------------------------------------------------- safetensors from others


def test_a_plain_file_becomes_a_dict_of_its_tensors(tmp_path: Path) -> None:
    state = {"b": torch.ones(2), "a": torch.zeros(3, dtype=torch.int8), "é.0": torch.tensor(1.5)}
    save_file(state, tmp_path / "x.safetensors", {"format": "pt", "by": "others"})
    run("safetensors2pt", tmp_path / "x.safetensors", tmp_path / "x.bin")
    again = torch_loaded(tmp_path / "x.bin", weights_only=True)
    assert type(again) is dict
    assert_same(load_file(tmp_path / "x.safetensors"), again)


def test_a_sharded_set_of_others_becomes_one_dict(tmp_path: Path) -> None:
    state = {f"layers.{number}.weight": torch.full((50,), float(number)) for number in range(12)}
    (tmp_path / "model").mkdir()
    save_torch_state_dict(state, tmp_path / "model", max_shard_size=900)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    for source in (tmp_path / "model", tmp_path / "model" / "model.safetensors.index.json"):
        run("safetensors2pt", source, tmp_path / "x.pt")
        again = torch_loaded(tmp_path / "x.pt", weights_only=True)
        assert_same(state, {name: again[name] for name in state})
        assert len(again) == len(state)


def test_tied_names_of_others_share_their_memory_again(tmp_path: Path) -> None:
    save_file({"embed": torch.ones(4, 2)}, tmp_path / "x.safetensors", {"format": "pt", "head": "embed"})
    run("safetensors2pt", tmp_path / "x.safetensors", tmp_path / "x.pt")
    again = torch_loaded(tmp_path / "x.pt")
    assert again["head"].untyped_storage().data_ptr() == again["embed"].untyped_storage().data_ptr()


# ------------------------------------------------------------------------------------------------------- other pt files


@every("path", torch_releases())
def test_files_of_old_releases_come_back(path: Path, tmp_path: Path) -> None:
    kind = path.name.split(".")[0]
    run("pt2safetensors", path, tmp_path / "x.safetensors")
    done = ckptconv_here("safetensors2pt", tmp_path / "x.safetensors", tmp_path / "x.pt", "--no-fsync")
    assert done.code == 0, done.err
    if kind == "module":
        theirs = torch.load(path, weights_only=False).state_dict()
        assert_same(dict(theirs), dict(torch_loaded(tmp_path / "x.pt")))
        return
    # torch cannot read 8-bit floats from a stream, though it writes them: the archive has the same tensors.
    expected, again = torch_loaded(DATA / "torch" / path.parent.name / f"{kind}.pt"), torch_loaded(tmp_path / "x.pt")
    for name in ("conjugate", "negative"):
        # Kept as the values they stand for, which are not those of the memory they were views of.
        if name in expected:
            assert torch.equal(expected.pop(name), again.pop(name))
    assert_same(expected, again)


# --------------------------------------------------------------------------------------------------------------- scale


def test_memory_stays_small_in_both_directions(tmp_path: Path) -> None:
    moments = [torch.randn(750, 8000) for _ in range(3)]
    state = {
        "state": {number: {"step": torch.tensor(3.0), "exp_avg": each} for number, each in enumerate(moments)},
        "shared": [moments[0][:500], moments[1].t()],
        "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "params": list(range(3))}],
    }
    path = saved(tmp_path, state)
    for arguments in (
        ("pt2safetensors", path, tmp_path / "x.safetensors"),
        ("safetensors2pt", tmp_path / "x.safetensors", tmp_path / "y.pt"),
    ):
        run = done(ckptconv(*arguments, "--json", "--no-fsync"))
        assert run.json["bytes_written"] > 70e6
        assert run.json["peak_rss_bytes"] < 64 << 20
    assert_same(state, torch_loaded(tmp_path / "y.pt", weights_only=True))


def test_many_tensors_take_little_each(tmp_path: Path) -> None:
    count = 8_000 * TIMES
    path = saved(tmp_path, {f"model.layers.{number}.weight": torch.ones(3) for number in range(count)})
    for arguments in (
        ("pt2safetensors", path, tmp_path / "x.safetensors"),
        ("safetensors2pt", tmp_path / "x.safetensors", tmp_path / "y.pt"),
    ):
        run = done(ckptconv(*arguments, "--json", "--no-fsync"))
        assert run.json["peak_rss_bytes"] < (48 << 20) + 2048 * count


# ----------------------------------------------------------------------------------------------- storages by themselves


def of_storage(storage: Any) -> tuple[type, torch.dtype, list[int]]:
    return type(storage), storage.dtype, storage.untyped().tolist()


def memory_of(value: Any) -> int:
    return value.untyped().data_ptr() if isinstance(value, torch.TypedStorage) else value.untyped_storage().data_ptr()


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@every("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex128])
@every("options", torch_containers().values(), ids=torch_containers())
def test_typed_storages_stay_storages_and_share_their_memory(
    dtype: torch.dtype, options: dict[str, Any], tmp_path: Path
) -> None:
    tensor = torch.arange(6).to(dtype)
    state = {
        "s": tensor.storage(),
        "t": tensor[1:3],
        "again": [tensor.storage()],
        "other": tensor.clone().storage(),
        "empty": torch.empty(0, dtype=dtype).storage(),
    }
    path = saved(tmp_path, state, **options)
    original = torch_loaded(path)
    got = torch_loaded(back(path), weights_only=True)
    verified_here(path, tmp_path / "x.safetensors")
    assert list(got) == list(original)
    for name in ("s", "other", "empty"):
        assert of_storage(got[name]) == of_storage(original[name]), name
    assert of_storage(got["again"][0]) == of_storage(original["s"])
    assert torch.equal(got["t"], original["t"])
    assert memory_of(got["s"]) == memory_of(got["again"][0]) != memory_of(got["other"])
    assert got["t"].data_ptr() == memory_of(got["s"]) + dtype.itemsize


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_untyped_storages_come_back_as_torch_reads_them(tmp_path: Path) -> None:
    eight = torch.arange(4.0).to(torch.float8_e4m3fn)
    path = saved(tmp_path, {"u": torch.ones(3).untyped_storage(), "t": eight, "s": eight.untyped_storage()})
    original, got = torch_loaded(path), torch_loaded(back(path), weights_only=True)
    for name in ("u", "s"):
        assert of_storage(got[name]) == of_storage(original[name]), name
    assert torch.equal(got["t"].view(torch.uint8), original["t"].view(torch.uint8))
    assert memory_of(got["t"]) == memory_of(got["s"]) != memory_of(got["u"])
