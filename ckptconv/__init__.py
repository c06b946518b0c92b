"""Offline conversion of checkpoints: any size, in little memory, and nothing in them runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .convert import Options, Report, convert
    from .errors import CkptconvError
    from .formats import open_source as open  # noqa: A004
    from .formats.source import Source
    from .keymap import flatten, unflatten

# Where each public name lives; imported when first used, so that `import ckptconv` costs next to nothing.
_HOMES = {
    "CkptconvError": ("errors", "CkptconvError"),
    "Options": ("convert", "Options"),
    "Report": ("convert", "Report"),
    "Source": ("formats.source", "Source"),
    "convert": ("convert", "convert"),
    "flatten": ("keymap", "flatten"),
    "open": ("formats", "open_source"),
    "unflatten": ("keymap", "unflatten"),
}

__all__ = ["CkptconvError", "Options", "Report", "Source", "__version__", "convert", "flatten", "open", "unflatten"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module, attribute = _HOMES[name]
    value = getattr(importlib.import_module(f".{module}", __name__), attribute)
    # The import has put the module under its own name: here, `convert` is the function.
    globals()[name] = value
    return value
