"""What tests of the trunk ask of OLMo's safetensors too."""

from __future__ import annotations

import base64
import pickle
import random
from pathlib import Path
from typing import Any

from attacks.assemble import number, pickled, several, text
from mutations import of_pickle
from safetensors.torch import load_file

from .attacks import FILES

ATTACKS = FILES.values()


def load_carelessly(path: Path) -> None:
    """Load a file as OLMo does."""
    for name, tensor in load_file(path).items():
        _, is_pickled = pickle.loads(base64.urlsafe_b64decode(name))
        if is_pickled:
            pickle.loads(bytes(tensor.numpy()))


CARELESS = load_carelessly


def changed_names(chance: random.Random) -> tuple[dict[str, Any], dict[str, str]]:
    """The header of a file whose names are pickles, one of them changed, and its metadata."""
    path = several(several(text("a"), number(0), text("b")), b"\x89")
    pickles = [of_pickle(pickled(path), chance), pickled(several(several(text("c")), b"\x89"))]
    names = [base64.urlsafe_b64encode(each).decode() for each in pickles]
    spans = {names[0]: [0, 12], names[1]: [12, 24]}
    return {name: {"dtype": "F32", "shape": [3], "data_offsets": span} for name, span in spans.items()}, {}


SAFETENSORS = changed_names
