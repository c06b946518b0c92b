"""Configurations: the JSON objects next to weights that describe them, such as config.json. This module reads
all of them.

Sources: transformers' `configuration_utils.py`, which writes them with Python's `json`, NaN and Infinity included;
vLLM's and SGLang's readers, which look for `quantization_config` and dtypes in nested configurations too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptconv.errors import CkptconvError, CorruptError
from ckptconv.storage import strict_json
from ckptconv.storage.location import Location
from ckptconv.tensors.dtypes import DTYPES

# Keys of a configuration for the quantization of weights, and for the dtype of weights; both at any depth.
QUANTIZING = ("quantization_config", "compression_config")
DTYPE = ("dtype", "torch_dtype")
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


def dtype_of(config: Mapping[str, Any]) -> str:
    """Return the dtype that a configuration states for its weights; "" if it states none."""
    return next((dtype_named(config[key]) for key in DTYPE if dtype_named(config.get(key))), "")


def dtype_named(value: Any) -> str:
    """Return the dtype that a value of a configuration names; "" if it names none."""
    name = value.removeprefix("torch.") if isinstance(value, str) else ""
    return name if name in DTYPES else ""
