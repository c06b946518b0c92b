"""The options of `inspect`."""

from __future__ import annotations

from ckptconv.options.kinds import counted
from ckptconv.options.option import Option, options_in
from ckptconv.options.table import COMMAND, OPTIONS, named_in


class _Inspecting:
    """Options that only `inspect` has."""

    depth = Option(
        counted(1, 1000),
        "The number of module levels to show.",
        metavar="N",
        fallback=("as many as fit on a page"),
        common=True,
    )


OF_INSPECT = options_in(_Inspecting)
INSPECTING = named_in(
    "key include exclude dequantize map size stats as_ max_shard_size html overwrite tag raw family inert spool_dir "
    "storage_options",
    {**OPTIONS, **COMMAND, **OF_INSPECT},
)
# Advice on options of `convert` that it lacks.
INSTEAD = {
    "dtype": "In inspect, this option is as_: as_='bf16' shows the output of a cast.",
    "statistics statistic summary": "Did you mean stats?",
}
# The name of the keywords' type, and its docstring.
KEYWORDS = INSPECTING, "Options of `inspect`."
