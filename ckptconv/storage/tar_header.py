"""Recognizes tar archives by their first header, as Python's tarfile does."""

from __future__ import annotations

# Bytes at the start of a file that show whether it is in this format: a tar header.
HEAD = 512
_ASCII = bytes(range(128))
_SUM = slice(148, 156)


def is_tar(head: bytes) -> bool:
    """Return whether a file that begins with `head` (HEAD bytes) is a tar archive.

    The checksum of the header decides, as it does for tarfile and so for torch.
    """
    return len(head) == HEAD and any(head) and _checksum(head[_SUM]) in _checksums(head)


def _checksum(field: bytes) -> int | None:
    """Parse a checksum field as tarfile does, less strictly: up to a NUL, and any octal that Python's `int` accepts."""
    if field[0] in (0x80, 0xFF):
        return int.from_bytes(field, "big", signed=True) if field[0] == 0xFF else int.from_bytes(field[1:], "big")
    try:
        return int(field.partition(b"\0")[0].decode("ascii").strip() or "0", 8)
    except ValueError:
        return None


def _checksums(header: bytes) -> tuple[int, int]:
    """Return the sums of a header's unsigned and signed bytes, with spaces for its checksum. Either is a valid one."""
    counted = header[: _SUM.start] + b" " * (_SUM.stop - _SUM.start) + header[_SUM.stop :]
    unsigned = sum(counted)
    return unsigned, unsigned - 256 * len(counted.translate(None, _ASCII))
