"""Reads the mapping from state dicts to safetensors that OLMo uses, without running its pickles.

Source: `olmo/safetensors_util.py` of https://github.com/allenai/OLMo. A tensor's name is the base64 (URL alphabet) of a
pickle of (path of keys, whether the value is pickled). A value that is no tensor is pickled into a uint8 tensor. Such a
file does not preserve empty containers and the order of keys.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

from ckptconv.errors import CorruptError, UnsafeError
from ckptconv.features.joining.nesting import nest
from ckptconv.formats.safetensors import TensorFiles
from ckptconv.formats.torch.container import MAX_PICKLE
from ckptconv.formats.torch.objects import vocabulary as objects_vocabulary
from ckptconv.pickles.machine import load
from ckptconv.pickles.vocabulary import WHOLE_TREES, MalformedError, Vocabulary
from ckptconv.storage.location import Location
from ckptconv.tensors.lazy import Stored

CALLED = "OLMo's map"
# The first bytes of pickles of protocols 2 to 5.
_PICKLES = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_ATOMS = frozenset({str, bytes, int, float, bool, type(None)})
_LONGEST_KEY = 100


def is_used(names: Iterable[str]) -> bool:
    """Return whether OLMo's mapping produced all of these names of tensors."""
    names = list(names)
    return bool(names) and all((_decoded(name) or b"").startswith(_PICKLES) for name in names)


def restored(files: TensorFiles, place: Location) -> tuple[dict[Any, Any], list[str]]:
    """Return the tree of a file whose tensor names are pickled paths; the pickles are read, never run."""

    def content(tensor: Stored) -> bytes:
        if tensor.dtype.name != "uint8" or tensor.nbytes > MAX_PICKLE:
            raise CorruptError(
                f"{tensor.file.path}: a pickled value is stored as {tensor.nbytes} bytes of {tensor.dtype}; at most "
                f"{MAX_PICKLE} bytes of uint8 are supported."
            )
        with place.at(tensor.file).open_reader() as reader:
            files.bytes_read += tensor.nbytes
            return reader.read_at(tensor.offset, tensor.nbytes)

    def storage(pid: Any) -> NoReturn:
        raise MalformedError("has a persistent id, which this file does not define")

    return restore(files.tensors, content, where=files.path, vocabulary=objects_vocabulary(storage))


def restore(
    tensors: Mapping[str, Any],
    read: Callable[[Any], bytes],
    *,
    where: str,
    vocabulary: Vocabulary | None = None,
) -> tuple[dict[Any, Any], list[str]]:
    """Return the state dict that was written as `tensors`, and the names of classes in it that were kept as `Opaque`.

    `read` returns the bytes of a uint8 tensor. `vocabulary` has the values that pickles may contain besides Python's
    own types. `where` names the file in errors. Raises CorruptError for a name that is not of this mapping, UnsafeError
    for a name that would call a function.
    """
    opaque: dict[str, None] = {}

    def leaves() -> Iterator[tuple[tuple[Any, ...], Any]]:
        for name, tensor in tensors.items():
            path, is_pickled = _path(name, where)
            value = tensor
            if is_pickled:
                place = f"{where}, the value of {_shown(path)}"
                loaded = load(read(tensor), vocabulary or Vocabulary(), where=place, limits=WHOLE_TREES)
                opaque.update((str(cls), None) for cls in loaded.opaque)
                value = loaded.value
            yield path, value

    return nest(leaves(), where, _shown).tree, list(opaque)


def _decoded(name: str) -> bytes | None:
    try:
        return base64.b64decode(name.encode("ascii"), altchars=b"-_", validate=True)
    except (ValueError, binascii.Error):
        return None


def _path(name: str, where: str) -> tuple[tuple[Any, ...], bool]:
    """Decode a name into a path of keys, and whether the value is pickled."""
    place = f"{where}, the tensor named {name[:100]!r}"
    data = _decoded(name)
    if data is None:
        raise CorruptError(f"{place}: the name is not base64, but this format encodes all names in base64.")
    loaded = load(data, where=place)
    if loaded.opaque:
        called = ", ".join(map(str, loaded.opaque))
        raise UnsafeError(
            f"{place}: the name is a pickle that calls {called[:200]}. Names never need calls: it is an attack."
        )
    value = loaded.value
    if not (type(value) is tuple and len(value) == 2 and type(value[0]) is tuple and type(value[1]) is bool):
        raise CorruptError(f"{place}: the name is not a pickled pair of a path and a flag.")
    path, is_pickled = value
    if not path or not all(map(_is_key, path)):
        raise CorruptError(f"{place}: the name is not a valid path of keys.")
    return path, is_pickled


def _is_key(key: Any) -> bool:
    """Return whether `key` is of a type that is fast to hash."""
    if type(key) is tuple:
        return len(key) <= _LONGEST_KEY and all(type(part) in _ATOMS for part in key)
    return type(key) in _ATOMS


def _shown(path: tuple[Any, ...]) -> str:
    return " → ".join(repr(key)[:50] for key in path[:20])
