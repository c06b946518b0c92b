"""Modules that ask programs in libraries which may not be installed: which of them can be asked here."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import pkgutil
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]


def parser_of(about: str | None, folder: str) -> argparse.ArgumentParser:
    """Return a parser of names of modules in `folder`, a package in scripts/, and of a directory for their files."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"modules in scripts/{folder}; all by default")
    parser.add_argument("--directory", type=Path, default=ROOT / "build" / folder)
    return parser


def present(folder: str, names: Sequence[str]) -> Iterator[tuple[str, ModuleType]]:
    """Yield the modules of a package that are asked for, all by default, with their names. Say of each whose `NEEDED`
    packages are not installed that it is left out."""
    package = importlib.import_module(folder)
    for name in names or [module.name for module in pkgutil.iter_modules(package.__path__)]:
        module = importlib.import_module(f"{folder}.{name}")
        lacking = [needed for needed in module.NEEDED if importlib.util.find_spec(needed) is None]
        if lacking:
            print(f"{name}: left out, as {', '.join(lacking)} is not installed")
        else:
            yield name, module


def emptied(place: Path) -> Path:
    """Make an empty directory at `place`, and return it."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    return place
