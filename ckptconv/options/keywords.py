"""The options of each public call, as types whose keys are the names of the options.

Editors and type checkers read `keywords.pyi`, which scripts/keywords.py generates from the same tables, with the type
and the help of each option.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, TypedDict

from ckptconv.options.option import Option
from ckptconv.options.table import OPTIONS

# The options that each type has, and its docstring.
TABLES = {
    "ConvertOptions": (OPTIONS, "Options of `convert`, `save_state_dict` and `VirtualFiles`."),
}
# Further types: the modules of features that have their options and docstring, as `KEYWORDS`.
FEATURES: dict[str, str] = {
    "AverageOptions": "ckptconv.features.average.options",
    "DiffOptions": "ckptconv.features.diff.options",
    "DistributedOptions": "ckptconv.features.dcp_reader.options",
    "FinishOptions": "ckptconv.features.parts.finishing",
    "InspectOptions": "ckptconv.features.inspect.options",
    "LoadOptions": "ckptconv.features.arrays.loading_options",
    "MergeOptions": "ckptconv.features.merge.options",
    "OpenOptions": "ckptconv.features.arrays.opening_options",
    "PatchOptions": "ckptconv.features.deltas.options",
    "RowsOptions": "ckptconv.features.rows.options",
    "ScanOptions": "ckptconv.features.scan.options",
    "VerifyOptions": "ckptconv.features.verify.keywords",
}


def tables() -> dict[str, tuple[Mapping[str, Option], str]]:
    """Return the options of each type, and its docstring, for features too."""
    return {**TABLES, **{name: import_module(module).KEYWORDS for name, module in FEATURES.items()}}


def __getattr__(name: str) -> Any:
    """Create the type of one call's options, for programs that use it outside of annotations."""
    if name not in (*TABLES, *FEATURES):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    options, docstring = tables()[name]
    keywords = TypedDict(name, dict.fromkeys(options, Any), total=False)  # type: ignore[operator]
    keywords.__doc__, keywords.__module__ = docstring, __name__
    return globals().setdefault(name, keywords)
