"""The options of `finish`."""

from __future__ import annotations

from ckptconv.options.table import named_in

FINISHING = named_in("checksum manifest attest overwrite fsync storage_options")
# The options of the type of the keywords, and its docstring.
KEYWORDS = FINISHING, "Options of `finish`."
