"""Cases of safetensors: headers changed token by token, whose JSON readers may understand in two ways."""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Sequence
from typing import Any

import torch
from mutations import of_bytes
from safetensors.torch import save

from differential.archives import an_archive
from differential.cases import Case
from differential.tensors import honest_tree


@functools.cache
def _flat() -> tuple[list[str], bytes]:
    """A header as tokens of JSON, and the data."""
    entries = {
        "__metadata__": {"format": "pt", "b": "1"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "I64", "shape": [], "data_offsets": [24, 32]},
        "c": {"dtype": "U8", "shape": [0, 4], "data_offsets": [32, 32]},
        "d": {"dtype": "BF16", "shape": [4], "data_offsets": [32, 40]},
    }
    return tokens(json.dumps(entries, separators=(",", ":"))), bytes(range(40))


def tokens(text_of: str) -> list[str]:
    """JSON in parts, each a string, a number or a sign."""
    return re.findall(r'"(?:[^"\\]|\\.)*"|-?[0-9.eE+-]+|[a-z]+|[][{},:]', text_of)


NUMBERS = [
    "0", "-0", "1", "-1", "24", "24.0", "2.4e1", "024", "+24", "1e400", "18446744073709551615",
    "18446744073709551616", "-0.0", "0.0", "0e0", "NaN", "Infinity", "-Infinity", "1E1", "9223372036854775807",
    "4294967296", "true", "null", '"24"', "[24]", "32", "40", "1.", ".5", "0x18", "00", "2", "3", "6", "\u0661",
]  # fmt: skip
STRINGS = [
    '"a"', '"b"', '"__metadata__"', '"\\u0061"', '"dtype"', '"shape"', '"data_offsets"', '"F32"', '"f32"', '"F16"',
    '"F64"', '"I8"', '"BOOL"', '"F8_E4M3"', '"F4"', '"F6_E2M3"', '"C64"', '"\\ud800"', '"\\ud83d\\ude00"',
    '"\\u0000"', '""', '"a\\/b"', "'a'", '"a\tb"', '"x"', '"\xe9"', '"\\x41"', '"\x7f"', '"U16"', '"F8_E8M0"',
    '"\ufeff"', '"../a"',
]  # fmt: skip


def a_header(chance: random.Random) -> Case:
    parts, data = _flat()
    roll = chance.random()
    if roll < 0.1:
        tensors = (
            {key: found for key, found in honest_tree(chance).items() if _is_plain(found)}
            if chance.random() < 0.9
            else {}
        )
        return Case(
            [
                save(
                    {key: found.clone().contiguous() for key, found in tensors.items()},
                    chance.choice([None, {"format": "pt"}, {"a": "\U0001f600"}]),
                )
            ],
            honest=True,
        )
    if roll < 0.2:
        raw = "".join(parts).encode()
        return Case([of_bytes(len(raw).to_bytes(8, "little") + raw + data, chance)])
    parts = [*parts]
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        parts = token_step(parts, chance)
    more = chance.choice([0] * 12 + [1, -1, 1 << 32, -8])
    after = chance.choice([b""] * 10 + [b"x", an_archive(chance)])

    def build(chosen: Sequence[str]) -> bytes:
        raw = "".join(chosen).encode("utf-8", "surrogatepass")
        return ((len(raw) + more) % (1 << 64)).to_bytes(8, "little") + raw + data + after

    return Case(parts, build)


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized


def token_step(parts: list[str], chance: random.Random) -> list[str]:
    at = chance.randrange(len(parts))
    kind = chance.randrange(8)
    numbers_at = [index for index, part in enumerate(parts) if part[0] in "-0123456789"]
    strings_at = [index for index, part in enumerate(parts) if part[0] == '"']
    if kind <= 2:
        at = chance.choice(numbers_at or [at])
        same = [
            f"{parts[at]}.0", f"{parts[at]}e0", f"0{parts[at]}", f"+{parts[at]}", f"-{parts[at]}", f"{parts[at]}E+0",
        ]  # fmt: skip
        return [*parts[:at], chance.choice(chance.choice([NUMBERS, same])), *parts[at + 1 :]]
    if kind <= 4:
        at = chance.choice(strings_at or [at])
        letter = parts[at][1:2]
        same = [
            f'"\\u{ord(letter):04x}{parts[at][2:]}',
            parts[at].upper(),
            f'{parts[at][:-1]} "',
            f'{parts[at][:-1]}\\u0000"',
        ]
        return [*parts[:at], chance.choice(chance.choice([STRINGS, same])), *parts[at + 1 :]]
    if kind == 5:
        new = chance.choice(
            [" ", "\n", "\t", "\0", "\ufeff", ",", "{", "}", "null", "\x0b", "\x0c", "\xa0", "//", "   ", "]", "\r"]
        )
        return [*parts[:at], new, *parts[at:]]
    if kind == 6:
        # A whole pair again, with or without a change.
        entry = chance.choice(
            [
                '"a":{"dtype":"I32","shape":[6],"data_offsets":[0,24]},',
                '"e":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},',
                '"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},', '"__metadata__":{"x":"y"},',
                '"__metadata__":null,', '"__metadata__":{"x":1},',
                '"e":{"dtype":"U8","dtype":"I8","shape":[0],"data_offsets":[24,24]},',
                '"e":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"more":1},',
                '"e":{"shape":[1,2],"data_offsets":[40,40]},',
                '"e":{"dtype":"U8","shape":[0,9223372036854775807,4],"data_offsets":[40,40]},',
                '"e":{"dtype":"U8","shape":[' + ",".join(["1"] * 70) + ',0],"data_offsets":[40,40]},', '"e":null,',
                '"e":{},', '"e":["U8",[0],[40,40]],', '"e":{"dtype":"F4","shape":[0],"data_offsets":[40,40]},',
                '"__metadata__":{"x":"y","x":"z"},', '"__metadata__":{},',
                '"e":{"dtype":{"U8":null},"shape":[0],"data_offsets":[40,40]},',
            ]
        )  # fmt: skip
        return [parts[0], *tokens(entry), *parts[1:]]
    stop = min(at + chance.randrange(1, 4), len(parts))
    return parts[:at] + parts[stop:]
