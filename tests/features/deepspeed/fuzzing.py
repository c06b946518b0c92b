"""Checkpoints of DeepSpeed that are changed at random."""

from __future__ import annotations

import functools
import random
import shutil
import tempfile
from pathlib import Path

from attacks.assemble import zipped
from checkpoints import ZERO
from fuzz import outcome
from mutations import members_of, of_bytes, of_pickle

from ckptconv.conversion import convert


def fuzz_zero(chance: random.Random, place: Path) -> str:
    """A file of a DeepSpeed checkpoint with its pickle changed, or without one of its files."""
    case = chance.choice(["z1_bf16_w2", "z2_bf16_w2", "z3_bf16_w2", "z3_bf16_legacyfmt_w2", "moe_z2_ep2_w2"])
    checkpoint = place / "checkpoint"
    shutil.rmtree(checkpoint, ignore_errors=True)
    shutil.copytree(ZERO / case / "checkpoint", checkpoint)
    victim = chance.choice(sorted(checkpoint.rglob("*.pt")))
    data = victim.read_bytes()
    kind = chance.randrange(8)
    if kind == 0:
        victim.unlink()
    elif kind == 1:
        text = chance.choice([b"", b"..", b"../..", b"/etc", b"a\0b", b"\xff\xfe", b"x" * 100_000, b"nowhere\n"])
        (checkpoint / "latest").write_bytes(text)
    elif kind == 2:
        victim.write_bytes(chance.choice(sorted(checkpoint.rglob("*.pt"))).read_bytes())
    elif kind == 3 or not data.startswith(b"PK"):
        victim.write_bytes(of_bytes(data, chance))
    else:
        parts = members_of(data)
        at = next(index for index, part in enumerate(parts) if str(part.name).endswith("data.pkl"))
        parts[at] = parts[at].changed(data=of_pickle(parts[at].data, chance))
        victim.write_bytes(zipped(parts))
    output = place / "out.safetensors"
    ended = outcome(checkpoint, output)
    nameless = "legacyfmt" in case and "model_states" in victim.name
    if ended == "done" and kind < 3 and not nameless:
        # The files that are there are sound: in their own places, or not at all. (ZeRO-3's model files do not say whose
        # they are where no archive does.)
        assert output.read_bytes() == sound(case), "files in the wrong places were converted"
    output.unlink(missing_ok=True)
    return ended


@functools.cache
def sound(case: str) -> bytes:
    """What the checkpoint is converted to as it is."""
    with tempfile.TemporaryDirectory() as place:
        output = Path(place) / "out.safetensors"
        convert(ZERO / case / "checkpoint", output)
        return output.read_bytes()
