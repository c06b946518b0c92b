"""The options of `scan`."""

from __future__ import annotations

from ckptconv.options import OUTPUT
from ckptconv.options.kinds import PATH, choice
from ckptconv.options.option import Option, options_in
from ckptconv.options.table import OPTIONS


class _Scanning:
    """Options that only the command has."""

    sarif = Option(
        PATH,
        "Also write the verdicts to FILE as SARIF 2.1.0, for code hosts.",
        metavar="FILE",
        group=OUTPUT,
        common=True,
    )
    fail_on = Option(
        choice("unknown", "call", "suspicious", "attack"),
        "Exit with code 3 for this verdict or worse. From least to most severe: unknown names and archives, calls "
        "of unknown functions, suspicious contents, attacks.",
        default="call",
        metavar="unknown|call|suspicious|attack",
        common=True,
    )


COMMAND = options_in(_Scanning)
SCANNING = {"storage_options": OPTIONS["storage_options"]}
# The name of the keywords' type, and its docstring.
KEYWORDS = SCANNING, "Options of `scan`."
