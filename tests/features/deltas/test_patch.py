"""Deltas: what `diff --delta` writes is what slime and sglang read, and `patch` gives every bit back or refuses."""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import signal
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from cells import looking, verify, verifying
from checkpoints import ckptconv_here, contents, done
from effort import examples
from faults import one_bit, spoiled
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from processes import CALLS, before_call, failing, in_child
from reading import state_in
from safetensors.numpy import load_file as load_bytes
from safetensors.numpy import save_file as save_bytes
from safetensors.torch import load_file, save_file

from ckptconv import (
    CorruptError,
    DifferenceError,
    FailedError,
    UnsupportedError,
    UsageError,
    convert,
    diff,
    patch,
)
from ckptconv.cli.registered import COMMANDS
from ckptconv.features.deltas import encoding, overwriting
from ckptconv.features.deltas.kernels import Overlay, Xor
from ckptconv.features.diff import reading
from ckptconv.features.diff.reading import Pair
from ckptconv.formats.detect import open_source
from ckptconv.options.table import OPTIONS
from ckptconv.outputs.kinds import CHECKPOINTS, NAMED
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.lazy import Zeros

INDEX = "model.safetensors.index.json"
ENCODINGS = ("xor", "overwrite")
Tensors = dict[str, torch.Tensor]


@pytest.fixture(params=ENCODINGS)
def encoded_as(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def model(seed: int = 0) -> Tensors:
    made = torch.Generator().manual_seed(seed)
    return {
        "a.weight": torch.randn(40, 33, generator=made).bfloat16(),
        "a.bias": torch.randn(33, generator=made),
        "b.weight": torch.randn(7, 5, generator=made).half(),
        "steps": torch.tensor(3),
        "nothing": torch.zeros(0, 4),
    }


def stepped(before: Tensors, seed: int, share: float = 0.3) -> Tensors:
    """The weights after a step that changes some elements of some tensors."""
    made = torch.Generator().manual_seed(seed)
    after = {name: tensor.clone() for name, tensor in before.items()}
    for name in ("a.weight", "b.weight"):
        chosen = torch.rand(after[name].shape, generator=made) < share
        after[name][chosen] += 1
    after["steps"] += 1
    return after


def saved(tensors: Tensors, path: Path) -> Path:
    save_file(tensors, path)
    return path


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and torch.equal(one[name].view(-1).view(torch.uint8), other[name].view(-1).view(torch.uint8))
        for name in one
    )


def read_as_slime_does(base: Tensors, directory: Path) -> Tensors:
    """The weights that a delta makes of `base`, read by its published layout and nothing else."""
    index = json.loads((directory / INDEX).read_text())
    told = index["metadata"]
    assert told["compression_format"] == "zstd"
    assert told["checksum_format"] == "adler32"
    made = {name: tensor.clone() for name, tensor in base.items()}
    for file in set(index["weight_map"].values()):
        raw = (directory / file).read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        sums = json.loads(raw[8 : 8 + length])["__metadata__"]
        stored = load_bytes(directory / file)
        assert stored.keys() == sums.keys() == {name for name, at in index["weight_map"].items() if at == file}
        for name, payload in stored.items():
            assert payload.dtype == np.uint8
            # This needs the size in the frame's header.
            change = np.frombuffer(zstandard.ZstdDecompressor().decompress(payload.tobytes()), "u1")
            new = np.frombuffer(made[name].reshape(-1).view(torch.uint8).numpy().tobytes(), "u1").copy()
            if told["delta_encoding"] == "xor":
                new ^= change
            else:
                count = int(change[:4].view("<u4")[0])
                positions, values = change[4 : 4 + 4 * count].view("<u4"), change[4 + 4 * count :]
                assert len(values) == count
                new[positions] = values
            assert sums[name] == f"{zlib.adler32(new.tobytes()):08x}"
            made[name] = torch.from_numpy(new).view(made[name].dtype).reshape(made[name].shape)
    return made


# --------------------------------------------------------------------------------------------------- there and back


def test_a_delta_is_in_the_layout_that_slime_and_sglang_read(tmp_path: Path, encoded_as: str) -> None:
    before, after = model(), stepped(model(), 1)
    a, b = saved(before, tmp_path / "a.safetensors"), saved(after, tmp_path / "b.safetensors")
    found = diff(a, b, delta=tmp_path / "weight_v000007", delta_encoding=encoded_as, delta_version=7)
    index = json.loads((tmp_path / "weight_v000007" / INDEX).read_text())
    assert index == {
        "metadata": {
            "version": "000007",
            "base_version": "000006",
            "delta_encoding": encoded_as,
            "compression_format": "zstd",
            "checksum_format": "adler32",
        },
        "weight_map": dict.fromkeys(("a.weight", "b.weight", "steps"), "model-00000-of-00001.safetensors"),
    }
    assert same(read_as_slime_does(before, tmp_path / "weight_v000007"), after)
    assert found.delta is not None
    assert (found.delta.tensors, found.delta.version, found.delta.base_version) == (3, 7, 6)


@examples(40, *HealthCheck)
@given(
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=4),
    share=st.sampled_from([0.0, 0.001, 0.1, 1.0]),
    encoded_as=st.sampled_from(("auto", *ENCODINGS)),
    step=st.sampled_from([16, 256, 1 << 18]),
    seed=st.integers(0, 1 << 32),
)
def test_any_bits_come_back(
    sizes: list[int], share: float, encoded_as: str, step: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place, made = tmp_path_factory.mktemp("step"), np.random.default_rng(seed)
    before = {f"t{number}": made.integers(0, 256, size, "u1") for number, size in enumerate(sizes)}
    after = {
        name: np.where(made.random(len(old)) < share, made.integers(0, 256, len(old), "u1"), old)
        for name, old in before.items()
    }
    save_bytes(before, place / "a.safetensors")
    save_bytes(after, place / "b.safetensors")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(reading, "UNIT", step)
        monkeypatch.setattr(encoding, "COLLECTED", step)
        monkeypatch.setattr(overwriting, "BLOCK", step)
        diff(place / "a.safetensors", place / "b.safetensors", delta=place / "delta", delta_encoding=encoded_as)
        patch(place / "a.safetensors", place / "delta", place / "c.safetensors")
    got = load_bytes(place / "c.safetensors")
    assert {name: tensor.tobytes() for name, tensor in got.items()} == {
        name: tensor.tobytes() for name, tensor in after.items()
    }


def written_as_slime_does(before: Tensors, after: Tensors, directory: Path, encoded_as: str) -> None:
    """A delta of two ranks, by the published layout."""
    directory.mkdir()
    ranks = [["a.weight"], ["steps", "b.weight"]]
    files = [f"model-{rank:05d}-of-00002.safetensors" for rank in range(2)]
    for names, file in zip(ranks, files, strict=True):
        payloads, sums = {}, {}
        for name in names:
            old, new = (
                np.frombuffer(side[name].reshape(-1).view(torch.uint8).numpy().tobytes(), "u1")
                for side in (before, after)
            )
            positions = np.flatnonzero(old != new).astype("<u4")
            overwrite = numbers(len(positions)) + positions.tobytes() + new[positions].tobytes()
            change = (old ^ new).tobytes() if encoded_as == "xor" else overwrite
            payloads[name] = np.frombuffer(zstandard.ZstdCompressor(level=1).compress(change), "u1")
            sums[name] = f"{zlib.adler32(new.tobytes()):08x}"
        save_bytes(payloads, directory / file, sums)
    told = {
        "version": "000001",
        "base_version": "000000",
        "delta_encoding": encoded_as,
        "compression_format": "zstd",
        "checksum_format": "adler32",
    }
    index = {name: file for names, file in zip(ranks, files, strict=True) for name in names}
    (directory / INDEX).write_text(json.dumps({"metadata": told, "weight_map": index}))


def test_a_delta_of_slime_is_applied(tmp_path: Path, encoded_as: str) -> None:
    before, after = model(), stepped(model(), 1)
    written_as_slime_does(before, after, tmp_path / "d", encoded_as)
    patch(saved(before, tmp_path / "a.safetensors"), tmp_path / "d", tmp_path / "b")
    assert same(load_file(tmp_path / "b" / "model.safetensors"), after)
    assert json.loads((tmp_path / "b" / ".ckptconv-manifest.json").read_text())["deltas"] == ["../d"]


def test_a_delta_of_what_a_cast_gives_is_applied_to_what_is_cast(tmp_path: Path, encoded_as: str) -> None:
    """Transposed tensors too, which are read in another order than they are stored."""
    made = torch.Generator().manual_seed(4)
    before = {"w": torch.randn(50, 60, generator=made).t(), "v": torch.randn(9, generator=made)}
    after = {
        name: tensor * torch.linspace(0.99, 1.01, tensor.shape[0]).view(-1, *[1] * (tensor.dim() - 1))
        for name, tensor in before.items()
    }
    torch.save(before, tmp_path / "a.pt")
    torch.save(after, tmp_path / "b.pt")
    diff(tmp_path / "a.pt", tmp_path / "b.pt", dtype="bf16", delta=tmp_path / "d", delta_encoding=encoded_as)
    patch(tmp_path / "a.pt", tmp_path / "d", tmp_path / "c.safetensors", dtype="bf16")
    assert same(
        load_file(tmp_path / "c.safetensors"), {name: tensor.bfloat16().contiguous() for name, tensor in after.items()}
    )


def test_a_chain_of_deltas_is_applied_in_its_order(tmp_path: Path) -> None:
    steps = [model()]
    for number in range(1, 5):
        steps.append(stepped(steps[-1], number))
    paths = [saved(each, tmp_path / f"{number}.safetensors") for number, each in enumerate(steps)]
    deltas = [
        diff(one, other, delta=tmp_path / f"d{number}", delta_version=number, delta_encoding=ENCODINGS[number in (2,)])
        for number, (one, other) in enumerate(itertools.pairwise(paths), 1)
    ]
    names = [each.delta.path for each in deltas if each.delta]
    for count in range(1, 5):
        patch(paths[0], names[:count], tmp_path / "made.safetensors")
        assert same(load_file(tmp_path / "made.safetensors"), steps[count])
    for wrong in (names[::-1], [names[0], names[2]]):
        with pytest.raises(UsageError, match="changes version"):
            patch(paths[0], wrong, tmp_path / "wrong.safetensors")
    with pytest.raises(CorruptError, match="the delta was already applied"):
        patch(paths[1], names[:1], tmp_path / "wrong.safetensors")
    assert not (tmp_path / "wrong.safetensors").exists()


def patched_twice(directory: Path, encoded_as: str) -> tuple[Path, Path]:
    """A base, and an output in which two deltas, d1 and d2 in `directory`, are applied to it."""
    steps = [model(), stepped(model(), 1)]
    steps.append(stepped(steps[-1], 2))
    paths = [saved(each, directory / f"{number}.safetensors") for number, each in enumerate(steps)]
    deltas = [directory / "d1", directory / "d2"]
    for number, (one, other) in enumerate(itertools.pairwise(paths), 1):
        diff(one, other, delta=deltas[number - 1], delta_version=number, delta_encoding=encoded_as)
    patch(paths[0], deltas, directory / "out", max_shard_size=300)
    return paths[0], directory / "out"


@verifying
def test_what_was_patched_is_verified_with_the_deltas_that_its_manifest_names(tmp_path: Path, encoded_as: str) -> None:
    base, output = patched_twice(tmp_path, encoded_as)
    found = verify(base, output)
    assert found.deltas == [str(tmp_path / "d1"), str(tmp_path / "d2")]
    assert found.bytes_compared == sum(tensor.nbytes for tensor in model().values())
    told = ckptconv_here("verify", base, output)
    assert told.code == 0
    assert "2 deltas applied" in told.out
    with pytest.raises(DifferenceError):
        verify(tmp_path / "2.safetensors", output)
    shard = next(path for path in output.iterdir() if path.name.startswith("model-00001"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DifferenceError, match=r"'a\.weight' differs"):
        verify(base, output)


@verifying
@pytest.mark.parametrize("deltas", [["../d1"], ["../d2"], ["../d1", "../d2", "../d3"], None])
def test_the_deltas_that_a_manifest_names_must_be_those_that_were_applied(
    tmp_path: Path, deltas: list[str] | None
) -> None:
    base, output = patched_twice(tmp_path, "overwrite")
    # Another delta that changes nothing more: the tensors alone do not tell.
    diff(tmp_path / "2.safetensors", tmp_path / "2.safetensors", delta=tmp_path / "d3", delta_version=3)
    manifest = output / ".ckptconv-manifest.json"
    told = json.loads(manifest.read_text())
    told["deltas"] = deltas
    if deltas is None:
        del told["deltas"]
    manifest.write_text(json.dumps(told))
    with pytest.raises(DifferenceError):
        verify(base, output)


@verifying
def test_deltas_that_are_gone_or_not_to_be_found_are_said(tmp_path: Path) -> None:
    base, output = patched_twice(tmp_path, "xor")
    (tmp_path / "d1").rename(tmp_path / "moved")
    told = ckptconv_here("verify", base, output)
    assert told.refused(2, "was written by `ckptconv patch`, but not all of its deltas can be read")
    manifest = output / ".ckptconv-manifest.json"
    manifest.write_text(manifest.read_text().replace('"../d1"', '"http://localhost/d1"'))
    assert ckptconv_here("verify", base, output).refused(2, "no usable path to them")


@pytest.mark.parametrize("alternates", [False, True])
def test_a_chain_may_be_long(tmp_path: Path, encoded_as: str, alternates: bool) -> None:
    count = 30 if alternates else 60
    before, names = model(), []
    after = stepped(before, 1)
    encodings = ENCODINGS if alternates else (encoded_as,) * 2
    one, other = saved(before, tmp_path / "a.safetensors"), saved(after, tmp_path / "b.safetensors")
    places = [tmp_path / f"{turn}" for turn in range(2)]
    diff(one, other, delta=places[0], delta_encoding=encodings[0])
    diff(other, one, delta=places[1], delta_encoding=encodings[1])
    for number in range(count + 1):
        place = tmp_path / f"d{number}"
        shutil.copytree(places[number % 2], place)
        edited(
            lambda index, number=number: index["metadata"].update(version=f"{number + 1}", base_version=f"{number}")
        )(place)
        names.append(place)
    report = patch(one, names, tmp_path / "c.safetensors", jobs=1)
    assert report.deltas == [str(name) for name in names]
    assert same(load_file(tmp_path / "c.safetensors"), after)


def test_a_chain_that_alternates_is_applied_in_parts(pair: tuple[Path, Path]) -> None:
    deltas = [delta_of(pair, each) for each in ENCODINGS]
    for delta in deltas:
        edited(lambda index: index["metadata"].update(version="1", base_version="1"))(delta)
    assert ckptconv_here("patch", pair[0], *deltas * 20, pair[0].parent / "c").refused(2, "changes 39 times")


def test_a_step_that_changes_one_element_in_a_hundred_takes_a_few_percent(tmp_path: Path, encoded_as: str) -> None:
    made = torch.Generator().manual_seed(3)
    before = {"w": torch.randn(600, 700, generator=made).bfloat16()}
    chosen = torch.rand(600, 700, generator=made) < 0.01
    after = {"w": torch.where(chosen, before["w"] * 1.02, before["w"])}
    a, b = saved(before, tmp_path / "a.safetensors"), saved(after, tmp_path / "b.safetensors")
    found = diff(a, b, delta=tmp_path / "d", delta_encoding=encoded_as)
    assert found.delta is not None
    assert 0 < found.delta.bytes < 0.04 * a.stat().st_size
    patch(a, tmp_path / "d", tmp_path / "c.safetensors")
    assert same(load_file(tmp_path / "c.safetensors"), after)


def test_the_output_is_what_a_conversion_of_the_new_weights_is(tmp_path: Path) -> None:
    """Names, shards and index, of a base in another format."""
    before, after = model(), stepped(model(), 1)
    torch.save(before, tmp_path / "a.pt")
    torch.save(after, tmp_path / "b.pt")
    ckptconv_here("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--delta", tmp_path / "d")
    patch(tmp_path / "a.pt", tmp_path / "d", tmp_path / "patched", max_shard_size=2000)
    convert(tmp_path / "b.pt", tmp_path / "wanted", max_shard_size=2000)
    made, wanted = (
        {name: data for name, data in contents(tmp_path / each).items() if name[0] != "."}
        for each in ("patched", "wanted")
    )
    assert len(made) > 2
    assert made == wanted


def test_tied_names_have_one_change(tmp_path: Path) -> None:
    for name, weight in (("a", torch.zeros(20)), ("b", torch.ones(20))):
        torch.save({"embedding": weight, "head": weight}, tmp_path / f"{name}.pt")
    found = diff(tmp_path / "a.pt", tmp_path / "b.pt", delta=tmp_path / "d")
    assert found.delta is not None
    assert found.delta.tensors == 1
    patch(tmp_path / "a.pt", tmp_path / "d", tmp_path / "c")
    assert diff(tmp_path / "c", tmp_path / "b.pt").equal
    # The names of what a conversion writes are those of the delta.
    convert(tmp_path / "a.pt", tmp_path / "a")
    diff(tmp_path / "a", tmp_path / "b.pt", delta=tmp_path / "d")
    assert json.loads((tmp_path / "d" / INDEX).read_text())["weight_map"].keys() == {"embedding"}
    assert load_file(tmp_path / "a" / "model.safetensors").keys() == {"embedding"}


def test_a_delta_that_unties_names_is_for_a_base_without_ties(tmp_path: Path) -> None:
    weight = torch.zeros(20)
    torch.save({"embedding": weight, "head": weight}, tmp_path / "tied.pt")
    torch.save({"embedding": weight.clone(), "head": weight.clone()}, tmp_path / "apart.pt")
    torch.save({"embedding": torch.ones(20), "head": weight + 2}, tmp_path / "b.pt")
    diff(tmp_path / "tied.pt", tmp_path / "b.pt", delta=tmp_path / "d")
    patch(tmp_path / "apart.pt", tmp_path / "d", tmp_path / "c")
    assert diff(tmp_path / "c", tmp_path / "b.pt").equal
    with pytest.raises(CorruptError, match="ties 'head' to 'embedding'"):
        patch(tmp_path / "tied.pt", tmp_path / "d", tmp_path / "e")


def test_checkpoints_that_are_equal_make_an_empty_delta(tmp_path: Path) -> None:
    a = saved(model(), tmp_path / "a.safetensors")
    assert ckptconv_here("diff", a, a, "--delta", tmp_path / "d", "--json").json["delta"]["tensors"] == 0
    assert json.loads((tmp_path / "d" / INDEX).read_text())["weight_map"] == {}
    patch(a, tmp_path / "d", tmp_path / "b.safetensors")
    assert same(load_file(tmp_path / "b.safetensors"), model())


def test_the_same_checkpoints_make_the_same_delta(tmp_path: Path, encoded_as: str) -> None:
    a, b = saved(model(), tmp_path / "a.safetensors"), saved(stepped(model(), 1), tmp_path / "b.safetensors")
    for name, jobs in (("one", 1), ("two", 3)):
        diff(a, b, delta=tmp_path / name, delta_encoding=encoded_as, jobs=jobs)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return saved(model(), tmp_path / "a.safetensors"), saved(stepped(model(), 1), tmp_path / "b.safetensors")


def test_a_delta_tells_nothing_but_new_values(tmp_path: Path) -> None:
    a = saved(model(), tmp_path / "a.safetensors")
    others: dict[str, Callable[[Tensors], object]] = {
        "more": lambda tensors: tensors.update(more=torch.ones(2)),
        "a.bias": lambda tensors: tensors.pop("a.bias"),
        "a.weight": lambda tensors: tensors.update({"a.weight": torch.zeros(40, 33).half()}),
        "b.weight": lambda tensors: tensors.update({"b.weight": torch.zeros(5, 7).half()}),
    }
    for name, change in others.items():
        tensors = model()
        change(tensors)
        b = saved(tensors, tmp_path / "b.safetensors")
        with pytest.raises(UnsupportedError, match=name):
            diff(a, b, delta=tmp_path / "d")
        assert not (tmp_path / "d").exists()


def test_a_delta_is_shown_and_never_taken_for_a_checkpoint(
    pair: tuple[Path, Path], tmp_path: Path, encoded_as: str
) -> None:
    made, out = delta_of(pair, encoded_as), tmp_path / "made"
    for command in looking():
        assert "ckptconv patch BASE" in " ".join(ckptconv_here(command, made, "--json").json["warnings"]), command
    taken: list[Callable[[], object]] = [
        lambda: convert(made, out),
        *([lambda: convert(made, tmp_path / "made.pt")] if "pt" in NAMED else []),
        *(functools.partial(convert, made, out, to=to) for to in CHECKPOINTS),
        *([lambda: convert(pair[0], out, like=made)] if "like" in OPTIONS else []),
        lambda: patch(made, made, out),
        lambda: diff(made, pair[0]),
        lambda: open_source(made).check_weights(),
    ]
    for take in taken:
        with pytest.raises(UnsupportedError, match=r"differences, not weights\. .*ckptconv patch BASE"):
            take()
    assert not out.exists()


def test_positions_are_counted_in_four_bytes() -> None:
    largest, larger = (Zeros(DTYPES["uint8"], (size,)) for size in ((1 << 32) - 1, 1 << 32))
    for encoded_as, tensor in (("overwrite", largest), ("xor", larger), ("auto", larger)):
        with encoding.Encoder(encoded_as, "adler32", "") as encoder:
            encoder.check({"w": Pair(tensor, tensor)})
    with (
        encoding.Encoder("overwrite", "adler32", "") as encoder,
        pytest.raises(UnsupportedError, match=r"'w' has 4294967296 bytes.*--delta-encoding xor"),
    ):
        encoder.check({"w": Pair(larger, larger)})


@pytest.mark.parametrize(("changes", "smaller"), [(20, "overwrite"), (40_000, "xor")])
def test_the_smaller_encoding_is_taken(changes: int, smaller: str, tmp_path: Path) -> None:
    made = np.random.default_rng(0)
    before = made.integers(0, 256, 1 << 21, "u1")
    after = before.copy()
    after[made.integers(0, len(after), changes)] += 1
    paths = [tmp_path / name for name in ("a.safetensors", "b.safetensors")]
    for path, tensor in zip(paths, (before, after), strict=True):
        save_bytes({"w": tensor, "same": before}, path)
    deltas = [diff(*paths, delta=tmp_path / each, delta_encoding=each).delta for each in ("auto", *ENCODINGS)]
    sizes = {each.encoding: each.bytes for each in deltas[1:] if each}
    assert deltas[0]
    assert deltas[0].encoding == smaller == min(sizes, key=lambda each: sizes[each])
    assert deltas[0].bytes == sizes[smaller]


def test_a_delta_that_is_larger_than_what_it_changes_is_told(tmp_path: Path) -> None:
    made = np.random.default_rng(0)
    for name in ("a.safetensors", "b.safetensors"):
        save_bytes({"w": made.integers(0, 256, 1 << 14, "u1")}, tmp_path / name)
    paths = [tmp_path / name for name in ("a.safetensors", "b.safetensors")]
    found = diff(*paths, delta=tmp_path / "delta", delta_encoding="overwrite")
    assert "but the tensors that it changes have only 16384" in found.warnings[-1]
    assert "--delta-encoding auto" in found.warnings[-1]
    found = diff(*paths, delta=tmp_path / "auto")
    assert "but the tensors that it changes have only 16384" in found.warnings[-1]
    assert "--delta-encoding" not in found.warnings[-1]


def test_a_small_change_in_a_large_checkpoint_is_a_delta_that_is_worth_it(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.safetensors", "b.safetensors")]
    for number, path in enumerate(paths):
        save_bytes({"w": np.full(3, number, "u1"), "same": np.zeros(1 << 14, "u1")}, path)
    found = diff(*paths, delta=tmp_path / "delta")
    assert found.delta
    assert found.delta.bytes > 3
    assert found.warnings == []


def test_words_that_lead_to_a_delta(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b")]
    for number, path in enumerate(paths):
        path.mkdir()
        save_bytes({"w": np.full(5, number, "u1")}, path / "model-00001-of-00001.safetensors")
        index = {"metadata": {"total_size": 5}, "weight_map": {"w": "model-00001-of-00001.safetensors"}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    delta, output = tmp_path / "delta", tmp_path / "out"
    ckptconv_here("diff", *paths, delta).refused(2, f"Did you mean --delta {delta}?")
    ckptconv_here("diff", *paths, "--output", delta).refused(2, "--delta DIR writes the difference.")
    ckptconv_here("patch", *paths, output).refused(2, f"`ckptconv diff BASE {paths[1]} --delta DIR` writes a delta")
    assert ckptconv_here("diff", *paths, "--delta", delta).code == 0
    assert ckptconv_here("patch", paths[0], delta, output).code == 0


def test_deltas_of_one_number_are_told_how_to_number_them(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.safetensors" for number in range(3)]
    for number, path in enumerate(paths):
        save_bytes({"w": np.full(5, number, "u1")}, path)
    run = ckptconv_here("diff", *paths[:2], "--delta", tmp_path / "d1")
    assert "changes version 000000 into 000001" in run.err
    diff(*paths[1:], delta=tmp_path / "d2")
    chain = (paths[0], tmp_path / "d1", tmp_path / "d2", tmp_path / "out.safetensors")
    run = ckptconv_here("patch", *chain)
    assert run.code == 2
    assert "write the later deltas again" in run.err
    diff(*paths[1:], delta=tmp_path / "d2", delta_version=2)
    assert ckptconv_here("patch", *chain).code == 0


def test_a_delta_that_is_replaced_is_said(pair: tuple[Path, Path], tmp_path: Path) -> None:
    delta = tmp_path / "weight_v000001"
    first = ckptconv_here("diff", *pair, "--delta", delta, "--json")
    assert first.json["warnings"] == []
    replaced = f"This replaces files in {delta}, an earlier output of ckptconv."
    assert ckptconv_here("diff", *pair, "--delta", delta, "--json").json["warnings"] == [replaced]
    # The number in the name was not counted up: a delta of a chain is lost.
    run = ckptconv_here("diff", *pair, "--delta", delta, "--delta-version", "2", "--quiet")
    assert replaced in run.err
    assert "The delta that was there changed version 000000 into 000001." in run.err


def test_each_side_is_read_once(tmp_path: Path) -> None:
    made = np.random.default_rng(0)
    before = made.integers(0, 256, (8, 1 << 18), "u1")
    after = before.copy()
    after[:, 0] += 1
    paths = [tmp_path / name for name in ("a.safetensors", "b.safetensors")]
    for path, tensor in zip(paths, (before, after), strict=True):
        save_bytes({f"w{index}": row for index, row in enumerate(tensor)}, path)
    found = diff(*paths, delta=tmp_path / "delta")
    assert 2 * before.nbytes <= found.bytes_read < 2 * before.nbytes + 10_000


def test_a_delta_may_be_called_delta(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    assert ckptconv_here("diff", *pair, "--delta", tmp_path / "v2.delta").code == 0
    assert (tmp_path / "v2.delta" / "model.safetensors.index.json").exists()
    assert ckptconv_here("patch", pair[0], tmp_path / "v2.delta", tmp_path / "c.safetensors").code == 0


def test_options_that_contradict_a_delta_are_refused(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    for options in (["--rtol", "0"], ["--with-states"]):
        assert ckptconv_here("diff", *pair, "--delta", tmp_path / "d", *options).refused(2, "--delta", options[0])
    (tmp_path / "d.delta").write_text("mine")
    assert ckptconv_here("diff", *pair, "--delta", tmp_path / "d.safetensors").refused(2, "a delta must be a directory")
    assert ckptconv_here("diff", *pair, "--delta", tmp_path / "d.delta").refused(2, "a delta must be a directory")
    assert ckptconv_here("patch", pair[0], tmp_path / "c.safetensors").refused(2, "at least one DELTA")
    done(ckptconv_here("diff", *pair, "--delta", tmp_path / "d"))
    told = ckptconv_here("patch", pair[0], tmp_path / "d").refused(2, "OUTPUT is missing")
    assert f"Add it: ckptconv patch {pair[0]} {tmp_path / 'd'} OUTPUT" in told
    said = ckptconv_here("patch", pair[0], tmp_path, tmp_path / "c.safetensors").refused(2, "is not a delta")
    assert ("--minus BASE OUTPUT --weights 2,1" in said) == ("average" in COMMANDS)
    assert ckptconv_here("patch", pair[0], tmp_path / "none", tmp_path / "c").refused(2, "does not exist")


def delta_of(pair: tuple[Path, Path], encoded_as: str) -> Path:
    place = pair[0].parent / f"delta-{encoded_as}"
    shutil.rmtree(place, ignore_errors=True)
    diff(*pair, delta=place, delta_encoding=encoded_as)
    return place


def rewritten(delta: Path, change: Callable[[dict[str, np.ndarray], dict[str, str]], object]) -> Path:
    """The delta with other payloads and checksums."""
    (path,) = delta.glob("*.safetensors")
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    sums, payloads = json.loads(raw[8 : 8 + length])["__metadata__"], load_bytes(path)
    change(payloads, sums)
    save_bytes(payloads, path, sums)
    return delta


def packed(data: bytes) -> np.ndarray:
    """A frame that does not say how much it holds."""
    return np.frombuffer(zstandard.ZstdCompressor(write_content_size=False).compress(data), "u1")


def numbers(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


HOSTILE: dict[str, tuple[str, bytes, str]] = {
    "less than the tensor": ("xor", bytes(69), "69 bytes"),
    "more than the tensor": ("xor", bytes(71), "more than the 70 bytes"),
    "a bomb": ("xor", bytes(64 << 20), "more than the 70 bytes"),
    "not a count": ("overwrite", b"\1", "is shorter than its count of changes requires"),
    "a count beyond the tensor": ("overwrite", numbers(71, *range(71)) + bytes(71), "overwrites 71 bytes"),
    "the largest count": ("overwrite", numbers(0xFFFFFFFF), "overwrites 4294967295 bytes"),
    "a count of more than there is": ("overwrite", numbers(5, 0, 1), "is shorter than its count of changes requires"),
    "a position beyond the tensor": ("overwrite", numbers(1, 70) + b"x", "byte 70 of a tensor of 70"),
    "a position twice": ("overwrite", numbers(2, 3, 3) + b"xy", "are not in ascending order"),
    "positions that descend": ("overwrite", numbers(2, 4, 3) + b"xy", "are not in ascending order"),
    "values too many": ("overwrite", numbers(1, 3) + b"xy", "longer than the 9 bytes"),
    "an overwriting bomb": ("overwrite", numbers(1, 3) + bytes(64 << 20), "longer than the 9 bytes"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_payload_that_lies_is_refused(case: str, pair: tuple[Path, Path]) -> None:
    encoded_as, payload, said = HOSTILE[case]
    delta = rewritten(delta_of(pair, encoded_as), lambda payloads, _: payloads.update({"b.weight": packed(payload)}))
    run = ckptconv_here("patch", pair[0], delta, pair[0].parent / "out")
    assert run.refused(4, "b.weight", said)
    assert not list(pair[0].parent.glob("out/*"))


def test_a_frame_that_asks_for_too_much_memory_is_refused(tmp_path: Path) -> None:
    """Its content is not what makes it large."""
    a, b = ({"w": torch.full((1 << 18,), fill, dtype=torch.uint8)} for fill in (1, 2))
    delta = delta_of((saved(a, tmp_path / "a.safetensors"), saved(b, tmp_path / "b.safetensors")), "xor")
    parameters = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=False)
    frame = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    payload = np.frombuffer(frame.compress(bytes([3]) * (1 << 18)) + frame.flush(), "u1")
    rewritten(delta, lambda payloads, _: payloads.update(w=payload))
    assert ckptconv_here("patch", tmp_path / "a.safetensors", delta, tmp_path / "out").refused(4, "memory")


def test_a_package_that_is_missing_is_named_first(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    checksum = ("--delta-checksum", "xxh3-128")
    for package, extra, code, options in (("xxhash", "xxhash", 2, checksum), ("zstandard", "zstd", 5, ())):
        monkeypatch.setitem(sys.modules, package, None)
        run = ckptconv_here("diff", *pair, "--delta", pair[0].parent / "d", *options)
        assert run.refused(code, package, f"pip install 'ckptconv[{extra}]'")
        assert not (pair[0].parent / "d").exists()


def test_what_is_no_frame_of_zstandard_is_refused(pair: tuple[Path, Path], encoded_as: str) -> None:
    for noise in (b"no frame at all", packed(bytes(70))[:9].tobytes()):
        delta = rewritten(
            delta_of(pair, encoded_as),
            lambda payloads, _, data=noise: payloads.update({"b.weight": np.frombuffer(data, "u1")}),
        )
        assert ckptconv_here("patch", pair[0], delta, pair[0].parent / "out").code == 4


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(delta: Path) -> None:
        index = json.loads((delta / INDEX).read_text())
        change(index)
        (delta / INDEX).write_text(json.dumps(index))

    return edit


DESCRIPTIONS: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "another encoding": (edited(lambda index: index["metadata"].update(delta_encoding="add")), 5, "'add'"),
    "another compression": (edited(lambda index: index["metadata"].update(compression_format="lz4")), 5, "'lz4'"),
    "another checksum": (edited(lambda index: index["metadata"].update(checksum_format=["md5"])), 5, "checksum_format"),
    "a version that is no number": (edited(lambda index: index["metadata"].update(version="x")), 4, "'x'"),
    "a version of another type": (edited(lambda index: index["metadata"].update(version=7)), 4, "7"),
    "No delta": (edited(lambda index: index["metadata"].pop("base_version")), 2, "is not a delta"),
    "a tensor that no file has": (
        edited(lambda index: index["weight_map"].update(x="model-00000-of-00001.safetensors")),
        4,
        "'x'",
    ),
    "a file that is not there": (
        edited(lambda index: index["weight_map"].update(x="y.safetensors")),
        4,
        "y.safetensors",
    ),
    "a file elsewhere": (edited(lambda index: index["weight_map"].update(x="../a.safetensors")), 3, "a.safetensors"),
    "no index": (lambda delta: (delta / INDEX).unlink(), 2, "is not a delta"),
    "no checksum": (lambda delta: rewritten(delta, lambda _, sums: sums.pop("steps")), 4, "no checksum of 'steps'"),
    "another checksum of a tensor": (
        lambda delta: rewritten(delta, lambda _, sums: sums.update({"steps": "00000001"})),
        4,
        "00000001 was expected",
    ),
    "no bytes": (
        lambda delta: rewritten(delta, lambda payloads, _: payloads.update(steps=np.zeros((2, 2), "u1"))),
        4,
        "a delta must contain bytes",
    ),
}


@pytest.mark.parametrize("case", DESCRIPTIONS)
def test_a_description_that_is_not_sound_is_refused(case: str, pair: tuple[Path, Path]) -> None:
    change, code, said = DESCRIPTIONS[case]
    delta = delta_of(pair, "xor")
    change(delta)
    assert ckptconv_here("patch", pair[0], delta, pair[0].parent / "out.safetensors").refused(code, said)
    assert not (pair[0].parent / "out.safetensors").exists()


def test_a_key_that_the_difference_had_is_named(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 2.0)):
        torch.save({"model": {"w": torch.full((9,), value)}, "step": 1}, tmp_path / f"{name}.pt")
    difference = ("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--key", "model", "--delta", tmp_path / "delta")
    assert ckptconv_here(*difference).code == 0
    words = ("patch", tmp_path / "a.pt", tmp_path / "delta", tmp_path / "out.safetensors")
    assert ckptconv_here(*words).refused(2, "'w'", "but this base has these names below 'model'", "--key model")
    assert ckptconv_here(*words, "--key", "model").code == 0


def test_a_checkpoint_that_is_given_as_a_delta_is_said_to_come_first(pair: tuple[Path, Path], tmp_path: Path) -> None:
    delta, further = delta_of(pair, "xor"), tmp_path / "further"
    words = ("patch", delta, pair[0], tmp_path / "out")
    assert ckptconv_here(*words).refused(2, "is not a delta", "BASE must come before the deltas")
    further.mkdir()
    shutil.copy(pair[0], further / "model.safetensors")
    for words in ((delta, further, tmp_path / "out"), (pair[0], further, delta)):
        ckptconv_here("patch", *words).refused(
            2, f"{further} is not a delta", f"{delta} is a delta. BASE must come before"
        )


def test_a_file_that_is_no_delta_may_be_a_difference_to_add(pair: tuple[Path, Path], tmp_path: Path) -> None:
    run = ckptconv_here("patch", *pair, tmp_path / "out.safetensors")
    assert run.refused(2, f"{pair[1]} is not a delta: it is a file.", "A delta is a directory")
    assert "BASE must come before" not in run.err
    assert ("such as a task vector: `ckptconv average BASE DIFFERENCE" in run.err) == ("average" in COMMANDS)


def test_a_file_of_a_delta_leads_to_its_directory(pair: tuple[Path, Path], tmp_path: Path) -> None:
    delta = delta_of(pair, "xor")
    file = next(delta.glob("*.safetensors"))
    said = f"It is a file of a delta: give the directory, {delta}."
    ckptconv_here("patch", pair[0], file, tmp_path / "out").refused(2, f"{file} is not a delta", said)
    assert ckptconv_here("patch", pair[0], delta, tmp_path / "out").code == 0


@pytest.mark.parametrize("suffix", ["", ".safetensors", *([".virtual.json"] if "virtual" in COMMANDS else [])])
def test_a_base_to_which_the_delta_was_applied_is_told_from_another(
    suffix: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    delta, said = delta_of(pair, "xor"), "the delta was already applied"
    ckptconv_here("patch", pair[1], delta, tmp_path / f"twice{suffix}").refused(4, "does not match", said)
    other = saved({**model(), "a.weight": torch.zeros(40, 33).bfloat16()}, tmp_path / "other.safetensors")
    err = ckptconv_here("patch", other, delta, tmp_path / f"twice{suffix}").refused(
        4, "is not the checkpoint from which"
    )
    assert said not in err


def test_another_base_is_named(pair: tuple[Path, Path], encoded_as: str, tmp_path: Path) -> None:
    delta = delta_of(pair, encoded_as)
    lacking = saved({"a.weight": model()["a.weight"]}, tmp_path / "lacking.safetensors")
    assert ckptconv_here("patch", lacking, delta, tmp_path / "out").refused(4, "another base", "lacks 'b.weight'")
    larger = saved({**model(), "b.weight": torch.zeros(9, 9).half()}, tmp_path / "larger.safetensors")
    run = ckptconv_here("patch", larger, delta, tmp_path / "out")
    assert run.refused(4, "another base", "162 bytes in 'b.weight'") if encoded_as == "xor" else run.code == 4
    other = saved({**model(), "a.weight": torch.zeros(40, 33).bfloat16()}, tmp_path / "other.safetensors")
    assert ckptconv_here("patch", other, delta, tmp_path / "out").refused(4, "'a.weight'", str(delta), str(other))
    assert not list(tmp_path.glob("out/*.safetensors"))


def test_no_input_is_replaced(pair: tuple[Path, Path]) -> None:
    delta = delta_of(pair, "xor")
    before = contents(delta)
    for output in (pair[0], delta):
        assert ckptconv_here("patch", pair[0], delta, output).code == 2
    assert ckptconv_here("diff", *pair, "--delta", pair[0]).code == 2
    assert contents(delta) == before
    assert same(load_file(pair[0]), model())


@pytest.mark.parametrize("kernel", [Xor, Overlay])
def test_a_kernel_that_errs_is_found_by_the_checksum(
    kernel: Any, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    delta = delta_of(pair, "xor" if kernel is Xor else "overwrite")
    spoiled(kernel, one_bit)(monkeypatch)
    with pytest.raises(CorruptError, match="was expected"):
        patch(pair[0], delta, pair[0].parent / "out.safetensors")
    assert not (pair[0].parent / "out.safetensors").exists()


# ------------------------------------------------------------------------------------------------- failures and kills


@pytest.mark.parametrize("command", ["diff", "patch"])
def test_a_kill_leaves_the_whole_output_or_none(command: str, pair: tuple[Path, Path]) -> None:
    made, delta = pair[0].parent / "made", delta_of(pair, "overwrite")
    last = made / (INDEX if command == "diff" else "model.safetensors")

    def run(after: int) -> int:
        def work() -> None:
            before_call(after, lambda: os.kill(os.getpid(), signal.SIGKILL))
            if command == "diff":
                diff(*pair, delta=made)
            else:
                patch(pair[0], delta, made)

        return in_child(work)

    def is_whole() -> bool:
        return same(read_as_slime_does(model(), made) if command == "diff" else load_file(last), stepped(model(), 1))

    after = 1
    while run(after):
        assert not last.exists() or is_whole()
        after += 3
    assert after > 10
    assert is_whole()
    assert {path.name[0] for path in pair[0].parent.iterdir()} == {"a", "b", "d", "m"}


def test_a_full_disk_is_said(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "pwrite" in CALLS
    for after in range(3):
        with failing(monkeypatch, "pwrite", after, OSError(28, "No space left on device")), pytest.raises(FailedError):
            diff(*pair, delta=pair[0].parent / "d")
        assert not list(pair[0].parent.glob("d/*.safetensors"))


# ------------------------------------------------------------------------------------------------------ the command


def test_the_commands_say_what_they_did(pair: tuple[Path, Path]) -> None:
    delta, output = pair[0].parent / "delta", pair[0].parent / "out.safetensors"
    run = ckptconv_here("diff", *pair, "--delta", delta)
    assert run.code == 0
    assert f"wrote {delta} (3 changed tensors" in run.err
    run = ckptconv_here("diff", *pair, "--delta", delta, "--json", "--delta-version", "5")
    assert run.code == 0
    assert run.json["ok"]
    assert not run.json["equal"]
    assert run.json["delta"]["version"] == 5
    assert ckptconv_here("diff", *pair).code == 1
    run = ckptconv_here("patch", pair[0], delta, output, "--json")
    assert run.code == 0
    assert run.json["outputs"][0]["path"] == str(output)
    dry = ckptconv_here("patch", pair[0], delta, pair[0].parent / "dry.safetensors", "--dry-run")
    assert dry.code == 0
    assert not (pair[0].parent / "dry.safetensors").exists()


@pytest.mark.skipif("map" not in OPTIONS, reason="there are no maps")
def test_a_delta_leads_from_a_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be combined with --map"):
        diff("a.pt", "b.pt", delta=tmp_path / "delta", map="my.toml")


def test_values_that_no_delta_changes_are_said_to_be_of_the_base(tmp_path: Path) -> None:
    for step in (20, 30):
        torch.save({"model": {"w": torch.full((3,), float(step))}, "step": step}, tmp_path / f"{step}.pt")
    diff(tmp_path / "20.pt", tmp_path / "30.pt", key=".", delta=tmp_path / "d")
    report = patch(tmp_path / "20.pt", tmp_path / "d", tmp_path / "whole", key=".")
    assert state_in(tmp_path / "whole")["step"] == 20
    assert report.warnings == ["The values under step were copied from BASE, because a delta changes only tensors."]
    diff(tmp_path / "20.pt", tmp_path / "30.pt", key="model", delta=tmp_path / "d", overwrite=True)
    assert not patch(tmp_path / "20.pt", tmp_path / "d", tmp_path / "weights", key="model").warnings


def test_tensors_that_no_delta_changes_are_said_not_to_be_checked(tmp_path: Path) -> None:
    old = {"a": torch.ones(3), "b": torch.ones(3), "none": torch.ones(0)}
    new = {**old, "a": torch.zeros(3)}
    other = {**old, "b": torch.full((3,), 2.0)}
    base, aim, wrong = (saved(tensors, tmp_path / f"{at}.safetensors") for at, tensors in enumerate((old, new, other)))
    diff(base, aim, delta=tmp_path / "d")
    made = tmp_path / "made.safetensors"
    for source in (base, wrong):
        (note,) = [note for note in patch(source, tmp_path / "d", made).notes if "not checked, because" in note]
        assert "no delta changes them: 'b'." in note
        assert f"ckptconv diff {made} B" in note
        assert diff(made, aim).equal == (source == base)
    diff(base, saved({**new, "b": torch.zeros(3)}, aim), delta=tmp_path / "all", overwrite=True)
    assert not [note for note in patch(base, tmp_path / "all", made).notes if "not checked, because" in note]


def test_values_that_are_no_tensors_are_not_in_a_delta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, step in (("a.pt", 7), ("b.pt", 8)):
        torch.save({"w": torch.full((9,), float(step)), "step": step}, name)
    run = ckptconv_here("diff", "a.pt", "b.pt", "--delta", "d")
    sentence = "not compared, and not in the delta: the values under step, which are not tensors"
    assert (run.code, sentence in run.out.splitlines()) == (0, True)


def test_a_tensor_that_only_one_side_has_takes_a_whole_checkpoint(pair: tuple[Path, Path], tmp_path: Path) -> None:
    more = saved({**model(), "new.weight": torch.ones(3)}, tmp_path / "more.safetensors")
    words = ("diff", pair[0], more, "--delta", tmp_path / "delta")
    ckptconv_here(*words).refused(5, "do not match: 'new.weight'", "use the whole checkpoint")
    assert not (tmp_path / "delta").exists()
    ckptconv_here(*words, "--exclude", "new.weight")
    assert ckptconv_here("patch", pair[0], tmp_path / "delta", tmp_path / "out.safetensors").code == 0
    assert "new.weight" not in load_file(tmp_path / "out.safetensors")
