"""run_config.yaml next to the tensors of a step: the configuration of a training by Megatron-Bridge.

Source: Megatron-Bridge 0.3.1 to 0.6.2, training/{config,checkpointing}.py. The file is YAML of plain values, and names
the class of each part as `_target_`. It is read where PyYAML is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from ckptconv.errors import CorruptError
from ckptconv.features.dcp.locate import located
from ckptconv.features.megatron_core.alone import LARGEST_RUN_CONFIG, RUN_CONFIG
from ckptconv.storage.location import Location
from ckptconv.text import brief

TARGET = "_target_"


class RunConfig(NamedTuple):
    """The content of the file `path`; none, for the reason `why`, if it was not read."""

    content: Mapping[str, Any] = {}
    path: str = ""
    why: str = ""

    def part(self, name: str) -> Mapping[str, Any]:
        """Return a part of the configuration, such as `model`; an empty one if it has none."""
        part = self.content.get(name)
        return part if isinstance(part, Mapping) else {}


def run_config(path: str, stores: Mapping[str, Any]) -> RunConfig:
    """Return the configuration next to the step at `path`. Raise CorruptError for a file that is no configuration."""
    place = located(Location(path, dict(stores))).directory
    file = place.join(RUN_CONFIG)
    if RUN_CONFIG not in place.names:
        return RunConfig(why=f"the step has no {RUN_CONFIG}")
    if find_spec("yaml") is None:
        return RunConfig(why=f"{file} was not read, because PyYAML is not installed")
    yaml = import_module("yaml")
    try:
        content = yaml.safe_load(file.read_text(LARGEST_RUN_CONFIG))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise CorruptError(
            f"{file} is not valid YAML with plain values: {' '.join(str(error).split())[:200]}.",
            "Copy it again, or remove it.",
        ) from None
    if not isinstance(content, Mapping):
        raise CorruptError(
            f"{file} contains {brief(content)}, but a mapping was expected.", "Copy it again, or remove it."
        )
    return RunConfig(content, str(file))
