"""The first rows of a vocabulary are kept in its tensors and its configuration, and what does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import VERIFIED, offered
from effort import every
from features.model_facts import models
from features.model_facts.models import converted

import ckptconv
from ckptconv.errors import CkptconvError, CorruptError, UsageError
from ckptconv.features.vocab.rows import edited
from ckptconv.outputs.kinds import NAMED

Config = dict[str, Any]


def test_the_first_rows_are_kept_and_counted(tmp_path: Path) -> None:
    shapes, config = models.latent()
    tensors = models.save(tmp_path / "m", shapes, config)
    found, told, report = converted(tmp_path / "m", tmp_path / "out", vocab=10)
    rows = {"model.embed_tokens.weight", "lm_head.weight", "model.layers.6.embed_tokens.weight"}
    assert {name: tensor.shape for name, tensor in found.items()} == {
        name: (10, *tensor.shape[1:]) if name in rows else tensor.shape for name, tensor in tensors.items()
    }
    assert all(torch.equal(found[name], tensor[: len(found[name])]) for name, tensor in tensors.items())
    assert told == {**config, "vocab_size": 10}
    assert "The output has 10 of 16 rows of the vocabulary." in report.notes
    assert report.configuration == {"vocab_size": ["16", "10"]}


def test_every_way_to_convert_gives_the_same_rows(tmp_path: Path) -> None:
    models.save(tmp_path / "m", *models.mixed())
    wanted, _, _ = converted(tmp_path / "m", tmp_path / "out", vocab=9)
    if "pt" in NAMED:
        ckptconv.convert(tmp_path / "m", tmp_path / "m.pt", fsync=False, **VERIFIED, vocab=9)
        found = torch.load(tmp_path / "m.pt", weights_only=True)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    for files in offered(tmp_path / "m", vocab=9):
        for name in ("model.safetensors", "config.json"):
            assert files.read_bytes(name) == (tmp_path / "out" / name).read_bytes()


def test_of_a_file_only_the_rows_that_are_kept_are_read(tmp_path: Path) -> None:
    models.save(tmp_path / "m", {"embed_tokens.weight": (1000, 256)}, {"vocab_size": 1000})
    report = ckptconv.convert(tmp_path / "m", tmp_path / "out", vocab=100, fsync=False)
    assert report.bytes_read <= 1.1 * report.bytes_written


def test_tied_names_stay_tied(tmp_path: Path) -> None:
    shapes, _ = models.mixed()
    tensors = models.of_shapes(shapes)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    torch.save(tensors, tmp_path / "m.pt")
    report = ckptconv.convert(tmp_path / "m.pt", tmp_path / "out", vocab=5, fsync=False, **VERIFIED)
    assert report.aliases == {"lm_head.weight": "model.embed_tokens.weight"}


def test_a_tokenizer_with_more_tokens_than_rows_is_told(tmp_path: Path) -> None:
    shapes, config = models.mixed()
    models.save(tmp_path / "m", shapes, {**config, "eos_token_id": 12})
    told = {"model": {"vocab": {str(number): number for number in range(14)}}, "added_tokens": [{"id": 15}]}
    (tmp_path / "m" / "tokenizer.json").write_text(json.dumps(told))
    _, _, report = converted(tmp_path / "m", tmp_path / "out", vocab=12)
    assert any("16 tokens, 4 more than the 12 rows" in warning for warning in report.warnings)
    assert any("eos_token_id" in note for note in report.notes)
    _, _, report = converted(tmp_path / "m", tmp_path / "all", vocab=16)
    assert report.warnings == []


@every(
    "before, after",
    [
        ({"vocab_size": 16}, {"vocab_size": 9}),
        (
            {"text_config": {"vocab_size": 16}, "eos_token_id": [1, 2]},
            {"text_config": {"vocab_size": 9}, "eos_token_id": [1, 2]},
        ),
        ({"vocab_size": 16, "pad_token_id": 9}, "pad_token_id 9"),
        ({"hidden_size": 4}, "does not specify the number of rows of the vocabulary, 16 in the weights"),
    ],
)
def test_keys_about_the_vocabulary_follow_it(before: Config, after: Any) -> None:
    if isinstance(after, str):
        with pytest.raises((UsageError, CorruptError), match=after):
            edited(before, 16, 9)
    else:
        assert edited(before, 16, 9).config == after


@every(
    "more, options, words",
    [
        ({"cls.predictions.bias": (16,)}, {"vocab": 8}, ["cls.predictions.bias has 16 rows"]),
        ({}, {"vocab": 17}, ["17 rows", "has 16 rows"]),
        ({"lm_head.weight_packed": (9, 2)}, {"vocab": 8}, ["lm_head.weight_packed", "[9, 2]"]),
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


def test_other_rows_are_another_output(tmp_path: Path) -> None:
    models.save(tmp_path / "m", *models.mixed())

    def plan(rows: int) -> str:
        ckptconv.convert(tmp_path / "m", tmp_path / "out", fsync=False, vocab=rows)
        return str(json.loads((tmp_path / "out" / ".ckptconv-manifest.json").read_text())["plan"])

    assert plan(3) != plan(4)


def test_a_range_of_rows_is_met_with_what_is_kept(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a number") as caught:
        ckptconv.convert(tmp_path, tmp_path / "out", vocab="5-10")
    assert caught.value.hint == "--vocab keeps the first N rows; other rows cannot be selected."
