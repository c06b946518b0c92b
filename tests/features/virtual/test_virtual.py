"""Descriptions of files that are not written: read like the files, refused where they are damaged or hostile."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from cells import VERIFIED, VERIFY, looking, of_features, verified_here
from checkpoints import ZERO, assert_same, ckptconv_here, contents, done, load_with_aliases, tag_of
from effort import every
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from stores import FAR

import ckptconv
from ckptconv.errors import CkptconvError, CorruptError, UnsafeError, UnsupportedError, UsageError
from ckptconv.features.virtual.description import bound, load
from ckptconv.formats.detect import open_source
from ckptconv.options.table import OPTIONS
from ckptconv.storage.location import Location


@pytest.fixture
def zero(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ZERO / "z3_fp32_w4" / "checkpoint", tmp_path / "zero"))


def described(source: Path, output: Path, *options: object) -> Path:
    done(ckptconv_here("virtual", source, output, "--quiet", "--no-fsync", *options))
    return output


# ------------------------------------------------------------------------------------------------------- what it gives


def test_a_conversion_of_it_writes_what_one_of_the_source_writes(zero: Path, tmp_path: Path) -> None:
    made = described(zero, tmp_path / "x.virtual.json", "--dtype", "bf16")
    ckptconv.convert(zero, tmp_path / "one", dtype="bf16")
    ckptconv.convert(made, tmp_path / "other", **VERIFIED)
    name = "model.safetensors"
    assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()


def test_what_it_describes_can_be_cast_chosen_renamed_and_described_again(zero: Path, tmp_path: Path) -> None:
    first = described(zero, tmp_path / "1.virtual.json")
    again = described(first, tmp_path / "2.virtual.json", "--dtype", "fp16", "--include", "l*", "--rename", "^l=layer")
    ckptconv.convert(again, tmp_path / "out.safetensors")
    ckptconv.convert(zero, tmp_path / "plain.safetensors", include="l*")
    expected = load_with_aliases(tmp_path / "plain.safetensors")
    assert_same(
        load_with_aliases(tmp_path / "out.safetensors"),
        {name.replace("l", "layer", 1): tensor.half() for name, tensor in expected.items()},
    )


READING = [name for more in of_features("FORMATS") for name, output in more.items() if output.endswith(".safetensors")]


@every("command", ["pt2safetensors", "zero-to-fp32", *READING])
def test_every_command_reads_it(command: str, zero: Path, tmp_path: Path) -> None:
    made = described(zero, zero.with_name(f"{command}.virtual.json"))
    assert ckptconv_here(command, made, tmp_path / "out.safetensors").code == 0
    assert load_file(tmp_path / "out.safetensors")
    verified_here(zero, tmp_path / "out.safetensors")
    assert open_source(made).format == "virtual: DeepSpeed ZeRO-3"


def test_it_is_the_output_of_every_command_by_its_name(zero: Path, tmp_path: Path) -> None:
    one, other = tmp_path / "1.virtual.json", tmp_path / "2.virtual.json"
    described(zero, one)
    run = ckptconv_here("zero-to-fp32", zero, other, "--json")
    assert json.loads(run.out)["tensors"] == len(open_source(one).weights) - 1
    assert one.read_bytes() == other.read_bytes()


def test_it_moves_with_what_lies_below_its_directory(zero: Path, tmp_path: Path) -> None:
    described(zero, tmp_path / "x.virtual.json")
    (tmp_path / "there").mkdir()
    for name in ("zero", "x.virtual.json"):
        (tmp_path / name).rename(tmp_path / "there" / name)
    ckptconv.convert(tmp_path / "there" / "x.virtual.json", tmp_path / "out.safetensors")
    # From another directory, sources are named by their absolute paths.
    (tmp_path / "elsewhere").mkdir()
    made = described(tmp_path / "there" / "zero", tmp_path / "elsewhere" / "x.virtual.json")
    assert json.loads(made.read_text())["roots"] == [str(tag_of(tmp_path / "there" / "zero"))]
    made.rename(tmp_path / "x.virtual.json")
    ckptconv.convert(tmp_path / "x.virtual.json", tmp_path / "other.safetensors")
    assert (tmp_path / "out.safetensors").read_bytes() == (tmp_path / "other.safetensors").read_bytes()


def test_it_may_name_what_lies_in_a_directory_beside_its_own(zero: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for name in ("step_1", "step_2"):
        (run / name).mkdir(parents=True)
    zero.rename(run / "step_2" / "zero")
    made = described(run / "step_2" / "zero", run / "step_1" / "x.virtual.json")
    ckptconv.convert(made, tmp_path / "one.safetensors")
    tag = tag_of(run / "step_2" / "zero")
    made.write_text(bound(made.read_text(), str(run / "step_1"), str(run)))
    assert json.loads(made.read_text())["roots"] == [f"../{tag.relative_to(run)}"]
    moved = run.rename(tmp_path / "moved")
    (tmp_path / "link").symlink_to(moved / "step_1")
    for number, place in enumerate((moved / "step_1", tmp_path / "link")):
        ckptconv.convert(place / "x.virtual.json", tmp_path / f"{number}.safetensors", **VERIFIED)
        assert (tmp_path / f"{number}.safetensors").read_bytes() == (tmp_path / "one.safetensors").read_bytes()
    # What lies elsewhere keeps its name.
    text = (moved / "step_1" / "x.virtual.json").read_text()
    assert bound(text, str(moved / "step_1"), str(tmp_path / "elsewhere")) == text


@FAR
def test_sources_on_a_store(zero: Path, tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    for name, data in contents(zero).items():
        store.pipe_file(f"/virtual/zero/{name}", data)
    ckptconv.convert("memory://virtual/zero", tmp_path / "x.virtual.json")
    ckptconv.convert("memory://virtual/zero", "memory://virtual/x.virtual.json")
    ckptconv.convert(zero, tmp_path / "plain.safetensors")
    for place in (str(tmp_path / "x.virtual.json"), "memory://virtual/x.virtual.json"):
        ckptconv.convert(place, tmp_path / "out.safetensors")
        assert (tmp_path / "out.safetensors").read_bytes() == (tmp_path / "plain.safetensors").read_bytes()
    with pytest.raises(UsageError, match="can refer only to files below its own directory"):
        ckptconv.convert(zero, "memory://virtual/other.virtual.json")
    store.rm("/virtual", recursive=True)


def test_what_makes_no_sense_is_refused(zero: Path, tmp_path: Path) -> None:
    for output, options, message in (
        ("x.json", (), "is not a name for a virtual checkpoint"),
        ("x.virtual.json", (*VERIFY,), "--verify has no effect: a virtual checkpoint contains no data"),
        *([("x.virtual.json", ("--part", "0/2"), "--part has no effect: a virtual")] if "part" in OPTIONS else []),
        ("x.virtual.json", ("--optimizer", tmp_path / "y.virtual.json"), "optimizer states are written as safetensors"),
    ):
        command = "zero-to-fp32" if options else "virtual"
        run = ckptconv_here(command, zero, tmp_path / output, *options)
        assert run.code == 2, run
        assert message in run.err
    assert [path.name for path in tmp_path.iterdir()] == ["zero"]


def test_source_and_output_that_are_swapped_are_put_in_order(zero: Path, tmp_path: Path) -> None:
    described = tmp_path / "x.virtual.json"
    done(ckptconv_here("virtual", zero, described))
    ckptconv_here("virtual", described, zero).refused(
        2, f"SOURCE comes before OUTPUT: ckptconv virtual {zero} {described}"
    )


SAID = {"touched": "its modification time is different.", "cut": "it had ", "gone": "it no longer exists."}


@pytest.mark.parametrize("how", SAID)
def test_a_source_that_has_changed_is_named(how: str, zero: Path, tmp_path: Path) -> None:
    made = described(zero, tmp_path / "x.virtual.json")
    changed = next(zero.rglob("*rank_2*optim_states.pt"))
    if how == "touched":
        os.utime(changed, ns=(1, 1))
    elif how == "cut":
        os.truncate(changed, 100)
    else:
        changed.unlink()
    for words in (("pt2safetensors", made, tmp_path / "out.safetensors"), *((each, made) for each in looking())):
        ckptconv_here(*words).refused(4, f"{changed} has changed since {made} was written: {SAID[how]}")
    assert not (tmp_path / "out.safetensors").exists()


# ------------------------------------------------------------------------------------------------- damaged and hostile

Change = Callable[[dict[str, Any]], object]


def first(key: str, **values: Any) -> Change:
    """Set `values` in the first entry of `key`."""
    return lambda told: told[key][0].update(values)


def outside(name: str) -> Change:
    return first("sources", name=name)


HEADER = '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
CHANGES: dict[str, tuple[Change, type[CkptconvError], str]] = {
    "no version": (lambda told: told.pop("ckptconv.virtual"), CorruptError, "does not begin with"),
    "a later version": (
        lambda told: told.update({"ckptconv.virtual": 2}),
        UnsupportedError,
        "a newer version of ckptconv",
    ),
    "no files": (lambda told: told.pop("files"), CorruptError, "'files' is not a list"),
    "a file that is none": (lambda told: told["files"].append(3), CorruptError, "a file is not an object: 3"),
    "a file twice": (lambda told: told["files"].append(told["files"][0]), CorruptError, "twice"),
    "a name with a path": (first("files", name="../model.safetensors"), UnsafeError, "a place outside"),
    "an absolute name": (first("files", name="/x.safetensors"), UnsafeError, "absolute"),
    "a size": (first("files", size=9), CorruptError, "bytes of data: the file was cut short"),
    "no header": (first("files", header="x"), CorruptError, "its header is invalid"),
    "another header": (first("files", header=HEADER, size=8 + len(HEADER) + 4), CorruptError, "1 tensors in its head"),
    "tensors that are missing": (lambda told: told["files"][0]["tensors"].pop(), CorruptError, "expressions"),
    "tensors in another order": (lambda told: told["files"][0]["tensors"].reverse(), CorruptError, "its expression"),
    "a source outside": (outside("../secret"), UnsafeError, "it refers to a place outside"),
    "an absolute source": (outside("/etc/passwd"), UnsafeError, "it is an absolute path"),
    "a URL as a source": (outside("s3://x/y"), UnsafeError, "it is a URL"),
    "another source": (outside("nothing"), CorruptError, "it no longer exists"),
    "a directory": (outside("zero"), CorruptError, "it no longer exists"),
    "another root": (first("sources", root=7), CorruptError, "refers to root 7"),
    "a relative root": (lambda told: told.update(roots=["zero"]), UnsafeError, "neither a URL, nor an absolute path"),
    "a root far above": (lambda told: told.update(roots=["../../etc"]), UnsafeError, "it has parts or characters"),
    "a root that leads out": (lambda told: told.update(roots=["../a/../../etc"]), UnsafeError, "it has parts or char"),
    "a root that climbs": (lambda told: told.update(roots=["/a/../etc"]), UnsafeError, "parts or characters"),
    "a root of two lines": (lambda told: told.update(roots=["/a\n/etc"]), UnsafeError, "parts or characters"),
    "a chained root": (lambda told: told.update(roots=["zip://x::s3://a/b"]), UnsafeError, "not a plain URL"),
    "a root with a password": (lambda told: told.update(roots=["sftp://me:pw@host/x"]), UnsafeError, "a password"),
    "a root of no server": (lambda told: told.update(roots=["http:///x"]), UnsafeError, "not a plain URL"),
    "a root of a directory in a directory": (
        lambda told: told.update(roots=["dir://x"]),
        UnsafeError,
        "not a plain URL",
    ),
    "a root with a query": (lambda told: told.update(roots=["http://x/y?z"]), UnsafeError, "not a plain URL"),
    "a source in itself": (
        lambda told: told["sources"].append(
            {"in": 5, "offset": 0, "nbytes": 4, "crc": None, "method": "deflate", "name": "x", "size": 4}
        ),
        CorruptError,
        "does not refer to a source before it",
    ),
    "a bomb": (
        lambda told: told["sources"].append(
            {"in": 0, "offset": 0, "nbytes": 4, "crc": None, "method": "deflate", "name": "x", "size": 1 << 50}
        ),
        CorruptError,
        "deflate cannot produce more",
    ),
    "lists of text": (lambda told: told.update(lists=[["a"]]), CorruptError, "is not a count"),
    "an endless tensor": (
        lambda told: told["files"].append(
            {
                "name": "x.safetensors",
                "size": 1 << 70,
                "header": HEADER.replace("[1]", "[1152921504606846976]").replace("4]", "4611686018427387904]"),
                "tensors": [["zeros", "float32", [1 << 60]]],
            }
        ),
        CorruptError,
        "is not a count",
    ),
}


@every("case", CHANGES)
def test_a_damaged_or_hostile_description_is_refused(case: str, zero: Path, tmp_path: Path) -> None:
    change, kind, message = CHANGES[case]
    made = described(zero, zero.with_name(f"{case}.virtual.json"))
    told = json.loads(made.read_text())
    change(told)
    made.write_text(json.dumps(told))
    run = ckptconv_here("pt2safetensors", made, tmp_path / "out.safetensors", "--json")
    assert (run.code, json.loads(run.out)["error"]["exit_code"]) == (kind.exit_code, kind.exit_code), run
    assert message in run.err
    assert str(made) in run.err or "deflate" in run.err
    assert not (tmp_path / "out.safetensors").exists()


@every("text", ["", "{", "[]", "3", '{"ckptconv.virtual": 1}', '{"ckptconv.virtual": 1, "x": NaN}'])
def test_what_is_no_description_is_corrupt(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.virtual.json").write_text(text)
    ckptconv_here("convert", tmp_path / "x.virtual.json", tmp_path / "out").refused(4)


def test_deep_nesting_is_corrupt(zero: Path, tmp_path: Path) -> None:
    made = described(zero, tmp_path / "x.virtual.json")
    text = made.read_text()
    made.write_text(text.replace('"roots":["."]', f'"roots":{"[" * 100_000}{"]" * 100_000}'))
    ckptconv_here("convert", made, tmp_path / "out").refused(4)


@FAR
def test_on_a_store_only_its_own_directory_is_read(zero: Path, tmp_path: Path) -> None:
    made = described(zero, tmp_path / "x.virtual.json")
    told = {**json.loads(made.read_text()), "roots": [str(tmp_path)]}
    fsspec.filesystem("memory").pipe_file("/x.virtual.json", json.dumps(told).encode())
    with pytest.raises(UnsafeError, match="on a store, a virtual checkpoint may refer only to its own directory"):
        open_source("memory://x.virtual.json")


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("mutated")
    shutil.copytree(ZERO / "z3_bf16_w2" / "checkpoint", place / "zero")
    return described(place / "zero", place / "x.virtual.json")


@given(data=st.data())
def test_no_change_of_a_byte_makes_a_traceback(example: Path, data: st.DataObject) -> None:
    raw = bytearray(example.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 2))] = data.draw(st.sampled_from([b"", b"0", b"9", b"[", b'"', b"null"]))
    other = example.with_name("y.virtual.json")
    other.write_bytes(raw)
    problem: CkptconvError | None = None
    try:
        load(Location(str(other)))
    except CkptconvError as error:
        problem = error
    assert problem is None or problem.exit_code in (3, 4, 5)
    assert "\n" not in str(problem)


def test_a_description_of_shards_becomes_shards(tmp_path: Path) -> None:
    torch.save({f"w{number}": torch.full((100,), number) for number in range(5)}, tmp_path / "x.pt")
    described = tmp_path / "x.virtual.json"
    ckptconv.convert(tmp_path / "x.pt", described, max_shard_size="2KB")
    ckptconv.convert(tmp_path / "x.pt", tmp_path / "plain", max_shard_size="2KB", fsync=False)
    ckptconv.convert(described, tmp_path / "out", fsync=False)
    ckptconv.convert(described, tmp_path / "renamed", rename="w=v", fsync=False)
    ckptconv.convert(described, tmp_path / "one.safetensors", fsync=False)
    files = sorted(path.name for path in (tmp_path / "plain").glob("*.safetensors"))
    assert len(files) == 3
    assert sorted(path.name for path in (tmp_path / "renamed").glob("*.safetensors")) == files
    for name in files:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


def test_a_description_that_was_moved_says_so(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    torch.save({"w": torch.ones(3)}, tmp_path / "a/x.pt")
    ckptconv.convert(tmp_path / "a/x.pt", tmp_path / "a/x.virtual.json")
    (tmp_path / "a/x.virtual.json").rename(tmp_path / "b/x.virtual.json")
    with pytest.raises(CorruptError, match=r"b/x\.pt .* it no longer exists\. .* was moved without its source"):
        open_source(tmp_path / "b/x.virtual.json")
