"""Make the tensors of a part: choose names, change numbers in them, and take rows. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ckptconv.errors import UsageError
from ckptconv.features.model_facts import places
from ckptconv.features.model_facts.counts import key_of, layers_in, width_of_layer
from ckptconv.features.model_parts.facts import Facts, Renaming
from ckptconv.features.model_parts.numbers import runs_of, text_of
from ckptconv.formats.coded import parts_among
from ckptconv.tensors.lazy import Concat, LazyTensor, Narrow
from ckptconv.text import count_of, some


class Asked(NamedTuple):
    """A request for a part: numbers of layers, of experts (one list, or one for each module that has some), and a
    component."""

    layers: tuple[int, ...] = ()
    experts: tuple[tuple[int, ...], ...] = ()
    component: str = ""


class Cut(NamedTuple):
    """A part: {old name: new name}, its tensors by new name, and the facts for its configuration."""

    names: dict[str, str]
    tensors: dict[str, LazyTensor]
    facts: Facts


def cut(
    request: Asked,
    tensors: Mapping[str, LazyTensor],
    config: Mapping[str, Any] | None,
    path: str,
) -> Cut:
    """Return the part of the `tensors` of the checkpoint at `path` that `request` describes; `config` is its
    configuration.

    Raise UsageError for layers, experts and components that do not exist; UnsupportedError for names that do not say
    where layers and experts are, CorruptError for a configuration that contradicts them.
    """
    named = _component(request.component, tensors, path)
    whole = {new: tensors[old] for old, new in named.items()}
    stack = places.stack_of(whole, path) if request.layers or request.component == "mtp" else None
    key = key_of(request.component, config or {}) if request.component in ("text", "vision") else ""
    count = layers_in(config[key] if config and key else config, stack.size, path) if stack else 0
    if request.component == "mtp":
        named = {old: new for old, new in named.items() if _is_further(new, stack, count)}
        if not named:
            raise UsageError(f"{path} has no layers that predict further tokens.")
        whole = {new: tensors[old] for old, new in named.items()}
    rows: dict[str, tuple[int, Sequence[int]]] = {}
    experts, numbers = _experts(request.experts, whole, path, rows) if request.experts else ({}, None)
    kept = _layers(request.layers, stack, count) if stack and request.layers else None
    if stack and kept:
        # Of layers of one kind, some may be quantized.
        weights = parts_among(whole)
        plain = [weights.get(name, name) for name in whole]
        places.check_layers(plain, stack, [layer for layer in kept if layer < count], count, path)
    if stack and kept and config:
        rows.update(_by_layer(whole, stack, kept, width_of_layer(config)))
    layers = {old: new for new, old in enumerate(kept)} if kept else {}
    renaming = Renaming(request.component, experts, stack.place if stack and kept else "", layers)
    names = {old: new for old in named if (new := renaming.of(old))}
    known: dict[Any, LazyTensor] = {}
    cut_tensors: dict[str, LazyTensor] = {}
    for old, new in names.items():
        tensor = tensors[old]
        if named[old] in rows:
            dim, taken = rows[named[old]]
            # Tied names have one object.
            tensor = known.setdefault((tensor, dim, tuple(taken)), taken_of(tensor, dim, taken))
        cut_tensors[new] = tensor
    total = stack.size if stack else 0
    before = total - count + places.further_layers(whole, stack)
    after = sum(number >= count for number in kept or range(total))
    after += places.further_layers(cut_tensors, stack)
    has_head = any(map(places.is_head, cut_tensors))
    return Cut(names, cut_tensors, Facts(renaming, count, total, kept, (before, after), numbers, has_head))


def taken_of(tensor: LazyTensor, dim: int, taken: Sequence[int]) -> LazyTensor:
    """Return these indices of a tensor along `dim`, in their order."""
    runs = runs_of(taken)
    if runs == [range(tensor.shape[dim])]:
        return tensor
    parts = tuple(Narrow(tensor, dim, run.start, len(run)) for run in runs)
    return parts[0] if len(parts) == 1 else Concat(parts, dim)


def _component(component: str, names: Collection[str], path: str) -> dict[str, str]:
    if component not in ("text", "vision"):
        return {name: name for name in names}
    if renamed := places.component_of(component, names):
        return renamed
    module = "language_model" if component == "text" else "vision_tower"
    top = (
        component == "text"
        and places.component_of("vision", names)
        and any(name.startswith("model.") for name in names)
    )
    raise UsageError(
        f"{path} has no {component} component, that is, no tensor of a module such as {module}.",
        "If the names of its language model begin with model., add --rename '^model\\.=language_model.model.'"
        if top
        else "",
    )


def _is_further(name: str, stack: places.Stack | None, count: int) -> bool:
    layer = places.numbered(name)
    is_behind = stack is not None and layer is not None and layer[0] == stack.place and layer[1] >= count
    return is_behind or (places.is_further(name) and not places.is_beside(name))


def _layers(numbers: Sequence[int], stack: places.Stack, count: int) -> tuple[int, ...]:
    """Return the layers that are kept. Raise UsageError for those that do not exist, and for those that predict further
    tokens before others."""
    if lacking := [number for number in numbers if number >= stack.size]:
        raise UsageError(
            f"--layers {text_of(numbers)} contains layer {lacking[0]}, but {stack.place} has layers 0 to "
            f"{stack.size - 1}."
        )
    if not any(number < count for number in numbers):
        raise UsageError(
            f"--layers {text_of(numbers)} keeps only layers that predict further tokens; the layers before them are 0 "
            f"to {count - 1}.",
            "To convert only the layers that predict further tokens, use --component mtp.",
        )
    if [*numbers] != sorted(numbers, key=lambda number: number >= count):
        raise UsageError(
            f"--layers {text_of(numbers)} must list the layers that predict further tokens, from {count} on, after all "
            "others."
        )
    return tuple(numbers)


def _by_layer(
    tensors: Mapping[str, LazyTensor], stack: places.Stack, kept: Sequence[int], width: int
) -> Iterator[tuple[str, tuple[int, Sequence[int]]]]:
    """Yield the kept part of tensors of all layers with `width` rows or columns for each, such as embeddings."""
    for name, tensor in tensors.items():
        if width and "per_layer" in name and places.numbered(name) is None and stack.size * width in tensor.shape:
            dim = tensor.shape.index(stack.size * width)
            yield name, (dim, [layer * width + at for layer in kept for at in range(width)])


def _experts(
    lists: Sequence[Sequence[int]],
    tensors: Mapping[str, LazyTensor],
    path: str,
    rows: dict[str, tuple[int, Sequence[int]]],
) -> tuple[dict[str, Mapping[int, int]], tuple[int, int]]:
    """Return the new numbers of experts by module, and how many each module has, in the model and in the part; add the
    tensors with a row for each to `rows`. Raise UsageError for experts that do not exist, and for unfit lists."""
    modules = places.experts_of(tensors, path)
    if not modules:
        raise UsageError(f"{path} has no experts.", "Omit --experts.")
    if len(lists) not in (1, len(modules)):
        raise UsageError(
            f"--experts has {len(lists)} lists, but {path} has {count_of(len(modules), 'module')} with experts: "
            f"{some([module.module for module in modules], 2)}.",
            "Give one list for all modules, or one list per module, in the order of the layers.",
        )
    every = [*lists] * len(modules) if len(lists) == 1 else lists
    counts, lengths = {module.size for module in modules}, {len(kept) for kept in every}
    if len(counts) > 1 or len(lengths) > 1:
        sizes, said = (counts, f"{path} has layers") if len(counts) > 1 else (lengths, "--experts has lists")
        raise UsageError(
            f"{said} of {some(sorted(sizes), form=str)} experts, but config.json has one number for all layers.",
            "Use a model whose layers all have the same number of experts, and keep the same number in each layer.",
        )
    renumbered: dict[str, Mapping[int, int]] = {}
    for experts, kept in zip(modules, every, strict=True):
        if max(kept) >= experts.size:
            raise UsageError(
                f"--experts {text_of(kept)} contains expert {max(kept)}, but {experts.module} has experts 0 to "
                f"{experts.size - 1}."
            )
        renumbered[experts.module] = {old: new for new, old in enumerate(kept)}
        rows.update((name, (dim, kept)) for name, dim in experts.rows.items())
    return renumbered, (counts.pop(), lengths.pop())
