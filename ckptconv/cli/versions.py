"""The versions of this program and of its packages, for `--version`."""

from __future__ import annotations

import contextlib
import os
import sys

from ckptconv.version import __version__

# Packages that convert, that read outputs, and that reach stores and other machines.
PARTS = ("torch", "safetensors", "numpy", "fsspec", "s3fs", "gcsfs", "adlfs", "huggingface_hub", "distributed")


def versions() -> list[str]:
    """Return the versions of this program, of Python, and of the packages it uses."""
    versions_of: dict[str, str] = {}
    # Read the versions from directory names: importlib.metadata takes as long to import as everything else.
    for directory in sys.path:
        with contextlib.suppress(OSError):
            for entry in os.listdir(directory or "."):
                name, _, suffix = entry.partition("-")
                if suffix.endswith(".dist-info"):
                    versions_of.setdefault(name.lower(), suffix.removesuffix(".dist-info"))
    python = ".".join(map(str, sys.version_info[:3]))
    return [
        f"ckptconv {__version__}",
        f"Python {python}",
        *(f"{name} {versions_of[name]}" for name in PARTS if name in versions_of),
    ]
