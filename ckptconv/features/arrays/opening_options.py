"""The options of `open`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ckptconv.options.table import OF_OPENING, OPENING, OPTIONS, named_in

# Those about reading a checkpoint, and in addition those about its names and dtypes.
VIEWING = {name: option for name, option in OPENING.items() if name != "states"} | named_in(
    "with_states partial fill", {**OPTIONS, **OF_OPENING}
)


def choosing(value: Any, *, excluded: bool = False) -> str:
    """Return the call that reads the tensors that `value`, names or globs, chooses or excludes."""
    words = [value] if isinstance(value, str) else list(value) if isinstance(value, Iterable) else []
    if not words or not all(isinstance(word, str) for word in words) or len(str(words)) > _LONGEST:
        return "ck.get_tensors(NAMES), where NAMES is a list of names."
    shown, inner = words[0] if len(words) == 1 else words, ""
    if any(sign in word for word in words for sign in "*?["):
        if isinstance(shown, str) and not excluded:
            return f"ck.get_tensors(fnmatch.filter(ck, {shown!r}))."
        one = f"fnmatch.fnmatchcase(n, {shown!r})"
        chosen = one if isinstance(shown, str) else f"any(fnmatch.fnmatchcase(n, glob) for glob in {shown!r})"
    else:  # names, or the beginnings of names
        begun = tuple(f"{word}." for word in words)
        chosen = f"(n + '.').startswith({(begun[0] if isinstance(shown, str) else begun)!r})"
        if isinstance(shown, str) and not excluded:
            inner = f" If {shown!r} is a mapping in the checkpoint, key={shown!r} selects it alone."
    return f"ck.get_tensors(n for n in ck if {'not ' * excluded}{chosen}).{inner}"


def casting(value: Any) -> str:
    """Return the call that casts a tensor to the dtype `value`, of torch, of numpy, or its name."""
    name = value if isinstance(value, str) else getattr(value, "__name__", str(value)).removeprefix("torch.")
    return f"ck[name].to({name!r})" if name.isidentifier() and value is not None else "ck[name].to(DTYPE)"


# Characters of names that are repeated.
_LONGEST = 300
# Advice on options of `convert` that it lacks.
INSTEAD = {
    "map_location device_map": "Use device.",
    "strip_prefix": "Rename in Python: {name.removeprefix(VALUE): ck.get_tensor(name) for name in ck}.",
    "rename": "Rename in Python: {re.sub(REGEX, REPLACEMENT, name): ck.get_tensor(name) for name in ck}.",
    "include": lambda value: f"Select tensors in Python: {choosing(value)}",
    "exclude": lambda value: f"Select tensors in Python: {choosing(value, excluded=True)}",
    "dtype": lambda value: f"Cast a tensor in Python: {casting(value)}. load_state_dict has an option dtype.",
    "exclude_frozen_parameters": "Did you mean exclude_frozen?",
}
# Advice on arguments of `get_tensor`.
OF_TENSORS = {
    "dtype": lambda value: f"Cast it: {casting(value)} is a lazy tensor, and .torch() or .numpy() reads it.",
    "device": "Pass device to ckptconv.open, or use ck[name].torch(device=VALUE).",
}
# The options of the type of the keywords, and its docstring.
KEYWORDS = VIEWING, "Options of `open`."
