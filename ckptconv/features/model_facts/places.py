"""Places of a model, by the names of its tensors: stacks of layers, modules with experts, components, embeddings. Pure.

Sources: the names in the checkpoints of transformers' models, and of the releases that they read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.text import count_of, some

# Words of a path: of the modules that hold layers by number, and of components other than the language model.
LAYER_WORDS = ("layers", "layer", "h", "blocks", "block")
_BESIDE = re.compile(
    r"(?:^|[._])(?:vision|visual|vit|image|video|audio|speech|talker|code2wav|token2wav|projector|multi_modal|mm)"
    r"(?:[._\d]|$)"
)
_VISION = re.compile(r"vision\w*|visual|vit")
_MTP = re.compile(r"mtp\w*|nextn\w*")
# A model of several components has its language model in a module of one of these names.
_TEXT = ("language_model", "text_model")
HEADS = ("lm_head", "output", "embed_out", "score")
_WORD_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in")
EMBEDDINGS = (*_WORD_EMBEDDINGS, "embeddings", "embedding", "shared")
_OF_VOCABULARY = (*EMBEDDINGS, *HEADS[:3])
# Embeddings and heads that layers which predict further tokens may have of their own.
_IN_LAYERS = re.compile(r"(?:^|\.)(?:embed_tokens|lm_head|shared_head\.head)$")
# A bias of a head, whose rows are in its last dimension.
BIAS_OF_HEAD = "final_logits_bias"
# Modules, and ends of names, of tensors with a row for each expert, next to the experts or above them.
_ROUTERS, _OF_EXPERTS = ("gate", "router", "moe_statics"), ("correction_bias", "expert_bias")
# Modules of layers that compute with the number of their layer, or whose tensors are stored in one layer for several.
_BY_NUMBER, _ACROSS = re.compile(r"lambda_[qk]1|gate_bias"), re.compile(r"shared_transf\w*")
# Codes of GPTQ and AWQ, whose rows are no outputs of a module.
_TRANSPOSED = ("qweight", "qzeros", "g_idx")
# Modules whose tensors may have the number of experts as their length by chance.
_WHOLE = re.compile(r"^shared|norm")
_FIRST = re.compile(r"^(?P<place>(?:[^.]+\.)*?[^.\d][^.]*)\.(?P<number>\d{1,6})(?=\.|$)")
_EXPERT = re.compile(r"^(?P<module>(?:.*\.)?experts)\.(?P<number>\d{1,6})(?=\.|$)")


class Stack(NamedTuple):
    """Modules that are called by number: the path of the module that holds them, and their number."""

    place: str
    size: int


def is_beside(path: str) -> bool:
    """Return whether a path leads into a component other than the language model, such as the vision model."""
    return _BESIDE.search(path) is not None


def is_head(name: str) -> bool:
    """Return whether a tensor, or a module, is the head of a language model."""
    words = name.split(".")
    return words[0] in HEADS or "lm_head" in words[:2]


def is_further(path: str) -> bool:
    """Return whether a path leads to a module that predicts further tokens."""
    return any(_MTP.fullmatch(word) for word in path.split("."))


def numbered(name: str) -> tuple[str, int] | None:
    """Return the stack of layers that a name is in, and the number of its layer; None if it is in none."""
    match = _FIRST.match(name)
    if match is None or match["place"].rpartition(".")[2].removeprefix("mtp_") not in LAYER_WORDS:
        return None
    return match["place"], int(match["number"])


def is_of_vocabulary(name: str) -> bool:
    """Return whether a tensor belongs to embeddings or a head."""
    module, _, leaf = name.rpartition(".")
    is_one = _IN_LAYERS.search(module) if numbered(name) else module.rpartition(".")[2] in _OF_VOCABULARY
    return bool(is_one and not is_beside(module)) or leaf == BIAS_OF_HEAD


def stack_of(names: Iterable[str], path: str) -> Stack:
    """Return the layers of the language model. Raise UnsupportedError if there are none, or several stacks of them,
    CorruptError if one of their numbers is missing."""
    stacks: dict[str, set[int]] = {}
    for name in names:
        place, number = numbered(name) or ("", 0)
        if place and not is_beside(place) and not is_further(place):
            stacks.setdefault(place, set()).add(number)
    if len(stacks) != 1:
        layers = f"several stacks of layers: {some(stacks)}" if stacks else "no numbered layers, such as model.layers.0"
        raise UnsupportedError(
            f"{path} has {layers}.", "Select tensors with --include and --exclude." if stacks else "Omit --layers."
        )
    ((place, numbers),) = stacks.items()
    missing = [number for number in range(max(numbers) + 1) if number not in numbers]
    if missing:
        raise CorruptError(
            f"{path} has layer {max(numbers)} of {place}, but not {some(missing, form=str)}.",
            "Convert the whole checkpoint, with all of its files.",
        )
    return Stack(place, len(numbers))


def check_layers(names: Iterable[str], stack: Stack, kept: Sequence[int], count: int, path: str) -> None:
    """Raise UnsupportedError if the layers `kept` of the first `count` would not be in a part what they are in the
    model at `path`, as the `names` tell: for something else has their number too, or they depend on their place."""
    within: list[set[str]] = [set() for _ in range(count)]
    beside: dict[str, set[str]] = {}
    for name in names:
        place, number = numbered(name) or ("", count)
        if place == stack.place and number < count:
            within[number].add(name[len(f"{place}.{number}.") :])
        elif (match := _FIRST.match(name)) and not (place or is_beside(name) or is_further(name)):
            beside.setdefault(match["place"], set()).add(match["number"])
    for place, numbers in beside.items():
        if numbers == {*map(str, range(count))} or place.endswith("_layers"):
            raise UnsupportedError(
                f"{path} has {len(numbers)} {place}.N next to {count} {stack.place}.N: it is not known which {place}.N "
                "belongs to which layer.",
                f"Exclude them with --exclude '{place}.*', or select tensors with --include and --rename.",
            )
    words = {word for layer in within for name in layer for word in name.split(".")}
    is_beginning = [*kept] == [*range(len(kept))]
    if word := next(filter(_ACROSS.fullmatch, sorted(words)), ""):
        raise UnsupportedError(f"{path} stores a {word} of several layers in one layer.", "Convert all layers.")
    if not is_beginning and (word := next(filter(_BY_NUMBER.fullmatch, sorted(words)), "")):
        raise UnsupportedError(
            f"{path} has layers with {word}, which depend on the number of the layer, but layers have other numbers in "
            "the part.",
            "Keep the first layers, such as --layers 0-3.",
        )
    for end, old, new in (("first", 0, kept[0]), ("last", count - 1, kept[-1])):
        more, less = within[old] - within[new], within[new] - within[old]
        if old != new and bool(more) != bool(less) and within.count(within[old]) == 1:
            different = some(sorted(more or less), 3, str)
            raise UnsupportedError(
                f"{path}: layer {old}, the {end} layer, has {'' if more else 'no '}{different}, unlike layer {new}. "
                f"Programs recognize such a layer by its position, but layer {new} would be the {end} one of the part.",
                f"Keep layer {old} as the {end} layer.",
            )


def further_layers(names: Iterable[str], stack: Stack | None) -> int:
    """Return the number of layers in modules of their own that predict further tokens."""
    inside = (numbered(name) for name in names if is_further(name) and not is_beside(name))
    found = {place for place in inside if place and (stack is None or place[0] != stack.place)}
    return len(found)


# ---------------------------------------------------------------------------------------------------------- components


def named_in(component: str, name: str) -> str | None:
    """Return the name of a tensor or a module in a component's own model; None if it is not in that component."""
    words = name.split(".")
    if component == "text":
        at = next((at for at, word in enumerate(words) if word in _TEXT), None)
        if at is not None and not is_beside(".".join(words[:at])):
            # At the top, the text model of a pair of encoders keeps its name.
            return name if words[at] == "text_model" and at == 0 else ".".join(words[:at] + words[at + 1 :])
        return name if is_head(name) else None
    at = next((at for at, word in enumerate(words) if _VISION.fullmatch(word)), None)
    return None if at is None else ".".join(words[at + 1 :])


def component_of(component: str, names: Iterable[str]) -> dict[str, str]:
    """Return the names in the text or vision component, {old: new}; {} if there is no such component."""
    renamed = {name: new for name in names if (new := named_in(component, name))}
    if component == "text":
        return renamed if any(word in _TEXT for name in renamed for word in name.split(".")) else {}
    return renamed


# ------------------------------------------------------------------------------------------------------------- experts


class Experts(NamedTuple):
    """A module with experts: its path, their number, and {name: dimension} of tensors with a row for each."""

    module: str
    size: int
    rows: Mapping[str, int]


def expert_in(name: str) -> tuple[str, int, str] | None:
    """Return the module of experts that a name is in, the number of the expert, and the rest of the name; None if it is
    in none that is called by number."""
    match = _EXPERT.match(name)
    return (match["module"].rpartition(".")[0], int(match["number"]), name[match.end() :]) if match else None


def experts_of(tensors: Mapping[str, LazyTensor], path: str) -> list[Experts]:
    """Return the modules with experts of the checkpoint at `path`, in order. Raise UnsupportedError for a tensor that
    has the number of experts as its length, if its rows are not known to be theirs."""
    inside: dict[str, list[str]] = {}
    for name in tensors:
        words = name.split(".")
        if "experts" in words[1:]:
            inside.setdefault(".".join(words[: words.index("experts", 1)]), [])
        # Modules whose experts have no module of their own: matrices next to a router.
        elif words[-3:] == ["router", "layer", "weight"]:
            inside.setdefault(".".join(words[:-3]), [])
    # Routers may lie beside the module with experts.
    layers = {f"{layer[0]}.{layer[1]}": module for module in inside if (layer := numbered(module))}
    for name in tensors:
        words = name.split(".")
        above = (".".join(words[:end]) for end in range(len(words) - 1, 0, -1))
        module = next((path for path in above if path in inside), "")
        if not module and _is_of_router(words) and (layer := numbered(name)):
            module = layers.get(f"{layer[0]}.{layer[1]}", "")
        if module:
            inside[module].append(name)
    return [_experts(module, {name: tensors[name].shape for name in names}, path) for module, names in inside.items()]


def _is_of_router(words: Sequence[str]) -> bool:
    return words[-1].endswith(_OF_EXPERTS) or (len(words) > 1 and words[-2] in _ROUTERS)


def _experts(module: str, shapes: Mapping[str, tuple[int, ...]], path: str) -> Experts:
    prefix = f"{module}."
    ends = {name: name.removeprefix(prefix).split(".") for name in shapes}
    numbers = {expert[1] for name in shapes if (expert := expert_in(name)) and expert[0] == module}
    stacks = {name for name, words in ends.items() if words[0] == "experts" and not "".join(words[1:2]).isdecimal()}
    if not numbers and not stacks:
        stacks = {name for name, shape in shapes.items() if len(shape) == 3}
    count = len(numbers) or max((shapes[name][0] for name in stacks if len(shapes[name]) > 1), default=0)
    if not count or (numbers and max(numbers) != count - 1):
        raise UnsupportedError(f"{path}: the experts of {module} are not numbered from 0, nor stacked in its tensors.")
    rows: dict[str, int] = {}
    for name, words in ends.items():
        shape, is_stack = shapes[name], name in stacks
        is_router = words[0] in _ROUTERS or _is_of_router(words)
        if is_router and words[-1] in _TRANSPOSED:
            raise _unknown(path, name, shape, module, count)
        if (is_stack or is_router) and shape and shape[0] == count:
            rows[name] = 0
        elif is_router and shape[-1:] == (count,) and shape[:-1] == (1,) * (len(shape) - 1):
            rows[name] = len(shape) - 1
        elif is_stack or is_router:
            if any(extent != 1 for extent in shape) and (is_stack or len(shape) > 1 or "bias" in words[-1]):
                raise _unknown(path, name, shape, module, count)
        elif words[0] != "experts" and shape[:1] == (count,) and len(words) < 3 and not _WHOLE.search(words[0]):
            raise _unknown(path, name, shape, module, count)
    return Experts(module, count, rows)


def _unknown(path: str, name: str, shape: Sequence[int], module: str, count: int) -> UnsupportedError:
    return UnsupportedError(
        f"{path}: {name} has the shape {list(shape)}, but {module} has {count_of(count, 'expert')}, so it is not known "
        "which rows belong to which expert.",
        f"Exclude the tensor with --exclude {name}, or convert without --experts.",
    )
