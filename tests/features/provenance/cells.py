"""What tests of the trunk ask of statements too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckptconv.cli import registered

# Of the option: its default, a value, and how that may be written; values that it has not; and what becomes of it in
# each kind of output, with an option that it needs.
ACCEPTED_VALUES: dict[str, tuple[Any, Any, list[Any]]] = {"attest": ("", "m.jsonl", [Path("m.jsonl"), "m.jsonl"])}
REFUSED_VALUES: dict[str, list[Any]] = {"attest": [3, b"m", ["m"]]}
ROWS_OF_KINDS: dict[str, tuple[Any, ...]] = {"attest": ("hhhh", {"attest": "attested"}, (("digest", "sha256"),))}
# What others make that statements could be about, by command.
_MAKING = {
    "average": "average g1.safetensors g2.safetensors -o new.safetensors",
    "merge": "merge base ad1 -o new.safetensors",
    "safetensors2pt": "safetensors2pt g1.safetensors new.pt",
}
_OF_RANKS = {"dcp2safetensors": "dcp2safetensors dcp new", "safetensors2dcp": "safetensors2dcp g1.safetensors new"}
REFUSED = """\
convert a.pt new.safetensors --digest sha256 --attest notes.md
pt2safetensors a.pt new.safetensors --digest sha256 --attest g1.safetensors
""" + "".join(
    f"{words} --digest sha256 --attest {name}\n"
    for name, commands in (("a.pt", _MAKING), ("notes.md", _OF_RANKS))
    for command, words in commands.items()
    if command in registered.COMMANDS
)
AGAIN = """\
convert a.pt stated.safetensors --manifest s.json --digest sha256 --attest s.jsonl
"""
BY_BYTES = {*AGAIN.splitlines()}
# What a command writes to a directory that others write to: the name, and its words.
WRITTEN: dict[str, tuple[str, tuple[object, ...]]] = {
    "attest": ("x.jsonl", ("convert", "MODEL", "OWN", "--digest", "sha256", "--attest", "PATH"))
}
