"""The options of `verify`."""

from __future__ import annotations

from ckptconv.options.table import OPTIONS

# Those of a conversion that reads states.
VERIFYING = {
    **{name: option for name, option in OPTIONS.items() if name != "optimizer"},
    "states": OPTIONS["states"].explained(
        "The optimizer states that the conversion wrote; for a checkpoint of torch.distributed.checkpoint, the states "
        "that the conversion read.",
        former="--optimizer",
    ),
}
# The name of the keywords' type, and its docstring.
KEYWORDS = VERIFYING, "Options of `verify`."
