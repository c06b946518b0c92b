"""Programs that put more than tensors into directories of torch.distributed.checkpoint.

Such a module has `read_extra`, which returns what is beside the tensors, or None; `check_backend` and
`is_of_another_backend`, for directories whose tensors are stored otherwise; and `facts`, what inspect shows of values.
What `read_extra` returns has `format`, the name of the checkpoint for people, `common`, the values that all ranks have
alike, the `log` of the files that were read, `arranged`, which returns the weights and states that are wanted, and
`notes`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from typing import Any

from ckptconv.formats.registered import DIALECTS
from ckptconv.storage.location import Location


def _asked(files: Collection[str], values: Collection[str] = ()) -> Iterator[Any]:
    """Yield the modules that know of files or values of these names."""
    for dialect in DIALECTS:
        if any(name in files for name in dialect.files) or any(name in values for name in dialect.values):
            yield import_module(dialect.module)


def read_extra(place: Location, values: Mapping[str, Any], digests: Mapping[str, str]) -> Any:
    """Return what a program has beside the tensors; None if none is known to have written more. `values` are those of
    the checkpoint by name, `digests` the SHA-256 of its files by path."""
    found = (module.read_extra(place, values, digests) for module in _asked(place.names, values))
    return next((extra for extra in found if extra), None)


def check_backend(place: Location) -> None:
    """Raise UnsupportedError if a program says that it stored the tensors otherwise."""
    for module in _asked(place.names):
        module.check_backend(place)


def is_of_another_backend(place: Location) -> bool:
    """Whether a program stored the tensors in a directory otherwise."""
    return any(module.is_of_another_backend(place) for module in _asked(place.names))


def facts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what inspect shows of values."""
    return {name: fact for module in _asked((), values) for name, fact in module.facts(values).items()}
