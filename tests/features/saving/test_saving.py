"""save_state_dict: what load_state_dict returns as it was, and a conversion would have written."""

from __future__ import annotations

import argparse
import errno
import functools
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cells import VERIFIED, of_features
from compare import assert_same
from processes import prepared
from reading import state_in, state_of
from safetensors import safe_open
from safetensors.numpy import load_file
from states import STATES
from torch.testing._internal.two_tensor import TwoTensor

import ckptconv
from ckptconv import CkptconvError, UsageError

# Tensors made of several, and objects, are tested with the mapper; arrays of numpy come back as tensors.
TREES = [name for name in STATES if not name.startswith(("1000-deep", "root", "bits", "quantized", "numpy"))]
# In safetensors, tensors lie in C order, and to bring them into another they would have to be copied.
LAID_OUT = ("strides", "parameters, gradients, attributes")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sharded", [{}, {"max_shard_size": "1kB"}], ids=["file", "shards"])
def test_any_state_comes_back_and_is_what_a_conversion_writes(sharded: dict[str, Any], tmp_path: Path) -> None:
    for number, name in enumerate(TREES):
        place = tmp_path / str(number)
        place.mkdir()
        state = STATES[name]()
        saved, converted = (place / (each if sharded else f"{each}.safetensors") for each in ("saved", "converted"))
        ckptconv.save_state_dict(state, saved, fsync=False, **VERIFIED, **sharded)
        loaded = state_in(saved)
        if name in LAID_OUT:
            assert all(torch.equal(state[key], loaded[key]) for key in state), name
        else:
            assert_same({name: state}, {name: loaded})
        torch.save(state, place / "x.pt")
        other = ckptconv.convert(place / "x.pt", converted, fsync=False, **sharded)
        if sharded:
            files = sorted(path.name for path in saved.glob("model*"))
            assert [Path(file.path).name for file in other.outputs if "model" in file.path] == files, name
        elif name != "sparse":  # what torch.save writes of one is not in the order of its parts
            assert saved.read_bytes() == converted.read_bytes(), name


def test_a_path_and_a_state_dict_are_not_taken_for_each_other(tmp_path: Path) -> None:
    state = {"w": torch.ones(2)}
    for call in (ckptconv.convert, *of_features("READER")):
        with pytest.raises(UsageError) as caught:
            call(state)
        assert caught.value.hint == "ckptconv.save_state_dict(STATE, PATH) writes a state dict."
    with pytest.raises(UsageError) as caught:
        ckptconv.save_state_dict("x.safetensors", state)  # type: ignore[arg-type]
    assert caught.value.hint == "The state comes first: save_state_dict(STATE, PATH)."
    with pytest.raises(UsageError, match=r"'x.pt' is not a state dict.*convert\(INPUT, OUTPUT\)"):
        ckptconv.save_state_dict("x.pt", tmp_path / "x.safetensors")


def test_objects_with_a_state_dict_are_saved_as_that(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    live = {"model": model, "optimizers": [optimizer], "schedules": (schedule,)}
    report = ckptconv.save_state_dict(live, tmp_path / "x.safetensors", fsync=False)
    (note,) = report.notes
    assert note.startswith("The state contains 3 objects of torch.nn.modules.linear.Linear, torch.optim.adamw.AdamW, ")
    assert note.endswith(". The output has the result of state_dict().")
    loaded = state_in(tmp_path / "x.safetensors")
    states = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict()],
        "schedules": (schedule.state_dict(),),
    }
    assert_same(states, loaded)
    optimizer.load_state_dict(loaded["optimizers"][0])
    ckptconv.save_state_dict(model, tmp_path / "m.safetensors", fsync=False)
    model.load_state_dict(state_in(tmp_path / "m.safetensors"))
    with pytest.warns(
        UserWarning, match="load_state_dict does not create again, with tensors inside: torch.nn.modules"
    ):
        raw = ckptconv.save_state_dict(model, tmp_path / "r.safetensors", raw=True, fsync=False)
    assert raw.opaque == ["torch.nn.modules.linear.Linear"]
    assert "(torch.nn.modules.linear.Linear)" in raw.warnings[1].replace("'", "")


class Averaged:
    """An object with a tensor, and no state dict."""

    def __init__(self) -> None:
        self.shadow = torch.ones(2)


class Unsaved:
    """An object whose state dict is `given`."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def state_dict(self) -> Any:
        return self.given()


def test_tensors_in_objects_that_do_not_come_back_are_warned_of(tmp_path: Path) -> None:
    state = {"w": torch.ones(1), "ema": Averaged(), "args": argparse.Namespace(lr=1)}
    with pytest.warns(UserWarning, match=r"with tensors inside: .*test_saving.Averaged\. Save these tensors") as caught:
        report = ckptconv.save_state_dict(state, tmp_path / "x.safetensors", fsync=False)
    assert [warning.filename for warning in caught] == [__file__]
    assert report.warnings == [str(caught[0].message)]
    assert set(report.opaque) == {f"{__name__}.Averaged", "argparse.Namespace"}
    with pytest.raises(UsageError, match=r"method Module.state_dict, not its result.*Call the method: state_dict\(\)"):
        ckptconv.save_state_dict({"a": torch.nn.Linear(2, 2).state_dict}, tmp_path / "y.safetensors")
    for given, problem in ((lambda: 3, "returned a int"), (lambda: 1 / 0, "failed: ZeroDivisionError")):
        with pytest.raises(UsageError, match=rf"Unsaved, whose state_dict\(\) {problem}"):
            ckptconv.save_state_dict({"a": Unsaved(given)}, tmp_path / "y.safetensors")


def test_a_model_with_tied_weights_is_stored_once(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(500, 8), torch.nn.Linear(8, 500, bias=False))
    model[1].weight = model[0].weight  # type: ignore[union-attr,assignment]
    report = ckptconv.save_state_dict(model.state_dict(), tmp_path / "x.safetensors", metadata={"who": "me"})
    assert report.aliases == {"1.weight": "0.weight"}
    assert (tmp_path / "x.safetensors").stat().st_size < 500 * 8 * 4 + 1000
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert {"who": "me", "format": "pt"}.items() <= file.metadata().items()


def test_arrays_of_numpy_are_tensors_without_torch(tmp_path: Path) -> None:
    script = """
import sys, numpy as np, ckptconv
state = {"a": np.arange(6.0).reshape(2, 3).T, "be": np.arange(3, dtype=">i4"), "n": {"b": np.ones(4, "f2")}, "step": 3}
ckptconv.save_state_dict(state, sys.argv[1], fsync=False)
assert "torch" not in sys.modules
"""
    done = prepared().run(script, tmp_path / "x.safetensors")
    assert done.returncode == 0, done.stderr
    found = load_file(tmp_path / "x.safetensors")
    assert {name: array.tolist() for name, array in found.items()} == {
        "a": [[0, 3], [1, 4], [2, 5]],
        "be": [0, 1, 2],
        "n.b": [1] * 4,
    }


def test_the_smallest_and_largest_values_of_numpy_come_back(tmp_path: Path) -> None:
    values = {
        "bytes": np.bytes_(b""),
        "text": np.str_(""),
        "array": np.zeros((2, 3), "S0"),
        "time": np.timedelta64(3, "2147483647s"),
    }
    ckptconv.save_state_dict({"w": torch.ones(1), **values}, tmp_path / "x.safetensors", fsync=False)
    loaded = state_in(tmp_path / "x.safetensors")
    for name, value in values.items():
        found = loaded[name]
        assert (type(found), found.dtype, found.tolist()) == (type(value), value.dtype, value.tolist()), name


def test_options_of_a_conversion_apply(tmp_path: Path) -> None:
    state = {"a": torch.ones(3), "b.bias": torch.ones(2)}
    ckptconv.save_state_dict(state, tmp_path / "x.safetensors", dtype="bf16", exclude="*.bias", fsync=False)
    loaded = state_in(tmp_path / "x.safetensors")
    assert loaded["a"].dtype == torch.bfloat16
    assert list(loaded) == ["a"]


def test_what_makes_no_sense_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    wrong: list[dict[str, Any]] = [
        {"metadata": {"format": "tf"}},
        {"metadata": {"b": "a"}},
        {"metadata": {"b": 3}},
        {"max_shard_sise": 3},
        {"max_shard_size": 3},
    ]
    for name, options in [("x.pt", {}), *(("x.safetensors", each) for each in wrong)]:
        with pytest.raises(UsageError):
            ckptconv.save_state_dict({"a": torch.ones(3), "c": torch.ones(2)}, tmp_path / name, **options)
    with pytest.raises(CkptconvError):
        ckptconv.save_state_dict({"a": torch.ones(3), "f": (each for each in ())}, tmp_path / "x.safetensors")
    assert not list(tmp_path.iterdir())


KILLED = """
import sys, os, numpy, ckptconv
from ckptconv.publish import publish
def end(*_): os._exit(9)
if sys.argv[2] == "kill": publish.complete = end
state = {f"w{n}": numpy.full(300, n + int(sys.argv[3]), "f4") for n in range(5)}
report = ckptconv.save_state_dict(state, sys.argv[1], max_shard_size=1500)
print(report.reused)
"""


def test_a_save_that_is_killed_leaves_nothing_and_is_resumed_with_the_same_data_only(tmp_path: Path) -> None:
    def run(how: str, shift: int) -> subprocess.CompletedProcess[str]:
        return prepared("torch").run(KILLED, tmp_path / "x", how, shift)

    assert run("kill", 0).returncode == 9
    assert not [path for path in (tmp_path / "x").glob("*") if not path.name.startswith(".")]
    assert run("finish", 0).stdout == "5\n"
    assert run("kill", 1).returncode == 9
    assert run("finish", 2).stdout == "0\n"
    loaded = state_in(tmp_path / "x")
    assert [loaded[f"w{n}"][0].item() for n in range(5)] == [2, 3, 4, 5, 6]


def test_the_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    made = []
    for number in range(2):
        state = {"b": torch.arange(6.0), "a": [torch.ones(2), 3]}
        ckptconv.save_state_dict(state, tmp_path / str(number), fsync=False)
        made.append({path.name: path.read_bytes() for path in (tmp_path / str(number)).iterdir()})
    assert made[0] == made[1]


def test_a_dtensor_is_told_to_be_gathered(tmp_path: Path) -> None:
    class DTensor(torch.Tensor):
        def full_tensor(self) -> torch.Tensor:
            return self

    part = torch.ones(2).as_subclass(DTensor)
    with pytest.raises(UsageError, match=r"Call full_tensor\(\) on it"):
        ckptconv.save_state_dict({"w": part}, tmp_path / "x.safetensors")


class Wrapped(torch.Tensor):
    """A tensor that wraps another one, which is its attribute, and says that it is on no device."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device="meta")  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(each.inner if isinstance(each, Wrapped) else each for each in args), **(kwargs or {}))


class Stated(Wrapped):
    """One whose state is no dict."""

    def __getstate__(self) -> Any:
        return "inner", self.inner

    def __setstate__(self, state: Any) -> None:
        self.inner = state[1]


@pytest.mark.filterwarnings("ignore")
def test_tensors_of_classes_that_wrap_others_are_what_a_conversion_writes(tmp_path: Path) -> None:
    jagged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    pair = TwoTensor(torch.ones(2, 3), torch.zeros(2, 3))
    for number, value in enumerate((pair, jagged, Wrapped(torch.arange(3.0)), Stated(torch.arange(3.0)))):
        state, path = {"w": value}, tmp_path / f"{number}.pt"
        torch.save(state, path)
        report = ckptconv.convert(path, path.with_suffix(".safetensors"), fsync=False)
        assert report.tensors
        saved = ckptconv.save_state_dict(state, tmp_path / "saved.safetensors", fsync=False)
        assert saved.tensors == report.tensors
        with safe_open(path.with_suffix(".safetensors"), "pt") as one, safe_open(saved.outputs[0].path, "pt") as other:
            assert {*one.keys()} == {*other.keys()}
            assert all(torch.equal(one.get_tensor(name), other.get_tensor(name)) for name in one.keys())  # noqa: SIM118
        (tmp_path / "saved.safetensors").unlink()
    loaded = state_of(tmp_path / "2.pt")["w"]
    assert torch.equal(loaded.parts["attributes"]["inner"], torch.arange(3.0)), "nothing is lost"
    for end in (".pt", ".safetensors"):
        what, inner = state_of(tmp_path / f"3{end}")["w"].parts["attributes"]
        assert (what, inner.tolist()) == ("inner", [0, 1, 2])


def test_what_is_missing_is_a_file_that_is_not_found(tmp_path: Path) -> None:
    path = tmp_path / "none.pt"
    for call in (
        lambda path: ckptconv.convert(path, tmp_path / "x.safetensors"),
        *(call for calls in of_features("OPENING") for call in calls),
        *(functools.partial(call, out=tmp_path / "x.safetensors") for call in of_features("MAKE")),
    ):
        with pytest.raises(FileNotFoundError, match=r"none\.pt does not exist") as caught:
            call(path)
        assert isinstance(caught.value, UsageError)
        assert caught.value.errno == errno.ENOENT


def test_metadata_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="metadata 5 is not a mapping"):
        ckptconv.save_state_dict({}, tmp_path / "out", metadata=5)  # type: ignore[arg-type]
    assert [*tmp_path.iterdir()] == []
