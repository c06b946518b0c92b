"""Checkpoints with a file for each rank that are changed at random."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from attacks.assemble import zipped
from features.ranks.rank_files import CASES, RANKS
from fuzz import outcome
from mutations import members_of, of_bytes, of_pickle


def fuzz_ranks(chance: random.Random, place: Path) -> str:
    """A checkpoint with a file for each rank, one of them changed, missing, or in the place of another."""
    checkpoint, output = place / "checkpoint", place / "out.safetensors"
    shutil.rmtree(checkpoint, ignore_errors=True)
    shutil.copytree(RANKS / chance.choice(CASES) / "checkpoint", checkpoint)
    victim, other = chance.sample(sorted(checkpoint.iterdir()), 2)
    kind = chance.random()
    if kind < 0.1:
        victim.unlink()
    elif kind < 0.2:
        shutil.copy(other, victim)
    elif kind < 0.4:
        victim.write_bytes(of_bytes(victim.read_bytes(), chance))
    else:
        parts = members_of(victim.read_bytes())
        at = next(index for index, part in enumerate(parts) if str(part.name).endswith("data.pkl"))
        parts[at] = parts[at].changed(data=of_pickle(parts[at].data, chance))
        victim.write_bytes(zipped(parts))
    ended = outcome(checkpoint, output)
    output.unlink(missing_ok=True)
    return ended
