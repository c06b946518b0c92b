"""A model whose outputs are attested, and the contents of statements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch


def mixed_model(path: Path) -> Path:
    """Save tensors larger and smaller than what is read at a time, tied, empty; return the path."""
    state = {f"small{n}": torch.full((n,), float(n)) for n in range(1, 40)}
    torch.save({**state, "large": torch.randn(700, 1100), "tied": state["small9"], "empty": torch.empty(0)}, path)
    return path


def statements(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def dependencies(path: Path) -> dict[str, str]:
    """The sha256 of each input, by name, as the statement about the last output has it."""
    definition = statements(path)[-1]["predicate"]["buildDefinition"]
    return {each["name"]: each["digest"]["sha256"] for each in definition["resolvedDependencies"]}
