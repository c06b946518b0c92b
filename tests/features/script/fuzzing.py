"""Archives of TorchScript that are changed at random."""

from __future__ import annotations

import functools
import io
import random
import warnings
from pathlib import Path

import torch
from attacks.assemble import Member, zipped
from fuzz import fuzz_files, quantized
from mutations import members_of, of_members, of_pickle


@functools.cache
def scripts() -> list[list[Member]]:
    """TorchScript archives: an ordinary, a frozen and a quantized one."""
    plain = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).eval()
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for each in (plain, torch.jit.freeze(torch.jit.script(plain)), quantized()):
            buffer = io.BytesIO()
            torch.jit.save(torch.jit.script(each), buffer)
            found.append(members_of(buffer.getvalue()))
    return found


def changed_script(chance: random.Random) -> bytes:
    parts = [*chance.choice(scripts())]
    if chance.random() < 0.3:
        return of_members(parts, chance)
    at = chance.choice([index for index, part in enumerate(parts) if str(part.name).endswith(".pkl")])
    parts[at] = parts[at].changed(data=of_pickle(parts[at].data, chance))
    return zipped(parts)


def fuzz_scripts(chance: random.Random, place: Path) -> str:
    return fuzz_files(changed_script, chance, place)
