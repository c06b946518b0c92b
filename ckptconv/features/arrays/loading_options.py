"""The options of `load_state_dict`."""

from __future__ import annotations

from ckptconv.options.table import named_in

LOADING = named_in("key dtype dequantize tag raw alone master unstack storage_options")
# What the type of the keywords has, and its docstring.
KEYWORDS = LOADING, "Options of `load_state_dict`."
