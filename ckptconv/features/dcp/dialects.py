"""Programs that put more than tensors into directories of torch.distributed.checkpoint.

Such a module has `read_extra`, which returns the data apart from the tensors, or None; `check_backend` and
`is_of_another_backend`, for directories whose tensors are stored otherwise; and `facts` about values, for inspect. The
result of `read_extra` has `format`, the name of the checkpoint for people, `common`, the values that all ranks have
alike, `left`, the names of values that it leaves out, `rest`, which holds the tensors in these, the `log` of the files
that were read, `arranged`, which returns the wanted weights and states, and `notes`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple

from ckptconv.storage.location import Location


class Dialect(NamedTuple):
    """A program that adds to such directories: the module that reads the additions, and names of files and values that
    indicate them."""

    module: str
    files: tuple[str, ...]
    values: tuple[str, ...]


# The names of values that Megatron-core has.
_MEGATRON = ("common_state/shard_0_1", "iteration", "checkpoint_version", "args", "optimizer")
DIALECTS: tuple[Dialect, ...] = (
    Dialect("ckptconv.features.megatron_core.extra", ("metadata.json", "common.pt"), _MEGATRON),
)


def _asked(files: Collection[str], values: Collection[str] = ()) -> Iterator[Any]:
    """Yield the modules that know of files or values of these names."""
    for dialect in DIALECTS:
        if any(name in files for name in dialect.files) or any(name in values for name in dialect.values):
            yield import_module(dialect.module)


def read_extra(place: Location, described: Any, values: Mapping[str, Any], digests: Mapping[str, str]) -> Any:
    """Return a program's data apart from the tensors; None if no program is known to have written more. `values` are
    those of the `described` checkpoint by name, `digests` the SHA-256 of its files by path."""
    extras = (module.read_extra(place, described, values, digests) for module in _asked(place.names, values))
    return next((extra for extra in extras if extra), None)


def check_backend(place: Location) -> None:
    """Raise UnsupportedError if a program says that it stored the tensors otherwise."""
    for module in _asked(place.names):
        module.check_backend(place)


def is_of_another_backend(place: Location) -> bool:
    """Return whether a program stored the tensors of a directory with a backend other than torch."""
    return any(module.is_of_another_backend(place) for module in _asked(place.names))


def facts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts about values for inspect."""
    return {name: fact for module in _asked((), values) for name, fact in module.facts(values).items()}
