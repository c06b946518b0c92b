"""The settings of adapters in the configuration of a training by Megatron-Bridge.

Source: Megatron-Bridge 067f987d, peft/lora.py and training/utils/checkpoint_utils.py. The file is YAML of plain values,
and names the class of each part as `_target_`. It is read where PyYAML is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from ckptconv.errors import CorruptError, UnsupportedError
from ckptconv.features.dcp.locate import located
from ckptconv.features.megatron_core.alone import LARGEST_RUN_CONFIG, RUN_CONFIG
from ckptconv.storage.location import Location
from ckptconv.text import brief

_TARGET, _LORA = "_target_", "megatron.bridge.peft.lora.LoRA"
_NUMBERS = ("dim", "alpha")


class Trained(NamedTuple):
    """The rank and alpha that a training states in the file `path`; None and the reason `why` if they are not known."""

    dim: float | None = None
    alpha: float | None = None
    path: str = ""
    why: str = ""


def trained(path: str, stores: Mapping[str, Any]) -> Trained:
    """Return the settings beside the step at `path`.

    Raise CorruptError for a file that is no configuration, UnsupportedError for adapters of another class.
    """
    place = located(Location(path, dict(stores))).directory
    if RUN_CONFIG not in place.names:
        return Trained(why="the step does not say it")
    file = place.join(RUN_CONFIG)
    if find_spec("yaml") is None:
        return Trained(why=f"{file} was not compared, because PyYAML is not installed")
    peft = _parsed(file).get("peft")
    if not isinstance(peft, Mapping):
        return Trained(why=f"{file} says nothing of adapters")
    if peft.get(_TARGET) != _LORA:
        raise UnsupportedError(
            f"{file}: its adapters are of {brief(peft.get(_TARGET))}, and only those of {_LORA} have a map."
        )
    for name in _NUMBERS:
        if type(peft.get(name)) not in (int, float):
            raise CorruptError(f"{file}: {name} of its adapters is {brief(peft.get(name))}, but a number was expected.")
    return Trained(peft["dim"], peft["alpha"], str(file))


def _parsed(file: Location) -> Mapping[str, Any]:
    yaml = import_module("yaml")
    try:
        content = yaml.safe_load(file.read_text(LARGEST_RUN_CONFIG))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise CorruptError(
            f"{file} is not YAML of plain values: {' '.join(str(error).split())[:200]}.",
            "Copy it again, or remove it: alpha is then that of --like alone.",
        ) from None
    if not isinstance(content, Mapping):
        raise CorruptError(f"{file} is {brief(content)}, but a table was expected.", "Copy it again, or remove it.")
    return content
