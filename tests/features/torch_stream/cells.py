"""What tests of the trunk ask of torch's stream format too."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from attacks.assemble import listed, mapped, streamed, tensor, text

from . import attacks

ATTACKS = attacks.FILES
# Files of old releases of torch, as tests/data/torch/make.py makes them.
RELEASES = Path(__file__).parent / "data"
# The keys in a stream that torch writes are addresses, and no two are alike.
_STREAM = streamed(mapped(text("state_dict"), mapped(text("w"), tensor()), text("ema"), listed(tensor())))
TORCH_FILES = [("pt/stream", lambda place: (place / "in.pt").write_bytes(_STREAM), ())]
# Containers of torch.save: its options that ask for them.
CONTAINERS: dict[str, dict[str, Any]] = {"stream": {"_use_new_zipfile_serialization": False}}


def _fuzz(chance: random.Random, place: Path) -> str:
    from features.torch_stream.fuzzing import fuzz_streams

    return fuzz_streams(chance, place)


FUZZED = {"stream": _fuzz}
