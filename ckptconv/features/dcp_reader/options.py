"""The options of `DistributedReader`."""

from __future__ import annotations

from ckptconv.features.dcp_output.states_option import STATES_READ
from ckptconv.options.table import OPTIONS, named_in

DISTRIBUTED = named_in(
    "dtype key include exclude strip_prefix rename map size states model_key optimizer_key flat_optimizer fill_states "
    "order tag exclude_frozen_parameters master unstack inert spool_dir storage_options",
    {**OPTIONS, "states": STATES_READ},
)
# The options of the type of the keywords, and its docstring.
KEYWORDS = DISTRIBUTED, "Options of `DistributedReader`."
