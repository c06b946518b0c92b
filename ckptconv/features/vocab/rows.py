"""Keep the first rows of the vocabulary: in embeddings and head, and in the configuration. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from ckptconv.errors import UnsupportedError, UsageError
from ckptconv.features.model_facts import places
from ckptconv.features.model_facts.counts import VOCABULARY
from ckptconv.features.model_facts.edits import Edited, Editor, configured, tensors_alone
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs.computed import Computing
from ckptconv.outputs.selected import Selected
from ckptconv.structure import parted
from ckptconv.tensors.lazy import LazyTensor, Narrow
from ckptconv.text import brief

_PAD = "pad_token_id"


class Vocabulary(NamedTuple):
    """The number of rows that are kept, and the numbers of tokens of tokenizers, by file."""

    rows: int
    tokens: Mapping[str, int]


def cut(count: int, tensors: Mapping[str, LazyTensor], path: str) -> tuple[int, dict[str, LazyTensor]]:
    """Return how many rows the vocabulary of the model at `path` has, and its tensors with the first `count` alone.

    Raise UsageError if it has fewer rows, UnsupportedError for a tensor of which it is not known if its rows are these.
    """
    vocabulary = [*filter(places.is_of_vocabulary, tensors)]
    size = max((tensors[name].shape[0] for name in vocabulary if len(tensors[name].shape) > 1), default=0)
    if count > size:
        has = f"has {size} rows" if size else "contains no embeddings or head with a known name"
        hint = f"Specify at most {size}: --vocab adds no rows." if size else ""
        raise UsageError(f"--vocab {count} keeps {count} rows, but {path} {has}.", hint)
    outer = (name for name in tensors if name not in vocabulary and not places.numbered(name))
    if alike := next((name for name in outer if tensors[name].shape[:1] == (size,) and not places.is_beside(name)), ""):
        raise UnsupportedError(
            f"{path}: {alike} has {size} rows, as many as the vocabulary, but may not be part of it.",
            f"Leave it out with --exclude {alike}, or leave out --vocab.",
        )
    rows: dict[str, tuple[int, int]] = {}
    for name in vocabulary:
        shape = tensors[name].shape
        if shape[:1] == (size,):
            rows[name] = 0, count
        elif name.endswith(places.BIAS_OF_HEAD) and shape[-1:] == (size,):
            rows[name] = len(shape) - 1, count
        elif math.prod(shape) > 1:
            # A scale for each block of rows.
            block = -(-size // shape[0]) if any(word in name.rpartition(".")[2] for word in ("scale", "zero")) else 0
            if block < 2 or -(-size // block) != shape[0] or count % block:
                raise UnsupportedError(
                    f"{path}: {name} has the shape {list(shape)}, but the vocabulary has {size} rows, so --vocab "
                    f"{count} cannot cut this tensor.",
                    "Use --dequantize to cut plain weights." if block > 1 else "Leave --vocab out.",
                )
            rows[name] = 0, count // block
    # Tied names have one object.
    known: dict[Any, LazyTensor] = {}
    kept = {}
    for name, (dim, length) in rows.items():
        tensor = tensors[name]
        if tensor.shape[dim] > length:
            kept[name] = known.setdefault((tensor, dim, length), Narrow(tensor, dim, 0, length))
    return size, kept


def edited(config: Mapping[str, Any], before: int, after: int) -> Edited:
    """Return `config` as it is true of `after` of the `before` rows. Raise UsageError for a token that is not among
    them and has to be, CorruptError if no key counts the rows."""
    editor = Editor()

    def value_of(key: str, value: Any, where: str, scope: Mapping[str, Any]) -> Any:
        if key == VOCABULARY and type(value) is int:
            editor.counted.add("rows of the vocabulary")
            return after
        tokens: Sequence[Any] = value if isinstance(value, list) else [value]
        beyond = [token for token in tokens if type(token) is int and token >= after]
        if re.search(r"_token_(?:id|index)$", key) and beyond:
            if key == _PAD:
                raise UsageError(
                    f"config.json specifies {where} {beyond[0]}, but the output contains rows 0 to {after - 1} of "
                    "the vocabulary.",
                    f"Keep at least {beyond[0] + 1} rows.",
                )
            editor.notes.append(f"{where} of config.json is {brief(value)}, beyond the {after} rows of the vocabulary.")
        return value

    changed = editor.walked(config, value_of)
    editor.check(before, "rows of the vocabulary", (VOCABULARY,))
    return editor.edited(changed)


def _selected(chosen: Selected, source: Source, options: Options, reference: Selected | None = None) -> Selected:
    """Return `chosen` with the first rows of its vocabulary alone."""
    vocabulary: Vocabulary = source.computed["vocab"]
    size, kept = cut(vocabulary.rows, chosen.tensors, source.path)
    for name, tensor in chosen.quantized.items():
        if any(parted.prefix_of(name) + part in kept for part in tensor.parts):
            raise UsageError(f"{name} is quantized by torchao, whose rows --vocab cannot select.", "Use --dequantize.")
    tensors = {**chosen.tensors, **kept}
    values = tensors_alone(chosen, "a part of a model")
    warnings = [
        f"{name} has {count:,} tokens, {count - vocabulary.rows:,} more than the {vocabulary.rows:,} rows of the "
        "vocabulary. The model fails on text with one of these additional tokens."
        for name, count in vocabulary.tokens.items()
        if count > vocabulary.rows
    ]
    chosen = chosen._replace(
        names={name: name for name in tensors},
        known=tensors,
        tensors=tensors,
        described=chosen.described._replace(tensors=tensors, structure=None),
        structured=False,
        unmapped=chosen.first,
        warnings=(*chosen.warnings, *warnings),
        notes=(*chosen.notes, *values, f"The output has {vocabulary.rows:,} of {size:,} rows of the vocabulary."),
    )
    return configured(chosen, source, lambda config: edited(config, size, vocabulary.rows))


def _states(source: Source, states: Mapping[str, Any], groups: Sequence[Any], ties: Mapping[str, str]) -> NoReturn:
    raise UsageError(
        "--vocab converts a part of the weights, but the optimizer's states belong to all weights.",
        "Convert the states without --vocab.",
    )


COMPUTING = Computing(
    heading={"vocab?": int},
    selected=_selected,
    tree=_selected,
    states=_states,
    record=lambda source: {"vocab": source.computed["vocab"].rows},
    retold="counts",
)
