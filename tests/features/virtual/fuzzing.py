"""Descriptions that were changed: the part of tests/fuzz.py that is about virtual checkpoints."""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import computed
from cells import VERIFIED, opened
from checkpoints import ZERO
from fuzz import WORDS, outcome, quantized_cases
from mutations import of_json
from safetensors import safe_open

from ckptconv.conversion import convert
from ckptconv.storage.files import look


@functools.cache
def descriptions() -> list[dict[str, Any]]:
    """Virtual checkpoints of what is computed: weights of every dialect, averages, merges, codes; and of ZeRO-3."""
    made = []
    with tempfile.TemporaryDirectory() as place:
        here = computed.sources(Path(place))
        for number, (job, source) in enumerate(computed.JOBS.values()):
            output = Path(place) / f"{number}.virtual.json"
            job(here, source, output)
            made.append(json.loads(output.read_text()))
        cases = [(path, {"dequantize": True}) for path in quantized_cases()]
        for number, (path, options) in enumerate([*cases, (ZERO / "z3_bf16_w2" / "checkpoint", {})]):
            output = Path(place) / f"d{number}.virtual.json"
            convert(path, output, **options)
            made.append(json.loads(output.read_text()))
        # What is read stays after this.
        kept = Path(tempfile.mkdtemp(prefix="described-"))
        atexit.register(shutil.rmtree, kept, ignore_errors=True)
        shutil.copytree(place, kept, dirs_exist_ok=True)
    for each in made:
        each["roots"] = [
            str(kept / Path(root).relative_to(place)) if root.startswith(place) else root for root in each["roots"]
        ]
        for source in each["sources"]:
            if "root" in source:
                root = each["roots"][source["root"]]
                source["stamp"] = look(str((kept if root == "." else Path(root)) / source["name"])).file.stamp
        each["roots"] = [str(kept) if root == "." else root for root in each["roots"]]
    return made


# What may stand where a number of an expression stands.
SIZES = [0, 1, 2, 3, 4, 5, 7, 8, 16, 31, 32, 33, 64, 127, 128, 1 << 16, (1 << 20) + 1, 1 << 31, (1 << 62) + 1]


def change_expression(told: list[Any], chance: random.Random) -> None:
    """Change one or two of the words and numbers of an expression into others of their kind."""
    places = []
    stack = [told]
    while stack:
        inside = stack.pop()
        places += [(inside, at) for at, each in enumerate(inside) if not isinstance(each, list)]
        stack += [each for each in inside if isinstance(each, list)]
    for inside, at in chance.choices(places, k=chance.choice([1, 1, 2])):
        value = inside[at]
        if isinstance(value, bool):
            inside[at] = not value
        elif isinstance(value, int):
            inside[at] = chance.choice([value + 1, max(value - 1, 0), 2 * value, value // 2, *chance.sample(SIZES, 4)])
        elif isinstance(value, float):
            inside[at] = chance.choice([0.0, -value, 2 * value, 1e308, 5e-324, 1.5])
        elif isinstance(value, str):
            inside[at] = chance.choice(WORDS)


def fuzz_description(chance: random.Random, place: Path) -> str:
    """A virtual checkpoint: its expressions, its lists and headers, or any part of it. What is written has to be what
    `verify` computes by itself, and what is read tensor by tensor."""
    path, output = place / "m.virtual.json", place / "out.safetensors"
    told = copy.deepcopy(chance.choice(descriptions()))
    kind = chance.random()
    if kind < 0.75:
        file = chance.choice([each for each in told["files"] if each.get("tensors")])
        at = chance.randrange(len(file["tensors"]))
        if chance.random() < 0.3:
            with contextlib.suppress(ValueError):
                file["tensors"][at] = json.loads(of_json(file["tensors"][at], chance))
        else:
            change_expression(file["tensors"][at], chance)
        text = json.dumps(told)
    elif kind < 0.85:
        text = json.dumps({**told, "lists": json.loads(of_json(told["lists"], random.Random(0)))})
    else:
        text = of_json(told, chance)
    path.write_text(text.replace('{"ckptconv.virtual": ', '{"ckptconv.virtual":', 1))
    ended = outcome(path, output, **VERIFIED)
    assert ended != "difference", "what was written is not what verify computes"
    if ended == "done":
        for read in opened(path, framework="np"):
            with safe_open(output, "np") as written:
                for name in written.keys():  # noqa: SIM118
                    assert bits_of(output, name) == read[name].numpy(raw=True).tobytes(), name
        output.unlink()
    return ended


def bits_of(path: Path, name: str) -> bytes:
    """The bytes of a tensor of a safetensors file."""
    data = path.read_bytes()
    stop = 8 + int.from_bytes(data[:8], "little")
    return data[stop:][slice(*json.loads(data[8:stop])[name]["data_offsets"])]
