"""OLMo's safetensors: names of tensors that are pickles of paths."""

from __future__ import annotations

import base64
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same
from reading import state_of
from safetensors.torch import save_file

from ckptconv import CorruptError, UnsafeError
from ckptconv.features.olmo import names as olmo
from ckptconv.pickles.nodes import Opaque
from ckptconv.structure.keymap import flatten


def olmo_flatten(tree: dict[Any, Any], path: tuple[Any, ...] = ()) -> dict[str, Any]:
    """What OLMo makes of a state dict, as its source describes it."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= olmo_flatten(value, (*path, key))
            continue
        pickled = not isinstance(value, torch.Tensor)
        name = base64.urlsafe_b64encode(pickle.dumps(((*path, key), pickled))).decode("ascii")
        flat[name] = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8) if pickled else value
    return flat


def read_tensor(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.numpy())


def test_olmo_files_are_read() -> None:
    tree = {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 2)}, ("a", 1): {None: torch.ones(1)}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0, 1]}],
        "epoch": 3,
        "é?>": "text",
    }
    flat = olmo_flatten(tree)
    assert olmo.is_used(flat)
    again, opaque = olmo.restore(flat, read_tensor, where="f.safetensors")
    assert_same(tree, again)
    assert opaque == []
    assert list(flatten(again)[0])[:2] == ["state.0.step", "state.0.exp_avg"]


def test_ordinary_names_are_not_taken_for_olmo() -> None:
    for names in ([], ["model.weight"], ["gAIx"[:2]], ["gAS=.weight"], [*olmo_flatten({"a": torch.ones(1)}), "bias"]):
        assert not olmo.is_used(names)


class Attack:
    def __reduce__(self) -> Any:
        return print, ("this must never be printed",)


def test_olmo_names_and_values_that_are_none_are_refused_and_run_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    again, opaque = olmo.restore(olmo_flatten({"a": [Attack()]}), read_tensor, where="f")
    assert (opaque, type(again["a"][0])) == (["builtins.print"], Opaque)
    with pytest.raises(UnsafeError, match=r"builtins\.print"):
        olmo.restore(olmo_flatten({Attack(): torch.ones(1)}), read_tensor, where="f")
    assert capsys.readouterr().out == ""
    one, inside = olmo_flatten({"a": torch.ones(1)}), olmo_flatten({"a": {"b": torch.ones(1)}})
    wrong = (5, ((), False), (("a",), 1), (("a",),), (([],), False), ((((((1,),),),),), False), ("a", False))
    names = [{base64.urlsafe_b64encode(pickle.dumps(path)).decode(): torch.ones(1)} for path in wrong]
    for flat in (one | inside, inside | one, {"weight": torch.ones(1)}, *names):
        with pytest.raises(CorruptError):
            olmo.restore(flat, read_tensor, where="f")


def test_files_in_olmos_map_become_the_nested_dict(tmp_path: Path) -> None:
    tree = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 2)}}, "groups": [{"lr": 0.1}], "n": 3}
    flat = {}
    for path, value in (
        (("state", 0, "step"), tree["state"][0]["step"]),
        (("state", 0, "exp_avg"), tree["state"][0]["exp_avg"]),
        (("groups",), tree["groups"]),
        (("n",), 3),
    ):
        plain = isinstance(value, torch.Tensor)
        name = base64.urlsafe_b64encode(pickle.dumps((path, not plain))).decode()
        flat[name] = value if plain else torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    save_file(flat, tmp_path / "x.safetensors")
    again = state_of(tmp_path / "x.safetensors")
    assert again["groups"] == [{"lr": 0.1}]
    assert again["n"] == 3
    assert_same({key: tree["state"][0][key] for key in ("exp_avg", "step")}, dict(sorted(again["state"][0].items())))
