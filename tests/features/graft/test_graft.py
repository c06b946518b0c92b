"""Tensors of another checkpoint are added as they are, and what does not fit is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from effort import every
from features.model_facts import models
from features.model_facts.models import converted

import ckptconv
from ckptconv.errors import CkptconvError, UsageError


def test_tensors_are_added_as_they_are(tmp_path: Path) -> None:
    tensors = models.save(tmp_path / "m", *models.mixed())
    more = models.save(tmp_path / "more", {"mtp.fc.weight": (3, 4), "mtp.norm.weight": (4,), "other": (2,)}, None)
    found, _, report = converted(tmp_path / "m", tmp_path / "out", graft=f"{tmp_path / 'more'}:mtp.*", dtype="bf16")
    assert found.keys() == tensors.keys() | {"mtp.fc.weight", "mtp.norm.weight"}
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in tensors.items())
    assert all(torch.equal(found[name], more[name]) for name in found.keys() - tensors.keys())
    assert [note for note in report.notes if note.startswith("grafted unchanged: 2 tensors of ")]
    assert report.configuration == {}


def test_what_is_no_tensor_is_left_out_with_a_note(tmp_path: Path) -> None:
    torch.save({"model": {"a": torch.ones(2)}, "epoch": 3}, tmp_path / "m.pt")
    models.save(tmp_path / "more", {"more": (2,)}, None)
    report = ckptconv.convert(tmp_path / "m.pt", tmp_path / "out", graft=f"{tmp_path / 'more'}:*", fsync=False)
    assert "Not converted: epoch, because an output with --graft contains only tensors." in report.notes
    assert report.warnings == []


@every(
    "more, options, words",
    [
        ({}, {"graft": "ref"}, ["REF:GLOB"]),
        ({}, {"graft": "{here}/m:nothing.*"}, ["'nothing.*'", "matches no name"]),
        ({}, {"graft": "{here}/m:lm_head.*"}, ["lm_head.weight", "already"]),
    ],
)
def test_what_a_user_gets_wrong_is_said(
    more: models.Shapes, options: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    shapes, config = models.mixed()
    models.save(tmp_path / "m", {**shapes, **more}, config)
    given = {key: value.format(here=tmp_path) if isinstance(value, str) else value for key, value in options.items()}
    with pytest.raises(CkptconvError) as error:
        ckptconv.convert(tmp_path / "m", tmp_path / "out", **given)
    assert [word for word in words if word not in str(error.value)] == []
    assert "Nothing was written." in str(error.value)
    assert not (tmp_path / "out").exists()


def test_names_that_the_command_cuts_from_those_of_its_input_are_refused(tmp_path: Path) -> None:
    state = {name: torch.ones(2, 2) for name in ("module.w", "module.norm")}
    torch.save({"model": state}, tmp_path / "m.pt")
    torch.save({"model": {"model.w": torch.ones(2), "model.norm": torch.ones(2)}}, tmp_path / "twice.pt")
    torch.save(state, tmp_path / "bare.pt")
    both = {"key": "model", "strip_prefix": "module."}
    for name, ref, options in [
        ("m.pt", "m.pt:*norm", both),
        ("m.pt", "bare.pt:*norm", both),
        ("bare.pt", "bare.pt:*norm", {"strip_prefix": "module."}),
        ("twice.pt", "twice.pt:*norm", {"key": "model"}),
        ("twice.pt", "twice.pt:*norm", {"for_hub": True}),
    ]:
        with pytest.raises(UsageError, match="but --key, --strip-prefix or --for-hub shortens") as error:
            ckptconv.convert(tmp_path / name, tmp_path / "o", graft=f"{tmp_path / ref}", exclude="*norm", **options)
        assert "Convert the grafted checkpoint first, with the same options" in error.value.hint
    ckptconv.convert(tmp_path / "m.pt", tmp_path / "first.safetensors", fsync=False, **both)
    options = {"graft": f"{tmp_path / 'first.safetensors'}:norm", "exclude": "*norm", "dtype": "bf16"}
    found, _, report = converted(tmp_path / "m.pt", tmp_path / "o", **options, **both)
    assert found.keys() == {"w", "norm"}
    bare = {"graft": f"{tmp_path / 'bare.pt'}:*norm", "exclude": "*norm", "dtype": "bf16", "structure": False}
    report = ckptconv.convert(tmp_path / "bare.pt", tmp_path / "bare", fsync=False, **bare)
    assert report.tensors == 2
    assert not report.warnings


def test_layers_that_do_not_follow_are_refused(tmp_path: Path) -> None:
    shapes, config = models.latent()
    models.save(tmp_path / "m", {**models.ends(), **models.layer(0)}, {**config, "num_hidden_layers": 1})
    models.save(tmp_path / "other", shapes, None)
    with pytest.raises(CkptconvError, match=r"adds layers 3 of model.layers.* 0 to 0, so the next layer must be 1"):
        ckptconv.convert(tmp_path / "m", tmp_path / "out", graft=f"{tmp_path / 'other'}:model.layers.3.*")
