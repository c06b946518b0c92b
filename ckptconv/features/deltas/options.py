"""The options of `patch`."""

from __future__ import annotations

from ckptconv.options import OUTPUT
from ckptconv.options.kinds import FLAG
from ckptconv.options.option import Option, options_in
from ckptconv.options.table import named_in


class _Patching:
    """Options that only the command `patch` has."""

    squash = Option(
        FLAG, "Join the deltas into one delta, and write it to the directory OUTPUT.", group=OUTPUT, common=True
    )


PATCHING = named_in(
    "max_shard_size dtype key strip_prefix rename copy_config tag exclude_frozen_parameters master unstack raw alone "
    "jobs memory fsync clobber overwrite manifest dry_run inert spool_dir storage_options"
)
PATCHING_TOO = options_in(_Patching)
# The name of the keywords' type, and its docstring.
KEYWORDS = PATCHING, "Options of `patch`."
