"""Lays out the bytes that a delta overwrites in a tensor, so that any range of them can be read.

A delta stores a count, then the positions of the changed bytes, then their new values. Here it becomes two bytes for
each byte of the tensor: the new value and 0xff if there is one, else 0 and 0.

Source: slime, slime/utils/disk_delta.py, `overwrite_encode`. Numbers are u4, little-endian; positions ascend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ckptconv.errors import CkptconvError
from ckptconv.features.compressed.unpacking import chunks_at, of_damage, zstandard_of
from ckptconv.storage.reading import Reader
from ckptconv.tensors.moves import File, Packed

# Bytes of a number, and of the stored data for each changed byte.
NUMBER, CHANGE = 4, 5
# Bytes of the layout for each byte of the tensor.
UNIT = 2
# Bytes of the tensor, and changes, that are laid out at a time.
BLOCK = 1 << 16


def unpacked(file: File, packed: Packed, reader: Reader) -> Iterator[bytes]:
    """Yield the layout of a packed file, in chunks."""

    def stored() -> Iterator[bytes]:
        return zstandard_of(file, packed, chunks_at(reader, packed))

    return laid_out(stored, file.size // UNIT, lambda why: of_damage(file, why))


def laid_out(
    stored: Callable[[], Iterator[bytes]], size: int, damaged: Callable[[str], CkptconvError]
) -> Iterator[bytes]:
    """Yield the layout for a tensor of `size` bytes, in chunks. Each call of `stored` returns the stored bytes anew.

    Raise the error that `damaged` makes from a reason, if the count or a position exceeds the tensor, if positions do
    not ascend, or if there are more or fewer bytes than the count requires.
    """
    import numpy as np

    # Positions come before values, and both are needed together: unpack twice, at two places.
    ahead, behind = _Stream(stored(), damaged), _Stream(stored(), damaged)
    count = int.from_bytes(ahead.take(NUMBER), "little")
    if count > size:
        raise damaged(f"it overwrites {count} bytes of a tensor of {size} bytes")
    behind.skip(NUMBER + NUMBER * count)
    left, last = count, -1
    positions, values = np.empty(0, "i8"), np.empty(0, "u1")
    for start in range(0, size, BLOCK):
        stop = min(start + BLOCK, size)
        units = np.zeros(stop - start, "<u2")
        while True:
            if not len(positions) and left:
                taken = min(left, BLOCK)
                positions = np.frombuffer(ahead.take(NUMBER * taken), "<u4").astype("i8")
                values = np.frombuffer(behind.take(taken), "u1")
                if positions[0] <= last or (positions[1:] <= positions[:-1]).any():
                    raise damaged("the positions that it overwrites are not in ascending order")
                last, left = int(positions[-1]), left - taken
                if last >= size:
                    raise damaged(f"it overwrites byte {last} of a tensor of {size} bytes")
            within = int(np.searchsorted(positions, stop))
            units[positions[:within] - start] = values[:within].astype("<u2") | 0xFF00
            positions, values = positions[within:], values[within:]
            if len(positions) or not left:
                break
        yield units.tobytes()
    if behind.take_any():
        raise damaged(f"it is longer than the {NUMBER + CHANGE * count} bytes that {count} changes require")


class _Stream:
    """Chunks of bytes, from which any number of bytes can be taken."""

    def __init__(self, chunks: Iterator[bytes], damaged: Callable[[str], CkptconvError]) -> None:
        self._chunks, self._damaged = chunks, damaged
        self._rest = b""

    def take(self, size: int) -> bytes:
        """Return the next `size` bytes."""
        taken = [self._rest]
        got = len(self._rest)
        while got < size:
            taken.append(self._next())
            got += len(taken[-1])
        data = b"".join(taken)
        self._rest = data[size:]
        return data[:size]

    def skip(self, size: int) -> None:
        """Skip the next `size` bytes."""
        while size > len(self._rest):
            size -= len(self._rest)
            self._rest = self._next()
        self._rest = self._rest[size:]

    def take_any(self) -> bytes:
        """Return some of the remaining bytes; none if there are none."""
        return self._rest or next(self._chunks, b"")

    def _next(self) -> bytes:
        chunk = next(self._chunks, b"")
        if not chunk:
            raise self._damaged("it is shorter than its count of changes requires")
        return chunk
