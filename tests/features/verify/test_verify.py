"""verify: equal outputs are found equal, and anything that is not as it should be is found."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from cells import of_features
from checkpoints import ZERO, Run, ckptconv, ckptconv_here, done
from compare import evaluate
from effort import TIMES, examples
from faults import spoiled
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from stores import FAR

import ckptconv as library
from ckptconv import convert
from ckptconv.errors import CkptconvError, DifferenceError, FailedError, UnsupportedError, UsageError
from ckptconv.features.regexes import regexes
from ckptconv.features.verify import arithmetic
from ckptconv.features.verify import evaluate as reference
from ckptconv.features.verify.evaluate import Evaluator
from ckptconv.formats.detect import open_source
from ckptconv.outputs.kinds import KINDS, NAMED, entry_of
from ckptconv.storage.files import Readers
from ckptconv.storage.reading import Reader
from ckptconv.tensors.computing import Bits, Join, Joined
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Concat, Convert, Inline, LazyTensor, Narrow, Partitioned, Picked, Stored, View, Zeros
from ckptconv.tensors.moves import Cast, File, Negate, Swap
from ckptconv.tensors.strides import contiguous_strides

MANIFEST = ".ckptconv-manifest.json"
INDEX = "model.safetensors.index.json"
MANIFEST = ".ckptconv-manifest.json"


def verified(source: Path, output: Path, **options: Any) -> Any:
    return library.verify(source, output, **options)


def difference(source: Path, output: Path, **options: Any) -> dict[str, Any]:
    """What differs, which has to be found."""
    with pytest.raises(DifferenceError) as found:
        library.verify(source, output, **options)
    assert found.value.exit_code == 1
    return found.value.difference


def flip(path: Path, byte: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(byte)
        old = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([old ^ (1 << bit)]))


def state() -> dict[str, Any]:
    """Tensors of every kind of dtype and layout, some of them tied, in containers."""
    generator = torch.Generator().manual_seed(7)
    base = torch.randn(6, 10, generator=generator)
    shared = torch.randn(8, generator=generator)
    return OrderedDict(
        model={
            "plain": base.clone(),
            "transposed": base.clone().t(),
            "sliced": torch.randn(9, 12, generator=generator)[1:8:2, 2:11:3],
            "expanded": torch.randn(5, 1, generator=generator).expand(5, 3),
            "images": torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last),
            "tied": shared,
            "to": shared,
            "half": torch.randn(7, generator=generator).half(),
            "brain": torch.randn(7, generator=generator).bfloat16(),
            "double": torch.randn(7, generator=generator).double(),
            "eighth": torch.randn(7, generator=generator).to(torch.float8_e4m3fn),
            "complex": torch.randn(3, 2, dtype=torch.complex64, generator=generator),
            "conjugate": torch.randn(3, 2, dtype=torch.complex64, generator=generator).conj(),
            "wide": torch.randn(3, 2, dtype=torch.complex128, generator=generator).t(),
            "negative": torch.randn(3, 2, dtype=torch.complex64, generator=generator).conj().imag,
            "count": torch.tensor(3),
            "mask": torch.tensor([True, False]),
            "empty": torch.empty(0, 4),
            "scalar": torch.tensor(1.5),
        },
        epoch=3,
        lr=[0.1, {"nested": torch.arange(4)}],
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "model.pt"
    torch.save(state(), path)
    return path


@pytest.fixture
def sharded(tmp_path: Path) -> tuple[Path, Path]:
    """A source and its output of several files."""
    source, output = tmp_path / "source.pt", tmp_path / "output"
    torch.save({name: torch.randn(3, 4) for name in "abcdef"}, source)
    convert(source, output, max_shard_size=100)
    assert len(list(output.glob("*.safetensors"))) == 3
    return source, output


# ------------------------------------------------------------------------------------------------- equal is equal


@pytest.mark.parametrize("case", ZERO.cases)
def test_zero_checkpoints_are_equal_to_their_outputs(case: str, tmp_path: Path) -> None:
    source = ZERO / case / "checkpoint"
    states = {"optimizer": str(tmp_path / "states")} if "v0" not in case and not case.startswith("z0") else {}
    try:
        convert(source, tmp_path / "model", max_shard_size=600, **states)
    except UsageError:  # not every optimizer's states can be told by parameter
        states = {}
        convert(source, tmp_path / "model", max_shard_size=600)
    done = verified(source, tmp_path / "model", max_shard_size=600, **states)
    stored = [name for path in tmp_path.glob("*/*.safetensors") for name in load_file(path)]
    assert done.tensors == len(stored) + len(done.aliases)
    assert done.bytes_compared >= sum(t.nbytes for p in tmp_path.glob("*/*.safetensors") for t in load_file(p).values())


@pytest.mark.parametrize("dtype", ["keep", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tied", ["alias", "duplicate"])
@pytest.mark.parametrize("name", ["model.safetensors", "model"])
def test_every_kind_of_tensor_is_equal_under_every_dtype(
    saved: Path, dtype: str, tied: str, name: str, tmp_path: Path
) -> None:
    convert(saved, tmp_path / name, dtype=dtype, tied=tied, max_shard_size=None if "." in name else 500)
    done = verified(saved, tmp_path / name, dtype=dtype, tied=tied)
    assert done.tensors == 20
    assert len(done.aliases) == (tied == "alias")


@pytest.mark.parametrize(
    "options",
    [
        {"key": "model"},
        {"include": ["model.*"], "exclude": ["*.half"]},
        {"strip_prefix": "model.", "rename": ["^lr=rate"]},
        {"key": "model", "rename": ["a=b"], "tied": "duplicate", "max_shard_size": 400},
    ],
)
def test_the_options_of_the_conversion_are_taken(saved: Path, options: dict[str, Any], tmp_path: Path) -> None:
    convert(saved, tmp_path / "model", **options)
    with_manifest = verified(saved, tmp_path / "model")
    assert with_manifest.manifest == str(tmp_path / "model" / MANIFEST)
    assert with_manifest.options.keys() == options.keys()
    (tmp_path / "model" / MANIFEST).unlink()
    assert verified(saved, tmp_path / "model", **options).tensors == with_manifest.tensors
    difference(saved, tmp_path / "model")


def test_an_option_that_is_given_comes_before_the_manifest_if_it_is_the_default_too(tmp_path: Path) -> None:
    torch.save({"b": torch.ones(3), "a": torch.ones(3)}, tmp_path / "m.pt")
    convert(tmp_path / "m.pt", tmp_path / "out", structure=False, fsync=False)
    assert verified(tmp_path / "m.pt", tmp_path / "out").options == {"structure": False}
    with pytest.raises(DifferenceError, match="structure"):
        verified(tmp_path / "m.pt", tmp_path / "out", structure=True)


def test_a_manifest_tells_the_options_and_has_to_be_true(tmp_path: Path) -> None:
    source = ZERO / "z3_bf16_w2/checkpoint"
    convert(source, tmp_path / "model", dtype="bfloat16", optimizer=str(tmp_path / "states"), max_shard_size=300)
    run = ckptconv_here("verify", source, tmp_path / "model")
    assert run.code == 0, run.err
    assert "dtype=bfloat16" in run.out
    assert verified(source, tmp_path / "states").tensors > 30  # the manifest says what these are
    path = tmp_path / "model" / MANIFEST
    told = json.loads(path.read_text())
    first = next(name for name in told["files"] if name.endswith(".safetensors"))
    changes: list[Any] = [
        lambda m: m["files"].popitem(),
        lambda m: m["files"][first].update(size=1),
        lambda m: m["files"][first]["tensors"].popitem(),
        lambda m: m["aliases"].clear(),
        lambda m: m.pop("files"),
        lambda m: m.update(files=[1]),
        lambda m: m["options"].update(dtype="float16"),
        lambda m: m["options"].clear(),
    ]
    for number, change in enumerate(changes):
        changed = json.loads(json.dumps(told))
        change(changed)
        path.write_text(json.dumps(changed))
        assert difference(source, tmp_path / "model")["what"] in ("manifest", "dtype"), number
    for name, value in (("dtype", 3), ("include", "a"), ("unknown", "x"), ("rename", [1])):
        path.write_text(json.dumps({**told, "options": {name: value}}))
        with pytest.raises(UsageError):
            library.verify(source, tmp_path / "model")


def _changes(told: dict[str, Any]) -> dict[str, Any]:
    """For every field of a manifest a change of it."""
    file = next(name for name, found in told["files"].items() if found["tensors"])
    tensor, source = next(iter(told["files"][file]["tensors"])), next(iter(told["source"]["inputs"]))
    return {
        "release": lambda m: m.update(ckptconv="0.0.1"),
        "plan": lambda m: m.update(plan="0" * 16),
        "kind": lambda m: m.update(kind="weights" if m["kind"] != "weights" else "optimizer"),
        "format": lambda m: m["source"].update(format="torch tar archive"),
        "rank": lambda m: m["source"].update(model_rank=3),
        "size of an input": lambda m: m["source"]["inputs"][source].update(size=1),
        "identity": lambda m: m["source"]["inputs"][source].update(identity="0" * 16),
        "an input less": lambda m: m["source"]["inputs"].pop(source),
        "an input more": lambda m: m["source"]["inputs"].update(x={"size": 3, "identity": "0" * 16}),
        "options": lambda m: m["options"].update(raw=True),
        "alias": lambda m: m["aliases"].update(one="other"),
        "deltas without a path": lambda m: m.update(deltas=[]),
        "checksum": lambda m: m["files"][file]["tensors"].update({tensor: "00000001"}),
        "no checksum": lambda m: m["files"][file]["tensors"].update({tensor: None}),
        "size": lambda m: m["files"][file].update(size=m["files"][file]["size"] + 1),
        "an invalid size": lambda m: m["files"][file].update(size=float("nan")),
        "a size below zero": lambda m: m["files"][file].update(size=-1),
        "order": lambda m: m.update(files=dict(reversed(m["files"].items()))),
        "a field more": lambda m: m.update(more=1),
    }


# Of features: what makes an output beside others, and says what it is verified with.
OF_FEATURES = {name: make for more in of_features("RECORDED") for name, make in more.items()}
RECORDED = ["weights", "states", *OF_FEATURES, "file", *(["torch"] if "torch" in KINDS else [])]


@pytest.mark.parametrize("made", RECORDED)
def test_every_field_of_a_manifest_is_checked(made: str, saved: Path, tmp_path: Path) -> None:
    source: Path = ZERO / "z2_bf16_w2/checkpoint"
    path = tmp_path / "out" / MANIFEST
    settings: dict[str, Any] = {}
    output: Path | None = tmp_path / "out"
    if made == "weights":
        convert(source, output, max_shard_size=300)
    elif made == "states":
        convert(source, tmp_path / "weights", optimizer=str(output), max_shard_size=300)
    elif made in OF_FEATURES:
        settings, output = OF_FEATURES[made](source, str(output)), None
    else:
        source, path, settings = saved, tmp_path / "m.json", {"manifest": str(tmp_path / "m.json")}
        convert(saved, tmp_path / "a.safetensors", manifest=str(path))
        output = tmp_path / "a.safetensors"
        if made == "torch":
            source, output = output, tmp_path / "back.pt"
            convert(source, output, manifest=str(path))
    told = json.loads(path.read_text())
    assert not verified(source, output, **settings).warnings
    # All changes of what is made of weights, and of each of the others a third.
    changes = list(_changes(told).items())
    for what, change in changes if made == "weights" else changes[RECORDED.index(made) % 3 :: 3]:
        changed = json.loads(json.dumps(told))
        change(changed)
        if list(changed.items()) == list(told.items()) and list(changed["files"]) == list(told["files"]):
            continue
        path.write_text(json.dumps(changed))
        if made == "torch" and what == "identity":
            # A source without checksums is known by its time, which a copy does not keep.
            assert "another modification time" in verified(source, output, **settings).warnings[0]
        elif what == "order" and (made in (*OF_FEATURES, "torch") or len(told["files"]) < 2):
            continue
        elif what == "kind":
            # Of another kind, it is compared with something else, which the source may not hold.
            with pytest.raises((DifferenceError, UsageError)):
                library.verify(source, output, **settings)
        else:
            assert difference(source, output, **settings)["what"] == "manifest", what
    path.write_text(json.dumps(told))
    verified(source, output, **settings)


def test_a_source_that_was_copied_is_still_what_the_output_was_made_of(sharded: tuple[Path, Path]) -> None:
    source, output = sharded
    os.utime(source, (1, 1))
    assert not verified(source, output).warnings


@pytest.mark.parametrize("rule", ["(a+)+$=x", "((((=x", "=" + "x" * 4000])
def test_rules_for_renaming_from_a_manifest_take_no_longer_than_they_may(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = tmp_path / "source.pt", tmp_path / "output"
    torch.save({"a" * 41 + "!": torch.ones(3), "c": torch.ones(3)}, source)
    convert(source, output, rename=["^c$=d"])
    assert verified(source, output).options == {"rename": ("^c$=d",)}
    told = json.loads((output / MANIFEST).read_text())
    rules = [rule] * (3 if rule.startswith("=") else 1)
    (output / MANIFEST).write_text(json.dumps({**told, "options": {"rename": rules}}))
    monkeypatch.setattr(regexes, "MOST_SECONDS", 1)
    with pytest.raises((UsageError, DifferenceError), match=r"--rename|lacks"):
        library.verify(source, output)


@FAR
def test_outputs_that_are_far_away_are_verified_where_they_are(saved: Path) -> None:
    import fsspec

    output = "memory://verify/model"
    report = convert(saved, output, max_shard_size=400, verify=True)
    assert report.bytes_verified == library.verify(saved, output).bytes_compared > 0
    files = fsspec.filesystem("memory")
    path = next(path for path in files.find("/verify/model") if "model-00002-of" in path)
    data = bytearray(files.cat(path))
    data[-1] ^= 1
    files.pipe(path, bytes(data))
    with pytest.raises(DifferenceError):
        library.verify(saved, output)


def test_tensor_parallel_ranks(tmp_path: Path) -> None:
    source = ZERO / "tp_z2_mp2_w4/checkpoint"
    convert(source, tmp_path / "model", per_rank=True, verify=True)
    assert len(verified(source, tmp_path / "model", per_rank=True).outputs) == 2
    ranks = [tmp_path / f"model/mp_rank_0{rank}" for rank in (0, 1)]
    ranks[0].rename(tmp_path / "other")
    ranks[1].rename(ranks[0])
    (tmp_path / "other").rename(ranks[1])
    assert difference(source, tmp_path / "model", per_rank=True)["what"] == "value"
    with pytest.raises(FailedError, match=r"mp_rank_00.*--no-clobber"):
        convert(source, tmp_path / "model", per_rank=True, clobber=False)


def test_optimizer_states_are_in_safetensors(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    for kind in map(entry_of, KINDS):
        for suffix in kind.suffixes if kind.called else ():
            with pytest.raises(UsageError, match=f"is the name of {kind.called}"):
                library.verify(tmp_path / "x.pt", optimizer=tmp_path / f"x{suffix}")


# ---------------------------------------------------------------------------------- whatever is not so is found


def test_every_single_bit_of_a_file_counts(tmp_path: Path) -> None:
    source, output = tmp_path / "source.pt", tmp_path / "output.safetensors"
    shared = torch.tensor([1.0, float("nan")])
    torch.save({"a\x1f": shared, "b": shared, "c": torch.tensor([True]), "step": 7}, source)
    convert(source, output)
    opened = open_source(source)
    whole = output.read_bytes()
    unnoticed = []
    # A bit or two of every byte, and in a thorough run all.
    for number in range(0, 8 * len(whole), 5 if TIMES == 1 else 1):
        byte, bit = divmod(number, 8)
        flip(output, byte, bit)
        try:
            library.verify(opened, output)
            unnoticed.append((byte, bit))
        except DifferenceError:
            pass
        flip(output, byte, bit)
    assert not unnoticed
    assert output.read_bytes() == whole
    assert verified(source, output).tensors == 3


@examples(60)
@given(st.data())
def test_a_flipped_bit_of_a_shard_or_its_record_is_found(data: st.DataObject) -> None:
    source, output = _flipping()
    path = data.draw(st.sampled_from(sorted(path for path in output.iterdir() if path.name != MANIFEST)))
    if path.name == INDEX:
        return
    byte, bit = data.draw(st.integers(0, path.stat().st_size - 1)), data.draw(st.integers(0, 7))
    flip(path, byte, bit)
    try:
        with pytest.raises(DifferenceError):
            library.verify(source, output)
    finally:
        flip(path, byte, bit)


def _flipping(made: list[Any] = []) -> tuple[Any, Path]:  # noqa: B006
    """A source that is open, and an output of it, made once."""
    if not made:
        import tempfile

        directory = Path(tempfile.mkdtemp())
        torch.save(state(), directory / "source.pt")
        convert(directory / "source.pt", directory / "output", max_shard_size=300)
        made.extend([open_source(directory / "source.pt"), directory / "output"])
    return made[0], made[1]


@pytest.mark.skipif("pt" not in NAMED, reason="no feature writes .pt files")
@examples(50)
@given(st.randoms(use_true_random=False))
def test_a_flipped_bit_of_the_data_of_a_file_of_torch_is_found(rng: random.Random) -> None:
    _, output = _flipping()
    back = output.parent / "back.pt"
    if not back.exists():
        convert(output, back)
    with torch.serialization._open_zipfile_reader(str(back)) as archive:
        records = [name for name in archive.get_all_records() if "/data/" in f"/{name}"]
        name = rng.choice([name for name in records if archive.get_record(name)])
        start, size = archive.get_record_offset(name), len(archive.get_record(name))
    byte, bit = start + rng.randrange(size), rng.randrange(8)
    flip(back, byte, bit)
    try:
        assert difference(output, back)["file"] == str(back)
    finally:
        flip(back, byte, bit)


def test_the_first_difference_is_named_by_tensor_index_and_values(tmp_path: Path) -> None:
    weights = {"a": torch.arange(24, dtype=torch.float32).reshape(2, 3, 4), "b": torch.arange(6).reshape(2, 3).t()}
    torch.save(weights, tmp_path / "source.pt")
    for name, place, value in (("a", (1, 0, 2), 99.5), ("b", (2, 1), 99)):
        changed = {key: tensor.clone(memory_format=torch.contiguous_format) for key, tensor in weights.items()}
        changed[name][place] = value
        convert(tmp_path / "source.pt", tmp_path / "output.safetensors")
        with safe_open(tmp_path / "output.safetensors", "pt") as file:
            metadata = file.metadata()
        save_file(changed, tmp_path / "output.safetensors", dict(sorted(metadata.items())))
        run = ckptconv_here("verify", tmp_path / "source.pt", tmp_path / "output.safetensors", "--json")
        assert run.code == 1
        error = run.json["error"]
        assert error["kind"] == "difference"
        assert error["difference"]["tensor"] == name
        assert error["difference"]["index"] == list(place)
        assert error["difference"]["expected"].startswith(str(weights[name][place].item()))
        assert error["difference"]["found"].startswith(str(value))
        assert f"{name!r} differs at index {list(place)}" in run.err
        assert "`ckptconv diff` compares any two checkpoints. If the output has another source" in run.err
        assert "specify the original source; otherwise, convert it again. For a single file that average" in run.err


def test_every_tensor_that_differs_is_named_and_counted(tmp_path: Path) -> None:
    source, output = tmp_path / "source.pt", tmp_path / "output.safetensors"
    state = {name: torch.arange(300_000, dtype=torch.float32) for name in "abcd"}
    state["t"] = torch.arange(6000, dtype=torch.int64).reshape(60, 100).t()
    torch.save(state | {"gone": torch.ones(1), "s": torch.ones(2, 3)}, source)
    convert(source, output)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["gone"]
        tensors["more"] = torch.ones(1)
        tensors["b"] = tensors["b"].double()
        tensors["s"] = tensors["s"].reshape(3, 2)
        # In blocks of their own.
        tensors["c"][[7, 299_999]] = 0.5
        tensors["t"][3:5, 10] = -1

    rewritten(output, change)
    found = difference(source, output)
    told = {each["tensor"]: each for each in found["differences"]}
    assert {name: each["what"] for name, each in told.items()} == {
        "gone": "missing",
        "more": "unexpected",
        "b": "dtype",
        "s": "shape",
        "c": "value",
        "t": "value",
    }
    assert (told["c"]["elements"], told["c"]["index"], told["c"]["expected"][:4]) == (2, [7], "7.0 ")
    assert (told["t"]["elements"], told["t"]["index"]) == (2, [3, 10])
    run = ckptconv_here("verify", source, output)
    run.refused(1, "lacks a tensor", "In total, 6 tensors differ: 'gone' (missing), 'more' (unexpected), 'b' (dtype)")
    assert "'t' (2 elements) and 1 more." in run.err


def test_two_tensors_of_one_shape_that_changed_places_are_found(sharded: tuple[Path, Path]) -> None:
    source, output = sharded
    for path in output.glob("*.safetensors"):
        first, second = sorted(load_file(path))
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        tensors = load_file(path)
        save_file({first: tensors[second], second: tensors[first]}, path, metadata)
        found = difference(source, output)
        assert (found["what"], found["tensor"], found["index"]) == ("value", first, [0, 0])
        save_file(tensors, path, metadata)
        verified(source, output)


def test_shards_that_changed_their_names_are_found(sharded: tuple[Path, Path]) -> None:
    source, output = sharded
    one, two, _ = sorted(output.glob("*.safetensors"))
    one.rename(output / "x")
    two.rename(one)
    (output / "x").rename(two)
    assert difference(source, output)["what"] == "index"


def rewritten(path: Path, change: Any, **metadata: str) -> None:
    """A file of safetensors with other tensors: `change` gets a dict of them."""
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        told = {**file.metadata(), **metadata}
    change(tensors)
    save_file(tensors, path, told)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda t: t.pop("b"), "missing"),
        (lambda t: t.update(z=torch.zeros(1)), "unexpected"),
        (lambda t: t.update(a=t["a"].double()), "dtype"),
        (lambda t: t.update(a=t["a"].view(torch.int32)), "dtype"),
        (lambda t: t.update(a=t["a"].reshape(-1)), "shape"),
        (lambda t: t.update(a=t["a"] + 1), "value"),
        (lambda t: t.update(B=t.pop("b")), "missing"),
    ],
)
def test_other_tensors_are_found(change: Any, what: str, tmp_path: Path) -> None:
    source, output = tmp_path / "source.pt", tmp_path / "output.safetensors"
    torch.save({"a": torch.randn(2, 3), "b": torch.randn(4), "none": torch.empty(0)}, source)
    convert(source, output)
    rewritten(output, change)
    assert difference(source, output)["what"] == what


@pytest.mark.parametrize(
    ("metadata", "what"),
    [
        ({"tied": "b"}, "alias"),
        ({"a": "b"}, "structure"),
        ({"a": "nothing"}, "alias"),
        ({"author": "me"}, "alias"),
        ({"format": "np"}, "header"),
        ({"ckptconv.structure": '{"version":1,"root":["dict"]}'}, "structure"),
    ],
)
def test_metadata_that_leads_elsewhere_is_found(metadata: dict[str, str], what: str, tmp_path: Path) -> None:
    source, output = tmp_path / "source.pt", tmp_path / "output.safetensors"
    shared = torch.randn(4)
    torch.save({"b": shared + 1, "kept": shared, "a": shared}, source)
    convert(source, output, include=["*"])
    assert library.verify(source, output).aliases == {"a": "kept"}
    rewritten(output, lambda tensors: None, **metadata)
    assert difference(source, output)["what"] == what


def test_an_alias_must_have_the_bytes_of_its_name(tmp_path: Path) -> None:
    """Two tensors of the source of which the output has one, and says that the other is the same."""
    source, output = tmp_path / "source.safetensors", tmp_path / "output.safetensors"
    save_file({"a": torch.zeros(4), "b": torch.tensor([0.0, 0, 1, 0])}, source)
    save_file({"a": torch.zeros(4)}, output, {"format": "pt", "b": "a"})
    found = difference(source, output)
    assert (found["what"], found["tensor"], found["index"]) == ("value", "b", [2])


def test_a_lost_alias_is_a_missing_name(tmp_path: Path) -> None:
    source = ZERO / "z3_bf16_w2/checkpoint"
    convert(source, tmp_path / "model", max_shard_size=400)
    index = json.loads((tmp_path / "model" / INDEX).read_text())
    assert index["metadata"].pop("head.weight") == "emb.weight"
    (tmp_path / "model" / INDEX).write_text(json.dumps(index))
    found = difference(source, tmp_path / "model")
    assert (found["what"], found["tensor"]) == ("missing", "head.weight")


def test_ties_of_a_part_name_the_options_that_chose_it(tmp_path: Path) -> None:
    weight = torch.zeros(3)
    torch.save({"model": {"emb": weight, "head": weight}, "step": 1}, tmp_path / "run.pt")
    convert(tmp_path / "run.pt", tmp_path / "w.safetensors", key="model", manifest=str(tmp_path / "m.json"))
    with pytest.raises(
        DifferenceError,
        match=r"no tensor of that name was expected\. .* If the output has another source.* --for-hub, --key, ",
    ):
        verified(tmp_path / "run.pt", tmp_path / "w.safetensors")


def test_the_source_of_another_output_is_told_by_its_files(tmp_path: Path) -> None:
    for name in "ab":
        torch.save({"w": torch.ones(3)}, tmp_path / f"{name}.pt")
    convert(tmp_path / "a.pt", tmp_path / "out")
    run = ckptconv_here("verify", tmp_path / "b.pt", tmp_path / "out")
    run.refused(1, f"converted from a.pt, which is not in {tmp_path / 'b.pt'}.", "ckptconv verify SOURCE OUTPUT")
    done(ckptconv_here("verify", tmp_path / "a.pt", tmp_path / "out"))


def test_checksums_of_the_source_are_compared_by_an_option_alone_and_said_not_to_be(tmp_path: Path) -> None:
    source, output = tmp_path / "a.pt", tmp_path / "a.safetensors"
    torch.save({"w": torch.arange(64.0)}, source)
    save_file({"w": torch.arange(64.0)}, tmp_path / "without.safetensors")
    data = source.read_bytes()
    at = data.index(torch.arange(64.0).numpy().tobytes())
    source.write_bytes(data[:at] + b"x" + data[at + 1 :])
    said = "which were not compared"
    assert said in done(ckptconv_here("convert", source, output, "--verify")).out
    assert said in done(ckptconv_here("verify", source, output)).out
    assert library.verify(source, output).unchecked
    # As the note says, the option compares them; it is not said where nothing is verified, or nothing recorded.
    ckptconv_here("convert", source, output, "--verify", "--checksum").refused(4, "has changed since it was written")
    source.write_bytes(data)
    for words in ((source, "--verify", "--checksum"), (source,), (tmp_path / "without.safetensors", "--verify")):
        assert "not compared" not in done(ckptconv_here("convert", words[0], output, *words[1:])).out
    assert not library.verify(tmp_path / "without.safetensors", output).unchecked


def test_a_difference_names_the_files_that_have_changed_since_the_manifest_was_written(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(4)}, tmp_path / "run.pt")
    convert(tmp_path / "run.pt", tmp_path / "out")
    torch.save({"a": torch.ones(4)}, tmp_path / "other.pt")
    with pytest.raises(DifferenceError) as unnamed:
        verified(tmp_path / "other.pt", tmp_path / "out")
    torch.save({"a": torch.ones(4)}, tmp_path / "run.pt")
    with pytest.raises(DifferenceError, match=r"'a' differs .* records another version of run\.pt"):
        verified(tmp_path / "run.pt", tmp_path / "out")
    assert "records another version" not in str(unnamed.value)


def test_an_output_that_is_none_asks_for_the_order(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(4)}, tmp_path / "source.safetensors")
    (tmp_path / "out").mkdir()
    with pytest.raises(
        UsageError, match=r"out contains neither .*\. The order of arguments is: verify SOURCE OUTPUT\."
    ):
        verified(tmp_path / "source.safetensors", tmp_path / "out")


def test_an_output_given_first_is_known_by_its_manifest(tmp_path: Path) -> None:
    for name in ("run.pt", "other.pt", "larger.pt"):
        torch.save({"a": torch.ones(4000 if name == "larger.pt" else 4)}, tmp_path / name)
    convert(tmp_path / "run.pt", tmp_path / "out", dtype="bf16", rename=["^=m."])
    (tmp_path / "model").mkdir()
    convert(tmp_path / "run.pt", tmp_path / "model" / "x.safetensors")
    convert(tmp_path / "model", tmp_path / "cast", dtype="bf16")
    for source, output in (("run.pt", "out"), ("model", "cast")):
        words = tmp_path / source, tmp_path / output
        told = ckptconv_here("verify", *words[::-1]).refused(1, f"If it is the output: ckptconv verify {words[0]} ")
        done(ckptconv_here(*told.rpartition("ckptconv ")[2].split()))
    shutil.copy(tmp_path / "larger.pt", tmp_path / "run.pt")
    for other in ("run.pt", "other.pt"):  # another size, another name
        assert "By its manifest" not in ckptconv_here("verify", tmp_path / "out", tmp_path / other).refused(1)


def test_files_that_do_not_belong_or_are_not_there(sharded: tuple[Path, Path]) -> None:
    source, output = sharded
    shard = sorted(output.glob("*.safetensors"))[1]
    for extra in ("model.safetensors", "model-00004-of-00004.safetensors", "other.safetensors"):
        shutil.copy(shard, output / extra)
        assert difference(source, output)["file"] == str(output / extra)
        (output / extra).unlink()
    (output / "config.json").write_text("{}")
    (output / "README.md").write_text("A model.")
    verified(source, output)
    shard.rename(output / "elsewhere")
    assert difference(source, output)["file"] == str(shard)
    (output / "elsewhere").rename(shard)
    (output / INDEX).rename(output / "elsewhere")
    assert difference(source, output)["file"] == str(output / INDEX)


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index["metadata"].update(total_size=index["metadata"]["total_size"] + 1),
        lambda index: index["metadata"].pop("total_size"),
        lambda index: index["metadata"].update(total_size=str(index["metadata"]["total_size"])),
        lambda index: index["metadata"].update(more=1),
        lambda index: index["weight_map"].pop("c"),
        lambda index: index["weight_map"].update(z=index["weight_map"]["c"]),
        lambda index: index["weight_map"].update(c=index["weight_map"]["a"]),
        lambda index: index["weight_map"].update(c="model-00009-of-00003.safetensors"),
        lambda index: index.pop("metadata"),
    ],
)
def test_a_stale_index_is_found(change: Any, sharded: tuple[Path, Path]) -> None:
    source, output = sharded
    index = json.loads((output / INDEX).read_text())
    (output / INDEX).write_text(json.dumps(index))  # how it is indented is no matter
    verified(source, output)
    change(index)
    (output / INDEX).write_text(json.dumps(index))
    assert difference(source, output)["what"] in ("index", "file", "missing")


def test_an_index_that_has_a_name_twice_is_found(sharded: tuple[Path, Path]) -> None:
    source, output = sharded
    text = (output / INDEX).read_text()
    (output / INDEX).write_text(text.replace('"a":', '"a": "x", "a":', 1))
    assert difference(source, output)["what"] == "index"


def test_shards_larger_than_was_asked_for_are_found(sharded: tuple[Path, Path]) -> None:
    source, output = sharded
    verified(source, output, max_shard_size=100)
    assert difference(source, output, max_shard_size=60)["expected"] == 60


@pytest.mark.parametrize("size", [0, 4, 8, 40, -1])
def test_a_truncated_output_is_found(size: int, tmp_path: Path) -> None:
    source, output = tmp_path / "source.pt", tmp_path / "output.safetensors"
    torch.save({"a": torch.randn(50)}, source)
    convert(source, output)
    os.truncate(output, size if size >= 0 else output.stat().st_size + size)
    assert difference(source, output)["file"] == str(output)


# -------------------------------------------------------------------------------------------- what is no success


def test_what_is_not_there_or_nothing_is_no_success(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(2)}, tmp_path / "source.pt")
    (tmp_path / "empty").mkdir()
    for output in ("missing.safetensors", "missing", "empty"):
        with pytest.raises(UsageError):
            library.verify(tmp_path / "source.pt", tmp_path / output)
    with pytest.raises(UsageError):
        library.verify(tmp_path / "source.pt")
    save_file({}, tmp_path / "none.safetensors", {"format": "pt"})
    assert difference(tmp_path / "source.pt", tmp_path / "none.safetensors")["what"] == "missing"
    torch.save({}, tmp_path / "nothing.pt")
    assert library.verify(tmp_path / "nothing.pt", tmp_path / "none.safetensors").tensors == 0
    assert ckptconv_here("verify", tmp_path / "source.pt", tmp_path / "missing").code == 2
    assert ckptconv_here("verify", tmp_path / "absent.pt", tmp_path / "none.safetensors").code == 2
    (tmp_path / "broken.pt").write_bytes(b"PK\x03\x04" + bytes(100))
    assert ckptconv_here("verify", tmp_path / "broken.pt", tmp_path / "none.safetensors").code == 4


def test_the_command_tells_what_was_compared(saved: Path, tmp_path: Path) -> None:
    output = tmp_path / "model.safetensors"
    assert ckptconv_here("pt2safetensors", saved, output, "--verify", "-q").code == 0
    run = ckptconv_here("verify", saved, output)
    assert run.code == 0, run.err
    assert "equal to" in run.out
    told = ckptconv_here("verify", saved, output, "--json").json
    assert told["ok"] is True
    assert told["tensors"] == 20
    assert told["outputs"] == [{"path": str(output), "bytes": output.stat().st_size, "tensors": 19}]
    assert told["bytes_compared"] == sum(tensor.nbytes for tensor in load_file(output).values())
    assert told["aliases"] == {"model.to": "model.tied"}


# ------------------------------------------------------------------------------- a path of its own: wrong kernels


def test_a_wrong_conversion_is_found_before_the_output_has_its_name(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def truncating(kernel: Cast, data: memoryview, out: memoryview) -> None:
        if (kernel.source, kernel.target) == ("float32", "bfloat16"):
            np.frombuffer(out, "u2")[...] = np.frombuffer(data, "u4") >> 16

    spoiled(Cast, truncating)(monkeypatch)
    convert(saved, tmp_path / "wrong.safetensors", dtype="bfloat16")
    assert difference(saved, tmp_path / "wrong.safetensors", dtype="bfloat16")["what"] == "value"
    for output in ("model.safetensors", "model"):
        with pytest.raises(DifferenceError) as found:
            convert(saved, tmp_path / output, dtype="bfloat16", verify=True)
        assert str(tmp_path / output) in str(found.value)
        assert not (tmp_path / output).exists()
    assert [path.name for path in tmp_path.iterdir()] == ["wrong.safetensors"]


def test_nothing_that_moves_bytes_takes_part(saved: Path, tmp_path: Path) -> None:
    convert(saved, tmp_path / "model.safetensors", dtype="float16")
    program = (
        "import sys, ckptconv\n"
        f"ckptconv.verify({str(saved)!r}, {str(tmp_path / 'model.safetensors')!r}, dtype='float16')\n"
        "moving = ('ckptconv.engine', 'ckptconv.tensors.kernels', 'ckptconv.publish', 'ckptconv.conversion')\n"
        "found = [name for name in sys.modules if name.startswith(moving)]\n"
        "assert not found, found\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_evaluator_imports_nothing_that_plans() -> None:
    program = (
        "import sys, ckptconv.features.verify.evaluate\n"
        "found = [name for name in sys.modules if name.startswith(('ckptconv.outputs', 'ckptconv.formats'))]\n"
        "assert not found, found\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_memory_stays_small_whatever_the_size_of_a_tensor(tmp_path: Path) -> None:
    source, output = tmp_path / "source.pt", tmp_path / "output.safetensors"
    big = torch.arange(14 << 20, dtype=torch.float32)
    torch.save({"a": big.reshape(4096, -1).t(), "b": big[: 1 << 20].half().reshape(64, -1)[:, ::3]}, source)
    convert(source, output, dtype="bfloat16")
    run: Run = ckptconv("verify", source, output, "--dtype", "bfloat16", "--json")
    assert run.code == 0, run.err
    assert run.json["peak_rss_bytes"] < (64 + 12) << 20


# ------------------------------------------------------------------------------------ the reference and its referees

_TORCH = {name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)}
_FLOATS = ["float32", "bfloat16", "float16", "float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz"]


def _bits_of(values: torch.Tensor) -> np.ndarray:
    return values.view({1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[values.element_size()]).numpy()


@pytest.mark.parametrize("target", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("source", _FLOATS)
def test_casts_are_torchs(source: str, target: str) -> None:
    item = DTYPES[source].itemsize
    if item <= 2:
        bits = np.arange(1 << (8 * item), dtype=f"u{item}")
    else:
        # Every exponent, with significands at, just under and just over every tie of the narrow formats.
        tops = np.arange(1 << 16, dtype="u4") << 16
        bits = np.concatenate(
            [tops + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0xFFF, 0x1000, 0x1001, 0x3000)]
        )
    values = torch.from_numpy(bits).view(_TORCH[source])
    expected = values.to(_TORCH[target])
    got = arithmetic.cast(source, target, bits)
    numbers = ~torch.isnan(values.float()).numpy()
    assert (got[numbers] == _bits_of(expected)[numbers]).all()
    again = torch.from_numpy(got).view(_TORCH[target])
    assert torch.isnan(again.float()).numpy()[~numbers].all()


@examples(100)
@given(st.floats(width=64), st.sampled_from(["float32", "bfloat16", "float16"]))
def test_a_double_is_rounded_once(value: float, target: str) -> None:
    from fractions import Fraction

    got = arithmetic.cast("float64", target, np.array([value]).view("u8"))
    number = float(arithmetic.values(target, got)[0])
    if np.isnan(value) or np.isinf(value):
        assert struct.pack("<d", number)[6:] == struct.pack("<d", value)[6:] or np.isnan(number)
        return
    # No number of the format is nearer, and of two as near it is the even one.
    bits = int(got[0])
    for other in (bits - 1, bits + 1):
        if not 0 <= other < 1 << (8 * DTYPES[target].itemsize):
            continue
        near = float(arithmetic.values(target, np.array([other], got.dtype))[0])
        if np.isfinite(near) and np.isfinite(number):
            one, two = abs(Fraction(value) - Fraction(number)), abs(Fraction(value) - Fraction(near))
            assert one < two or (one == two and bits % 2 == 0) or near == number


@st.composite
def expressions(draw: st.DrawFn, file: File) -> LazyTensor:
    """A lazy tensor over a file of 4,096 bytes."""
    dtype = DTYPES[draw(st.sampled_from(["uint8", "int16", "float32", "float64", "complex64", "complex128"]))]
    kind = draw(st.sampled_from(["stored", "strided", "partitioned", "inline", "zeros"]))
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    count = int(np.prod(shape))
    if kind == "inline":
        tensor: LazyTensor = Inline(bytes(i % 251 for i in range(count * dtype.itemsize)), dtype, shape)
    elif kind == "zeros":
        tensor = Zeros(dtype, shape)
    elif kind == "partitioned":
        ranks = draw(st.integers(1, 4))
        bases = tuple(draw(st.integers(0, 100)) for _ in range(ranks))
        tensor = Partitioned((file,) * ranks, bases, draw(st.integers(0, 50)), -(-count // ranks), dtype, shape)
    else:
        strides = contiguous_strides(shape)
        if kind == "strided":
            strides = tuple(draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape))))
        tensor = Stored(file, draw(st.integers(0, 60)), dtype, shape, strides)
    for _ in range(draw(st.integers(0, 3))):
        tensor = draw(wrapped(tensor))
    return tensor


# How bytes are changed by kernels of features.
CHANGES = [made for each in of_features("CHANGES") for made in each]


@st.composite
def wrapped(draw: st.DrawFn, tensor: LazyTensor) -> LazyTensor:
    choices = ["flat", "one", "transposed"]
    if tensor.shape:
        choices += ["narrow", "concat", "concat"]
    if tensor.dtype.name == "complex64":
        choices += ["pairs"]
    if tensor.dtype.kind == "f":
        choices += ["swap", "negate"]
    if tensor.dtype.kind in "iu":
        choices += ["bits"]
    if tensor.dtype.name == "uint8":
        choices += ["join", *(["changes"] if CHANGES else [])]
    kind = draw(st.sampled_from(choices))
    if kind == "bits":
        item = tensor.dtype.itemsize
        shift = draw(st.integers(0, 8 * item - 1))
        width = draw(st.integers(1, 8 * item - shift))
        return Convert(tensor, Bits(item, shift, width, item), tensor.dtype)
    if kind == "join":
        return Joined((tensor, tensor), Join(((1, 0, 8), (1, 8, 8)), 2), DTYPES["int16"])
    if kind == "changes":
        wide = Joined((tensor, tensor), Join(((1, 0, 8), (1, 8, 8)), 2), DTYPES["uint16"])
        backwards = View(Convert(wide, Swap(2), wide.dtype), DTYPES["uint8"], (2 * tensor.numel,))
        others = View(Narrow(backwards, 0, tensor.numel, tensor.numel), tensor.dtype, tensor.shape)
        changed: LazyTensor = draw(st.sampled_from(CHANGES))(tensor, others, wide)
        return changed
    if kind == "transposed":
        return Picked(tensor, 0, tensor.shape[::-1], contiguous_strides(tensor.shape)[::-1])
    if kind == "flat":
        return View(tensor, tensor.dtype, (tensor.numel,))
    if kind == "one":
        return View(tensor, tensor.dtype, (1, *tensor.shape))
    if kind == "pairs":
        return View(tensor, DTYPES["float32"], (*tensor.shape, 2))
    if kind == "swap":
        return Convert(tensor, Swap(tensor.dtype.itemsize), tensor.dtype)
    if kind == "negate":
        return Convert(tensor, Negate(tensor.dtype.name), tensor.dtype)
    dim = draw(st.integers(0, len(tensor.shape) - 1))
    start = draw(st.integers(0, tensor.shape[dim] - 1))
    narrow = Narrow(tensor, dim, start, draw(st.integers(1, tensor.shape[dim] - start)))
    return narrow if kind == "narrow" else Concat((tensor, narrow, tensor), dim)


@examples(100)
@given(st.data())
def test_the_reference_and_the_moves_agree_on_every_expression(data: st.DataObject) -> None:
    path = _flipping()[1].parent / "bytes"
    if not path.exists():
        path.write_bytes(random.Random(5).randbytes(4096))
    tensor = data.draw(expressions(File(str(path), 4096)))
    with Readers() as readers:
        evaluator = Evaluator(readers)
        whole = evaluator.flat(tensor, 0, tensor.numel)
        assert whole.tobytes() == evaluate(tensor)
        start = data.draw(st.integers(0, tensor.numel))
        stop = data.draw(st.integers(start, tensor.numel))
        assert evaluator.flat(tensor, start, stop).tobytes() == whole[start:stop].tobytes()
        starts = [data.draw(st.integers(0, extent - 1)) for extent in tensor.shape]
        counts = [data.draw(st.integers(1, extent - at)) for extent, at in zip(tensor.shape, starts, strict=True)]
        cut = tuple(slice(at, at + count) for at, count in zip(starts, counts, strict=True))
        assert evaluator.box(tensor, starts, counts).tobytes() == whole.reshape(tensor.shape)[cut].tobytes()


class _Watched(Readers):
    """Readers that keep what they are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, int]] = []

    def open(self, file: File) -> Reader:
        reader, asked = super().open(file), self.asked

        class Watching(Reader):
            def read_at(self, offset: int, length: int) -> bytes:
                asked.append((offset, offset + length))
                return reader.read_at(offset, length)

        return Watching()


@examples(100)
@given(st.data())
def test_what_an_expression_reads_lies_in_its_footprint(data: st.DataObject) -> None:
    _, output = _flipping()
    path = output.parent / "bytes"
    path.write_bytes(random.Random(5).randbytes(4096))
    tensor = data.draw(expressions(File(str(path), 4096)))
    start = data.draw(st.integers(0, tensor.numel))
    stop = data.draw(st.integers(start, tensor.numel))
    with _Watched() as readers:
        Evaluator(readers).flat(tensor, start, stop)
        told = {at for _, first, last in reference.footprint(tensor, start, stop) for at in range(first, last)}
        assert all(told.issuperset(range(first, last)) for first, last in readers.asked)
        assert not told or max(told) < 4096


def test_a_footprint_tells_gaps_from_what_is_read() -> None:
    file = File("far", 1 << 40)
    column = Stored(file, 0, DTYPES["float32"], (3, 2), (1 << 20, 1))
    assert [span[1:] for span in reference.footprint(column, 0, 6)] == [(at << 22, (at << 22) + 8) for at in range(3)]
    near = Stored(file, 0, DTYPES["float32"], (300, 2), (100, 1))
    assert [span[1:] for span in reference.footprint(near, 0, 600)] == [(0, 299 * 400 + 8)]
    many = Stored(file, 0, DTYPES["float32"], (100_000, 2), (1 << 10, 1))
    assert len(list(reference.footprint(many, 0, many.numel))) == 1


def test_a_cast_without_a_reference_is_refused() -> None:
    with pytest.raises(CkptconvError):
        arithmetic.cast("int8", "float32", np.zeros(1, "u1"))


def test_a_release_of_the_library_that_does_not_know_a_dtype_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is right, and not called damaged."""

    def refusing(*args: object, **options: object) -> None:
        raise safetensors.SafetensorError("InvalidHeaderDeserialization")

    cases = {"float8_e4m3fn": ("0.4.0", "0.4.1"), "float8_e8m0fnu": ("0.5.3", "0.6.1"), "complex64": ("0.6.2", "0.7.0")}
    monkeypatch.setattr(safetensors, "safe_open", refusing)
    for dtype, (here, needed) in cases.items():
        torch.save({"a": torch.ones(4).to(getattr(torch, dtype)), "b": torch.ones(2)}, tmp_path / "x.pt")
        library.convert(tmp_path / "x.pt", tmp_path / f"{dtype}.safetensors")
        monkeypatch.setattr(safetensors, "__version__", here)
        with pytest.raises(
            UnsupportedError, match=f"'a' is {dtype}, which the library supports since {needed}"
        ) as caught:
            library.verify(tmp_path / "x.pt", tmp_path / f"{dtype}.safetensors")
        assert "damaged" not in str(caught.value)
        monkeypatch.setattr(safetensors, "__version__", needed)
        with pytest.raises(DifferenceError, match="the safetensors library cannot read it"):
            library.verify(tmp_path / "x.pt", tmp_path / f"{dtype}.safetensors")


def test_options_that_renamed_or_chose_tensors_are_asked_for(tmp_path: Path) -> None:
    torch.save({"state_dict": {"module.a": torch.ones(2)}, "epoch": 1}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "a.safetensors", key="state_dict", strip_prefix="module.")
    run = ckptconv_here("verify", tmp_path / "a.pt", tmp_path / "a.safetensors")
    run.refused(1, "lacks a tensor", "--key", "--strip-prefix")
    run = ckptconv_here(
        "verify", tmp_path / "a.pt", tmp_path / "a.safetensors", "--key", "state_dict", "--strip-prefix", "module."
    )
    assert run.code == 0, run.err


def test_names_without_a_prefix_lead_to_the_option_of_the_conversion(tmp_path: Path) -> None:
    weights = {"model.a": torch.ones(2), "model.b": torch.ones(2)}
    torch.save(weights, tmp_path / "flat.pt")
    torch.save({"model": {"a": torch.ones(2), "b": torch.ones(2)}, "other": torch.ones(2)}, tmp_path / "train.pt")
    for source, option in (("flat.pt", ["--strip-prefix", "model."]), ("train.pt", ["--key", "model"])):
        output = tmp_path / f"{source}.safetensors"
        done(ckptconv_here("convert", tmp_path / source, output, *option))
        run = ckptconv_here("verify", tmp_path / source, output)
        run.refused(
            1, f"The output has the names of a conversion with {' '.join(option)}.", "use the same --for-hub, --key"
        )
        done(ckptconv_here("verify", tmp_path / source, output, *option))
    save_file({"a": torch.ones(2), "c": torch.ones(2)}, tmp_path / "others.safetensors")
    run = ckptconv_here("verify", tmp_path / "flat.pt", tmp_path / "others.safetensors")
    assert "The output has the names" not in run.err
