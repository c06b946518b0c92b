"""The quantization that configurations next to a checkpoint state for its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ckptconv.errors import UnsupportedError
from ckptconv.features.companions import reading
from ckptconv.features.companions.contents import EXPERT_DTYPE, is_of_codes
from ckptconv.features.companions.directory import QUANTIZED
from ckptconv.features.configs import configs
from ckptconv.features.quantized.words import NAMES_OF_COMPRESSED, Statement
from ckptconv.formats.source import CONFIG
from ckptconv.text import brief

# The key of ComfyUI in the metadata of safetensors.
COMFY = "_quantization_metadata"


class QuantizedWeights(NamedTuple):
    """A group of weights of compressed-tensors: int or float, bits, strategy, and the size of its groups."""

    format: str
    kind: str
    bits: int
    strategy: str
    size: int
    block: tuple[int, int] | None
    symmetric: bool


class Configuration(NamedTuple):
    """The quantization of a checkpoint's weights: its `method`, "" if there is no configuration, and all its keys in
    `told`.

    `expert_dtype` is the model's own key. `layers` has the quantization of single modules, by name. `stated` has the
    statement of each place.
    """

    method: str = ""
    told: Mapping[str, Any] = {}
    expert_dtype: str = ""
    layers: Mapping[str, Mapping[str, Any]] = {}
    path: str = ""
    stated: tuple[Statement, ...] = ()

    @property
    def block(self) -> tuple[int, int] | None:
        """The sides of the blocks of block FP8."""
        return _pair(self.told.get("weight_block_size"))

    def layer(self, weight: str) -> Mapping[str, Any] | None:
        """Return the configuration of the module of a weight; None if it has none of its own."""
        return self.layers.get(weight.removesuffix(".weight"))

    def algorithms(self, weight: str) -> tuple[str, ...]:
        """The words of Model Optimizer for a weight."""
        if self.method != "modelopt":
            return ()
        layer = self.layer(weight)
        if layer is not None:
            return (str(layer.get("quant_algo", "")),)
        if self.layers and str(self.told.get("quant_algo", "")).startswith("MIXED"):
            return tuple({str(layer.get("quant_algo", "")): None for layer in self.layers.values()})
        return (str(self.told.get("quant_algo", "")),)

    @property
    def groups(self) -> tuple[QuantizedWeights, ...]:
        """The groups of compressed-tensors."""
        groups = self.told.get("config_groups")
        if self.method not in NAMES_OF_COMPRESSED or not isinstance(groups, Mapping):
            return ()
        return tuple(dict.fromkeys(self._weights(groups)))

    def _weights(self, groups: Mapping[str, Any]) -> Iterator[QuantizedWeights]:
        for group in groups.values():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            if not isinstance(weights, Mapping):
                continue
            format_ = group.get("format") or self.told.get("format")
            bits, size = weights.get("num_bits"), weights.get("group_size")
            if type(bits) is int and 1 < bits <= 8:
                size = size if type(size) is int and size > 0 else 0
                strategy = weights.get("strategy") or ("group" if size else "tensor")
                yield QuantizedWeights(
                    str(format_),
                    str(weights.get("type", "int")),
                    bits,
                    str(strategy),
                    size,
                    _pair(weights.get("block_structure")),
                    weights.get("symmetric") is not False,
                )


def _pair(value: Any) -> tuple[int, int] | None:
    fits = isinstance(value, list) and len(value) == 2 and all(type(side) is int and side > 0 for side in value)
    return (value[0], value[1]) if fits else None


def of_all(read: Mapping[str, reading.Configuration], metadata: Mapping[str, str]) -> Configuration:
    """Return the quantization that a config.json, Model Optimizer's file (by name, as far as they exist) and the
    metadata of safetensors state together.

    Raise UnsupportedError if they name several methods, or several dtypes of experts.
    """
    path, model = (read[CONFIG].file.path, read[CONFIG].says) if CONFIG in read else ("", {})
    statements = [
        Statement(path, at, statement)
        for at, statement in configs.values(model, *configs.QUANTIZING)
        if isinstance(statement, Mapping) and statement
    ]
    statements += [
        Statement(path, at, statement)
        for at, statement in configs.values(model, "quantization")
        if is_of_codes("quantization", statement)
    ]
    own = read.get(QUANTIZED)
    statement = own.says.get("quantization") if own else None
    if own and isinstance(statement, Mapping):
        statements.append(Statement(own.file.path, "", {"quant_method": "modelopt", **statement}))
    if COMFY in metadata:
        statement = configs.parsed(f"{COMFY} in the metadata", metadata[COMFY])
        statements.append(Statement(COMFY, "", {"quant_method": "comfy", **statement}))
    known = {at: one for at, one in configs.values(model, EXPERT_DTYPE) if isinstance(one, str)}
    expert = _agreed({f"{path} ({at})": one for at, one in known.items()}, EXPERT_DTYPE) or ""
    if not statements:
        return Configuration("", {}, expert, {}, path)
    methods = {one.method: one.path for one in statements}
    if len(methods) > 1:
        raise UnsupportedError(
            f"{' and '.join(dict.fromkeys(methods.values()))} specify different quantization methods: "
            f"{', '.join(methods)}.",
            "Set the same quant_method in all of them.",
        )
    statement = {key: value for one in reversed(statements) for key, value in one.told.items() if value is not None}
    layers = statement.get("layers") or statement.get("quantized_layers")
    named = (
        {str(name): one for name, one in layers.items() if isinstance(one, Mapping)}
        if isinstance(layers, Mapping)
        else {}
    )
    return Configuration(statements[0].method, statement, expert, named, statements[0].path, tuple(statements))


def _agreed(configs: Mapping[str, Any], key: str) -> Any:
    """Return the one value under `key` in all `configs`, which are by their place; None if none has a value.

    Raise UnsupportedError if two values differ.
    """
    said = {where: value for where, value in configs.items() if value is not None}
    first = next(iter(said), "")
    for where, value in said.items():
        if value != said[first]:
            raise UnsupportedError(
                f"{first} and {where} contradict each other: their {key} is {brief(said[first])} and {brief(value)}.",
                "Correct the wrong one.",
            )
    return said.get(first)
