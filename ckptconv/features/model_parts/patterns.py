"""Rename modules in a configuration of quantized weights. Pure.

Sources: `ignore` of compressed-tensors, `modules_to_not_convert` of transformers, `dynamic` of GPTQModel,
`exclude_modules` of Model Optimizer, `exclude` of Quark, `extra_config` of AutoRound.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from ckptconv.errors import UsageError
from ckptconv.features.model_facts.places import LAYER_WORDS
from ckptconv.features.model_parts.facts import Renaming
from ckptconv.text import brief

_LITERAL = re.compile(r"[\w-]+(?:\.[\w-]+)+|[A-Za-z_]\w*")
# The beginning of a pattern that is about one layer alone, and an expression for any number.
_ONE_LAYER = re.compile(
    rf"(?P<before>[-+:^\w]*?(?:[\w-]+\\?\.)*(?:{'|'.join(LAYER_WORDS)})\\?\.)(?P<number>\d+)(?=\\?\.|\$?$)"
)
_ANY = re.compile(r"\\d[+*]?|\[0-9\][+*]?|\{\d+(?:,\d*)?\}")
# A number that is not part of a word, or some of several.
_SOME = re.compile(r"(?<![A-Za-z_\d])\d+|\[[^\]]*\d")

Changed = Callable[[str, Any, Any], Any]


def renamed(tree: Any, renaming: Renaming, where: str, changed: Changed) -> Any:
    """Return a `tree` of the configuration with the modules' names in a part, and without modules that are not in it.
    `changed` is called with the place of a list or object, its value and its new one, and returns the new one.

    Raise UsageError for a pattern that may mean a module with another name in the part.
    """
    if isinstance(tree, Mapping):
        new: dict[str, Any] = {}
        moved = False
        for key, value in tree.items():
            # Other keys are words of the configuration.
            name = _module(key, renaming, where) if re.search(r"[.*\\]", key) else key
            moved = moved or name != key
            if name is not None:
                new[name] = renamed(value, renaming, f"{where}.{key}", changed)
        return changed(where, tree, new) if moved else new
    if isinstance(tree, list) and all(isinstance(text, str) for text in tree):
        names = [name for text in tree if (name := _module(text, renaming, where)) is not None]
        return changed(where, tree, names)
    return [renamed(entry, renaming, where, changed) for entry in tree] if isinstance(tree, list) else tree


def _module(text: str, renaming: Renaming, where: str) -> str | None:
    """Return a module's name or a pattern as the part needs it; None if it is about no module of the part."""
    if _LITERAL.fullmatch(text):
        try:
            return renaming.of(text, is_module=True)
        except ValueError:
            raise _unclear(text, where) from None
    match = _ONE_LAYER.match(text)
    begin = suffix = ""
    if match:
        literal = re.sub(r"^(?:[-+]:|re:|\^)*", "", match["before"].replace("\\", ""))
        layer = renaming.of(f"{literal}{match['number']}", is_module=True)
        if layer is None:
            return None
        if layer.rpartition(".")[0] != f"{literal}{match['number']}".rpartition(".")[0]:
            raise _unclear(text, where)
        begin, suffix = f"{match['before']}{layer.rpartition('.')[2]}", text[match.end() :]
        text = begin + suffix
    if renaming.moves and _SOME.search(_ANY.sub("", suffix if match else text)):
        raise _unclear(text, where)
    return text


def _unclear(text: str, where: str) -> UsageError:
    return UsageError(
        f"config.json has {where} {brief(text, 200)}, which may refer to layers or experts that have other numbers in "
        "the part.",
        "List each module separately in config.json, or use --dequantize, which removes this list.",
    )
