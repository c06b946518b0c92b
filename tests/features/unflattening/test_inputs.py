"""Safetensors files with a structure record as an input."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import pytest
import torch
from cells import VERIFY, of_features, verified_here
from checkpoints import bits, ckptconv_here, done, metadata_of
from reading import state_in
from safetensors.torch import load_file, save_file

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.formats.detect import open_source

NESTED = {"s": {"x": torch.ones(3), "y": torch.zeros(2, 2)}, "epoch": 3}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    torch.save(NESTED, "in.pt")
    done(ckptconv_here("convert", "in.pt", "in.safetensors"))
    return tmp_path


def test_the_structure_record_stays_true(place: Path) -> None:
    done(ckptconv_here("convert", "in.safetensors", "cast.safetensors", "--dtype", "bf16", *VERIFY))
    back = state_in(place / "cast.safetensors")
    assert back["epoch"] == 3
    assert torch.equal(back["s"]["x"], NESTED["s"]["x"].bfloat16())  # type: ignore[index]
    done(ckptconv_here("convert", "in.safetensors", "shards", "--max-shard-size", "12B", *VERIFY))
    done(ckptconv_here("convert", "shards", "merged.safetensors", *VERIFY))
    assert Path("merged.safetensors").read_bytes() == Path("in.safetensors").read_bytes()


def test_names_given_in_an_earlier_conversion_stay(place: Path) -> None:
    done(ckptconv_here("convert", "in.pt", "renamed.safetensors", "--rename", "^s=net"))
    done(ckptconv_here("convert", "renamed.safetensors", "out.safetensors", "--dtype", "bf16", *VERIFY))
    assert set(load_file("out.safetensors")) == {"net.x", "net.y"}
    verified_here("renamed.safetensors", "out.safetensors", "--dtype", "bf16")
    assert state_in(place / "out.safetensors")["s"].keys() == {"x", "y"}
    done(ckptconv_here("convert", "renamed.safetensors", "again.safetensors", "--rename", "net=t", *VERIFY))
    assert set(load_file("again.safetensors")) == {"t.x", "t.y"}
    assert state_in(place / "again.safetensors")["s"].keys() == {"x", "y"}
    run = done(ckptconv_here("convert", "renamed.safetensors", "some.safetensors", "--include", "net.x", *VERIFY))
    assert "its structure record was left out" in run.err
    assert set(load_file("some.safetensors")) == {"net.x"}
    assert metadata_of(place / "some.safetensors") == {"format": "pt"}


def test_names_are_those_of_the_file_where_an_earlier_release_recorded_keys_before_they_changed(place: Path) -> None:
    record = '{"version":1,"root":["odict",null,"m.b",{"name":"b"},"m.a",{"name":"a"}]}'
    save_file({"a": torch.ones(3), "b": torch.zeros(2)}, "old.safetensors", {"ckptconv.structure": record})
    assert list(state_in(place / "old.safetensors")) == ["m.b", "m.a"]
    assert list(open_source("old.safetensors").weights) == ["m.b", "m.a"]
    done(ckptconv_here("convert", "old.safetensors", "again.safetensors", *VERIFY))
    assert metadata_of(place / "again.safetensors")["ckptconv.structure"] == record


def test_a_structure_record_that_does_not_fit_is_refused_or_left_out(place: Path) -> None:
    whole = load_file("in.safetensors")
    less = {name: tensor for name, tensor in whole.items() if name != "s.y"}
    for tensors in (less, {**whole, "extra": torch.ones(1)}):
        save_file(tensors, "in.safetensors", metadata=metadata_of(place / "in.safetensors"))
        err = ckptconv_here("convert", "in.safetensors", "out.safetensors").refused(4)
        assert "Use --no-structure to convert the tensors without the record" in err
        run = done(ckptconv_here("convert", "in.safetensors", "out.safetensors", "--no-structure", *VERIFY))
        assert "its structure record was left out" in run.err
        assert metadata_of(place / "out.safetensors") == {"format": "pt"}
        found = load_file("out.safetensors")
        assert found.keys() == tensors.keys()
        assert all(torch.equal(bits(found[name]), bits(tensors[name])) for name in tensors)


def test_a_record_that_does_not_fit_the_tensors_is_told_with_its_place(tmp_path: Path) -> None:
    record = '{"version":1,"root":["dict","w",{},"v",{}]}'
    save_file({"w": torch.ones(2)}, tmp_path / "x.safetensors", {"ckptconv.structure": record})
    with pytest.raises(CorruptError, match=r"x\.safetensors.*'v'"):
        open_source(tmp_path / "x.safetensors")
    save_file({"w": torch.ones(2)}, tmp_path / "x.safetensors", {"ckptconv.structure": "nonsense"})
    with pytest.raises(CorruptError, match=r"x\.safetensors.*not JSON"):
        open_source(tmp_path / "x.safetensors")
    save_file({"w": torch.ones(2)}, tmp_path / "x.safetensors", {"ckptconv.structure": '{"version":2,"root":{}}'})
    with pytest.raises(UnsupportedError, match=r"x\.safetensors.*version 2"):
        open_source(tmp_path / "x.safetensors")


def test_a_record_beside_a_directory_of_files_is_found(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "model-00002-of-00002.safetensors")
    files = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (tmp_path / "ckptconv.structure.json").write_text('{"version":1,"root":["list",{"name":"b"},{"name":"a"},7]}')
    assert [type(part).__name__ for part in open_source(tmp_path).weights] == ["Stored", "Stored", "int"]


def test_what_an_earlier_conversion_made_of_a_training_is_published_as_the_training_is(place: Path) -> None:
    weights = {"embed.weight": torch.ones(4, 2), "norm.weight": torch.zeros(2)}
    torch.save({"epoch": 3, "state_dict": weights, "optimizer": {"state": {0: {"m": torch.ones(2)}}}}, "training.pt")
    done(ckptconv_here("convert", "training.pt", "all"))
    (place / "all" / "config.json").write_text(json.dumps({"model_type": "tiny"}))
    done(ckptconv_here("convert", "all", "out", "--for-hub", *VERIFY))
    assert sorted(os.listdir("out")) == ["config.json", "model.safetensors"]
    assert load_file("out/model.safetensors").keys() == weights.keys()


def test_no_directory_is_proposed_that_is_not_that_of_the_others(tmp_path: Path) -> None:
    """Earlier releases did not mark what was made of one file."""
    parts = {name: part for made in of_features("PARTS") for name, part in made.items()}
    for family in itertools.chain(*of_features("LYING_ELSEWHERE")):
        place = tmp_path / family
        place.mkdir()
        path = parts[family][0](place)
        done(ckptconv_here("convert", path, place / "o.safetensors", "--alone", "--no-fsync"))
        remade(place / "o.safetensors", without="ckptconv.alone")
        told = ckptconv_here("convert", place / "o.safetensors", place / "new.safetensors").err
        assert "DIRECTORY" in told, family
        assert f"{place} " not in told, family
        assert f"{tmp_path} " not in told, family


def remade(path: Path, *, without: str) -> None:
    """Write a file of safetensors again without an entry of its metadata."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    del header["__metadata__"][without]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
