"""The options of `open`."""

from __future__ import annotations

from ckptconv.options.table import OF_OPENING, OPENING, OPTIONS, named_in

# Those about reading a checkpoint, and in addition those about its names and dtypes.
VIEWING = {name: option for name, option in OPENING.items() if name != "states"} | named_in(
    "with_states partial fill", {**OPTIONS, **OF_OPENING}
)
# What the type of the keywords has, and its docstring.
KEYWORDS = VIEWING, "Options of `open`."
