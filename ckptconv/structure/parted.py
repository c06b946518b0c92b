"""Tensors of classes that a library stores in parts, and restores by the metadata of safetensors files. Pure.

Part `qdata` of the tensor `0.weight` is stored as `0._weight_qdata`. The metadata of a library is understood by its
feature, which is named here and imported for files that the library wrote, or for a tensor of its classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple

# By the prefix of the full names of its classes: a key that its metadata has, and the module that has `PARTING`.
PARTED: Mapping[str, tuple[str, str]] = {
    "torchao.": ("tensor_names", "ckptconv.features.torchao.parts"),
}


class PartedTensor(NamedTuple):
    """A tensor that is stored in parts: the text of its entry in the metadata, and the names of its parts. `of` is how
    the names of its library's classes begin."""

    text: str
    parts: tuple[str, ...]
    of: str


class Parting(NamedTuple):
    """The functions of a library that stores tensors in parts.

    - `called` is the word for such tensors. `is_one`: tensors of the class with this full name are stored so.
    - `described` returns the description of a `Composite` of a kind, with its parts, in metadata; None if it cannot.
    - `read` returns such tensors, by name, that the metadata of a file with tensors of some names describes. `without`
      returns the metadata without the library's own entries. `assembled` returns stored tensors and values by name,
      with the nodes that a pickle would have instead of their parts.
    - `metadata` returns the metadata of a file which holds tensors {old: new}, of which some are known by old name.
    """

    called: str
    is_one: Callable[[str], bool]
    described: Callable[[str, Mapping[str, Any]], PartedTensor | None]
    read: Callable[[Mapping[str, str], Iterable[str]], dict[str, PartedTensor]]
    without: Callable[[Mapping[str, str]], dict[str, str]]
    assembled: Callable[[Mapping[str, Any], Mapping[str, str]], dict[str, Any]]
    metadata: Callable[[Mapping[str, PartedTensor], Mapping[str, str]], dict[str, str]]


def of_class(name: str) -> Parting | None:
    """Return how tensors of the class with this full name are stored in parts; None if they are not."""
    parting = next((_parting(begins) for begins in PARTED if name.startswith(begins)), None)
    return parting if parting and parting.is_one(name) else None


def prefix_of(name: str) -> str:
    """Return the prefix of the names of a tensor's parts.

    >>> prefix_of("0.weight")
    '0._weight_'
    """
    module, dot, last = name.rpartition(".")
    return f"{module}{dot}_{last}_"


def parts_of(known: Mapping[str, PartedTensor]) -> frozenset[str]:
    """Return the names under which the parts of tensors are stored."""
    return frozenset(prefix_of(name) + part for name, parted in known.items() for part in parted.parts)


def read(metadata: Mapping[str, str], names: Iterable[str]) -> dict[str, PartedTensor]:
    """Return the tensors, by name, that `metadata` describes of a file that holds tensors `names`."""
    return {name: parted for parting in _written(metadata) for name, parted in parting.read(metadata, names).items()}


def called(known: Mapping[str, PartedTensor]) -> str:
    """Return the word for the tensors `known`."""
    return " and ".join(dict.fromkeys(_parting(parted.of).called for parted in known.values()))


def without(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata without the entries of libraries about tensors in parts."""
    remaining = dict(metadata)
    for parting in _written(metadata):
        remaining = parting.without(remaining)
    return remaining


def assembled(flat: Mapping[str, Any], metadata: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the state dict whose tensors a library stored as `flat`, as a pickle of it would have it. A tensor with an
    unknown detail remains in parts."""
    for parting in _written(metadata):
        flat = parting.assembled(flat, metadata)
    return flat


def metadata_of(known: Mapping[str, PartedTensor], names: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata of a file that holds tensors `names` {old: new}. The tensors `known` by old name are in
    parts. Return {} if none of these is present with all its parts, under names that belong together."""
    metadata: dict[str, str] = {}
    for begins in dict.fromkeys(parted.of for parted in known.values()):
        metadata |= _parting(begins).metadata(
            {name: parted for name, parted in known.items() if parted.of == begins}, names
        )
    return metadata


def _written(metadata: Mapping[str, str]) -> Iterator[Parting]:
    """Yield the ways to store tensors in parts of the libraries that wrote the `metadata`."""
    return (_parting(begins) for begins, (key, _) in PARTED.items() if key in metadata)


def _parting(begins: str) -> Parting:
    parting: Parting = import_module(PARTED[begins][1]).PARTING
    return parting
