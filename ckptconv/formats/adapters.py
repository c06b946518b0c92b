"""A source into which PEFT's adapters are to be merged, and what their configurations say.

Source: PEFT 0.21, tuners/lora (config.py, layer.py) and utils/other.get_pattern_key.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ckptconv.errors import CorruptError, UnsupportedError, UsageError
from ckptconv.formats import configs
from ckptconv.formats.detect import open_source
from ckptconv.formats.source import Adapter, Scale, Source, computed
from ckptconv.plan import Input
from ckptconv.storage.location import Location
from ckptconv.structure.regexes import ExpressionError, LimitsError, first_matches
from ckptconv.text import brief, some

CONFIG = "adapter_config.json"
# The weights beside it, as PEFT wrote them before it wrote safetensors.
_OLD = "adapter_model.bin"
# Stands before the names of the files of adapters among those of the source.
_OF_ADAPTERS = "--adapter"
# What a configuration may ask for that changes what is merged, and is not known here.
_UNKNOWN = (
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "velora_config",
    "layer_replication",
    "alora_invocation_tokens",
    "trainable_token_indices",
)
# How factors may begin without a change of the base.
_BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
_MOST_RANK = 1 << 20
# A pattern in which no character but a dot means something else than itself.
_PLAIN = re.compile(r"[\w.]+")


def read_adapters(paths: Sequence[str], settings: Mapping[str, Any]) -> list[Adapter]:
    """Read each of the adapters at `paths`, with the `settings` of `open_source`.

    Raise UsageError for one without a configuration, UnsupportedError for one that is not LoRA's, CorruptError for a
    configuration that is none.
    """
    return [_read(path, settings) for path in paths]


def _read(path: str, settings: Mapping[str, Any]) -> Adapter:
    plain = {"like": "", "map": "", "size": None, "dequantize": False, "family": "", "key": ""}
    options = dict(settings.get("storage_options") or {})
    given = Location(path, options)
    is_old = given.kind == "directory" and _OLD in given.names
    source = open_source(given.join(_OLD).path if is_old else path, **{**settings, **plain})
    place = Location(source.path, options)
    here = place if place.kind == "directory" else place.parent
    file = next((each for each in (here.join(CONFIG), here.parent.join(CONFIG)) if each.kind == "file"), None)
    if file is None:
        raise UsageError(
            f"{path} is no adapter: there is no {CONFIG} with it.",
            f"Put the {CONFIG} that PEFT wrote beside it.",
        )
    told = configs.read(file)
    found = file.entry.file
    source = source._replace(inputs={**source.inputs, CONFIG: Input(found, (found.size, found.stamp))})
    parameters = told.get("target_parameters") or []
    if not isinstance(parameters, list) or not all(isinstance(each, str) for each in parameters):
        raise CorruptError(
            f"{file}: its target_parameters are {brief(parameters)}, where a list of names was expected."
        )
    return Adapter(source, _scale(file, told), told.get("fan_in_fan_out") is True, tuple(parameters))


def _scale(file: Location, told: Mapping[str, Any]) -> Scale:
    """Return what a configuration says of ranks and scales."""
    if told.get("peft_type") != "LORA":
        raise UnsupportedError(
            f"{file} says that the adapter is of type {brief(told.get('peft_type'))}, and LORA is merged."
        )
    asked = [name for name in _UNKNOWN if told.get(name) not in (None, False)]
    if asked:
        raise UnsupportedError(f"{file} asks for {some(asked)}, which is not supported.")
    if (begun := told.get("init_lora_weights")) not in _BEGINNINGS:
        raise UnsupportedError(
            f"{file} says that the factors began as {brief(begun)}, which takes their product away from the base: it "
            "cannot be added to the base's files as they are.",
            "Save it again with PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...).",
        )
    patterns = []
    for name in ("rank_pattern", "alpha_pattern"):
        given = told.get(name) or {}
        if not isinstance(given, dict):
            raise CorruptError(f"{file}: its {name} is {brief(given)}, where an object was expected.")
        patterns.append({key: _number(file, name, value) for key, value in given.items()})
    return Scale(
        _number(file, "r", told.get("r")),
        _number(file, "lora_alpha", told.get("lora_alpha")),
        patterns[0],
        patterns[1],
        told.get("use_rslora") is True,
        told.get("use_dora") is True,
    )


def _number(file: Location, name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value <= _MOST_RANK:
        raise CorruptError(f"{file}: its {name} is {brief(value)}, where a number from 1 to {_MOST_RANK} was expected.")
    return float(value)


def settled(scale: Scale, names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Return the rank and alpha of each of `names`, which are modules, or parameters of them: those of the first
    pattern that matches it from its beginning, or from behind a dot, to its end.

    Raise UnsupportedError for patterns that are not understood.
    """
    told = (scale.ranks, scale.rank), (scale.alphas, scale.alpha)
    patterns = [list(each) for each, _ in told]
    if all(map(_PLAIN.fullmatch, itertools.chain(*patterns))):
        first = [[_first_plain(each, name) for name in names] for each in patterns]
    else:
        try:
            first = first_matches([[f"(.*\\.)?({pattern})$" for pattern in each] for each in patterns], names)
        except (ExpressionError, LimitsError) as error:
            every = list(dict.fromkeys(itertools.chain(*patterns)))
            raise UnsupportedError(f"The patterns of {CONFIG} are not supported: {some(every, 3)}.") from error
    ranks, alphas = (
        [default if number is None else values[each[number]] for number in numbers]
        for (values, default), each, numbers in zip(told, patterns, first, strict=True)
    )
    return dict(zip(names, zip(ranks, alphas, strict=True), strict=True))


def _first_plain(patterns: Sequence[str], name: str) -> int | None:
    """Return the number of the first of `patterns` that matches, in which only dots mean something else."""
    for number, pattern in enumerate(patterns):
        end = name[-len(pattern) :]
        is_whole = len(name) == len(pattern) or name[-len(pattern) - 1 : -len(pattern)] == "."
        if is_whole and len(end) == len(pattern) and all(a in (".", b) for a, b in zip(pattern, end, strict=True)):
            return number
    return None


def factor(scale: Scale, told: tuple[float, float], name: str, rank: int) -> float:
    """Return what the product of the factors of `name`, with `rank` columns, is multiplied by, where the configuration
    has `told` its rank and alpha. Raise CorruptError if it says another rank."""
    r, alpha = told
    if r != rank:
        raise CorruptError(
            f"The factors of {name!r} have rank {rank}, and {CONFIG} says {r:g}.",
            "The adapter is damaged, or its configuration is of another.",
        )
    return alpha / (r**0.5 if scale.rooted else r)


def merging(source: Source, adapters: Sequence[Adapter]) -> Source:
    """Return `source`, into which `adapters` are to be merged in order."""
    inputs = {
        f"{_OF_ADAPTERS}/{number}/{name}": each
        for number, adapter in enumerate(adapters)
        for name, each in adapter.source.inputs.items()
    }
    terms = [source, *(adapter.source for adapter in adapters)]
    return computed(source, terms, inputs, adapters=tuple(adapters))
