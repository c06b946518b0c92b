"""Hints for keys and globs that match nothing. Pure."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Mapping, Sequence

from ckptconv.errors import UsageError
from ckptconv.formats.source import MODEL_KEYS
from ckptconv.structure.choice import Choice
from ckptconv.text import some

# Components of models that config.json describes, by their modules.
_COMPONENTS = {"language_model": "text", "vision_tower": "vision"}


def candidates(wanted: str, names: Sequence[str], most: int = 8) -> str:
    """Return a hint that suggests the `names` most like `wanted`, or lists them."""
    if not names:
        return "It has no keys."
    if wanted and any(name.startswith(f"{wanted}.") for name in names):
        component = _COMPONENTS.get(wanted.rpartition(".")[2])
        part = f", or with --component {component} if config.json describes it" if component else ""
        return f"Names begin with {wanted}., but no mapping has this key. Select these names with --include{part}."
    words = re.split(r"\W|_", wanted)  # model is like ema_model, and so is ema
    close = [*difflib.get_close_matches(wanted, names), *(name for name in names if name in words)]
    if close:
        return f"Did you mean {' or '.join(map(repr, dict.fromkeys(close)))}?"
    return f"The keys are {some(names, most, repr)}."


def keys_like(wanted: str, children: Mapping[str, object], above: str) -> str:
    """Return a hint for a key that is not among those of `children`, which are under the key `above`."""
    for name, value in children.items():
        if isinstance(value, Mapping) and any(str(key).startswith(f"{wanted}.") for key in value):
            key = f"{above}.{name}".lstrip(".")
            return f"Names under {key} begin with {wanted}.: select these with --key {key} --include '{wanted}.*'."
    hint = candidates(wanted, list(children))
    is_flat = hint.startswith("The keys are ") and any(name.endswith(".weight") for name in children)
    return "The weights are at the top. Leave out --key." if is_flat and wanted in MODEL_KEYS and not above else hint


def check_glob(glob: str, names: Sequence[str], choice: Choice) -> None:
    """Raise UsageError for a `glob` that matches none of `names`: for one of `include` without any match, and for one
    that matches a part of the tree with tensors, whose values alone are not meant."""
    is_include = glob in choice.include
    parts = {name[: dot.start()] for name in names for dot in re.finditer(r"\.", name)}
    if fnmatch.filter(parts, glob) or (is_include and not (names and glob in choice.used)):
        option = "--include" if is_include else "--exclude"
        hint = globs_like(glob, names)
        if is_include and "optim" in glob and not hint.startswith("Did you mean"):
            hint = "convert --optimizer PATH converts the states of an optimizer, if the input has any."
        raise UsageError(f"{option} {glob!r} matches none of the {len(names)} names.", hint)


def globs_like(glob: str, names: Sequence[str]) -> str:
    """Return a hint for a `glob` that matches none of the `names`: one for all names below it, or names like it."""
    if "\\" in glob:
        return "The pattern is a glob, not a regular expression: * matches any characters, and a dot matches itself."
    if re.search("[{,]", glob):
        return "A glob cannot contain {…} or commas. Repeat the option for each glob."
    literal = "." + re.split(r"[*?[]", glob)[0]
    heads = {name[: name.index(literal) + 1] for name in names if literal in name}
    head = heads.pop() if len(heads) == 1 else "*."
    tried = (
        *(f"{glob}.*", f"{head}{glob}", f"{head}{glob}.*", f"{glob}*", f"*{glob}", f"*{glob}*"),
        _respelled(glob, names),
    )
    near = next((text for text in tried if fnmatch.filter(names, text)), "")
    return f"Did you mean {near!r}?" if glob and near else candidates(glob, names)


def _respelled(glob: str, names: Sequence[str]) -> str:
    """Return `glob` with each word that is in none of `names` replaced by the most similar word of theirs."""
    words = {word for name in names for word in name.split(".")}
    return re.sub(r"\w+", lambda match: next(iter(difflib.get_close_matches(match[0], words, 1)), match[0]), glob)
