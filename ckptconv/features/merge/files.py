"""A source with PEFT's adapters to merge into it, and the adapters' configurations.

Source: PEFT 0.21, tuners/lora (config.py, layer.py) and utils/other.get_pattern_key.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ckptconv.errors import CkptconvError, CorruptError, UnsupportedError, UsageError
from ckptconv.features.companions import reading
from ckptconv.features.configs import configs
from ckptconv.features.merge.targets import Targets, read_targets
from ckptconv.features.regexes.regexes import ExpressionError, LimitsError, first_matches
from ckptconv.features.sums.sources import combined
from ckptconv.formats.adapter_names import is_adapter, other_program
from ckptconv.formats.detect import open_source
from ckptconv.formats.source import ADAPTER_CONFIG, CONFIG, Source
from ckptconv.options.table import CHANGING
from ckptconv.outputs.computed import repeated
from ckptconv.plan import Input
from ckptconv.storage.location import Location
from ckptconv.text import brief, some

# The prefix of the names of adapters' files among those of the source.
_OF_ADAPTERS = "--adapter"
# Keys of a configuration that do not change a merge, or that this module reads.
_KNOWN = (
    "alpha_pattern auto_mapping bias corda_config ensure_weight_tying eva_config exclude_modules fan_in_fan_out "
    "inference_mode init_lora_weights layers_pattern layers_to_transform loftq_config lora_bias lora_ga_config "
    "megatron_config modules_to_save rank_pattern runtime_config target_modules target_parameters "
    "trainable_token_indices use_dora use_rslora"
)
# The keys that a configuration needs, in words.
KEYS = '"peft_type": "LORA", r, lora_alpha and target_modules'
# Initial values of factors that leave the base unchanged.
_BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
# The largest rank and alpha of a configuration; `MOST_RANK` is the largest rank of factors.
_LARGEST = 1 << 20
_BASE = "base_model_name_or_path"
# The most adapters: each adds a level to the expression of a tensor.
_MOST_ADAPTERS = 64
# Modules that PEFT trains whole for a task, although the configuration does not name them.
_HEADS = {
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}
# A pattern in which no character but a dot has a special meaning.
_PLAIN = re.compile(r"[\w.]+")


class Scale(NamedTuple):
    """The rank and alpha of an adapter's factors, and those of modules that match a pattern.

    A product is multiplied by alpha over the rank, or, if `rooted`, over the root of the rank. `dora`: rows have
    lengths of their own.
    """

    rank: float
    alpha: float
    ranks: Mapping[str, float]
    alphas: Mapping[str, float]
    rooted: bool
    dora: bool


class Adapter(NamedTuple):
    """One adapter of PEFT. If its source has several, it is the one called `name`.

    `turned`: its configuration says that the base stores matrices transposed. `parameters` are the ends of the names of
    parameters that it adapts by themselves, not as weights of modules; `saved` the ends of the names of modules that
    were trained whole. `tokens` are the trained rows of a module, by the end of its name, "" for the embedding. `tied`:
    tensors that the base ties were trained as one. `has_bias`: the factors have a bias. `targets` are the adapted
    modules. `base` is the name or the path of its base, if known.
    """

    source: Source
    scale: Scale
    turned: bool
    parameters: tuple[str, ...] = ()
    name: str = ""
    saved: tuple[str, ...] = ()
    tokens: Mapping[str, tuple[int, ...]] = {}
    tied: bool = False
    has_bias: bool = False
    targets: Targets = Targets()
    base: str = ""


class Merge(NamedTuple):
    """Adapters to merge into a source, in order; `model` is the content of the config.json next to the source."""

    adapters: tuple[Adapter, ...]
    model: Mapping[str, Any]


def read_adapters(paths: Sequence[str], settings: Mapping[str, Any], name: str = "") -> list[Adapter]:
    """Read each of the adapters at `paths`, with the `settings` of `open_source`. If a path holds several, read the one
    called `name`.

    Raise UsageError for an adapter without a configuration, UnsupportedError for one that is not LoRA's, CorruptError
    for an invalid configuration.
    """
    if len(paths) > _MOST_ADAPTERS:
        raise UsageError(
            f"{len(paths):,} adapters were given; at most {_MOST_ADAPTERS} can be merged in one run.",
            "Merge some of the adapters first, then the others into that output.",
        )
    return [_read(path, settings, name) for path in paths]


def _read(path: str, settings: Mapping[str, Any], name: str) -> Adapter:
    plain: dict[str, Any] = {"family": "", "key": ""}
    plain |= {name: option.default for name, option in CHANGING.items()}
    options = dict(settings.get("storage_options") or {})
    # save_pretrained puts each adapter except the default one into a directory of its name.
    if name and "/" not in name and Location(path, options).join(name, ADAPTER_CONFIG).kind == "file":
        path = Location(path, options).join(name).path
    source = open_source(path, **{**settings, **plain})
    source.check_weights()
    place = Location(source.path, options)
    directory = place if place.kind == "directory" else place.parent
    places = (directory.join(ADAPTER_CONFIG), directory.parent.join(ADAPTER_CONFIG))
    file = next((config_place for config_place in places if config_place.kind == "file"), None)
    names = source.weights if isinstance(source.weights, Mapping) else {}
    if file is None:
        raise other_program(path, names) or _without_configuration(path, names)
    said = _Said(file, configs.read(file))
    if "peft_type" not in said.told and (error := other_program(path, names)):
        raise error
    source = source._replace(inputs={**source.inputs, ADAPTER_CONFIG: Input.stamped(file.entry.file)})
    return Adapter(
        source,
        _scale(said),
        said.flag("fan_in_fan_out"),
        said.names("target_parameters"),
        name,
        (
            *said.names("modules_to_save"),
            *next((heads for task, heads in _HEADS.items() if task == said.told.get("task_type")), ()),
        ),
        _tokens(said),
        said.flag("ensure_weight_tying"),
        said.flag("lora_bias"),
        read_targets(said.told, file),
        base if isinstance(base := said.told.get(_BASE), str) else "",
    )


def _without_configuration(path: str, names: Mapping[str, object]) -> UsageError:
    """Return the error for an adapter without a configuration, or for a model in the place of an adapter."""
    order = "The base must come first: ckptconv merge BASE ADAPTER OUTPUT."
    if names and not is_adapter(names):
        return UsageError(
            f"{path} is not an adapter: it has neither {ADAPTER_CONFIG} nor LoRA factors.",
            f"{order} To combine whole models, use ckptconv average.",
        )
    return UsageError(
        f"{path} is not an adapter: it has no {ADAPTER_CONFIG}.",
        f"Copy PEFT's {ADAPTER_CONFIG} into the directory of the adapter, or create one there with {KEYS} of the "
        f"training run. {order}",
    )


class _Said:
    """The content of a configuration: each value is checked to have the expected type."""

    def __init__(self, file: Location, config: Mapping[str, Any]) -> None:
        self.file, self.told = file, config

    def wrong(self, name: str, value: Any, expected: str) -> CorruptError:
        return CorruptError(f"{self.file}: its {name} is {brief(value)}, but {expected} was expected.")

    def flag(self, name: str) -> bool:
        value = self.told.get(name)
        if value is not None and type(value) is not bool:
            raise self.wrong(name, value, "true or false")
        return value is True

    def names(self, name: str) -> tuple[str, ...]:
        value = self.told.get(name) or []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(name, value, "a list of names")
        return tuple(value)

    def number(self, name: str, value: Any) -> float:
        if type(value) not in (int, float) or not 0 < value <= _LARGEST:
            raise self.wrong(name, value, f"a number above 0, at most {_LARGEST},")
        return float(value)

    def numbers(self, name: str) -> dict[str, float]:
        value = self.told.get(name) or {}
        if not isinstance(value, dict):
            raise self.wrong(name, value, "an object")
        return {key: self.number(name, item) for key, item in value.items()}


def _tokens(said: _Said) -> dict[str, tuple[int, ...]]:
    """Return the trained rows of each module."""
    name = "trainable_token_indices"
    value = said.told.get(name)
    if value is None:
        return {}
    rows_of = value if isinstance(value, dict) else {"": value}
    for listed in rows_of.values():
        if not isinstance(listed, list) or any(type(row) is not int or row < 0 for row in listed):
            raise said.wrong(name, value, "a list of row numbers, or an object with one such list per module,")
        if len(set(listed)) != len(listed):
            raise said.wrong(name, value, "each row at most once")
    return {key: tuple(rows) for key, rows in rows_of.items()}


def _scale(said: _Said) -> Scale:
    """Return the ranks and scales of a configuration."""
    file, config = said.file, said.told
    if config.get("peft_type") != "LORA":
        raise UnsupportedError(f"{file} has the peft_type {brief(config.get('peft_type'))}; only LORA can be merged.")
    # An unknown key changes the factors if it is switched on, or has settings of its own.
    unknown = [name for name in config if name not in _KNOWN.split() and _asks(config[name])]
    if unknown:
        raise UnsupportedError(f"{file} sets {some(unknown)}, which is not supported.")
    if (begun := config.get("init_lora_weights")) not in _BEGINNINGS:
        raise UnsupportedError(
            f"{file} has init_lora_weights {brief(begun)}, which subtracts the product of the factors from the base, "
            "so the adapter cannot be merged into the unchanged base.",
            "Save the adapter again with PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...).",
        )
    return Scale(
        said.number("r", config.get("r")),
        said.number("lora_alpha", config.get("lora_alpha")),
        said.numbers("rank_pattern"),
        said.numbers("alpha_pattern"),
        said.flag("use_rslora"),
        said.flag("use_dora"),
    )


def _asks(value: object) -> bool:
    """Return whether the value of an unknown key switches something on, or holds its settings."""
    return value is True or (isinstance(value, (dict, list)) and bool(value))


def settled(scale: Scale, names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Return the rank and alpha of each of `names`, which are modules, or parameters of modules. They are those of the
    first pattern that matches the name, from its beginning or from behind a dot, to its end.

    Raise UnsupportedError for invalid patterns.
    """
    tables = (scale.ranks, scale.rank), (scale.alphas, scale.alpha)
    patterns = [list(own_patterns) for own_patterns, _ in tables]
    if all(map(_PLAIN.fullmatch, itertools.chain(*patterns))):
        first = [[_first_plain(own_patterns, name) for name in names] for own_patterns in patterns]
    else:
        try:
            first = first_matches(
                [[f"(.*\\.)?({pattern})$" for pattern in own_patterns] for own_patterns in patterns], names
            )
        except (ExpressionError, LimitsError) as error:
            why = "is not a regular expression" if isinstance(error, ExpressionError) else "takes too long to match"
            every = list(dict.fromkeys(itertools.chain(*patterns)))
            raise UnsupportedError(
                f"A pattern of rank_pattern or alpha_pattern in {ADAPTER_CONFIG} {why}; the patterns are "
                f"{some(every, 3)}."
            ) from error
    ranks, alphas = (
        [default if number is None else values[own_patterns[number]] for number in numbers]
        for (values, default), own_patterns, numbers in zip(tables, patterns, first, strict=True)
    )
    return dict(zip(names, zip(ranks, alphas, strict=True), strict=True))


def _first_plain(patterns: Sequence[str], name: str) -> int | None:
    """Return the number of the first of `patterns` that matches; only dots have a special meaning in them."""
    for number, pattern in enumerate(patterns):
        end = name[-len(pattern) :]
        is_whole = len(name) == len(pattern) or name[-len(pattern) - 1 : -len(pattern)] == "."
        if is_whole and len(end) == len(pattern) and all(a in (".", b) for a, b in zip(pattern, end, strict=True)):
            return number
    return None


def factor(scale: Scale, stated: tuple[float, float], name: str, rank: int) -> float:
    """Return the scale of the product of the factors of `name`, which have `rank` columns. `stated` are the rank and
    alpha of the configuration. Raise CorruptError if its rank is another."""
    r, alpha = stated
    if r != rank:
        raise CorruptError(
            f"The factors of {name!r} have rank {rank}, but {ADAPTER_CONFIG} specifies rank {r:g}.",
            "The adapter is damaged, or its configuration belongs to another adapter.",
        )
    return alpha / (r**0.5 if scale.rooted else r)


def merging(source: Source, adapters: Sequence[Adapter], options: Mapping[str, object]) -> Source:
    """Return `source` with `adapters` to merge into it in order; `options` are those of its store."""
    inputs = {
        f"{_OF_ADAPTERS}/{number}/{name}": identity
        for number, adapter in enumerate(adapters)
        for name, identity in adapter.source.inputs.items()
    }
    model: Mapping[str, Any] = {}
    try:
        for name, config in reading.configurations(source, options, CONFIG):
            inputs.setdefault(name, Input.stamped(config.file))
            model = config.says
    except CkptconvError:
        # A later step that needs the configuration reports the error: nothing is known of the model.
        model = {}
    terms = [source, *(adapter.source for adapter in adapters)]
    merged = combined(source, terms, inputs, merge=Merge(tuple(adapters), model))
    return merged._replace(warnings=[*merged.warnings, *repeated(terms)])
