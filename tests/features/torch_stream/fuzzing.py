"""Files in the stream format that are changed at random."""

from __future__ import annotations

import pickletools
import random
from pathlib import Path

from fuzz import fuzz_files
from mutations import of_bytes, of_pickle
from samples import STREAMS


def changed_stream(chance: random.Random) -> bytes:
    data = chance.choice(STREAMS)
    if chance.random() < 0.3:
        return of_bytes(data, chance)
    pickles, at = [], 0
    for _ in range(5):
        stop = at + next(position for code, _, position in pickletools.genops(data[at:]) if code.name == "STOP") + 1
        pickles.append(data[at:stop])
        at = stop
    which = chance.choice([0, 1, 2, 3, 3, 3, 3, 4])
    pickles[which] = of_pickle(pickles[which], chance)
    return b"".join(pickles) + data[at:]


def fuzz_streams(chance: random.Random, place: Path) -> str:
    return fuzz_files(changed_stream, chance, place)
