"""What the configurations beside a checkpoint say of how its weights are quantized."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.storage import strict_json

# Keys under which a configuration says how weights are quantized, at any depth.
KEYS = ("quantization_config", "compression_config")
# The key of ComfyUI in the metadata of safetensors.
COMFY = "_quantization_metadata"
_COMPRESSED = ("compressed-tensors", "compressed_tensors", "sparseml")


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


def of_texts(config: tuple[str, str], own: tuple[str, str], metadata: Mapping[str, str]) -> Configuration:
    """Return what a config.json, Model Optimizer's file (path and text each, the text "" if there is none) and the
    metadata of safetensors say together.

    Raise CorruptError for what is no JSON object, UnsupportedError if they contradict each other.
    """
    found: list[tuple[str, Mapping[str, Any]]] = []
    path, text = config
    model = _object(path, text) if text else {}
    found += [(path, told) for told in _within(model)]
    if own[1]:
        told = _object(*own).get("quantization")
        if isinstance(told, Mapping):
            found.append((own[0], {"quant_method": "modelopt", **told}))
    if COMFY in metadata:
        told = _object(f"{COMFY} in the metadata", metadata[COMFY])
        found.append((COMFY, {"quant_method": "comfy", **told}))
    expert = next((each for each in _values(model, "expert_dtype") if isinstance(each, str)), "")
    if not found:
        return Configuration("", {}, expert, {}, path if text else "")
    methods = {_method(told): where for where, told in found}
    if len(methods) > 1:
        raise UnsupportedError(
            f"{' and '.join(dict.fromkeys(methods.values()))} say that the weights are quantized in several ways: "
            f"{', '.join(methods)}.",
            "Name one of them as quant_method.",
        )
    told = found[0][1]
    layers = told.get("layers") or told.get("quantized_layers")
    named = (
        {str(name): each for name, each in layers.items() if isinstance(each, Mapping)}
        if isinstance(layers, Mapping)
        else {}
    )
    return Configuration(next(iter(methods)), told, expert, named, found[0][0])


def _method(told: Mapping[str, Any]) -> str:
    method = told.get("quant_method")
    if not isinstance(method, str):
        method = "modelopt" if "quant_algo" in told else "compressed-tensors" if "config_groups" in told else "unnamed"
    return "compressed-tensors" if method in _COMPRESSED else method


def _object(path: str, text: str) -> Mapping[str, Any]:
    try:
        told = strict_json.parse(text)
    except ValueError as error:
        raise CorruptError(f"{path} is not JSON: {error}.") from error
    if not isinstance(told, dict):
        raise CorruptError(f"{path} is no JSON object.")
    return told


def _within(told: Any) -> Iterator[Mapping[str, Any]]:
    for key in KEYS:
        for found in _values(told, key):
            if isinstance(found, Mapping) and found:
                yield found


def _values(told: Any, key: str) -> Iterator[Any]:
    """Yield the values of `key` at any depth."""
    if isinstance(told, Mapping):
        for name, value in told.items():
            if name == key:
                yield value
            else:
                yield from _values(value, key)
    elif isinstance(told, list):
        for each in told:
            yield from _values(each, key)


def cleaned(text: str, dtype: str) -> str:
    """Return a config.json without what it says of quantizing, at every depth, and with `dtype` as that of the weights,
    unless that is "".

    Everything else stays as it is, in its order.
    """

    def without(told: Any) -> Any:
        if isinstance(told, dict):
            kept = {key: without(value) for key, value in told.items() if key not in (*KEYS, "expert_dtype")}
            for key in ("dtype", "torch_dtype"):
                if dtype and isinstance(kept.get(key), str):
                    kept[key] = dtype
            return kept
        return [without(each) for each in told] if isinstance(told, list) else told

    told = without(strict_json.parse(text))
    if dtype and not any(key in told for key in ("dtype", "torch_dtype")):
        told["dtype"] = dtype
    return json.dumps(told, indent=2, ensure_ascii=False) + "\n"


def stated(text: str, quantization: Mapping[str, Any]) -> str:
    """Return a config.json that says how the weights are quantized. Everything else stays as it is, in its order."""
    told = strict_json.parse(text)
    return json.dumps({**told, KEYS[0]: quantization}, indent=2, ensure_ascii=False) + "\n"


def with_settings(text: str | bytes, settings: Mapping[str, Any]) -> bytes:
    """Return a configuration with other `settings`: at its top, and where it says these of its language model."""
    told = strict_json.parse(text if isinstance(text, str) else text.decode())
    inner = told.get("text_config")
    if isinstance(inner, dict):
        told["text_config"] = {key: settings.get(key, value) for key, value in inner.items()}
    missing = {key: value for key, value in settings.items() if not isinstance(inner, dict) or key not in inner}
    told.update({key: value for key, value in settings.items() if key in told or key in missing})
    return (json.dumps(told, indent=2, ensure_ascii=False) + "\n").encode()
