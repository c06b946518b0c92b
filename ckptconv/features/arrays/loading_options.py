"""The options of `load_state_dict`."""

from __future__ import annotations

from ckptconv.options.table import named_in

LOADING = named_in("key dtype dequantize tag raw alone master unstack storage_options")
# Advice on options of `convert` that it lacks.
INSTEAD = {
    "strip_prefix rename": "In Python: {key.removeprefix('module.'): tensor for key, tensor in state.items()}.",
    "include exclude": "To read some tensors only, use ckptconv.open: ck.get_tensors(name for name in ck if "
    "name.endswith('.bias')).",
    "inert": "ckptconv.open(PATH, inert=True) reads the tensors of malicious files too.",
}
# The options of the type of the keywords, and its docstring.
KEYWORDS = LOADING, "Options of `load_state_dict`."
