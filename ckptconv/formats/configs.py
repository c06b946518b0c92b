"""Configurations: the JSON objects beside weights that say what these are, such as config.json. All of them are read,
and written, here.

Sources: transformers' `configuration_utils.py`, which writes them with Python's `json`, NaN and Infinity included;
vLLM's and SGLang's readers, which look for `quantization_config` and dtypes in nested configurations too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ckptconv.errors import CkptconvError, CorruptError, UnsupportedError
from ckptconv.formats.change import Change
from ckptconv.storage import strict_json
from ckptconv.storage.location import Location
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.text import brief

# Keys under which a configuration says how weights are quantized, and the dtype of the weights; both at any depth.
QUANTIZING = ("quantization_config", "compression_config")
DTYPE = ("dtype", "torch_dtype")
# The key of a model's own words for the codes of its experts.
EXPERT_DTYPE = "expert_dtype"
# The largest configuration that is read, in bytes, and how many lists and objects may be inside one another. Those of
# quantized weights may name every module.
_LARGEST, _DEEPEST = 8 << 20, 64


def read(place: Location) -> dict[str, Any]:
    """Return the configuration at `place`. Raise CorruptError if it is no JSON object, FailedError if it cannot be
    read."""
    return parsed(place.path, place.read_text(_LARGEST))


def known(place: Location) -> dict[str, Any] | None:
    """Return the configuration at `place`; None if there is none that can be read."""
    try:
        return read(place) if place.kind == "file" else None
    except CkptconvError:
        return None


def read_list(place: Location, shapes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the list of objects at `place`, each with members of these `shapes`. Raise as `read` does."""
    path = place.path
    try:
        told = strict_json.list_of(_parsed(place.read_text(_LARGEST)), "it")
        for number, each in enumerate(told):
            for key, shape in shapes.items():
                strict_json.check(strict_json.object_of(each, str(number)).get(key), shape, f"{number}.{key}")
    except ValueError as error:
        raise CorruptError(f"{path} is not a valid configuration: {error}.") from error
    return told


def parsed(path: str, text: str) -> dict[str, Any]:
    """Return the configuration that is the `text` of `path`. Raise CorruptError if it is no JSON object."""
    try:
        return strict_json.object_of(_parsed(text), "it")
    except ValueError as error:
        raise CorruptError(f"{path} is not a valid configuration: {error}.") from error


def _parsed(text: str) -> Any:
    return strict_json.parse(text, constants=True, deepest=_DEEPEST)


def values(told: Any, *keys: str, at: str = "") -> Iterator[tuple[str, Any]]:
    """Yield where `keys` are in a configuration, at any depth, such as "text_config.dtype", and their values."""
    if isinstance(told, Mapping):
        for name, value in told.items():
            if name in keys:
                yield at + name, value
            else:
                yield from values(value, *keys, at=f"{at}{name}.")
    elif isinstance(told, list):
        for number, each in enumerate(told):
            yield from values(each, *keys, at=f"{at}{number}.")


def agreed(told: Mapping[str, Any], key: str) -> Any:
    """Return what all `told`, by where they are told, say under `key`; None if none says anything.

    Raise UnsupportedError if two of them differ.
    """
    said = {where: value for where, value in told.items() if value is not None}
    first = next(iter(said), "")
    for where, value in said.items():
        if value != said[first]:
            raise UnsupportedError(
                f"{first} and {where} contradict each other: their {key} is {brief(said[first])} and {brief(value)}.",
                "Correct the wrong one.",
            )
    return said.get(first)


def dtype_of(told: Mapping[str, Any]) -> str:
    """Return the dtype that a configuration says its weights have; "" if it says none."""
    return next((_dtype(told[key]) for key in DTYPE if _dtype(told.get(key))), "")


def _dtype(value: Any) -> str:
    """Return the dtype that a value of a configuration names; "" if it names none."""
    name = value.removeprefix("torch.") if isinstance(value, str) else ""
    return name if name in DTYPES else ""


def changed(told: Mapping[str, Any], change: Change) -> dict[str, Any]:
    """Return a configuration as `change` says, at every depth. Everything else stays as it is, in its order."""
    without = (*QUANTIZING, EXPERT_DTYPE) if change.plain or change.quantization is not None else ()

    def of(value: Any) -> Any:
        if isinstance(value, list):
            return [of(each) for each in value]
        if not isinstance(value, Mapping):
            return value
        kept = {key: of(each) for key, each in value.items() if key not in without}
        stale = [key for key in DTYPE if change.dtype and _dtype(kept.get(key)) not in ("", change.dtype)]
        return {**kept, **dict.fromkeys(stale, change.dtype)}

    made: dict[str, Any] = of(told)
    # Loaders take the dtype of a configuration that says nothing for another than that of weights that were codes.
    if change.plain and change.dtype and not dtype_of(made):
        made[DTYPE[0]] = change.dtype
    made = _with_settings(made, change.settings) if change.settings else made
    return made if change.quantization is None else {**made, QUANTIZING[0]: change.quantization}


def _with_settings(told: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with other `settings`: at its top, and where it says these of its language model."""
    inner = told.get("text_config")
    inner = inner if isinstance(inner, Mapping) else {}
    made = dict(told)
    if inner:
        made["text_config"] = {key: settings.get(key, value) for key, value in inner.items()}
    return {**made, **{key: value for key, value in settings.items() if key in told or key not in inner}}


def text_of(told: Mapping[str, Any]) -> str:
    """Return the text of a configuration, as transformers writes it."""
    return json.dumps(told, indent=2, ensure_ascii=False) + "\n"
