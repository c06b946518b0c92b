"""What tests of the trunk ask of `serve` too."""

from __future__ import annotations

from ckptconv.features.serve.options import SERVING

# Options of the command that no other has.
FLAGS = {"serve": (SERVING,)}
# It writes nothing, and what it prints is tried where it listens.
READING = {"serve"}
WAYS: dict[str, list[list[str]]] = {"serve": []}
