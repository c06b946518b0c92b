"""Sharded sets whose index is changed at random."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from attacks.assemble import DATA, Member, mapped, pickled, text, zipped
from attacks.assemble import tensor as a_tensor
from checkpoints import load_with_aliases
from differential.trees import bits
from fuzz import outcome
from mutations import of_json


def fuzz_index(chance: random.Random, place: Path) -> str:
    """A sharded set of `.bin` files whose index is changed."""
    directory, output = place / "set", place / "out.safetensors"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    names = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    for name, key in zip(names, "ab", strict=True):
        shard = zipped(
            [Member("archive/data.pkl", pickled(mapped(text(key), a_tensor()))), Member("archive/data/0", DATA)]
        )
        (directory / name).write_bytes(shard)
    index = {"metadata": {"total_size": 48}, "weight_map": {"a": names[0], "b": names[1]}}
    path = directory / "pytorch_model.bin.index.json"
    path.write_text(of_json(index, chance))
    kind = outcome(path, output)
    if kind == "done":
        assert {bits(found) for found in load_with_aliases(output).values()} == {DATA}
        output.unlink()
    return kind
