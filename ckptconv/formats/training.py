"""The model in a training checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptconv.errors import UsageError
from ckptconv.formats.optimizers import is_optimizer, subtree, weights_key
from ckptconv.formats.source import Source, without_states
from ckptconv.options.table import Options
from ckptconv.structure import keymap
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.text import some


def model_alone(source: Source, options: Options) -> Source:
    """Return `source` with the weights of its model alone: under the options' key, in the place where training
    checkpoints have them, or in the only state dict. "." is everything. A note says what is left out.

    Raise UsageError if there are several state dicts, or only that of an optimizer.
    """
    source = source._replace(notes=[without_states(note) for note in source.notes])
    tree = source.weights
    if options.key or source.of_model or not source.structured or not isinstance(tree, Mapping):
        return source
    # There may be a million values, of few types.
    kinds = {kind for kind in {*map(type, tree.values())} if issubclass(kind, Mapping)}
    nested = (
        [name for name, value in tree.items() if type(value) in kinds and keymap.flatten(value)[0]] if kinds else []
    )
    if not nested:
        return source
    chosen = weights_key(tree) or (nested[0] if len(nested) == 1 and not _has_tensors(tree) else "")
    if not chosen:
        raise UsageError(
            f"{source.path} contains tensors under {some(nested)}, but it is not clear which is the model.",
            "Select the model with --key; --key . takes everything.",
        )
    if any(map(is_optimizer, (tree, subtree(tree, chosen)))):
        raise UsageError(
            f"{source.path} contains optimizer states, but no weights.",
            "Give the checkpoint of the model. To convert the states, leave out --for-hub.",
        )
    left = [str(name) for name in tree if name != chosen.partition(".")[0]]
    notes = [f"selected {chosen}; omitted: {some(left, len(left), str)}" if left else f"selected {chosen}"]
    alone = source._replace(weights=subtree(tree, chosen), stored=None)
    if not (alone.hints or options.strip_prefix or options.rename):  # a prefix may be a wrapper's because of the key
        notes += (hint for hint in source.hints if f"--key {chosen} " in hint)
    return alone._replace(notes=[*source.notes, *notes])


def _has_tensors(tree: Mapping[Any, Any]) -> bool:
    return any(isinstance(value, LazyTensor) for value in tree.values())
