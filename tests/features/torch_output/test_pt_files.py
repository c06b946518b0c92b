"""What is in a `.pt` file: names, keys and values, as the options say."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from cells import VERIFIED, trained, verifying
from checkpoints import assert_same
from safetensors.torch import load_file, save_file

import ckptconv
from ckptconv import CkptconvError, UsageError
from ckptconv.formats.source import Source
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Inline

RENAMING = {"strip_prefix": "m.", "rename": "weight$=w"}


def test_a_pt_file_of_plain_safetensors_has_the_names_that_were_asked_for(tmp_path: Path) -> None:
    tensors = {"m.a.weight": torch.ones(3), "m.b": torch.zeros(2), "c": torch.ones(1)}
    save_file(tensors, tmp_path / "m.safetensors")
    ckptconv.convert(tmp_path / "m.safetensors", tmp_path / "m.pt", exclude="c", **VERIFIED, **RENAMING)
    assert_same(torch.load(tmp_path / "m.pt"), {"a.w": tensors["m.a.weight"], "b": tensors["m.b"]})
    with pytest.raises(UsageError, match="the same name, 'b'"):
        ckptconv.convert(tmp_path / "m.safetensors", tmp_path / "m.pt", rename=("^m.b=b", "^c=b"))


def test_a_pt_file_of_plain_shards_has_the_names_in_the_order_of_the_shards(tmp_path: Path) -> None:
    homes = {f"m.{name}": f"model-0000{number}-of-00002.safetensors" for number, name in ((1, "b"), (2, "a"))}
    for name, home in homes.items():
        save_file({name: torch.ones(2)}, tmp_path / home)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    ckptconv.convert(tmp_path, tmp_path / "m.pt", strip_prefix="m.", **VERIFIED)
    assert list(torch.load(tmp_path / "m.pt")) == ["b", "a"]


def test_a_pt_file_of_a_nested_state_has_its_keys_unless_it_has_no_structure(tmp_path: Path) -> None:
    state = OrderedDict({"n": {"m.a.weight": torch.nn.Parameter(torch.ones(3))}})
    torch.save(state, tmp_path / "m.pt")
    ckptconv.convert(tmp_path / "m.pt", tmp_path / "m.safetensors")
    for source in ("m.pt", "m.safetensors"):
        output = tmp_path / f"{source}.back.pt"
        with pytest.raises(UsageError, match="keeps this structure") as refused:
            ckptconv.convert(tmp_path / source, output, strip_prefix="n.m.")
        assert "--no-structure" in refused.value.hint
        ckptconv.convert(tmp_path / source, output, structure=False, **VERIFIED, strip_prefix="n.m.")
        assert_same(torch.load(output), {"a.weight": torch.ones(3)})


def test_a_flat_state_dict_gets_other_names_and_stays_what_it_is(tmp_path: Path) -> None:
    module = torch.nn.DataParallel(torch.nn.Linear(2, 3))
    torch.save(module.state_dict(), tmp_path / "state.pt")
    torch.save(OrderedDict(module.named_parameters()), tmp_path / "parameters.pt")
    for name in ("state", "parameters"):
        ckptconv.convert(tmp_path / f"{name}.pt", tmp_path / f"{name}.safetensors")
        for source in (f"{name}.pt", f"{name}.safetensors"):
            output = tmp_path / f"of-{source}.pt"
            report = ckptconv.convert(tmp_path / source, output, strip_prefix="module.", **VERIFIED)
            loaded = torch.load(output, weights_only=True)
            assert type(loaded) is OrderedDict
            assert_same(loaded, dict(module.module.named_parameters()))
            assert all(type(each) is torch.nn.Parameter for each in loaded.values()) == (name == "parameters")
            assert any("_metadata" in note for note in report.notes) == (name == "state")


@verifying
def test_a_pt_file_is_made_of_any_input(tmp_path: Path) -> None:
    """With the tensors that safetensors of it would have, and the nesting."""
    shared = torch.arange(6.0)
    state = {"epoch": 3, "model": {"a": shared, "b": shared[2:], "c": torch.arange(3)}, "lrs": [0.5, torch.ones(2)]}
    torch.save(state, tmp_path / "train.pt")
    for number, options in enumerate(
        ({}, {"dtype": "bf16"}, {"key": "model"}, {"include": "model.*", "opaque": "drop"})
    ):
        output = tmp_path / f"{number}.pt"
        ckptconv.convert(tmp_path / "train.pt", output, **VERIFIED, **options)
        loaded = torch.load(output, weights_only=True)
        model = loaded if "key" in options else loaded["model"]
        assert model["a"].dtype == (torch.bfloat16 if "dtype" in options else torch.float32)
        assert_same({"b": model["b"].float(), "c": model["c"]}, {"b": shared[2:], "c": torch.arange(3)})
        assert model["b"].data_ptr() == model["a"][2:].data_ptr()
        assert "key" in options or set(loaded) == ({"model"} if "include" in options else set(state))
    for number, source in enumerate(trained()):
        output, plain = tmp_path / f"of{number}.pt", tmp_path / f"of{number}.safetensors"
        ckptconv.convert(source, output, **VERIFIED)
        ckptconv.convert(source, plain, tied="duplicate")
        assert_same(torch.load(output, weights_only=True), load_file(plain))
        assert ckptconv.verify(source, output).tensors


def test_weights_whose_data_is_nowhere_are_in_no_pt_file(tmp_path: Path) -> None:
    """What safetensors of a source would not hold, a `.pt` file does not hold either."""
    made = Source("made", "other", "here", {"a": Inline(b"\0" * 4, DTYPES["float32"], (1,))}, unaccounted=["b"])
    with pytest.raises(CkptconvError, match="without data: b"):
        ckptconv.convert(made, tmp_path / "x.pt")
    made = made._replace(unaccounted=(), pieces=re.compile("^a$"))
    with pytest.raises(CkptconvError, match="flat parameters"):
        ckptconv.convert(made, tmp_path / "x.pt")
