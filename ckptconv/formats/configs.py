"""Configurations: the JSON objects next to weights that describe them, such as config.json. This module reads and
writes all of them.

Sources: transformers' `configuration_utils.py`, which writes them with Python's `json`, NaN and Infinity included;
vLLM's and SGLang's readers, which look for `quantization_config` and dtypes in nested configurations too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ckptconv.errors import CkptconvError, CorruptError
from ckptconv.formats.change import Change
from ckptconv.storage import strict_json
from ckptconv.storage.location import Location
from ckptconv.tensors.dtypes import DTYPES

# Keys of a configuration for the quantization of weights, and for the dtype of weights; both at any depth.
QUANTIZING = ("quantization_config", "compression_config")
DTYPE = ("dtype", "torch_dtype")
# The key of a model's own name for the codes of its experts.
EXPERT_DTYPE = "expert_dtype"
# The size of the largest configuration that is read, in bytes, and the depth of the lists and objects in it. A
# configuration of quantized weights may name every module.
_LARGEST, _DEEPEST = 8 << 20, 64


def read(place: Location) -> dict[str, Any]:
    """Return the configuration at `place`. Raise CorruptError if it is no JSON object, FailedError if unreadable."""
    return parsed(place.path, place.read_text(_LARGEST))


def known(place: Location) -> dict[str, Any] | None:
    """Return the configuration at `place`; None if there is none, or it cannot be read."""
    try:
        return read(place) if place.kind == "file" else None
    except CkptconvError:
        return None


def parsed(path: str, text: str) -> dict[str, Any]:
    """Return the configuration in `text`, the content of `path`. Raise CorruptError if it is not a JSON object."""
    try:
        return strict_json.object_of(strict_json.parse(text, constants=True, deepest=_DEEPEST), "it")
    except ValueError as error:
        raise CorruptError(f"{path} is not a valid configuration: {error}.") from error


def values(config: Any, *keys: str, at: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the places of `keys` in a configuration, at any depth, such as "text_config.dtype", and their values."""
    if isinstance(config, Mapping):
        for name, value in config.items():
            if name in keys:
                yield at + name, value
            else:
                yield from values(value, *keys, at=f"{at}{name}.")
    elif isinstance(config, list):
        for number, item in enumerate(config):
            yield from values(item, *keys, at=f"{at}{number}.")


def is_of_codes(key: str, value: Any) -> bool:
    """Whether a member of a configuration is about quantized weights; "quantization" is, if mlx-lm wrote it."""
    is_of_mlx = key == "quantization" and isinstance(value, Mapping) and "group_size" in value
    return is_of_mlx or key in QUANTIZING or key == EXPERT_DTYPE


def dtype_of(config: Mapping[str, Any]) -> str:
    """Return the dtype that a configuration states for its weights; "" if it states none."""
    return next((_dtype(config[key]) for key in DTYPE if _dtype(config.get(key))), "")


def _dtype(value: Any) -> str:
    """Return the dtype that a value of a configuration names; "" if it names none."""
    name = value.removeprefix("torch.") if isinstance(value, str) else ""
    return name if name in DTYPES else ""


def changed(config: Mapping[str, Any], change: Change) -> dict[str, Any]:
    """Return a configuration with `change`, at every depth. Everything else stays unchanged, in its order."""
    config = change.edit(config) if change.edit else config
    is_new = change.plain or change.quantization is not None

    def of(value: Any) -> Any:
        if isinstance(value, list):
            return [of(inner) for inner in value]
        if not isinstance(value, Mapping):
            return value
        kept = {key: of(inner) for key, inner in value.items() if not (is_new and is_of_codes(key, inner))}
        stale = [key for key in DTYPE if change.dtype and _dtype(kept.get(key)) not in ("", change.dtype)]
        return {**kept, **dict.fromkeys(stale, change.dtype)}

    result: dict[str, Any] = of(config)
    # If a configuration has no dtype, loaders assume another one than that of weights that were codes.
    if change.plain and change.dtype and not dtype_of(result):
        result[DTYPE[0]] = change.dtype
    return result if change.quantization is None else {**result, QUANTIZING[0]: change.quantization}


def text_of(config: Mapping[str, Any]) -> str:
    """Return the text of a configuration, as transformers writes it."""
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"
