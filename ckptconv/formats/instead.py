"""What a file is that is no checkpoint, by its beginning or by what an archive holds. Pure."""

from __future__ import annotations

import re

from ckptconv.errors import CorruptError, UnsupportedError, damaged

_CORRUPT, _UNSUPPORTED = CorruptError, UnsupportedError
_AGAIN = "Download it again, and look at what the server says."
_UNPACK = "Unpack it first."
_OTHERS = "Files of PyTorch, DeepSpeed and safetensors are read."
_BESIDE = "Name the other file: this one's name without the ._ it begins with."
_REPICKLE = "If it holds a state dict that you trust: load it with pickle, and write it with torch.save."
_EXPORTED = "Load it with torch.export.load, and save its state_dict with torch.save."
# First bytes of other files: the error, what the file is, what to do.
_BEGINNINGS: tuple[tuple[bytes, type[CorruptError] | type[UnsupportedError], str, str], ...] = (
    (
        b"version https://git-lfs",
        _CORRUPT,
        "is a git-lfs pointer, not the file itself.",
        "Fetch the file: git lfs pull.",
    ),
    (b"<!doctype html", _CORRUPT, "is a web page, not a checkpoint.", _AGAIN),
    (b"<html", _CORRUPT, "is a web page, not a checkpoint.", _AGAIN),
    (b"<?xml", _CORRUPT, "is an XML document, not a checkpoint.", _AGAIN),
    (b"\x1f\x8b", _UNSUPPORTED, "is compressed with gzip.", _UNPACK),
    (b"\x28\xb5\x2f\xfd", _UNSUPPORTED, "is compressed with zstandard.", _UNPACK),
    (b"BZh", _UNSUPPORTED, "is compressed with bzip2.", _UNPACK),
    (b"\xfd7zXZ\0", _UNSUPPORTED, "is compressed with xz.", _UNPACK),
    (b"7z\xbc\xaf\x27\x1c", _UNSUPPORTED, "is a 7z archive.", _UNPACK),
    (b"\x89HDF\r\n\x1a\n", _UNSUPPORTED, "is an HDF5 file, such as Keras writes.", _OTHERS),
    (b"PYTORCH1", _UNSUPPORTED, "is a TorchScript archive of torch 1.0, which was no zip archive yet.", _OTHERS),
    (b"GGUF", _UNSUPPORTED, "is a GGUF file.", _OTHERS),
    (b"\x93NUMPY", _UNSUPPORTED, "is a numpy array (.npy).", _OTHERS),
    (b"\x00\x05\x16\x07", _UNSUPPORTED, "is an AppleDouble file: what macOS keeps of another file beside it.", _BESIDE),
    (b"\x00\x05\x16\x00", _UNSUPPORTED, "is an AppleSingle file.", _UNPACK),
    (
        b"# This file tracks properties of this Flutter project",
        _UNSUPPORTED,
        "is a description of a Flutter project, not of a checkpoint.",
        _OTHERS,
    ),
)
# The beginning of pickles of protocols 0 and 1, which have no header: a container put into the memo, or a name.
_PICKLE_BEGINS = rb"[(\]})]+[dlt]?(?:q[\0\1]|p[01]\n)|\(*c[\w.]+\n[\w.]+\n(?:[q(}\])]|p\d)"
# Members of other zip archives: the last part of a name, what the archive is, what to do.
OTHER_ARCHIVES = (
    ("archive_format", "an archive of torch.export (.pt2)", _EXPORTED),
    ("serialized_exported_program.json", "an archive of torch.export (.pt2)", _EXPORTED),
    ("extern_modules", "a package of torch.package", "Load what it holds, and save that with torch.save."),
    ("model.weights.h5", "an archive of Keras (.keras)", _OTHERS),
)


def plain_pickle() -> UnsupportedError:
    """Return the error for a pickle without torch's container; its message lacks the name."""
    return UnsupportedError("is a plain pickle, not a file of torch.save.", _REPICKLE)


def what_it_is(head: bytes, size: int) -> CorruptError | UnsupportedError | None:
    """Return what a file that is no zip archive is, by its first 512 bytes, as an error whose message lacks the name.

    Return None if it is nothing known.
    """
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for beginning, kind, what, hint in _BEGINNINGS:
        if head.startswith(beginning) or (beginning[:1] == b"<" and text.startswith(beginning)):
            return kind(what, hint)
    if not size:
        return CorruptError("is empty (0 bytes).", "It was probably never written: look for another copy.")
    if not head.strip(b"\0"):
        return damaged("begins with zeros only: space was reserved for it, and not filled.")
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size - 8:
        return UnsupportedError("is a safetensors file already.", "It needs no conversion.")
    if head[257:262] == b"ustar":
        return UnsupportedError("is a tar archive, not a zip archive.")
    if (head[:1] == b"\x80" and head[1:2] <= b"\x05") or begins_as_pickle(head):
        return plain_pickle()
    return None


def begins_as_pickle(head: bytes) -> bool:
    """Whether a file that begins with `head` is a pickle of protocol 0 or 1."""
    return re.match(_PICKLE_BEGINS, head) is not None
