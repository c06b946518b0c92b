"""The options of `load_state_dict`."""

from __future__ import annotations

from ckptconv.features.arrays.opening_options import choosing
from ckptconv.options.table import named_in

LOADING = named_in("key dtype dequantize tag raw alone master unstack storage_options")
# Advice on options of `convert` that it lacks.
INSTEAD = {
    "map_location device_map": "Use device.",
    "strip_prefix": "For a flat state, such as key= selects in a nested one: "
    "{name.removeprefix(VALUE): tensor for name, tensor in state.items()}.",
    "rename": "For a flat state, such as key= selects in a nested one: "
    "{re.sub(REGEX, REPLACEMENT, name): tensor for name, tensor in state.items()}.",
    "include": lambda value: f"To read some tensors, use ckptconv.open: {choosing(value)}",
    "exclude": lambda value: f"To read some tensors, use ckptconv.open: {choosing(value, excluded=True)}",
    "inert": "ckptconv.open(PATH, inert=True) reads the tensors of malicious files too.",
}
# The options of the type of the keywords, and its docstring.
KEYWORDS = LOADING, "Options of `load_state_dict`."
