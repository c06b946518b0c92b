"""The options of `patch`."""

from __future__ import annotations

from ckptconv.options.table import named_in

PATCHING = named_in(
    "max_shard_size dtype key strip_prefix rename copy_config tag exclude_frozen_parameters master unstack raw alone "
    "jobs memory fsync clobber overwrite manifest dry_run inert spool_dir storage_options"
)
# What the type of the keywords has, and its docstring.
KEYWORDS = PATCHING, "Options of `patch`."
