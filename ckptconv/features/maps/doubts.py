"""Doubts that a map is for a model, from properties in its config.json that names and shapes do not show. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# Maps with the same names and shapes, by whether the model scales rotary embeddings as Llama 3.1 does. MaxText turns
# pairs in such a model, and halves in others.
_BY_ROPE = {True: "maxtext-llama3.1", False: "maxtext-llama"}
_SCALED = "llama3"
# The model_type of models whose names and shapes are those of others.
_BY_TYPE = {"megatron-gemma": "gemma", "maxtext-gemma": "gemma"}


def doubts(name: str, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each fact in a configuration of transformers that contradicts the built-in map `name`."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        return
    expected = _BY_TYPE.get(name, model_type)
    if model_type != expected:
        yield (
            f"the map {name} is for models with the model_type {expected!r}, but config.json has {model_type[:100]!r}. "
            "Is this the right map?"
        )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = str(rope.get("rope_type", rope.get("type", "default"))) if isinstance(rope, Mapping) else "default"
    other = _BY_ROPE[kind == _SCALED]
    if name in _BY_ROPE.values() and name != other:
        yield (
            f"config.json has rope_type {kind[:100]!r}, but the map {name} is for models with "
            f"{'another rope_type' if kind == _SCALED else f'rope_type {_SCALED!r}'}. Should the map be {other}? Both "
            "maps have the same names and shapes, but order the rows of queries and keys differently."
        )
