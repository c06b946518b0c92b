"""The numbers of layers and experts that a configuration states, and where it describes which component. Pure.

Keys are known by their meaning, at any depth of the objects that describe the language model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ckptconv.errors import CorruptError
from ckptconv.features.configs.configs import QUANTIZING
from ckptconv.text import count_of, some

# Keys that count layers, those of them that predict further tokens, experts, and the experts that a token takes.
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
ALSO_LAYERS = ("num_blocks", "decoder_layers")  # if they have that number
FURTHER = re.compile(
    r"num_nextn_predict_layers|mtp_num_(?:hidden_)?layers|(?:num|n)_mtp_(?:hidden_)?(?:layers|modules)"
)
EXPERTS = (
    "num_experts",
    "n_routed_experts",
    "num_local_experts",
    "moe_num_experts",
    "num_routed_experts",
    "n_experts",
    "num_moe_experts",
)
PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_k",
    "moe_topk",
    "moe_top_k",
    "experts_per_token",
    "top_k",
)
# Keys for the rows of embeddings: tokens, all rows with padding, the multiple to which they are padded, and more rows.
VOCABULARY, _PADDED = "vocab_size", ("padded_vocab_size", "embedding_size")
_MULTIPLE, _ADDITIONAL = "pad_vocab_size_multiple", "additional_vocab_size"
# A nested configuration is that of the language model if it is called one of these; one with a model type of its own,
# or called like another component, is another's.
_TEXT = ("text_config", "language_config", "llm_config", "thinker_config")
OTHER = re.compile(r"vision|visual|image|video|audio|speech|talker|code2wav|token2wav|projector|codec|vq|mtp|nextn")
# Words of keys about layers.
SPEAKS = re.compile(r"layer|block|idx|indices|pattern")


def scopes(config: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the objects in a configuration that describe the language model: where each is, and the object."""
    yield at, config
    for key, value in config.items():
        if isinstance(value, Mapping) and not is_other(key, value):
            yield from scopes(value, f"{at}{key}.")


def is_other(key: str, value: Mapping[str, Any]) -> bool:
    if key in QUANTIZING or OTHER.search(key) or key.startswith("rope"):
        return True
    return key not in _TEXT and "model_type" in value


def layers_in(config: Mapping[str, Any] | None, total: int, path: str) -> int:
    """Return how many of the `total` layers in the names of weights are not layers that predict further tokens; that is
    the number in a configuration. Raise CorruptError if it states another."""
    if config is None:
        return total
    every = [(at, key, value) for at, scope in scopes(config) for key, value in scope.items()]
    numbers = [(at + key, value) for at, key, value in every if type(value) is int]
    further = max((value for key, value in numbers if FURTHER.fullmatch(key.rpartition(".")[2])), default=0)
    counts = {key: value for key, value in numbers if key.rpartition(".")[2] in LAYERS}
    possible = (total, total - further)
    if wrong := next((key for key, value in counts.items() if value not in possible), None):
        raise CorruptError(
            f"config.json has {wrong} {counts[wrong]}, but the weights of {path} have {count_of(total, 'layer')}.",
            "Correct config.json, or convert the whole checkpoint.",
        )
    if len({*counts.values()}) > 1:
        said = some(counts.items(), form=lambda count: f"{count[0]} {count[1]}")
        raise CorruptError(f"config.json contradicts itself: it has {said}.", "Correct the wrong value.")
    if counts:
        return next(iter(counts.values()))
    lengths = [len(value) for _, key, value in every if isinstance(value, (list, str)) and SPEAKS.search(key)]
    return possible[1] if total not in lengths and possible[1] in lengths else total


def experts_in(config: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the keys of a configuration that count experts, and their values."""
    every = [(at + key, scope[key]) for at, scope in scopes(config) for key in EXPERTS if key in scope]
    return [(key, value) for key, value in every if type(value) is int and value > 1]


def vocabularies_in(config: Mapping[str, Any]) -> list[tuple[str, int, set[int]]]:
    """Return the keys of a configuration that state a vocabulary, and their values, each with the numbers of rows that
    embeddings may have by it. A nested configuration takes precedence over that around it."""
    stated = []
    for at, scope in scopes(config):
        numbers = {key: value for key, value in scope.items() if type(value) is int}
        if size := numbers.get(VOCABULARY, 0):
            step = max(numbers.get(_MULTIPLE, 1), 1)
            padded = {numbers[key] for key in _PADDED if key in numbers}
            possible = {size, -(-size // step) * step, size + numbers.get(_ADDITIONAL, 0), *padded}
            stated.append((at + VOCABULARY, size, possible))
    return [one for one in stated if "." in one[0]] or stated


def width_of_layer(config: Mapping[str, Any]) -> int:
    """Return the number of elements of each layer in tensors of all layers; 0 if there are no such tensors."""
    widths = (scope.get("hidden_size_per_layer_input") for _, scope in scopes(config))
    return next((width for width in widths if type(width) is int), 0)


def key_of(component: str, config: Mapping[str, Any]) -> str:
    """Return the key of the configuration of a component; "" if there is none."""
    words = re.compile("|".join(_TEXT) if component == "text" else r"vis(?:ion|ual)\w*_config")
    return next((key for key, value in config.items() if words.fullmatch(key) and isinstance(value, Mapping)), "")
