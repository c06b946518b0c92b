"""What tests of the trunk ask of the commands and functions for rows too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ckptconv
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
    ("pack_rows", "optimizer", 3),
    ("pack_rows", "jobs", 0),
    ("check_rows", "global_id_offset", 1.5),
    ("check_rows", "bucket_size", "many"),
    ("check_rows", "max_dim", True),
]
