"""The CRC-32s of the tensors of an output file, computed while they are made, and the trailers that depend on them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from ckptconv.plan import Data, FilePlan, Trailer
from ckptconv.storage.crc import combine, crc32
from ckptconv.tensors.moves import BLOCK

if TYPE_CHECKING:
    from ckptconv.storage.writing import Writer


class Crcs(Mapping[str, int]):
    """The CRC-32 of every non-empty tensor, by name, combined from the pieces made so far."""

    def __init__(self) -> None:
        # By name: the CRC-32 of the whole tensor, or (offset, bytes, CRC-32) of each piece.
        self._known: dict[str, int | list[tuple[int, int, int]]] = {}

    def add(self, part: Data, start: int, data: memoryview) -> None:
        """Add `data`, the bytes of `part` from `start` on."""
        if not start and len(data) == part.nbytes:
            self._known[part.name] = crc32(data)
            return
        pieces = self._pieces(part.name)
        if pieces and pieces[-1][0] + pieces[-1][1] == start:
            first, size, crc = pieces.pop()
            pieces.append((first, size + len(data), crc32(data, crc)))
        else:
            pieces.append((start, len(data), crc32(data)))

    def take(self, other: Crcs) -> None:
        """Take over those of `other`, which is then empty."""
        for name, crc in other._known.items():
            if isinstance(crc, int):
                self._known[name] = crc
            else:
                self._pieces(name).extend(crc)
        other._known.clear()

    def _pieces(self, name: str) -> list[tuple[int, int, int]]:
        pieces = self._known.setdefault(name, [])
        assert isinstance(pieces, list)
        return pieces

    def __getitem__(self, name: str) -> int:
        crc = self._known[name]
        return crc if isinstance(crc, int) else combine(crc)

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


def finish(
    file: FilePlan, writer: Writer, known: Iterable[Crcs | None], written: Collection[int], digests: dict[str, int]
) -> int:
    """Put the CRC-32 of the tensors into `digests`, and write the trailers, which depend on them. Return the bytes of
    these. `known` is what each worker has; the trailers at the offsets `written` are there already."""
    crcs = Crcs()
    for of_worker in known:
        if of_worker:
            crcs.take(of_worker)
    digests.update(crcs)
    for part in file.parts:
        # Tensors moved as tiles were never in memory in order: read them back while they are in the page cache.
        if isinstance(part, Data) and part.name not in digests and part.nbytes:
            crc = 0
            for at in range(0, part.nbytes, BLOCK):
                crc = crc32(writer.read_at(part.offset + at, min(BLOCK, part.nbytes - at)), crc)
            digests[part.name] = crc
    nbytes = 0
    for part in file.parts:
        if isinstance(part, Trailer) and part.offset not in written:
            writer.write_at(part.offset, memoryview(part.make(digests)))
            nbytes += part.nbytes
    return nbytes
