"""Read the entries of `.distcp` files: complete torch.save archives, back to back.

Source: torch/distributed/checkpoint/filesystem.py. The metadata says where an entry is. Only the archive says where its
data is: its own directory is read, as for any .pt file. An entry may be compressed as one zstandard frame. It is
decompressed once to read its description, and again when its data is moved. With SerializationFormat.SAFETENSORS, all
tensors of a file are one safetensors file at its end instead.
"""

from __future__ import annotations

import array
import functools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ckptconv.errors import CorruptError, UnsupportedError, damaged
from ckptconv.features.dcp.archive_templates import ArchivePatterns
from ckptconv.features.dcp.metadata import Chunk, Description, EntryPlace, SavedTensor, agree
from ckptconv.features.joining.chunks import ChunkTile
from ckptconv.features.joining.chunks import join as join_tiles
from ckptconv.features.joining.names import MAX_VALUE, named, named_in
from ckptconv.formats.torch.container import TorchFile
from ckptconv.formats.torch.zip import read_zip
from ckptconv.storage import LOCAL_SIGNATURE as ZIP
from ckptconv.storage.buffered import BufferedReader
from ckptconv.storage.files import open_reader
from ckptconv.storage.location import Location
from ckptconv.storage.reading import Reader
from ckptconv.storage.records import Record, Records
from ckptconv.tensors.lazy import LazyTensor, Stored, same_bytes, untagged
from ckptconv.tensors.moves import File
from ckptconv.text import some

ZSTD = ("stream.zstd/1",)
# Compressed entries may decompress to MAX_GROWTH times the bytes of all files plus ROOM_TO_GROW: zeros compress well.
MAX_GROWTH, ROOM_TO_GROW = 64, 16 << 30
# Values of these types, in archives up to this many bytes, are cached by the archive's bytes.
_SMALL = 1 << 11
_ATOMS = frozenset({bool, int, float, str, type(None)})
# Bytes kept at either end of a compressed entry: an archive of one tensor has a few KiB in addition to its data.
_ENDS = 1 << 16


@dataclass
class Entries:
    """Opens the entries of the files in `place`, and records their storages.

    `records` are the storages found, by the path of their file. `described` is set once the metadata is read: it names
    the files of the checkpoint.
    """

    place: Location
    described: Description = field(default_factory=Description)
    files: dict[str, File] = field(default_factory=dict)
    records: dict[str, list[Record]] = field(default_factory=dict)
    bytes_read: int = 0
    _unpacked: int = 0
    _headers: dict[tuple[str, int], Mapping[str, Chunk]] = field(default_factory=dict)
    _patterns: ArchivePatterns = field(default_factory=ArchivePatterns)

    def find(self, places: Iterable[EntryPlace]) -> None:
        """Stat the files of these places. Raise CorruptError if one is missing or too short."""
        for place in places:
            file = self.files.get(place.name) or self._look(place.name)
            if file is None:
                raise self._lacking()
            self.files[place.name] = file
            if place.offset + place.length > file.size:
                raise damaged(
                    f"{file.path} has {file.size} bytes, but the metadata describes an entry of {place.length} bytes "
                    f"at byte {place.offset}: the file was cut short, or belongs to another save."
                )

    def cut_short(self) -> set[str]:
        """Return the paths of files that were read, and lack bytes of other entries."""
        read = ((place, self.files.get(place.name)) for place in self.described.places())
        return {file.path for place, file in read if file and place.offset + place.length > file.size}

    def _look(self, name: str) -> File | None:
        entry = self.place.join(*name.split("/")).entry
        return entry.file if entry.kind == "file" else None

    def _lacking(self) -> CorruptError:
        """Return an error that lists all missing files, not only the first."""
        names = sorted({place.name for place in self.described.places()})
        missing = [name for name in names if name not in self.files and self._look(name) is None]
        return CorruptError(
            f"{self.place} lacks {len(missing)} of the {len(names)} files with its tensors: "
            f"{some(missing, form=named)}.",
            "Copy the files of all ranks to one place.",
        )

    def tensors(self, saved: Mapping[str, SavedTensor]) -> dict[str, LazyTensor]:
        """Return the tensors, joined from their chunks. Those whose chunks lie in the same places are one object.

        Raise CorruptError if a chunk differs from the metadata, or if the chunks do not cover a tensor exactly.
        """
        chunks = self.chunks(saved)
        joined: dict[Hashable, LazyTensor] = {}
        by_name: dict[str, LazyTensor] = {}
        for name, tensor in saved.items():
            # Joining sorts the tiles.
            several = len(chunks[name]) > 1
            tiles = [(tile.offsets, same_bytes(tile.tensor)) for tile in chunks[name]] if several else []
            by_name[name] = join_tiles(
                tensor.dtype, tensor.shape, chunks[name], functools.partial(named_in, self.place, name)
            )
            if several:
                by_name[name] = joined.setdefault((tensor.dtype, tensor.shape, *tiles), by_name[name])
        return by_name

    def chunks(self, saved: Mapping[str, SavedTensor]) -> dict[str, list[ChunkTile]]:
        """Return the chunks of each tensor, in the order of their description. Raise CorruptError if one differs from
        the metadata."""
        work = [
            (chunk.place, (name, index))
            for name, tensor in saved.items()
            for index, chunk in enumerate(tensor.chunks)
            if isinstance(chunk.place, EntryPlace)
        ]
        data: dict[tuple[str, int], LazyTensor] = {}
        for (name, index), place, reader in self._in_order(work):
            tensor = saved[name]
            data[name, index] = self._chunk(name, tensor, tensor.chunks[index], place, reader)
        return {
            name: [
                ChunkTile(chunk.offsets, chunk.place if isinstance(chunk.place, Stored) else data.pop((name, index)))
                for index, chunk in enumerate(tensor.chunks)
            ]
            for name, tensor in saved.items()
        }

    def values(self, places: Mapping[str, EntryPlace]) -> Iterator[tuple[str, TorchFile | None]]:
        """Yield each other value by name; None for one that torch.save did not write."""
        # There may be a number for each parameter, but few different ones.
        known: dict[bytes, TorchFile] = {}
        for name, place, reader in self._in_order([(place, name) for name, place in places.items()]):
            archive, start, size = self._archive(place, reader, MAX_VALUE, MAX_VALUE)
            if size < len(ZIP) or archive.read_at(start, len(ZIP)) != ZIP:
                yield name, None
                continue
            data = archive.read_at(start, size) if size <= _SMALL else b""
            file = known.get(data) or self._read(archive, start, size)
            if data and type(file.value) in _ATOMS:
                known[data] = file
            yield name, file

    def _in_order(self, work: Sequence[tuple[EntryPlace, Any]]) -> Iterator[tuple[Any, EntryPlace, BufferedReader]]:
        """Yield each item of `work` with a reader of its file, in the order of the files."""
        self.find(place for place, _ in work)
        by_file: dict[str, list[tuple[EntryPlace, Any]]] = {}
        for item in work:
            by_file.setdefault(item[0].name, []).append(item)
        for name, items in by_file.items():
            items.sort(key=lambda item: item[0].offset)
            with self._reading(self.files[name]) as reader:
                for place, key in items:
                    yield key, place, reader

    @contextmanager
    def _reading(self, file: File) -> Iterator[BufferedReader]:
        # The end of an entry is close to the beginning of the next: a buffer serves both.
        place = self.place.at(file)
        with open_reader(place.file or place.path, place.options, around=True) as reader:
            try:
                yield reader
            finally:
                self.bytes_read += reader.bytes_read

    def _chunk(
        self, name: str, tensor: SavedTensor, chunk: Chunk, place: EntryPlace, reader: BufferedReader
    ) -> LazyTensor:
        """Return the data of a chunk."""

        def where() -> str:
            return f"{reader.file.path}: the chunk of {named(name)} at byte {place.offset}"

        data = self._alike(place, reader)
        if data is None:
            if not place.transforms and reader.read_at(place.offset, min(place.length, len(ZIP))) != ZIP:
                from ckptconv.features.dcp.in_safetensors import chunk_in  # of few checkpoints

                return chunk_in(self._headers, name, tensor, chunk, reader)
            nbytes = math.prod(chunk.sizes) * tensor.dtype.itemsize
            archive, start, size = self._archive(place, reader, _ENDS, nbytes + _ENDS)
            read = self._read(archive, start, size)
            if not isinstance(read.value, LazyTensor):
                kind = type(read.value).__name__
                raise CorruptError(f"{where()} contains a value of type {kind}, but a tensor was expected.")
            data = untagged(read.value)
            if isinstance(data, Stored) and len(read.records) == 1:
                self._patterns.learn(archive, start, size, data, read.records[0])
        agree(where, (data.dtype, data.shape), (tensor.dtype, chunk.sizes))
        return data

    def _alike(self, place: EntryPlace, reader: BufferedReader) -> LazyTensor | None:
        """Return the data of a chunk whose archive matches one that was read before."""
        match = None if place.transforms else self._patterns.find(reader, place.offset, place.length)
        if match is None:
            return None
        self.records.setdefault(reader.file.path, []).append(match.record)
        return match.tensor

    def _archive(self, place: EntryPlace, reader: BufferedReader, keep: int, most: int) -> tuple[Reader, int, int]:
        """Return the archive at `place`: a reader for it, its offset there, and its size.

        Of a compressed one, read `keep` bytes at either end; it may have at most `most` bytes in all.
        """
        if not place.transforms:
            return reader, place.offset, place.length
        if place.transforms != ZSTD:
            raise UnsupportedError(
                f"{reader.file.path}: an entry uses the unsupported transform {', '.join(place.transforms)[:200]}."
            )
        from ckptconv.features.dcp.ends import EndsReader  # few checkpoints are compressed

        # Decompression takes time, and an entry may lie about its size: the size of the files bounds all of it
        # together.
        room = MAX_GROWTH * sum(file_read.size for file_read in self.files.values()) + ROOM_TO_GROW - self._unpacked
        ends = EndsReader(reader, place.offset, place.length, keep, min(most, room))
        self._unpacked += ends.file.size
        self.bytes_read += place.length
        return ends, 0, ends.file.size

    def _read(self, archive: Reader, start: int, size: int) -> TorchFile:
        """Read an archive, and record its storages."""
        torch_file = read_zip(archive, start, size)
        if archive.file.packed is None:
            self.records.setdefault(archive.file.path, []).extend(torch_file.records)
        else:
            from ckptconv.features.dcp.ends import check_packed

            check_packed(archive, torch_file.records)
        return torch_file


def records_of(by_path: Mapping[str, Iterable[Record]]) -> dict[str, Records]:
    """Return the storages of each file, in order of offset."""
    ordered_records = {}
    for path, records in by_path.items():
        ordered = sorted({record.offset: record for record in records}.values(), key=lambda record: record.offset)
        ordered_records[path] = Records(
            array.array("Q", [record.offset for record in ordered]),
            array.array("Q", [record.size for record in ordered]),
            array.array("I", [record.crc or 0 for record in ordered]),
        )
    return ordered_records
