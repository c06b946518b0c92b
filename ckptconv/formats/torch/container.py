"""The parts that the containers of torch files share: numbers of storages, how they begin, the result."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ckptconv.errors import CkptconvError, TruncatedError, UnsafeError, UnsupportedError
from ckptconv.pickles.machine import load
from ckptconv.pickles.nodes import Global
from ckptconv.storage.records import Records
from ckptconv.tensors.moves import File

# The longest description read, in bytes: a million tensors take a seventh of this.
MAX_PICKLE = 1 << 30

# Bytes of a refused file that are searched for an attack. A file with nothing but an attack is short.
SCANNED = 1 << 20

# The magic number of the stream format, and how it is pickled by protocols 2 and up, and by protocol 1.
STREAM_MAGIC = 0x1950A86A20F9469CFC6C
_MAGICS = (b"\x8a\x0a" + STREAM_MAGIC.to_bytes(10, "little") + b".", b"L%dL\n." % STREAM_MAGIC)
# Bytes at the start of a file that hold it: the protocol and a frame may precede it.
STREAM_HEAD = 40
# The beginning of pickles of protocols 0 and 1, which have no header: a container put into the memo, or a name.
_PICKLE_BEGINS = rb"[(\]})]+[dlt]?(?:q[\0\1]|p[01]\n)|\(*c[\w.]+\n[\w.]+\n(?:[q(}\])]|p\d)"
# Members of TorchScript archives of torch 1.0 to 1.2: the description (data.pkl in later ones), attributes and tensors.
SCRIPT_DESCRIPTION, SCRIPT_ATTRIBUTES, SCRIPT_RECORDS = "model.json", "attributes.pkl", "tensors/"

_containers = itertools.count()


class Taken(NamedTuple):
    """A tree with modules replaced by their state dicts, notes and warnings for people, and the classes left in it.

    `values` are attributes of the modules that are plain values, as CLASS.NAME; no state dict has them.
    """

    tree: Any
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    opaque: tuple[Global, ...]
    values: Mapping[str, Any] = MappingProxyType({})


def is_stream(head: bytes) -> bool:
    """Return whether a file that begins with `head` (STREAM_HEAD bytes) is in the stream format."""
    return any(magic in head[:STREAM_HEAD] for magic in _MAGICS)


def first_identity() -> int:
    """Return the number of the first storage of a container; storage numbers are unique in this process."""
    return next(_containers) << 32


def is_pickle(data: bytes, where: str, *, or_begins: bool = False) -> bool:
    """Return whether `data` begins with a complete pickle; with `or_begins`, also with the beginning of a longer one.

    `where` names it in errors. Raise UnsafeError for an attack.
    """
    try:
        load(data, where=where)
    except UnsafeError:
        raise
    except TruncatedError:
        return or_begins
    except CkptconvError:
        return False
    return True


def begins_as_pickle(head: bytes) -> bool:
    """Return whether a file that begins with `head` is a pickle of protocol 0 or 1."""
    return re.match(_PICKLE_BEGINS, head) is not None


def plain_pickle(path: str) -> UnsupportedError:
    """Return the error for a pickle at `path` that is not in torch's container."""
    return UnsupportedError(
        f"{path} is a plain pickle, not a file of torch.save.",
        "If you trust it and it contains a state dict, load it with pickle, and save it with torch.save.",
    )


class TorchFile(NamedTuple):
    """The content of a torch file: its tree, and facts about it.

    `opaque` are the classes and functions kept as inert data; `globals` are all that are mentioned. `records` are the
    container's storages, used or not. `bytes_read` counts the bytes read to open the file. `container` is its name in
    messages; `warnings` and `notes` are for people too. `stem` is the name under which the file was written, without
    suffix, if the file says so.
    """

    value: Any
    file: File
    opaque: tuple[Global, ...]
    globals: tuple[Global, ...]
    byteorder: str
    records: Records
    bytes_read: int
    container: str
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    stem: str = ""
