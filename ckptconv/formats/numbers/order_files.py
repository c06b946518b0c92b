"""Reads the order of a model's parameters from a path that the user gives, or the configuration of the weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

from ckptconv.errors import UsageError
from ckptconv.formats import configs
from ckptconv.formats.model_directory import ADAPTER_CONFIG, CONFIG
from ckptconv.formats.numbers.matching import Model, Order
from ckptconv.formats.numbers.orders import is_kept, is_known, parameters
from ckptconv.plan import Input
from ckptconv.storage import strict_json
from ckptconv.storage.location import Location

# The largest list of names that is read, in bytes.
_MOST = 64 << 20
# The prefixes of the names of inputs: those of --order, and those of an adapter's base.
_ASKED, _OF_BASE = "--order/", "base/"
# The hint for an adapter whose base is not local: nothing is fetched for it.
_BASE = "--order may give a directory with its config.json"


def model_of(weights: Mapping[str, Any], orders: list[Order], tree: Any = None, place: Location | None = None) -> Model:
    """Return a model by its `weights`, with the orders that were asked for, the order of its state dict if `tree` is
    one, and the order of the configuration in the directory `place`."""
    trainable, aliases = parameters(weights)
    shapes = {name: tensor.shape for name, tensor in trainable.items()}
    if orders and orders[0].is_asked:
        return Model(shapes, aliases, orders)
    known = [*orders]
    why = "names in safetensors are sorted"
    if tree is not None:
        why = "the state dict does not show that it is in the order of the model's modules"
        if is_kept(tree):
            return Model(shapes, aliases, [*known, Order("the order of the state dict", [*weights])])
    if place is None:
        why = f"{why}, and {CONFIG} is only looked for next to local files"
    else:
        config = configured(place)
        why = f"{why}, and {config.why}" if config.why else why
        if config.architecture:
            source = f"{config.architecture}, which {CONFIG} names"
            known.append(Order(source, architecture=config.architecture, inputs=config.inputs))
    return Model(shapes, aliases, known, why)


class Configured(NamedTuple):
    """The architecture of the catalogue that a configuration names, or "" and the reason; and the identities of the
    files that name it."""

    architecture: str = ""
    why: str = ""
    inputs: Mapping[str, Hashable] = {}


def configured(place: Location) -> Configured:
    """Return the architecture that the configuration in a directory names.

    For an adapter of PEFT, it is its base's: adapter_config.json names it, or the directory with its configuration.
    """
    read = place.join(CONFIG)
    inputs: dict[str, Hashable] = {}
    config = configs.known(read)
    if config is None and (adapter := configs.known(place.join(ADAPTER_CONFIG))) is not None:
        inputs |= _identified("", place.join(ADAPTER_CONFIG))
        mapping = adapter.get("auto_mapping")
        named = mapping.get("base_model_class") if isinstance(mapping, dict) else None
        base = adapter.get("base_model_name_or_path")
        config = {"architectures": [named]} if named else None
        if config is None and isinstance(base, str) and base and os.path.isdir(base):
            read = Location(base).join(CONFIG)
            config = configs.known(read)
        if config is None:
            return Configured("", f"{place.join(ADAPTER_CONFIG)} names no local base model ({_BASE})")
    if config is None:
        return Configured("", f"{CONFIG} is missing in their directory")
    if config.get("auto_map"):
        return Configured("", f"{CONFIG} names custom model code, whose order of modules is not known")
    if read.kind == "file":
        inputs |= _identified("" if read.parent == place else _OF_BASE, read)
    names = config.get("architectures")
    architecture = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    if not is_known(architecture):
        return Configured("", f"{CONFIG} names {architecture[:100] or 'no architecture'}, whose order is not known")
    return Configured(architecture, "", inputs)


def _identified(prefix: str, place: Location) -> dict[str, Hashable]:
    """Return the identity of a file, by its name after a prefix."""
    return {f"{prefix}{place.name}": Input.stamped(place.entry.file)}


def order_at(path: str, options: Mapping[str, Any], liked: Callable[[str], Order | None]) -> Order:
    """Return the order at `path`, which the user gives: a file of names, a configuration's directory, or a checkpoint,
    of which `liked` returns the order.

    Raise UsageError if there is no order in it.
    """
    place = Location(path, dict(options))
    source = f"{path}"
    if place.kind == "missing":
        raise UsageError(f"{path}, given with --order, does not exist.")
    if place.kind == "file" and (names := _listed(place)) is not None:
        grouped = bool(names) and all(isinstance(group, list) for group in names)
        texts = [name for group in names for name in group] if grouped else names
        if not texts or not all(type(name) is str for name in texts):
            raise UsageError(
                f"{path} is neither a list of names, nor a list of such lists for the groups of an optimizer."
            )
        if len({*texts}) < len(texts):
            raise UsageError(f"{path} names a parameter twice.")
        names_given = {"groups": names} if grouped else {"names": texts}
        return Order(source, is_asked=True, inputs=_identified(_ASKED, place), **names_given)
    if place.kind == "directory" or place.name == CONFIG:
        config = configured(place if place.kind == "directory" else place.parent)
        if config.architecture:
            inputs = {f"{_ASKED}{name}": identity for name, identity in config.inputs.items()}
            source = f"{config.architecture} in {path}"
            return Order(source, architecture=config.architecture, is_asked=True, inputs=inputs)
    order = liked(path)
    if order is None:
        raise UsageError(
            f"{path} does not give the order of a model's parameters: it is neither a list of names, nor a checkpoint "
            f"that keeps their order, nor a directory with the {CONFIG} of a known model.",
        )
    return order._replace(source=source, is_asked=True)


def _listed(place: Location) -> Any:
    """Return the names in a file, one a line, or a list in JSON; None if it is another kind of file."""
    with place.open_reader() as reader:
        head = reader.read_at(0, min(reader.file.size, 4096))
        if reader.file.size > _MOST or b"\0" in head or head[:2] == b"PK" or head[:1] in (b"\x80", b"{"):
            return None
    text = place.read_text(_MOST)
    if text.lstrip().startswith("["):
        try:
            names = strict_json.parse(text)
        except ValueError as error:
            raise UsageError(f"{place} is not JSON: {error}.") from error
        return names if isinstance(names, list) else None
    return [line.strip() for line in text.splitlines() if line.strip()]
