"""What tests of the trunk ask of the commands and functions for rows too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ckptconv
from ckptconv.cli import registered
from ckptconv.features.rows.options import PACKING, ROWS

# Options of commands that no other command has, by the beginning of the command.
FLAGS = {"rows ": (ROWS, PACKING)}
# Functions of the library, called with options; options that are misspelt, and what is meant; and wrong values.
CALLS: dict[str, Callable[..., Any]] = {
    "split_rows": lambda **options: ckptconv.split_rows("none.pt", "out", **options),
    "pack_rows": lambda **options: ckptconv.pack_rows("none.pt", "out", **options),
    "check_rows": lambda **options: ckptconv.check_rows("none.pt", **options),
}
MISSPELT = [
    ("split_rows", "embeding_dim", "embedding_dim"),
    ("pack_rows", "momentum_dtype", "momentum1_dtype"),
    ("check_rows", "bucketsize", "bucket_size"),
]
WRONG_VALUES: list[tuple[str, str, Any]] = [
    ("split_rows", "embedding_dim", 0),
    ("split_rows", "decode", "yes"),
    ("split_rows", "names", 3),
    ("split_rows", "weight_dtype", 16),
    ("pack_rows", "names", "weight"),
    ("pack_rows", "names", {"weight": 3}),
    ("pack_rows", "method", 3),
    ("pack_rows", "jobs", 0),
    ("check_rows", "global_id_offset", 1.5),
    ("check_rows", "bucket_size", "many"),
    ("check_rows", "max_dim", True),
]


# ---------------------------------------------------------------------------------------------------- what is printed

LAYOUT = ["--embedding-dim", "64", "--method", "adagrad", "kv.pt"]


def table() -> None:
    """Write kv.pt: ten used rows of 64 float16 items with Adagrad's state, and their ids."""
    rows = torch.zeros(10, 76, dtype=torch.float16)
    rows.view(torch.int64)[:, 0] = torch.arange(10)
    rows.view(torch.uint8)[:, 15] = 0x80
    torch.save({"emb.t.weight": rows, "emb.t.weight_id": torch.arange(10)[:, None]}, "kv.pt")


def wrong_table() -> None:
    table()
    state = torch.load("kv.pt")
    state["emb.t.weight"].view(torch.int64)[3, 0] = 4
    torch.save(state, "kv.pt")


# Each command, and what it is called with, one after another, where `BEFORE` was done.
BEFORE = [table, ["rows", "split", *LAYOUT, "split"]]
WAYS: dict[str, list[list[str]]] = {
    **({"inspect": [["kv.pt"]]} if "inspect" in registered.COMMANDS else {}),
    "rows split": [[*LAYOUT, "again"]],
    "rows pack": [["split", "again.pt"]],
    "rows check": [LAYOUT, ["split"]],
}
# Commands that read any input, whether they have an OUTPUT, and whether they say of a bad one what `inspect` says.
READERS = {"rows split": (True, True), "rows pack": (True, False), "rows check": (False, True)}
# Wrong usage, and the command and the input that are known then.
USAGE = [("rows check a.pt b.pt --bucket-size x", "rows check", "a.pt"), ("rows", None, None)]
# What is made, and the command that finds a difference in it.
DIFFERING = [(wrong_table, ["rows", "check", *LAYOUT])]
# Words that are refused with this exit code, and what is said.
SAID = [
    ("rows join", 2, "The commands of rows are split, pack, check."),
    (
        "rows model.pt 5,17",
        2,
        "No such command 'model.pt'.;get_slice(NAME)[5:10];The commands of rows are split, pack, check.",
    ),
    ("rows --tensor t split", 2, "of ckptconv rows itself;ckptconv rows COMMAND --tensor"),
    ("rows split model.pt --jobs", 2, "'--jobs' requires an argument;See ckptconv rows split --help."),
    ("rows split a", 2, "rows split needs a TABLE and an OUTPUT"),
    ("unpack model.pt", 2, "No such command 'unpack'. Did you mean ckptconv rows split?"),
    ("rows splt", 2, "No such command 'splt'. Did you mean ckptconv rows split?"),
]
GROUPS = ["rows"]
COMMANDS = ["rows split", "rows pack", "rows check"]
# Commands that name their output by an option, last.
NAMED = [
    (table, "rows split --embedding-dim 64 --method adagrad kv.pt -o parts"),
    (None, "rows pack parts -o again.pt"),
]
# Functions of the library that are given a path; those that take several.
PATHS: dict[str, Callable[[Any], object]] = {
    "split_rows": lambda value: ckptconv.split_rows(value, "out", embedding_dim=64, method="adagrad"),
    "pack_rows": lambda value: ckptconv.pack_rows(value, "out"),
    "check_rows": ckptconv.check_rows,
}
SEVERAL = ["check_rows", "pack_rows", "split_rows"]


# --------------------------------------------------------------------------------------------------- what is replaced


def scene(here: Path) -> None:
    """Put kv1.pt, kv2.pt and the directory rows beside what others made."""
    for name in ("kv1", "kv2"):
        torch.save({"t": torch.zeros(2, 76, dtype=torch.float16)}, here / f"{name}.pt")
    ckptconv.split_rows(here / "kv1.pt", here / "rows", embedding_dim=64, method="adagrad")


READING = {"rows check"}
# Options of a path that is read.
READ_THERE = {("rows", "map")}
REFUSED = """\
rows split kv1.pt g1.safetensors --embedding-dim 64 --method adagrad
rows split kv1.pt hf --embedding-dim 64 --method adagrad
rows pack rows g1.safetensors
rows pack rows a.pt
rows pack rows -o rows
rows pack rows -o hf
"""
DONE: dict[str, set[str]] = {
    "rows split kv1.pt new --embedding-dim 64 --method adagrad": set(),
    "rows pack rows -o a.pt": {"a.pt"},
}
AGAIN = """\
rows split kv1.pt new --embedding-dim 64 --method adagrad
rows pack rows new
"""
WRITING: list[Callable[[], object]] = [
    lambda: ckptconv.split_rows("kv1.pt", "hf", embedding_dim=64, method="adagrad"),
    lambda: ckptconv.pack_rows("rows", "hf"),
]
