"""What tests of the trunk, and of other features, ask of `verify` too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cells import READ_BACK

import ckptconv
from ckptconv.features.verify.evaluate import Evaluator, footprint
from ckptconv.features.verify.keywords import VERIFYING
from ckptconv.options.table import COMMAND, OPTIONS
from ckptconv.storage.files import Readers
from ckptconv.tensors.lazy import LazyTensor

# Compares an output with its source.
COMPARING_OUTPUTS = ckptconv.verify
# Computes elements of an expression, and tells which bytes of files these need.
EVALUATORS = Evaluator, footprint


def evaluate(tensor: LazyTensor) -> bytes:
    """Return the bytes of a tensor by other means than a conversion's."""
    with Readers() as readers:
        return Evaluator(readers).flat(tensor, 0, tensor.numel).tobytes()


EVALUATING = evaluate
# Options of the command that no other has.
FLAGS = {"verify": ({name: option for name, option in VERIFYING.items() if name not in {**COMMAND, **OPTIONS}},)}
# A command that writes nothing.
READING = {"verify"}
# The option of conversions: its default, a value, and how that may be written; what becomes of it, by kind of output.
ACCEPTED_VALUES: dict[str, tuple[Any, Any, list[Any]]] = {"verify": (False, True, [True])}
ROWS_OF_KINDS: dict[str, tuple[Any, ...]] = {"verify": ("hhhh", {"verify": True})}
# Functions of the library that are given a path, and how they are called by the names of options.
PATHS: dict[str, Callable[[Any], object]] = {"verify": lambda value: ckptconv.verify(value, "model.pt")}
CALLS: dict[str, Callable[..., Any]] = {"verify": lambda **options: ckptconv.verify("none.pt", "out", **options)}
MISSPELT = [("verify", "maxshardsize", "max_shard_size")]
WRONG_VALUES = [("verify", "dtype", 3)]


# ---------------------------------------------------------------------------------------------------- what is printed

# The command, and what it is called with.
WAYS: dict[str, list[list[Any]]] = {"verify": [["model.pt", "model.safetensors", *READ_BACK]]}
# A command that reads any input, whether it has an OUTPUT, and whether it says of a bad one what `pt2safetensors` says.
READERS = {"verify": (True, False)}
COMMANDS = ["verify"]
# The defaults that the command tells, of --dtype and --max-shard-size.
DEFAULTS = [("verify", "from the manifest", "from the manifest")]
# Words that people use for it.
MEANT = {"check": "verify"}
SAID = [
    ("verify a b c", 2, "Too many arguments: c.;Usage: ckptconv verify [OPTIONS] SOURCE [OUTPUT]"),
    ("verify model.pt notes/notes.txt", 2, "is not an output;ckptconv diff compares any two checkpoints."),
    ("transform model.pt", 2, "The commands of ckptconv are ; verify"),
    ("verity", 2, "Did you mean ckptconv verify?"),
    ("verify '' out.safetensors", 2, "The path of the input is empty.;not set?"),
    ("verify --jsn model.pt", 2, "Did you mean --json?"),
    ("verify x y --no-fsync", 2, "convert has --no-fsync"),
]
