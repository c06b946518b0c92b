"""Outputs that are like a reference: its names, files, dtypes and small files; what of it is missing, or too much."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from cells import VERIFIED, naming_attacks, offered, verified, verify, verifying
from checkpoints import ZERO, ckptconv_here, contents, done, load_with_aliases
from effort import every
from huggingface_hub import save_torch_state_dict
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckptconv
from ckptconv import (
    CorruptError,
    DifferenceError,
    Options,
    UnsafeError,
    UsageError,
    convert,
)
from ckptconv.features.like.likeness import compare
from ckptconv.formats.registered import DESCRIBING
from ckptconv.options.table import OPTIONS
from ckptconv.outputs.kinds import NAMED
from ckptconv.process import has_feature
from ckptconv.tensors.dtypes import DTYPES, DType

INDEX = "model.safetensors.index.json"
MANIFEST = ".ckptconv-manifest.json"
EXTRAS = {"config.json": b'{"torch_dtype": "bfloat16"}', "tokenizer.json": b"{}", "generation_config.json": b"{ }"}
EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
LAYERS = [f"model.layers.{number}.weight" for number in range(4)]
NAMES = [EMBED, *LAYERS, NORM]


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {EMBED: (50, 8), **dict.fromkeys(LAYERS, (8, 8)), NORM: (8,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def hub_model(directory: Path, state: Mapping[str, torch.Tensor], shard: int = 400) -> Path:
    """A model as huggingface_hub saves it, in files of at most `shard` bytes, with its small files."""
    directory.mkdir()
    save_torch_state_dict(dict(state), directory, max_shard_size=shard)
    for name, data in EXTRAS.items():
        (directory / name).write_bytes(data)
    return directory


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    """A sharded model in bfloat16, but for one tensor in float32."""
    state = {name: tensor if name == NORM else tensor.bfloat16() for name, tensor in tensors(1).items()}
    return hub_model(tmp_path / "reference", state)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The same tensors from a training: in float32, in one file, and in another order."""
    torch.save(dict(reversed(tensors(2).items())), tmp_path / "trained.pt")
    return tmp_path / "trained.pt"


def without(source: Path, *names: str) -> Path:
    """A source that lacks tensors."""
    state = torch.load(source)
    path = source.with_name("less.pt")
    torch.save({name: tensor for name, tensor in state.items() if name not in names}, path)
    return path


def layout(directory: Path) -> dict[str, Any]:
    """Which file of a directory holds what: {file: {tensor: (dtype, shape)}}."""
    found: dict[str, Any] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, it is no dict
        found[path.name] = {name: (each.get_dtype(), each.get_shape()) for name, each in slices.items()}
    return found


def weight_map(directory: Path) -> dict[str, str]:
    told: dict[str, str] = json.loads((directory / INDEX).read_text())["weight_map"]
    return told


def spoil(directory: Path, name: str) -> None:
    """Change a bit of a tensor in a directory."""
    file = directory / weight_map(directory)[name]
    data = bytearray(file.read_bytes())
    data[data.index(load_file(file)[name].numpy().tobytes())] ^= 1
    file.write_bytes(data)


# ----------------------------------------------------------------------------------------------------- what is the same


def test_names_files_index_dtypes_and_small_files_are_those_of_the_reference(
    source: Path, reference: Path, tmp_path: Path
) -> None:
    report = convert(source, tmp_path / "out", like=reference, **VERIFIED)
    assert len(layout(reference)) > 2
    assert layout(tmp_path / "out") == layout(reference)
    assert weight_map(tmp_path / "out") == weight_map(reference)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in reference.iterdir()} | {
        MANIFEST
    }
    assert {name: (tmp_path / "out" / name).read_bytes() for name in EXTRAS} == EXTRAS
    found, expected = load_with_aliases(tmp_path / "out"), tensors(2)
    assert all(torch.equal(found[name], expected[name].to(found[name].dtype)) for name in expected)
    assert report.like is not None
    assert (report.like.matched, report.like.casts) == (len(NAMES), {"float32 to bfloat16": len(NAMES) - 1})


def sets() -> list[str]:
    return ["torch shards"] if has_feature("torch_shards") else []


@verifying
@every("kind", ["index", "one file", "torch", "directory of one", "another output", *sets()])
def test_a_reference_may_be_anything_that_can_be_opened(
    kind: str, source: Path, reference: Path, tmp_path: Path
) -> None:
    state = load_with_aliases(reference)
    place = tmp_path / "other"
    place.mkdir()
    if kind == "index":
        place = reference / INDEX
    elif kind == "one file":
        save_file(state, place / "whatever.safetensors")
        place /= "whatever.safetensors"
    elif kind == "directory of one":
        save_file(state, place / "model.safetensors")
    elif kind == "torch":
        torch.save(state, place / "model.bin")
        place /= "model.bin"
    elif kind in sets():
        names = {name: f"pytorch_model-{1 + (name == EMBED):05d}-of-00002.bin" for name in NAMES}
        for file in set(names.values()):
            torch.save({name: tensor for name, tensor in state.items() if names[name] == file}, place / file)
        (place / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    else:
        convert(source, place, like=reference)
    convert(source, tmp_path / "out", like=place, **VERIFIED)
    expected = layout(reference)
    if kind in sets():
        parts = [{name: each for file in expected.values() for name, each in file.items() if (name == EMBED) == here}
                 for here in (False, True)]  # fmt: skip
        expected = {f"model-{at:05d}-of-00002.safetensors": part for at, part in enumerate(parts, 1)}
    elif kind in ("one file", "torch", "directory of one"):
        expected = {"model.safetensors": {name: each for file in expected.values() for name, each in file.items()}}
    assert layout(tmp_path / "out") == expected
    verify(source, tmp_path / "out")


def test_a_single_file_has_the_names_and_dtypes(source: Path, reference: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out.safetensors", like=reference, **VERIFIED)
    found = {name: tensor.dtype for name, tensor in load_file(tmp_path / "out.safetensors").items()}
    assert found == {name: tensor.dtype for name, tensor in load_with_aliases(reference).items()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.safetensors", "reference", "trained.pt"]


def test_files_with_names_that_no_output_has_are_numbered(source: Path, reference: Path, tmp_path: Path) -> None:
    files = sorted(layout(reference))
    told = (reference / INDEX).read_text()
    for number, name in enumerate(files):
        (reference / name).rename(reference / f"part_{number}.safetensors")
        told = told.replace(name, f"part_{number}.safetensors")
    (reference / INDEX).write_text(told)
    convert(source, tmp_path / "out", like=reference, **VERIFIED)
    assert list(layout(tmp_path / "out")) == files
    assert list(layout(tmp_path / "out").values()) == list(layout(reference).values())


def test_names_of_six_digits_are_kept(source: Path, reference: Path, tmp_path: Path) -> None:
    count = len(layout(reference))
    old, new = f"-of-{count:05d}", f"-of-{count:06d}"
    for name in layout(reference):
        (reference / name).rename(reference / name.replace(old, new))
    (reference / INDEX).write_text((reference / INDEX).read_text().replace(old, new))
    convert(source, tmp_path / "out", like=reference)
    assert layout(tmp_path / "out") == layout(reference)
    convert(source, tmp_path / "out")
    assert list(layout(tmp_path / "out")) == ["model.safetensors"], "they are files of an output, which go with it"


def test_dtype_and_size_that_are_asked_for_go_before_those_of_the_reference(
    source: Path, reference: Path, tmp_path: Path
) -> None:
    convert(source, tmp_path / "out", like=reference, dtype="fp16", max_shard_size="1GB", **VERIFIED)
    assert list(layout(tmp_path / "out")) == ["model.safetensors"]
    assert {kind for kind, _ in layout(tmp_path / "out")["model.safetensors"].values()} == {"F16"}
    convert(source, tmp_path / "kept", like=reference, dtype="keep", **VERIFIED)
    assert layout(tmp_path / "kept").keys() == layout(reference).keys()
    assert {kind for file in layout(tmp_path / "kept").values() for kind, _ in file.values()} == {"F32"}


def test_a_value_that_a_cast_makes_infinite_is_told(source: Path, tmp_path: Path) -> None:
    torch.save({"w": torch.tensor([1.0, 1e30])}, tmp_path / "w.pt")
    save_file({"w": torch.ones(2, dtype=torch.float16)}, tmp_path / "half.safetensors")
    report = convert(tmp_path / "w.pt", tmp_path / "w.safetensors", like=tmp_path / "half.safetensors")
    assert report.warnings == ["1 value was too large for their dtype and became infinite, in 'w'."]


def test_a_training_checkpoint_in_fp32_is_cast_to_what_the_reference_has(tmp_path: Path) -> None:
    checkpoint = ZERO / "z3_bf16_w2" / "checkpoint"
    convert(checkpoint, tmp_path / "plain")
    state = load_with_aliases(tmp_path / "plain")
    halves = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    hub_model(tmp_path / "reference", halves, 10**6)
    report = convert(checkpoint, tmp_path / "out", like=tmp_path / "reference", **VERIFIED)
    found = load_with_aliases(tmp_path / "out")
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        name: tensor.dtype for name, tensor in halves.items()
    }
    assert report.format.startswith("DeepSpeed")
    only = convert(checkpoint, optimizer=tmp_path / "states", like=tmp_path / "reference")
    assert "--like has no effect: it applies only to weights." in only.warnings


def test_values_beside_tensors_are_in_no_record_as_the_reference_has_none(tmp_path: Path, reference: Path) -> None:
    torch.save({"model": tensors(3), "epoch": 3}, tmp_path / "train.pt")
    report = convert(tmp_path / "train.pt", tmp_path / "out", key="model", like=reference, **VERIFIED)
    assert report.recorded == []
    assert not (tmp_path / "out" / "ckptconv.structure.json").exists()


# -------------------------------------------------------------------------------------------------------------- ties


def test_a_tied_name_that_the_reference_does_not_store_is_an_alias(
    source: Path, reference: Path, tmp_path: Path
) -> None:
    state = torch.load(source)
    torch.save({**state, HEAD: state[EMBED]}, source)
    report = convert(source, tmp_path / "out", like=reference, **VERIFIED)
    assert report.aliases == {HEAD: EMBED}
    assert layout(tmp_path / "out") == layout(reference)
    with pytest.raises(DifferenceError, match=HEAD):
        convert(source, tmp_path / "other", like=reference, tied="duplicate")


def test_tied_names_that_the_reference_stores_twice_are_stored_twice(tmp_path: Path) -> None:
    both = {EMBED: torch.ones(5, 2), HEAD: torch.zeros(5, 2)}
    save_file(both, tmp_path / "reference.safetensors")
    weight = torch.randn(5, 2)
    torch.save({EMBED: weight, HEAD: weight}, tmp_path / "source.pt")
    out = tmp_path / "out.safetensors"
    report = convert(tmp_path / "source.pt", out, like=tmp_path / "reference.safetensors", **VERIFIED)
    assert report.aliases == {}
    assert all(torch.equal(tensor, weight) for tensor in load_file(out).values())
    assert load_file(out).keys() == both.keys()


def test_a_tensor_is_found_under_another_name_that_the_reference_knows(tmp_path: Path) -> None:
    weight = torch.ones(5, 2, dtype=torch.bfloat16)
    hub_model(tmp_path / "reference", {EMBED: weight, HEAD: weight})  # which keeps one of the two, and names both
    (stored,) = layout(tmp_path / "reference")["model.safetensors"]
    other = EMBED if stored == HEAD else HEAD
    torch.save({other: torch.randn(5, 2)}, tmp_path / "source.pt")
    report = convert(tmp_path / "source.pt", tmp_path / "out", like=tmp_path / "reference", **VERIFIED)
    assert report.aliases == {other: stored}
    assert layout(tmp_path / "out") == layout(tmp_path / "reference")
    verified(tmp_path / "source.pt", tmp_path / "out")


def test_equal_tensors_that_are_not_tied_are_too_many(source: Path, reference: Path, tmp_path: Path) -> None:
    state = torch.load(source)
    torch.save({**state, HEAD: state[EMBED].clone()}, source)
    with pytest.raises(DifferenceError, match=f"1 not in the reference: '{HEAD}'"):
        convert(source, tmp_path / "out", like=reference)
    convert(source, tmp_path / "out", like=reference, exclude=HEAD, **VERIFIED)


# ------------------------------------------------------------------------------------------------------- differences


class Change(NamedTuple):
    """What is done to the source's tensors, and the row of the table that tells it."""

    tensors: dict[str, torch.Tensor | None]
    what: str
    name: str
    expected: dict[str, Any] | None
    found: dict[str, Any] | None
    hint: str


BF16 = {"dtype": "bfloat16", "shape": [8, 8]}
CHANGES = [
    Change({LAYERS[1]: None}, "missing", LAYERS[1], BF16, None, "--fill"),
    Change({"more": torch.ones(2)}, "extra", "more", None, {"dtype": "float32", "shape": [2]}, "--exclude"),
    Change(
        {"q.lora_A.weight": torch.ones(2)},
        "extra",
        "q.lora_A.weight",
        None,
        {"dtype": "float32", "shape": [2]},
        "ckptconv merge BASE ADAPTER OUTPUT",
    ),
    Change(
        {"lm_head.weight": torch.ones(50, 8)},
        "extra",
        "lm_head.weight",
        None,
        {"dtype": "float32", "shape": [50, 8]},
        f"lm_head.weight is stored separately from {EMBED}: exclude it only if both have the same values.",
    ),
    Change(
        {LAYERS[2]: torch.ones(8, 4)}, "shape", LAYERS[2], BF16, {"dtype": "float32", "shape": [8, 4]}, "another model"
    ),
    Change(
        {LAYERS[3]: torch.ones(8, 8).int()},
        "dtype",
        LAYERS[3],
        BF16,
        {"dtype": "int32", "shape": [8, 8]},
        "--dtype keep",
    ),
]


@pytest.mark.parametrize("change", CHANGES)
def test_each_difference_is_told_before_anything_is_written(
    change: Change, source: Path, reference: Path, tmp_path: Path
) -> None:
    state = {**torch.load(source), **change.tensors}
    torch.save({name: tensor for name, tensor in state.items() if tensor is not None}, source)
    run = ckptconv_here("convert", source, tmp_path / "out", "--like", reference, "--json")
    run.refused(1, change.name, change.hint, "Nothing was written.")
    assert not (tmp_path / "out").exists()
    difference = run.json["error"]["difference"]
    assert difference["what"] == "reference"
    assert difference["counts"] == {"matched": len(NAMES) - (change.what != "extra"), change.what: 1}
    row = {"tensor": change.name, "what": change.what, "expected": change.expected, "found": change.found}
    assert difference["tensors"] == [row]
    shown = ckptconv_here("convert", source, tmp_path / "out", "--like", reference).err.splitlines()
    assert [line.split()[:2] for line in shown[2:]] == [[change.what, change.name]]


def test_a_resized_vocabulary_is_named_with_the_way_to_convert_it(
    source: Path, reference: Path, tmp_path: Path
) -> None:
    resized = {**torch.load(source), EMBED: torch.ones(53, 8), HEAD: torch.ones(53, 8)}
    base = hub_model(tmp_path / "base", {**tensors(1), HEAD: torch.ones(50, 8)})
    (tmp_path / "run").mkdir()
    torch.save(resized, tmp_path / "run" / "trained.pt")
    with pytest.raises(DifferenceError, match="2 with another shape") as caught:
        ckptconv.convert(tmp_path / "run" / "trained.pt", tmp_path / "out", for_hub=True, like=base)
    assert caught.value.hint.startswith(
        "The vocabulary of the input has 53 rows, but that of the reference, its config.json and its tokenizer has 50."
    )
    assert "--for-hub, without --like" in caught.value.hint
    # One tensor of the two with a further difference, or both with others, is another model.
    for other in (torch.ones(50, 9), torch.ones(51, 8)):
        torch.save({**resized, HEAD: other}, source)
        with pytest.raises(DifferenceError) as caught:
            ckptconv.convert(source, tmp_path / "out", like=base)
        assert "another model" in caught.value.hint
    # What the advice says works: the small files of the training.
    (tmp_path / "run" / "config.json").write_text(json.dumps({"vocab_size": 53}))
    report = ckptconv.convert(tmp_path / "run" / "trained.pt", tmp_path / "whole", for_hub=True)
    assert not report.warnings
    assert json.loads((tmp_path / "whole" / "config.json").read_text()) == {"vocab_size": 53}


def test_long_tables_are_cut_and_counted(reference: Path, tmp_path: Path) -> None:
    save_file({f"w{number}": torch.ones(1) for number in range(1500)}, tmp_path / "many.safetensors")
    run = ckptconv_here("convert", tmp_path / "many.safetensors", tmp_path / "out", "--like", reference)
    assert len(run.refused(1).splitlines()) < 50
    assert "and 1,466 more" in run.err
    told = ckptconv_here("convert", tmp_path / "many.safetensors", tmp_path / "out", "--like", reference, "--json").json
    assert told["error"]["difference"]["counts"] == {"matched": 0, "missing": 6, "extra": 1500}
    assert len(told["error"]["difference"]["tensors"]) == 1006


@pytest.mark.parametrize(
    ("old", "new", "hint"),
    [
        ("", "module.", "--strip-prefix module."),
        ("model.", "net.", "--rename '^net\\.=model.'"),
        ("model.", "", "--rename '^=model.'"),
    ],
)
def test_names_that_differ_by_a_prefix_come_with_the_option_that_changes_it(
    old: str, new: str, hint: str, source: Path, reference: Path, tmp_path: Path
) -> None:
    state = torch.load(source)
    torch.save({name.replace(old, new, 1): tensor for name, tensor in state.items()}, source)
    run = ckptconv_here("convert", source, tmp_path / "out", "--like", reference)
    run.refused(1, f"Use {hint} to match 6 of these 6 names with the reference.")
    option, _, value = hint.partition(" ")
    assert ckptconv_here("convert", source, tmp_path / "out", "--like", reference, option, value.strip("'")).code == 0


names = st.sampled_from("abcdef")
kinds = st.tuples(st.sampled_from(["float32", "bfloat16", "int32", "float8_e4m3fn"]), st.sampled_from([(2,), (2, 3)]))
described = st.dictionaries(names, kinds)


class Kind(NamedTuple):
    dtype: DType
    shape: tuple[int, ...]


@given(described, described, st.dictionaries(names, names))
def test_every_name_is_in_one_list_and_a_comparison_with_itself_finds_nothing(
    given_: dict[str, Any], wanted_: dict[str, Any], ties: dict[str, str]
) -> None:
    one = {name: Kind(DTYPES[dtype], shape) for name, (dtype, shape) in given_.items()}
    other = {name: Kind(DTYPES[dtype], shape) for name, (dtype, shape) in wanted_.items()}
    ties = {alias: kept for alias, kept in ties.items() if kept in one and kept not in ties and alias in one}
    found = compare(one, other, ties)
    assert sorted([*found.matched, *found.missing, *found.shapes, *found.dtypes]) == sorted(other)
    assert sorted([*found.extra, *found.aliases]) == sorted(one.keys() - other.keys())
    assert all(kept in other and kept in one for kept in found.aliases.values())
    assert compare(one, one, ties).kinds == {}
    assert compare(one, other, casts=False).dtypes == ()


# --------------------------------------------------------------------------------------------------- partial and fill


def test_partial_leaves_out_what_is_missing_and_says_so(source: Path, reference: Path, tmp_path: Path) -> None:
    less = without(source, EMBED, LAYERS[0])
    report = convert(less, tmp_path / "out", like=reference, partial=True, **VERIFIED)
    assert report.like is not None
    assert sorted(report.like.missing) == [EMBED, LAYERS[0]]
    assert any("omitted 2 tensors of " in text and EMBED in text for text in report.warnings)
    expected = {
        file: {name: kind for name, kind in held.items() if name not in (EMBED, LAYERS[0])}
        for file, held in layout(reference).items()
    }
    assert layout(tmp_path / "out") == {file: held for file, held in expected.items() if held}
    assert weight_map(tmp_path / "out").keys() == set(NAMES) - {EMBED, LAYERS[0]}
    verified(less, tmp_path / "out")
    if "part" in OPTIONS:
        for part in ("0/2", "1/2"):
            convert(less, tmp_path / "parts", like=reference, partial=True, part=part)
        ckptconv.finish(tmp_path / "parts")
        assert contents(tmp_path / "parts") == contents(tmp_path / "out")


@verifying
def test_fill_takes_what_is_missing_from_the_reference_byte_for_byte(
    source: Path, reference: Path, tmp_path: Path
) -> None:
    less = without(source, EMBED, NORM)
    report = convert(less, tmp_path / "out", like=reference, fill=True, **VERIFIED)
    assert report.like is not None
    assert sorted(report.like.filled) == [EMBED, NORM]
    assert layout(tmp_path / "out") == layout(reference)
    found, theirs = load_with_aliases(tmp_path / "out"), load_with_aliases(reference)
    assert all(torch.equal(found[name], theirs[name]) for name in (EMBED, NORM))
    assert all(torch.equal(found[name], tensors(2)[name].bfloat16()) for name in LAYERS)
    verify(less, tmp_path / "out")
    told = json.loads((tmp_path / "out" / MANIFEST).read_bytes())
    assert told["like"] == "../reference"
    assert told["source"]["inputs"].keys() >= {f"--like/{name}" for name in layout(reference)}
    assert told["options"] == {"fill": True}


def test_only_the_tensors_of_a_choice_may_come_from_the_source(source: Path, reference: Path, tmp_path: Path) -> None:
    report = convert(source, tmp_path / "out", like=reference, include="*.layers.*", fill=True, **VERIFIED)
    assert report.like is not None
    assert report.like.matched == len(LAYERS)
    assert torch.equal(load_with_aliases(tmp_path / "out")[EMBED], load_with_aliases(reference)[EMBED])


def test_filled_tensors_of_a_torch_file_are_checked_by_its_checksums(source: Path, tmp_path: Path) -> None:
    torch.save(tensors(1), tmp_path / "reference.pt")
    data = bytearray((tmp_path / "reference.pt").read_bytes())
    at = data.index(tensors(1)[NORM].numpy().tobytes())
    less = without(source, NORM)
    settings: dict[str, Any] = {"like": tmp_path / "reference.pt", "fill": True, "checksum": True}
    assert convert(less, tmp_path / "out", **settings).checksums == len(NAMES)
    data[at] ^= 1
    (tmp_path / "reference.pt").write_bytes(data)
    with pytest.raises(CorruptError, match=r"reference\.pt"):
        convert(less, tmp_path / "out", **settings)


@every(
    "options, words",
    [
        ({"fill": True}, "--fill requires a reference."),
        ({"partial": True}, "--partial requires a reference."),
        (
            {"like": "{}", "partial": True, "fill": True},
            "--partial and --fill cannot be combined",
        ),
        ({"like": "-"}, "--like - is a pipe"),
        ({"like": "nowhere"}, "nowhere does not exist"),
    ],
)
def test_requests_that_make_no_sense(
    options: dict[str, Any], words: str, source: Path, reference: Path, tmp_path: Path
) -> None:
    if options.get("like") == "{}":
        options = {**options, "like": reference}
    with pytest.raises(UsageError, match=words):
        convert(source, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif("pt" not in NAMED, reason="no feature writes .pt files")
def test_a_file_for_torch_is_like_no_reference(source: Path, reference: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--like applies only to safetensors"):
        convert(reference, tmp_path / "out.pt", like=reference)


# ---------------------------------------------------------------------------------------------------- what is reported


def test_a_dry_run_shows_what_becomes_of_each_tensor(source: Path, reference: Path, tmp_path: Path) -> None:
    less = without(source, NORM)
    command = ["convert", less, tmp_path / "out", "--like", reference, "--fill", "--rename", "^$=x", "--dry-run"]
    shown = ckptconv_here(*command).out
    assert f"like {reference}: 5 tensors of the input, 1 copied from the reference ('{NORM}')" in shown
    lines = [line.split() for line in shown.splitlines() if line.startswith("  ")]
    home = weight_map(reference)
    assert [EMBED, EMBED, "float32", "to", "bfloat16", home[EMBED]] in lines
    assert [NORM, "(the", "reference)", "float32", home[NORM]] in lines
    rows = {row["tensor"]: row for row in ckptconv_here(*command, "--json").json["like"]["tensors"]}
    assert {name: row["file"] for name, row in rows.items()} == home
    assert rows[NORM]["source"] is None
    assert rows[EMBED] == {
        "tensor": EMBED, "source": EMBED, "source_dtype": "float32", "dtype": "bfloat16", "file": home[EMBED],
    }  # fmt: skip


def test_small_files_are_copied_unless_that_is_not_wanted(source: Path, reference: Path, tmp_path: Path) -> None:
    (source.parent / "config.json").write_bytes(b"mine")
    (source.parent / "vocab.txt").write_bytes(b"mine")
    report = convert(source, tmp_path / "out", like=reference, **VERIFIED)
    assert not (tmp_path / "out" / "vocab.txt").exists()
    assert any(f"from {reference}" in note for note in report.notes)
    convert(source, tmp_path / "both", like=reference, copy_config=True, **VERIFIED)
    assert (tmp_path / "both" / "config.json").read_bytes() == EXTRAS["config.json"], "the reference's go first"
    assert (tmp_path / "both" / "vocab.txt").read_bytes() == b"mine"
    verified(source, tmp_path / "both")
    assert ckptconv_here("convert", source, tmp_path / "none", "--like", reference, "--no-extras").code == 0
    assert {path.suffix for path in (tmp_path / "none").iterdir()} == {".safetensors", ".json"}
    assert not EXTRAS.keys() & {path.name for path in (tmp_path / "none").iterdir()}


def test_a_file_system_sees_what_a_conversion_writes(source: Path, reference: Path, tmp_path: Path) -> None:
    less = without(source, NORM)
    convert(less, tmp_path / "out", like=reference, fill=True)
    written = contents(tmp_path / "out")
    for files in offered(less, like=reference, fill=True):
        assert {name: files.read_bytes(name) for name in files} == {
            name: data for name, data in written.items() if name != MANIFEST
        }
    for suffix in DESCRIBING:
        described = tmp_path / f"it{suffix}"
        convert(less, described, like=reference, fill=True)
        convert(described, tmp_path / "of_it", like=reference, **VERIFIED)
        assert layout(tmp_path / "of_it") == layout(reference)


# ------------------------------------------------------------------------------------ verify, and hostile references


@verifying
def test_verify_finds_the_reference_from_the_output_and_asks_if_it_is_gone(
    source: Path, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    less = without(source, NORM)
    convert(less, tmp_path / "out", like=reference, fill=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert verify(less, tmp_path / "out").options["fill"] is True
    reference.rename(tmp_path / "moved")
    with pytest.raises(UsageError, match="records that the conversion used a reference"):
        verify(less, tmp_path / "out")
    verify(less, tmp_path / "out", like=tmp_path / "moved")
    manifest = tmp_path / "out" / MANIFEST
    told = json.loads(manifest.read_bytes())
    for place in ("", "http://127.0.0.1:1/x", "file::s3://b/x", "a\0b", "x" * 5000):
        manifest.write_text(json.dumps({**told, "like": place}))
        with pytest.raises(UsageError, match="Specify the reference with --like REF"):
            verify(less, tmp_path / "out")
    del told["like"]
    manifest.write_text(json.dumps(told))
    with pytest.raises(DifferenceError, match="its reference"):
        verify(less, tmp_path / "out", like=tmp_path / "moved")


@verifying
def test_verify_finds_a_wrong_bit_in_a_filled_tensor(source: Path, reference: Path, tmp_path: Path) -> None:
    less = without(source, NORM)
    convert(less, tmp_path / "out", like=reference, fill=True)
    spoil(tmp_path / "out", NORM)
    with pytest.raises(DifferenceError, match=NORM):
        verify(less, tmp_path / "out")


@verifying
def test_verify_finds_a_reference_that_has_other_values_since(source: Path, reference: Path, tmp_path: Path) -> None:
    less = without(source, NORM)
    convert(less, tmp_path / "out", like=reference, fill=True)
    spoil(reference, NORM)
    with pytest.raises(DifferenceError, match=NORM):
        verify(less, tmp_path / "out")


def test_a_reference_that_changes_while_it_is_read_spoils_the_output(
    source: Path, reference: Path, tmp_path: Path
) -> None:
    class Changing:
        def __call__(self, count: int) -> None:
            pass

        def on_file(self, name: str) -> None:
            with open(reference / weight_map(reference)[NORM], "r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(b"?")

    with pytest.raises(CorruptError, match="changed while it was read"):
        convert(without(source, NORM), tmp_path / "out", like=reference, fill=True, progress=Changing())
    assert not (tmp_path / "out").exists()


def test_neither_reference_nor_input_is_replaced(source: Path, reference: Path, tmp_path: Path) -> None:
    before = contents(reference)
    for options in ({}, {"fill": True}):
        with pytest.raises(UsageError, match="a file of the reference"):
            convert(source, reference, like=reference, **options)
    shutil.copytree(reference, tmp_path / "source")
    with pytest.raises(UsageError, match="the input itself"):
        convert(reference, reference, like=reference)
    assert contents(reference) == before
    convert(reference, tmp_path / "copy", like=reference, **VERIFIED)
    assert layout(tmp_path / "copy") == layout(reference)


def test_beside_the_reference_its_small_files_stay(source: Path, reference: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", like=reference)
    torch.save(load_with_aliases(reference), tmp_path / "out" / "another.pt")
    convert(source, tmp_path / "out", like=tmp_path / "out" / "another.pt", overwrite=True)
    assert EXTRAS.items() <= contents(tmp_path / "out").items()


@pytest.mark.skipif("depfile" not in OPTIONS, reason="there are no rules for make")
def test_a_depfile_names_the_reference(source: Path, reference: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", like=reference, depfile=tmp_path / "out.d")
    rule = (tmp_path / "out.d").read_text()
    assert all(str(reference / name) in rule for name in layout(reference))


def test_another_reference_is_another_plan(source: Path, reference: Path, tmp_path: Path) -> None:
    def plan(directory: Path) -> Any:
        convert(source, tmp_path / "out", like=directory)
        return json.loads((tmp_path / "out" / MANIFEST).read_bytes())["plan"]

    state = {name: tensor.bfloat16() if name != NORM else tensor for name, tensor in tensors(9).items()}
    first = plan(reference)
    assert plan(reference) == first
    assert plan(hub_model(tmp_path / "other", state)) != first


class Attack:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def test_an_index_that_leads_out_and_a_header_that_lies_are_refused(
    source: Path, reference: Path, tmp_path: Path
) -> None:
    told = (reference / INDEX).read_text()
    (reference / INDEX).write_text(told.replace(weight_map(reference)[NORM], "../outside.safetensors"))
    with pytest.raises(UnsafeError, match="outside"):
        convert(source, tmp_path / "out", like=reference)
    (reference / INDEX).write_text(told)
    file = reference / weight_map(reference)[NORM]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptError, match=file.name):
        convert(source, tmp_path / "out", like=reference)
    (reference / INDEX).write_text("{" * 1000)
    with pytest.raises(CorruptError, match="index"):
        convert(source, tmp_path / "out", like=reference)
    assert not (tmp_path / "out").exists()


@naming_attacks
def test_a_reference_that_is_an_attack_is_refused(source: Path, tmp_path: Path) -> None:
    torch.save({"w": Attack()}, tmp_path / "attack.pt")
    with pytest.raises(UnsafeError, match=r"attack\.pt"):
        convert(source, tmp_path / "out", like=tmp_path / "attack.pt")
    assert not (tmp_path / "out").exists()


def test_options_of_a_reference_are_recorded_but_for_its_path() -> None:
    assert Options(like="x", partial=True, fill=True).recorded() == {"fill": True, "partial": True}


LIKE_MODEL = {"model.layers.0.w": (3,), "model.layers.1.w": (4,), "lm_head.weight": (2, 3)}


@every(
    "prefixes, others",
    [(["model."], {}), (["net._orig_mod."], {}), (["model."], {"model.loss": (5,)}), (["student.", "teacher."], {})],
)
def test_what_is_proposed_for_a_lightning_file_works(
    prefixes: list[str], others: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    tensors = {name: torch.randn(shape) for name, shape in LIKE_MODEL.items()}
    save_file(tensors, tmp_path / "ref.safetensors")
    states = {f"{prefix}{name}": tensor.clone() for prefix in prefixes for name, tensor in tensors.items()}
    states.update({name: torch.zeros(shape) for name, shape in others.items()})
    optimizer = {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"params": [0]}]}
    told = {"epoch": 2, "pytorch-lightning_version": "2.1", "state_dict": states, "optimizer_states": [optimizer]}
    torch.save(told, tmp_path / "x.ckpt")
    convert = ("convert", tmp_path / "x.ckpt", tmp_path / "out.safetensors", "--like", tmp_path / "ref.safetensors")
    run = ckptconv_here(*convert)
    assert run.code == 1
    option = re.search(r"Use (.*) to match 3 of these \d+ names with the reference\.", run.err)
    assert option, run.err
    done(ckptconv_here(*convert, *shlex.split(option[1])))
    made = load_file(tmp_path / "out.safetensors")
    assert made.keys() == tensors.keys()
    assert all(torch.equal(made[name], tensor) for name, tensor in tensors.items())
    # And the other way round.
    convert = ("convert", tmp_path / "ref.safetensors", tmp_path / "out.safetensors", "--like", tmp_path / "x.ckpt")
    run = ckptconv_here(*convert)
    option = re.search(r"Use (.*) to match 3 of these 3 names with the reference\. .* --partial", run.err)
    assert option, run.err
    assert ckptconv_here(*convert, *shlex.split(option[1]), "--partial").code == 0


def test_a_reference_may_be_named_by_a_file_url(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "m.pt")
    here = f"file://{tmp_path}"
    convert(f"{here}/m.pt", f"{here}/out")
    convert(f"{here}/m.pt", f"{here}/more", like=f"{here}/out", fsync=False, **VERIFIED)
