"""A base and a chain of deltas as one virtual checkpoint, and a chain that is joined into one delta."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import of_features, offered
from checkpoints import ckptconv_here, done
from effort import every
from safetensors.torch import load_file, save_file

import ckptconv
from ckptconv.features.compressed import unpacking
from ckptconv.features.deltas.reading import read_delta
from ckptconv.formats.registered import DESCRIBING
from ckptconv.storage.location import Location

DESCRIBED = pytest.mark.skipif(not DESCRIBING, reason="nothing describes files here")
STEPS = 5
ENCODINGS = {
    "xor": itertools.repeat("xor"),
    "overwrite": itertools.repeat("overwrite"),
    "mixed": itertools.cycle(("xor", "overwrite")),
}


def chain_in(place: Path, encodings: str) -> list[Path]:
    """A base, some steps, and the deltas between them; the steps themselves go."""
    chance = torch.Generator().manual_seed(1)
    tensors = {
        "a": torch.randn(60, 50, generator=chance).bfloat16(),
        "b": torch.randn(300, generator=chance),
        "kept": torch.randn(9),
    }
    save_file(tensors, place / "base.safetensors")
    deltas = []
    ways = itertools.islice(ENCODINGS[encodings], STEPS)
    for number, encoding in enumerate(ways, 1):
        for name in ("a", "b")[: 1 + number % 2]:
            tensors[name] = tensors[name].clone()
            tensors[name][torch.rand(tensors[name].shape, generator=chance) < 0.05] += 1
        save_file(tensors, place / f"step-{number}.safetensors")
        before = place / (f"step-{number - 1}.safetensors" if number > 1 else "base.safetensors")
        deltas.append(place / f"delta-{number}")
        ckptconv.diff(
            before,
            place / f"step-{number}.safetensors",
            delta=deltas[-1],
            delta_version=number,
            delta_encoding=encoding,
        )
    for number in range(1, STEPS):
        (place / f"step-{number}.safetensors").unlink()
    return deltas


@every("encodings", ENCODINGS)
@DESCRIBED
def test_a_base_and_a_chain_are_one_virtual_checkpoint_of_the_bytes_that_patch_writes(
    encodings: str, tmp_path: Path
) -> None:
    deltas = chain_in(tmp_path, encodings)
    whole = tmp_path / "whole.virtual.json"
    done(ckptconv_here("patch", tmp_path / "base.safetensors", *deltas, whole))
    done(ckptconv_here("patch", tmp_path / "base.safetensors", *deltas, tmp_path / "patched"))
    expected = (tmp_path / "patched" / "model.safetensors").read_bytes()
    assert whole.stat().st_size < len(expected)
    for files in offered(whole):
        assert files.read_bytes("model.safetensors") == expected
        assert files.read_bytes("model.safetensors", 5000, 5003) == expected[5000:5003]
    done(ckptconv_here("convert", whole, tmp_path / "out.safetensors"))
    last = load_file(tmp_path / f"step-{STEPS}.safetensors")
    for name, tensor in load_file(tmp_path / "out.safetensors").items():
        assert torch.equal(tensor, last[name])
    assert ckptconv.diff(whole, tmp_path / f"step-{STEPS}.safetensors").equal


@every("encodings", ENCODINGS)
def test_a_chain_that_is_joined_makes_of_the_base_what_the_chain_makes(encodings: str, tmp_path: Path) -> None:
    deltas = chain_in(tmp_path, encodings)
    done(ckptconv_here("patch", "--squash", tmp_path / "base.safetensors", *deltas, tmp_path / "all"))
    joined = read_delta(Location(str(tmp_path / "all")))
    assert (joined.base_version, joined.version) == (0, STEPS)
    assert joined.payloads.keys() == {"a", "b"}
    done(ckptconv_here("patch", tmp_path / "base.safetensors", tmp_path / "all", tmp_path / "out.safetensors"))
    assert ckptconv.diff(tmp_path / "out.safetensors", tmp_path / f"step-{STEPS}.safetensors").equal
    size = sum(path.stat().st_size for path in (tmp_path / "all").iterdir())
    assert size < sum(path.stat().st_size for delta in deltas for path in delta.iterdir())


def test_a_part_of_a_chain_is_joined_and_takes_its_place_in_it(tmp_path: Path) -> None:
    deltas = chain_in(tmp_path, "xor")
    done(ckptconv_here("patch", tmp_path / "base.safetensors", deltas[0], tmp_path / "one.safetensors"))
    told = done(
        ckptconv_here("patch", "--squash", "--json", tmp_path / "one.safetensors", *deltas[1:4], tmp_path / "m")
    )
    assert json.loads(told.out)["ok"]
    chain = [deltas[0], tmp_path / "m", deltas[4]]
    done(ckptconv_here("patch", tmp_path / "base.safetensors", *chain, tmp_path / "out.safetensors"))
    assert ckptconv.diff(tmp_path / "out.safetensors", tmp_path / f"step-{STEPS}.safetensors").equal


def test_deltas_of_another_base_and_out_of_order_make_neither(tmp_path: Path) -> None:
    deltas = chain_in(tmp_path, "xor")
    save_file({name: tensor + 1 for name, tensor in load_file(tmp_path / "base.safetensors").items()}, tmp_path / "o")
    for words in (["--squash", tmp_path / "o", *deltas, tmp_path / "x"], [tmp_path / "o", *deltas, "x.virtual.json"]):
        ckptconv_here("patch", *words).refused(4, "does not match")
    ckptconv_here("patch", "--squash", tmp_path / "base.safetensors", deltas[1], deltas[0], "x").refused(2, "changes")
    ckptconv_here("patch", "--squash", "--dtype", "bf16", tmp_path / "base.safetensors", *deltas, "x").refused(
        2, "--squash writes a delta"
    )


@DESCRIBED
def test_a_virtual_checkpoint_of_deltas_that_changed_is_refused(tmp_path: Path) -> None:
    deltas = chain_in(tmp_path, "overwrite")
    whole = tmp_path / "whole.virtual.json"
    done(ckptconv_here("patch", tmp_path / "base.safetensors", *deltas, whole))
    shutil.rmtree(deltas[2])
    for offer in of_features("OFFERING"):
        with pytest.raises(ckptconv.CorruptError, match="has changed since"):
            offer(whole)


@DESCRIBED
def test_an_overwritten_source_larger_than_any_is_refused(tmp_path: Path) -> None:
    deltas = chain_in(tmp_path, "overwrite")
    whole = tmp_path / "whole.virtual.json"
    done(ckptconv_here("patch", tmp_path / "base.safetensors", *deltas, whole))
    told = json.loads(whole.read_text())
    packed = next(source for source in told["sources"] if source.get("method") == "overwriting")
    packed["size"] = 1 << 40
    whole.write_text(json.dumps(told))
    for offer in of_features("OFFERING"):
        with pytest.raises(ckptconv.CorruptError, match="has the invalid size"):
            offer(whole)


def test_of_a_long_chain_few_deltas_are_unpacked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"w": torch.zeros(1 << 21, dtype=torch.uint8)}
    save_file(tensors, tmp_path / "base.safetensors")
    tensors["w"][::1000] = 1
    save_file(tensors, tmp_path / "changed.safetensors")
    deltas = []
    for version, name in enumerate(["changed", "base"] * 20 + ["changed"], 1):
        before, deltas = tmp_path / ("base" if name == "changed" else "changed"), [*deltas, tmp_path / f"d{version}"]
        after = tmp_path / f"{name}.safetensors"
        ckptconv.diff(before.with_suffix(".safetensors"), after, delta=deltas[-1], delta_version=version)
    live, most = 0, 0
    unpack = unpacking.UNPACKING["zstandard"]

    def counted(*arguments: Any) -> Iterator[bytes]:
        nonlocal live, most
        live += 1
        most = max(live, most)
        try:
            yield from unpack(*arguments)
        finally:
            live -= 1

    monkeypatch.setattr(unpacking, "UNPACKING", {**unpacking.UNPACKING, "zstandard": counted})
    ckptconv.patch(tmp_path / "base.safetensors", deltas, tmp_path / "out.safetensors", jobs=1)
    assert torch.equal(load_file(tmp_path / "out.safetensors")["w"], tensors["w"])
    assert 1 < most < 20
    assert live == 0
