"""What the configurations beside a checkpoint say of how its weights are quantized."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ckptconv.errors import UnsupportedError
from ckptconv.formats import configs

# The key of ComfyUI in the metadata of safetensors.
COMFY = "_quantization_metadata"
_COMPRESSED = ("compressed-tensors", "compressed_tensors", "sparseml")
# By method, the fields that decide what weights are, each of the shape that `strict_json.check` asks for: where several
# configurations have one, they say the same. Sizes of groups may be -1, a whole row.
_SIZE, _GROUPS, _NAMED = range(-1, 1 << 31), "config_groups", {str: dict}
_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "fp8": {"weight_block_size": [_SIZE]},
    "mxfp8": {"weight_block_size": [_SIZE]},
    "compressed-tensors": {"format": str, _GROUPS: _NAMED},
    "modelopt": {"quant_algo": str, "group_size": _SIZE, "quantized_layers": _NAMED},
    "gptq": {"bits": _SIZE, "group_size": _SIZE, "checkpoint_format": str},
    "awq": {"bits": _SIZE, "group_size": _SIZE, "version": str},
    "comfy": {"layers": _NAMED},
}
# The same of single modules, and of the weights of a group.
_INNER = {
    **dict.fromkeys(("quant_algo", "format", "strategy", "type"), str),
    **dict.fromkeys(("group_size", "num_bits"), _SIZE),
    "weights": dict,
}


class QuantizedWeights(NamedTuple):
    """What compressed-tensors says of a group of weights: int or float, bits, strategy, and the size of its groups."""

    format: str
    kind: str
    bits: int
    strategy: str
    size: int
    block: tuple[int, int] | None
    symmetric: bool


class Configuration(NamedTuple):
    """How weights are quantized: the `method` and all that is `told` of it; "" if there is no configuration.

    `expert_dtype` is the model's own word. `layers` says it of single modules, by name.
    """

    method: str = ""
    told: Mapping[str, Any] = {}
    expert_dtype: str = ""
    layers: Mapping[str, Mapping[str, Any]] = {}
    path: str = ""

    @property
    def block(self) -> tuple[int, int] | None:
        """The sides of the blocks of block FP8."""
        return _pair(self.told.get("weight_block_size"))

    def algorithms(self, module: str) -> tuple[str, ...]:
        """The words of Model Optimizer for a module."""
        if self.method != "modelopt":
            return ()
        layer = self.layers.get(module)
        if layer is not None:
            return (str(layer.get("quant_algo", "")),)
        if self.layers and str(self.told.get("quant_algo", "")).startswith("MIXED"):
            return tuple({str(layer.get("quant_algo", "")): None for layer in self.layers.values()})
        return (str(self.told.get("quant_algo", "")),)

    @property
    def groups(self) -> tuple[QuantizedWeights, ...]:
        """The groups of compressed-tensors."""
        groups = self.told.get("config_groups")
        if self.method not in _COMPRESSED or not isinstance(groups, Mapping):
            return ()
        return tuple(dict.fromkeys(self._weights(groups)))

    def _weights(self, groups: Mapping[str, Any]) -> Iterator[QuantizedWeights]:
        for group in groups.values():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            if not isinstance(weights, Mapping):
                continue
            made = group.get("format") or self.told.get("format")
            bits, size = weights.get("num_bits"), weights.get("group_size")
            if type(bits) is int and 1 < bits <= 8:
                strategy = weights.get("strategy") or ("group" if size and size > 0 else "tensor")
                yield QuantizedWeights(
                    str(made),
                    str(weights.get("type", "int")),
                    bits,
                    str(strategy),
                    size if type(size) is int and size > 0 else 0,
                    _pair(weights.get("block_structure")),
                    weights.get("symmetric") is not False,
                )


def _pair(value: Any) -> tuple[int, int] | None:
    fits = isinstance(value, list) and len(value) == 2 and all(type(each) is int and each > 0 for each in value)
    return (value[0], value[1]) if fits else None


class _Statement(NamedTuple):
    """What `path` says of quantizing, at a key that leads `at` it."""

    path: str
    at: str
    told: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.path} ({self.at})" if self.at else self.path

    @property
    def method(self) -> str:
        method = self.told.get("quant_method")
        if method is None:
            telling = {"quant_algo": "modelopt", _GROUPS: "compressed-tensors"}
            method = next((of for key, of in telling.items() if key in self.told), "unnamed")
        return "compressed-tensors" if method in _COMPRESSED else str(method)

    def said(self, key: str) -> Any:
        """Return what it says under `key`; of groups, what they say of weights."""
        return Configuration(self.method, self.told).groups or None if key == _GROUPS else self.told.get(key)

    def check(self) -> _Statement:
        """Return it. Raise CorruptError for fields of other types."""
        configs.check(self.path, self.told, {"quant_method": str}, self.at)
        fields = _FIELDS.get(self.method, {})
        configs.check(self.path, self.told, fields, self.at)
        for inner in (self.told.get(key) for key, shape in fields.items() if shape == _NAMED):
            for each in (inner or {}).values():
                configs.check(self.path, each, _INNER, self.at)
                configs.check(self.path, each.get("weights") or {}, _INNER, self.at)
        return self


def of_all(
    config: tuple[str, Mapping[str, Any]], own: tuple[str, Mapping[str, Any]], metadata: Mapping[str, str]
) -> Configuration:
    """Return what a config.json, Model Optimizer's file (path and contents each, "" and {} if there is none) and the
    metadata of safetensors say together.

    Raise CorruptError for fields of other types, UnsupportedError if they contradict each other.
    """
    path, model = config
    statements = [
        _Statement(path, at, told)
        for at, told in configs.values(model, *configs.QUANTIZING)
        if isinstance(told, Mapping) and told
    ]
    told = own[1].get("quantization")
    if isinstance(told, Mapping):
        statements.append(_Statement(own[0], "", {"quant_method": "modelopt", **told}))
    if COMFY in metadata:
        told = configs.parsed(f"{COMFY} in the metadata", metadata[COMFY])
        statements.append(_Statement(COMFY, "", {"quant_method": "comfy", **told}))
    known = {at: each for at, each in configs.values(model, configs.EXPERT_DTYPE) if isinstance(each, str)}
    expert = configs.agreed({f"{path} ({at})": each for at, each in known.items()}, configs.EXPERT_DTYPE) or ""
    if not statements:
        return Configuration("", {}, expert, {}, path)
    methods = {each.check().method: each.path for each in statements}
    if len(methods) > 1:
        raise UnsupportedError(
            f"{' and '.join(dict.fromkeys(methods.values()))} say that the weights are quantized in several ways: "
            f"{', '.join(methods)}.",
            "Name one of them as quant_method.",
        )
    (method,) = methods
    for key in _FIELDS.get(method, {}):
        configs.agreed({str(each): each.said(key) for each in statements}, key)
    told = {key: value for each in reversed(statements) for key, value in each.told.items() if value is not None}
    layers = told.get("layers") or told.get("quantized_layers")
    named = (
        {str(name): each for name, each in layers.items() if isinstance(each, Mapping)}
        if isinstance(layers, Mapping)
        else {}
    )
    return Configuration(method, told, expert, named, statements[0].path)
