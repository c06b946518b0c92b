"""`ckptconv verify`, and the options that it takes from manifests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ckptconv_here, done
from safetensors.torch import save_file

import ckptconv
from ckptconv.errors import UsageError
from ckptconv.outputs.kinds import NAMED

WEIGHTS = {"a": torch.arange(4.0), "b": torch.ones(2)}


def test_a_file_is_not_compared_with_itself(place: Path) -> None:
    save_file(WEIGHTS, "a.safetensors")
    torch.save({"model": WEIGHTS}, "a.pt")
    for name in ("a.safetensors", "a.pt") if "pt" in NAMED else ("a.safetensors",):
        ckptconv_here("verify", name, f"./{name}").refused(2, f"{name} is both SOURCE and OUTPUT.")


def test_a_conversion_says_as_what_the_source_was_compared(place: Path) -> None:
    save_file(WEIGHTS, "a.safetensors")
    for words, how in (((), "the source bit for bit"), (("--dtype", "bf16"), "the source as cast to bfloat16, bit")):
        assert f" match {how}" in done(ckptconv_here("convert", "a.safetensors", "b", "--verify", *words)).out
    run = ckptconv_here("convert", "a.safetensors", "c", "--verify", "--dtype", "keep")
    assert " match the source bit for bit" in done(run).out


@pytest.mark.skipif("pt" not in NAMED, reason="no feature writes .pt files")
def test_two_pt_files_are_verified_as_any_source_and_output(place: Path) -> None:
    for name in ("model.pt", "other.pt"):
        torch.save({"w": torch.ones(3)}, name)
    done(ckptconv_here("verify", "model.pt", "other.pt"))
    torch.save({"w": torch.zeros(3)}, "other.pt")
    ckptconv_here("verify", "model.pt", "other.pt").refused(1, "other.pt", "'w'")


def test_an_output_of_another_dtype_differs_unless_it_is_said(place: Path) -> None:
    save_file(WEIGHTS, "a.safetensors", metadata={"format": "pt"})
    ckptconv.convert("a.safetensors", "b.safetensors", dtype="bf16")
    assert ckptconv.verify("a.safetensors", "b.safetensors", dtype="bf16").tensors == 2
    with pytest.raises(ckptconv.DifferenceError):
        ckptconv.verify("a.safetensors", "b.safetensors")


def test_metadata_of_the_source_belongs_into_every_file(place: Path) -> None:
    save_file(WEIGHTS, "in.safetensors", metadata={"format": "tf", "step": "7"})
    save_file(WEIGHTS, "out.safetensors", metadata={"format": "tf", "step": "8"})
    ckptconv_here("verify", "in.safetensors", "out.safetensors").refused(1, "its metadata does not set step to '7'")


def test_objects_alone_are_no_model(place: Path) -> None:
    torch.save({"a": Thing(w=torch.ones(2))}, "x.pt")
    done(ckptconv_here("pt2safetensors", "x.pt"))
    run = ckptconv_here("verify", "x.pt", "x.safetensors")
    assert "no model" in run.err
    assert "verified" not in run.out


class Thing:
    """Is known to ckptconv by its name only."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


def test_the_short_help_says_what_an_option_means_here() -> None:
    assert "Write a model" not in ckptconv_here("verify", "-h").out


def test_the_source_comes_first() -> None:
    import inspect

    assert next(iter(inspect.signature(ckptconv.verify).parameters)) == "source"


# --------------------------------------------------------------------------------------------- options from manifests


def test_a_manifest_with_a_value_that_no_option_has_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "m.pt")
    ckptconv.convert(tmp_path / "m.pt", tmp_path / "out", dtype=torch.float16)
    manifest = tmp_path / "out" / ".ckptconv-manifest.json"
    told = json.loads(manifest.read_text())
    assert told["options"] == {"dtype": "float16"}
    for options in ({"dtype": "int8"}, {"max_shard_size": -1}, {"tied": "x"}, {"jobs": 3}, {"structure": 1}):
        manifest.write_text(json.dumps({**told, "options": options}))
        with pytest.raises(UsageError, match="records an unknown option or value"):
            ckptconv.verify(tmp_path / "m.pt", tmp_path / "out")


@pytest.mark.parametrize("options", [{"exclude": [*map(str, range(2000)), "b"]}, {"rename": f"{'w' * 5000}=v"}])
def test_what_no_manifest_is_believed_is_verified_with_the_options_themselves(options: Any, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3), "b": torch.ones(3)}, tmp_path / "m.pt")
    ckptconv.convert(tmp_path / "m.pt", tmp_path / "out", **options, fsync=False)
    with pytest.raises(UsageError, match=r"Specify the options of the conversion on the command line\."):
        ckptconv.verify(tmp_path / "m.pt", tmp_path / "out")
    assert ckptconv.verify(tmp_path / "m.pt", tmp_path / "out", **options).bytes_compared


@pytest.mark.parametrize("name", ["of.json", "of.virtual.json"])
def test_a_kind_that_the_name_rules_out_is_not_asked_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({"w": torch.ones(2)}, "m.safetensors")
    Path(name).write_text("{}")
    told = ckptconv_here("verify", "m.safetensors", name).refused(2, "ckptconv diff compares any two checkpoints")
    assert "--to" not in told
