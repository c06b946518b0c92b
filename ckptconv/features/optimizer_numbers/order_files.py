"""Reads the order of a model's parameters from a path that the user gives, or the configuration of the weights."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from ckptconv.errors import UsageError
from ckptconv.features.configs import configs
from ckptconv.features.optimizer_numbers.matching import CHECKPOINT, CONFIGURED, ways
from ckptconv.features.optimizer_numbers.orders import follows_modules, is_kept, is_known
from ckptconv.features.optimizer_states.numbering import Model, Order
from ckptconv.features.optimizer_states.training import model_tree
from ckptconv.formats.detect import open_source
from ckptconv.formats.source import ADAPTER_CONFIG, CONFIG, OF_REFERENCE
from ckptconv.plan import Input
from ckptconv.storage import strict_json
from ckptconv.storage.location import Location
from ckptconv.structure import keymap

# The largest list of names that is read, in bytes.
_MOST = 64 << 20
# The prefixes of the names of inputs: those of --order, and those of an adapter's base.
_ASKED, _OF_BASE = "--order/", "base/"
# The hint for an adapter whose base is not local: nothing is fetched for it.
_BASE = "--order accepts a directory with the config.json of the base model"


def completed(model: Model) -> Model:
    """Return `model` with the order in which it was saved, if that is the order of its modules, or that of the
    configuration in its directory; or with the reason why they give none. An order that was asked for is enough."""
    if model.orders and model.orders[0].is_asked:
        return model
    if model.saved is not None and _is_of_modules(model.saved, model.tree):
        return model._replace(orders=[*model.orders, model.saved])
    if model.why:
        return model
    why = "safetensors files sort tensor names"
    if model.tree is not None:
        why = "the order of the state dict may differ from the order of the model's modules"
    if model.place is None:
        return model._replace(why=f"{why}, and {CONFIG} is read only for local files")
    config = configured(model.place)
    if not config.architecture:
        return model._replace(why=f"{why}, and {config.why}")
    source = f"{config.architecture} in {CONFIG}"
    order = Order(source, architecture=config.architecture, inputs=config.inputs)
    return model._replace(orders=[*model.orders, order])


def _is_of_modules(saved: Order, tree: Any) -> bool:
    """Return whether the saved order of a model, by its state dict `tree` or by names alone, is that of its modules."""
    return follows_modules(dict.fromkeys(saved.names)) if tree is None else is_kept(tree)


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
            where = place.join(ADAPTER_CONFIG)
            return Configured("", f"{where} specifies no local base model with a {CONFIG} ({_BASE})")
    if config is None:
        return Configured("", f"the directory contains no {CONFIG}")
    if config.get("auto_map"):
        return Configured("", f"{CONFIG} refers to custom model code, whose order of modules is not known")
    if read.kind == "file":
        inputs |= _identified("" if read.parent == place else _OF_BASE, read)
    names = config.get("architectures")
    architecture = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    if not is_known(architecture):
        return Configured("", f"{CONFIG} specifies {architecture[:100] or 'no architecture'}, whose order is not known")
    return Configured(architecture, "", inputs)


def _identified(prefix: str, place: Location) -> dict[str, Hashable]:
    """Return the identity of a file, by its name after a prefix."""
    return {f"{prefix}{place.name}": Input.stamped(place.entry.file)}


def order_in(path: str, reaching: Mapping[str, Any]) -> Order | None:
    """Return the order of the weights of the checkpoint at `path`; None if it keeps none."""
    settings = {name: reaching[name] for name in ("inert", "spool_dir", "storage_options")}
    source = open_source(path, structure=False, **settings)
    tree = model_tree(source, source.wanted.key)
    if not (source.structured and is_kept(tree)):
        return None
    inputs = {f"{OF_REFERENCE}{name}": identity for name, identity in source.inputs.items()}
    return Order(f"the order in {source.path}", [*keymap.flatten(tree)[0]], inputs=inputs)


def order_at(path: str, reaching: Mapping[str, Any]) -> Order:
    """Return the order at `path`, which the user gives: a file of names, a configuration's directory, or a checkpoint.
    `reaching` are the options of `open_source` for any checkpoint.

    Raise UsageError if there is no order in it.
    """
    place = Location(path, dict(reaching["storage_options"] or {}))
    source = f"{path}"
    if place.kind == "missing":
        raise UsageError(f"{path}, specified with --order, does not exist.")
    if place.kind == "file" and (names := _listed(place)) is not None:
        grouped = bool(names) and all(isinstance(group, list) for group in names)
        texts = [name for group in names for name in group] if grouped else names
        if not texts or not all(type(name) is str for name in texts):
            raise UsageError(f"{path} is neither a list of names nor a list with one such list per parameter group.")
        if len({*texts}) < len(texts):
            twice = next(name for name, count in Counter(texts).items() if count > 1)
            raise UsageError(f"{path} lists the parameter {twice[:100]!r} more than once.")
        names_given = {"groups": names} if grouped else {"names": texts}
        return Order(source, is_asked=True, inputs=_identified(_ASKED, place), **names_given)
    if place.kind == "directory" or place.name == CONFIG:
        config = configured(place if place.kind == "directory" else place.parent)
        if config.architecture:
            inputs = {f"{_ASKED}{name}": identity for name, identity in config.inputs.items()}
            source = f"{config.architecture} in {path}"
            return Order(source, architecture=config.architecture, is_asked=True, inputs=inputs)
    order = None if place.name == CONFIG else order_in(path, reaching)
    if order is None:
        raise UsageError(
            f"{path} does not specify the parameter order of a model: it is neither a list of names, nor a "
            f"checkpoint that preserves their order, nor a directory with the {CONFIG} of a known model.",
            ways([CONFIGURED if place.kind == "directory" or place.name == CONFIG else CHECKPOINT]),
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
            raise UsageError(f"{place} is not valid JSON: {error}.") from error
        return names if isinstance(names, list) else None
    return [line.strip() for line in text.splitlines() if line.strip()]
