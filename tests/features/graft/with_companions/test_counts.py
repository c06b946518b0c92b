"""The configuration that is copied into an output counts the layers that were grafted."""

from __future__ import annotations

from pathlib import Path

from effort import every
from features.model_facts import models
from features.model_facts.models import converted

FURTHER = "num_nextn_predict_layers"


@every("stated, noted", [({FURTHER: 0}, False), ({FURTHER: 1}, False), ({}, True)])
def test_layers_behind_the_last_are_counted(stated: dict[str, int], noted: bool, tmp_path: Path) -> None:
    shapes, config = models.latent()
    place = tmp_path / "m"
    trained = {name: shape for name, shape in shapes.items() if not name.startswith("model.layers.6.")}
    models.save(place, trained, {**{key: config[key] for key in config if "nextn" not in key}, **stated})
    models.save(tmp_path / "other", shapes, None, seed=1)
    _, told, report = converted(place, tmp_path / "out", graft=f"{tmp_path / 'other'}:model.layers.6.*")
    assert told.get(FURTHER) == (None if noted else 1)
    assert any(f"has no key, such as {FURTHER}" in note for note in report.notes) == noted


@every("place", ["mtp.layers", "model.mtp_layers", "model.mtp_block"])
def test_layers_in_a_module_of_their_own_are_counted(place: str, tmp_path: Path) -> None:
    shapes, config = models.mixed()
    models.save(tmp_path / "m", shapes, {**config, FURTHER: 0})
    more = {**models.layer(0, place=place), **models.layer(1, place=place), "mtp.norm.weight": (4,)}
    models.save(tmp_path / "more", more, None)
    _, told, _ = converted(tmp_path / "m", tmp_path / "out", graft=f"{tmp_path / 'more'}:*mtp*")
    assert told[FURTHER] == 2
