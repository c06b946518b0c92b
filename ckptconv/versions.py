"""What this program and its parts are, for reports of mistakes."""

from __future__ import annotations

import contextlib
import os
import sys

from ckptconv.version import __version__

# What converts, what reads back, and what reaches stores and other machines.
PARTS = ("torch", "safetensors", "numpy", "fsspec", "s3fs", "gcsfs", "adlfs", "huggingface_hub", "distributed")


def versions() -> list[str]:
    """The version of this program, and of all that has a part in what it does."""
    found: dict[str, str] = {}
    # The names of directories tell; importlib.metadata takes as long to import as all else.
    for directory in sys.path:
        with contextlib.suppress(OSError):
            for entry in os.listdir(directory or "."):
                name, _, rest = entry.partition("-")
                if rest.endswith(".dist-info"):
                    found.setdefault(name.lower(), rest.removesuffix(".dist-info"))
    python = ".".join(map(str, sys.version_info[:3]))
    return [
        f"ckptconv {__version__}",
        f"Python {python}",
        *(f"{name} {found[name]}" for name in PARTS if name in found),
    ]
