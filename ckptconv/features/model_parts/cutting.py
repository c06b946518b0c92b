"""Make the tensors of a part: choose names, change numbers in them, and take rows. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ckptconv.errors import UnsupportedError, UsageError
from ckptconv.features.model_parts import places
from ckptconv.features.model_parts.editing import key_of, layers_in, width_of_layer
from ckptconv.features.model_parts.facts import Facts, Renaming
from ckptconv.features.model_parts.numbers import text_of
from ckptconv.tensors.lazy import Concat, LazyTensor, Narrow
from ckptconv.text import some


class Asked(NamedTuple):
    """The part that is asked for: numbers of layers, of experts (one list, or one for each module that has some), a
    component, and a number of rows of the vocabulary."""

    layers: tuple[int, ...] = ()
    experts: tuple[tuple[int, ...], ...] = ()
    component: str = ""
    vocab: int | None = None


class Cut(NamedTuple):
    """A part: {old name: new name}, its tensors by new name, and what its configuration has to say."""

    names: dict[str, str]
    tensors: dict[str, LazyTensor]
    facts: Facts


def cut(
    asked: Asked,
    tensors: Mapping[str, LazyTensor],
    config: Mapping[str, Any] | None,
    path: str,
    grafted: Collection[str] = (),
) -> Cut:
    """Return the part of the `tensors` of the checkpoint at `path` that is `asked` for; `config` is its configuration,
    and `grafted` are the names that are added to the part.

    Raise UsageError for layers, experts, components and rows that there are not, and for grafted layers that do not
    follow those of the part; UnsupportedError for names that do not say where layers and experts are, CorruptError for
    a configuration that contradicts them.
    """
    named = _component(asked.component, tensors, path)
    whole = {new: tensors[old] for old, new in named.items()}
    has_layers = any(places.numbered(name) for name in grafted)
    stack = places.stack_of(whole, path) if asked.layers or asked.component == "mtp" or has_layers else None
    key = key_of(asked.component, config or {}) if asked.component in ("text", "vision") else ""
    count = layers_in(config[key] if config and key else config, stack.size, path) if stack else 0
    if asked.component == "mtp":
        named = {old: new for old, new in named.items() if _is_further(new, stack, count)}
        if not named:
            raise UsageError(f"{path} has no layers that predict further tokens.")
        whole = {new: tensors[old] for old, new in named.items()}
    rows: dict[str, tuple[int, Sequence[int]]] = {}
    experts, numbers = _experts(asked.experts, whole, path, rows) if asked.experts else ({}, None)
    kept = _layers(asked.layers, stack, count) if stack and asked.layers else None
    if stack and kept and config:
        rows.update(_by_layer(whole, stack, kept, width_of_layer(config)))
    vocabulary = _vocabulary(asked.vocab, whole, path, rows) if asked.vocab else None
    layers = {old: new for new, old in enumerate(kept)} if kept else {}
    renaming = Renaming(asked.component, experts, stack.place if stack and kept else "", layers)
    names = {old: new for old in named if (new := renaming.of(old))}
    known: dict[Any, LazyTensor] = {}
    made: dict[str, LazyTensor] = {}
    for old, new in names.items():
        tensor = tensors[old]
        if named[old] in rows:
            dim, taken = rows[named[old]]
            # Tied names have one object.
            tensor = known.setdefault((tensor, dim, tuple(taken)), taken_of(tensor, dim, taken))
        made[new] = tensor
    total = stack.size if stack else 0
    before = total - count + places.further_layers(whole, stack)
    after = sum(number >= count for number in kept or range(total)) + places.further_layers([*made, *grafted], stack)
    if stack:
        after += _grafted_layers(grafted, stack, len(kept or range(total)), path)
    return Cut(names, made, Facts(renaming, count, total, kept, (before, after), numbers, vocabulary))


def taken_of(tensor: LazyTensor, dim: int, taken: Sequence[int]) -> LazyTensor:
    """Return these indices of a tensor along `dim`, in their order."""
    runs: list[list[int]] = []
    for index in taken:
        if runs and index == sum(runs[-1]):
            runs[-1][1] += 1
        else:
            runs.append([index, 1])
    if runs == [[0, tensor.shape[dim]]]:
        return tensor
    parts = tuple(Narrow(tensor, dim, first, length) for first, length in runs)
    return parts[0] if len(parts) == 1 else Concat(parts, dim)


def _component(component: str, names: Iterable[str], path: str) -> dict[str, str]:
    if component not in ("text", "vision"):
        return {name: name for name in names}
    if found := places.component_of(component, names):
        return found
    held = "language_model" if component == "text" else "vision_tower"
    raise UsageError(f"{path} has no {component} component: no tensor is in a module such as {held}.")


def _is_further(name: str, stack: places.Stack | None, count: int) -> bool:
    layer = places.numbered(name)
    is_behind = stack is not None and layer is not None and layer[0] == stack.place and layer[1] >= count
    return is_behind or (places.is_further(name) and not places.is_beside(name))


def _layers(asked: Sequence[int], stack: places.Stack, count: int) -> tuple[int, ...]:
    """Return the layers that are kept. Raise UsageError for those that do not exist, and for those that predict further
    tokens before others."""
    if lacking := [number for number in asked if number >= stack.size]:
        raise UsageError(
            f"--layers {text_of(asked)} names layer {lacking[0]}, but {stack.place} has layers 0 to {stack.size - 1}."
        )
    if not any(number < count for number in asked):
        raise UsageError(
            f"--layers {text_of(asked)} keeps only layers that predict further tokens: those before are 0 to "
            f"{count - 1}.",
            "To take them alone, use --component mtp.",
        )
    if [*asked] != sorted(asked, key=lambda number: number >= count):
        raise UsageError(
            f"--layers {text_of(asked)} puts a layer that predicts further tokens, from {count} on, before one that "
            "does not."
        )
    return tuple(asked)


def _by_layer(
    tensors: Mapping[str, LazyTensor], stack: places.Stack, kept: Sequence[int], width: int
) -> Iterator[tuple[str, tuple[int, Sequence[int]]]]:
    """Yield tensors of all layers with `width` rows or columns for each, such as embeddings: what is taken of them."""
    for name, tensor in tensors.items():
        if width and "per_layer" in name and places.numbered(name) is None and stack.size * width in tensor.shape:
            dim = tensor.shape.index(stack.size * width)
            yield name, (dim, [layer * width + at for layer in kept for at in range(width)])


def _experts(
    asked: Sequence[Sequence[int]],
    tensors: Mapping[str, LazyTensor],
    path: str,
    rows: dict[str, tuple[int, Sequence[int]]],
) -> tuple[dict[str, Mapping[int, int]], tuple[int, int]]:
    """Return the new numbers of experts by module, and how many each module has, before and then; add to `rows` the
    tensors with a row for each. Raise UsageError for experts that do not exist, and for lists that do not fit."""
    found = places.experts_of(tensors, path)
    if not found:
        raise UsageError(f"{path} has no experts.", "Leave --experts out.")
    if len(asked) not in (1, len(found)):
        raise UsageError(
            f"--experts has {len(asked)} lists, but {len(found)} modules of {path} have experts: "
            f"{some([each.module for each in found], 2)}.",
            "Give one list for all of them, or one for each, in the order of the layers.",
        )
    every = [*asked] * len(found) if len(asked) == 1 else asked
    counts, lengths = {each.size for each in found}, {len(each) for each in every}
    if len(counts) > 1 or len(lengths) > 1:
        told, said = (counts, f"{path} has layers") if len(counts) > 1 else (lengths, "--experts has lists")
        raise UsageError(f"{said} of {some(sorted(told), form=str)} experts, and a configuration has one number.")
    made: dict[str, Mapping[int, int]] = {}
    for experts, kept in zip(found, every, strict=True):
        if max(kept) >= experts.size:
            raise UsageError(
                f"--experts {text_of(kept)} names expert {max(kept)}, but {experts.module} has experts 0 to "
                f"{experts.size - 1}."
            )
        made[experts.module] = {old: new for new, old in enumerate(kept)}
        rows.update((name, (dim, kept)) for name, dim in experts.rows.items())
    return made, (counts.pop(), lengths.pop())


def _vocabulary(
    count: int, tensors: Mapping[str, LazyTensor], path: str, rows: dict[str, tuple[int, Sequence[int]]]
) -> tuple[int, int]:
    """Return how many rows the vocabulary has, before and then; add to `rows` the tensors of it."""
    found = places.vocabulary_of(tensors)
    size = max((tensors[name].shape[0] for name in found if len(tensors[name].shape) > 1), default=0)
    if count > size:
        has = f"has {size} rows" if size else "has no embeddings or head that are known by name"
        raise UsageError(f"--vocab {count} keeps {count} rows, but {path} {has}.")
    for name in found:
        shape = tensors[name].shape
        if shape[:1] == (size,):
            rows[name] = 0, range(count)
        elif name.endswith("final_logits_bias") and shape[-1:] == (size,):
            rows[name] = len(shape) - 1, range(count)
        elif math.prod(shape) > 1:
            # A scale for each block of rows.
            block = -(-size // shape[0]) if any(word in name.rpartition(".")[2] for word in ("scale", "zero")) else 0
            if block < 2 or -(-size // block) != shape[0] or count % block:
                raise UnsupportedError(
                    f"{path}: {name} has the shape {list(shape)}, and the vocabulary {size} rows: --vocab "
                    f"{count} cannot cut it.",
                    "Use --dequantize to cut plain weights." if block > 1 else "Leave --vocab out.",
                )
            rows[name] = 0, range(count // block)
    return size, count


def _grafted_layers(grafted: Iterable[str], stack: places.Stack, count: int, path: str) -> int:
    """Return how many layers are grafted behind the `count` layers of the part of the stack. Raise UsageError for those
    that do not follow these."""
    numbers = {found[1] for name in grafted if (found := places.numbered(name)) and found[0] == stack.place}
    layers = sorted(number for number in numbers if number >= count)
    if layers == [*range(count, count + len(layers))]:
        return len(layers)
    raise UsageError(
        f"--graft adds layers {text_of(layers)} of {stack.place}, but the part of {path} has layers 0 to {count - 1}: "
        f"{count} has to be next.",
        "Convert the graft first, with --include and --rename, and graft that.",
    )
