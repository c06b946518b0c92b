"""Import single modules of packages whose other modules need a GPU, or packages that are not installed.

They are the packages' own files. Whatever else they import of the packages is a stand-in, which no conversion uses.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: Iterable[str], real: Iterable[str]) -> None:
        self._packages, self._real = set(packages), set(real)

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if not any(f"{name}.".startswith(f"{package}.") for package in self._packages):
            return None
        if name in self._real:
            return importlib.machinery.PathFinder.find_spec(name, path)
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        last = name.rpartition(".")[2]
        spec.submodule_search_locations = [
            str(Path(each, last)) for each in path or sys.path if Path(each, last).is_dir()
        ]
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return mock.MagicMock(
            name=spec.name, __name__=spec.name, __path__=spec.submodule_search_locations, __spec__=spec
        )

    def exec_module(self, module: ModuleType) -> None: ...


def only(*real: str, packages: Iterable[str], instead: Mapping[str, object] | None = None) -> list[ModuleType]:
    """Import the modules `real`, with stand-ins for all others of `packages`, in which
    `instead` gives things by name."""
    sys.meta_path.insert(0, _Finder(packages, real))
    for name, thing in (instead or {}).items():
        module, _, attribute = name.rpartition(".")
        setattr(importlib.import_module(module), attribute, thing)
    return [importlib.import_module(name) for name in real]
