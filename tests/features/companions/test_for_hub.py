"""`--for-hub`: the weights of a model alone, with its configuration, and what is left out is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import VERIFIED, verified, verifying
from checkpoints import contents, torch_file
from safetensors import safe_open
from safetensors.torch import load_file

import ckptconv
from ckptconv import DifferenceError, UsageError
from ckptconv.options.table import OPTIONS
from ckptconv.outputs.kinds import FURTHER

EMBEDDING = torch.arange(6.0).reshape(3, 2)
WEIGHTS = {"embed.weight": EMBEDDING, "norm.weight": torch.ones(2), "head.weight": EMBEDDING}
CONFIG = {"model_type": "tiny"}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("secret")
    return tmp_path


def publish(source: Path, **options: Any) -> ckptconv.Report:
    return ckptconv.convert(source, source.parent / "out", for_hub=True, fsync=False, **options)


def training(**more: Any) -> dict[str, Any]:
    optimizer = {"state": {0: {"exp_avg": torch.zeros(3, 2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    return {"epoch": 3, "api_key": "sk-secret", "state_dict": WEIGHTS, "optimizer": optimizer, **more}


def test_the_weights_alone_are_written_with_the_configuration(place: Path) -> None:
    report = publish(torch_file(place, training(ema=WEIGHTS)), **VERIFIED)
    assert contents(place / "out").keys() == {"model.safetensors", "config.json", "tokenizer.json"}
    assert load_file(place / "out" / "model.safetensors").keys() == {"embed.weight", "norm.weight"}
    assert b"secret" not in b"".join(contents(place / "out").values())
    assert "selected state_dict; omitted: epoch, api_key, optimizer, ema" in report.notes
    assert not report.recorded


def test_a_tied_name_is_stored_once(place: Path) -> None:
    assert publish(torch_file(place, training())).aliases == {"head.weight": "embed.weight"}
    with safe_open(place / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}


def test_the_only_state_dict_is_the_model(place: Path) -> None:
    publish(torch_file(place, {"net": WEIGHTS, "step": 7}))
    assert load_file(place / "out" / "model.safetensors").keys() == {"embed.weight", "norm.weight"}


def test_values_among_the_weights_are_left_out_and_said(place: Path) -> None:
    report = publish(torch_file(place, {**WEIGHTS, "version": 3}))
    assert any("left out, because they are not tensors: 'version'" in note for note in report.notes)


def test_of_several_state_dicts_one_is_to_be_named(place: Path) -> None:
    source = torch_file(place, {"generator": WEIGHTS, "discriminator": WEIGHTS})
    with pytest.raises(UsageError, match="under 'generator', 'discriminator', but it is not clear which"):
        publish(source)
    assert not (place / "out").exists()
    publish(source, key="generator")
    assert "norm.weight" in load_file(place / "out" / "model.safetensors")
    publish(source, key=".")
    assert "generator.norm.weight" in load_file(place / "out" / "model.safetensors")


@pytest.mark.parametrize("state", [training()["optimizer"], {"optimizer": training()["optimizer"], "step": 7}])
def test_the_states_of_an_optimizer_are_no_model(state: dict[str, Any], place: Path) -> None:
    source = torch_file(place, state)
    with pytest.raises(UsageError, match="contains optimizer states, but no weights"):
        publish(source)
    assert not (place / "out").exists()
    # As the hint says, they are converted without the option.
    assert ckptconv.convert(source, place / "out.safetensors").tensors == 1


def test_a_record_and_a_manifest_of_an_earlier_output_go(place: Path) -> None:
    source = torch_file(place, training())
    ckptconv.convert(source, place / "out", copy_config=True)
    assert {".ckptconv-manifest.json", "ckptconv.structure.json"} <= contents(place / "out").keys()
    publish(source)
    assert contents(place / "out").keys() == {"model.safetensors", "config.json", "tokenizer.json"}


@verifying
def test_verify_compares_it_without_a_manifest(place: Path) -> None:
    source = torch_file(place, training())
    publish(source)
    assert ckptconv.verify(source, place / "out", for_hub=True).tensors == len(WEIGHTS)
    (place / "out" / "config.json").write_text(json.dumps({"model_type": "tany"}))
    with pytest.raises(DifferenceError, match=r"config\.json"):
        ckptconv.verify(source, place / "out", for_hub=True)
    for name in ("config.json", "tokenizer.json"):
        publish(source, overwrite=True)
        (place / "out" / name).unlink()
        with pytest.raises(DifferenceError, match=f"{place / 'out'} lacks {name}"):
            ckptconv.verify(source, place / "out", for_hub=True)


def test_a_manifest_can_be_written_elsewhere(place: Path) -> None:
    source = torch_file(place, training())
    publish(source, manifest=str(place / "manifest.json"), digest="sha256")
    assert json.loads((place / "manifest.json").read_text())["options"]["for_hub"] is True
    assert ".ckptconv-manifest.json" not in contents(place / "out")
    verified(source, place / "out", manifest=str(place / "manifest.json"))


def test_digests_without_a_manifest_are_refused_with_the_option_that_keeps_them(place: Path) -> None:
    with pytest.raises(UsageError) as refused:
        publish(torch_file(place, training()), digest="sha256")
    assert refused.value.hint == "Give --manifest FILE too, or convert to a directory without --for-hub."


def test_one_file_has_no_place_for_the_configuration(place: Path) -> None:
    report = ckptconv.convert(torch_file(place, training()), place / "one.safetensors", for_hub=True)
    assert any(warning.startswith("--for-hub copies nothing") for warning in report.warnings)
    assert load_file(place / "one.safetensors").keys() == {"embed.weight", "norm.weight"}


def test_what_is_no_model_to_publish_is_refused(place: Path) -> None:
    source = torch_file(place, training())
    wrong: list[dict[str, Any]] = [*({name: "u"} for name in FURTHER), {"per_rank": True}]
    wrong += [{"part": "0/2"}] if "part" in OPTIONS else []
    for options in (*wrong, {"digest": "sha256"}):
        with pytest.raises(UsageError):
            publish(source, **options)
        assert not (place / "out").exists(), options
