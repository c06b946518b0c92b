"""Encodes the changes of tensors in the form of a delta: block by block, in bounded memory, into a temporary file.

The size of the encoded data is known only afterwards, and the header of a file begins with sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from ckptconv.errors import UnsupportedError
from ckptconv.features.deltas.overwriting import CHANGE, NUMBER
from ckptconv.features.deltas.reading import ENCODINGS, MOST_OVERWRITTEN, OVERWRITE, XOR
from ckptconv.features.spool.spool import Spool
from ckptconv.storage.digests import hasher
from ckptconv.storage.files import DescriptorReader
from ckptconv.tensors.dtypes import DTYPES
from ckptconv.tensors.float_formats import numpy_module
from ckptconv.tensors.lazy import Concat, LazyTensor, Stored
from ckptconv.tensors.moves import File
from ckptconv.text import install

# Stands for the encoding that turns out to be the smaller one.
AUTO = "auto"
# Bytes of compressed data that are collected before they are written.
COLLECTED = 1 << 18
# Fast: the changes of a step hardly compress better at higher levels. A window of 2^17 bytes stays in the second-level
# cache.
_LEVEL, _WINDOW = 1, 17
# If more than one byte in so many changes, and more than a few, overwriting them takes more space than xor.
_SPARSE, _FEW = 2048, 4096
_ZEROS = bytes(1 << 18)
_U8 = DTYPES["uint8"]


class Pair(Protocol):
    """Two tensors of one shape, which are compared."""

    one: LazyTensor
    other: LazyTensor


class Places(NamedTuple):
    """The places of a tensor's payload in the spool of a number, as (offset, bytes), and the new tensor's checksum."""

    spool: int
    runs: Sequence[tuple[int, int]]
    checksum: str

    @property
    def nbytes(self) -> int:
        return sum(size for _, size in self.runs)

    def payload(self, files: Sequence[File]) -> LazyTensor:
        """Return the payload, as bytes of the spool's file, which is one of `files`."""
        file = files[self.spool]
        parts = tuple(Stored(file, start, _U8, (length,), (1,)) for start, length in self.runs)
        return parts[0] if len(parts) == 1 else Concat(parts)


# By the identity of a pair, and encoding; and which encodings all pairs may have.
_Made: TypeAlias = "tuple[dict[int, dict[str, Places]], dict[str, bool]]"


class Encoder:
    """Encodes the changes of tensors while these are compared: a context manager, which owns temporary files.

    There is one of `spools` for each process that encodes. `encoding` is one of `ENCODINGS`, or "auto": then xor, or
    overwrite if that is smaller, because very few bytes change. The blocks of a pair come in order, from one thread.
    Call `check_installed` first.
    """

    def __init__(self, encoding: str, checksum: str, spool_dir: str) -> None:
        self._encoding, self._checksum = encoding, checksum
        self.spools = [Spool(spool_dir)]
        self._spool = 0
        # Whether all tensors can be overwritten, or changed by xor.
        self._kinds = {kind: encoding in (kind, AUTO) for kind in ENCODINGS}
        self._open: dict[int, _Encoded] = {}
        self._made: dict[int, dict[str, Places]] = {}

    def __enter__(self) -> Encoder:
        return self

    def __exit__(self, *_: object) -> None:
        for spool in self.spools:
            spool.close()

    def reserve(self, count: int) -> None:
        """Prepare to be copied into so many processes."""
        self.spools += [Spool(self.spools[0].directory) for _ in range(count - len(self.spools))]
        _ = [spool.descriptor for spool in self.spools]  # opened here, they can be read here

    def share(self, number: int) -> None:
        """From now on, encode in process `number` of these, for the pairs that the process takes."""
        self._spool = number

    def done(self) -> _Made:
        """Return the result of encoding in this process."""
        return self._made, self._kinds

    def include(self, done: _Made) -> None:
        """Take the result of encoding in another process, which is a copy of this one."""
        places, kinds = done
        self._made.update(places)
        for kind, is_able in kinds.items():
            self._kinds[kind] &= is_able

    def check(self, pairs: Mapping[str, Pair]) -> None:
        """Raise UnsupportedError for a tensor with more bytes than the positions of an overwriting delta can count."""
        for name, pair in pairs.items():
            if not self._kinds[OVERWRITE] or pair.one.nbytes <= MOST_OVERWRITTEN:
                continue
            if self._encoding == OVERWRITE:
                raise UnsupportedError(
                    f"{name!r} has {pair.one.nbytes} bytes, but the overwrite encoding supports at most "
                    f"{MOST_OVERWRITTEN}. No delta was written.",
                    "Use the other encoding: --delta-encoding xor.",
                )
            self._kinds[OVERWRITE] = False

    def add(self, pair: Pair, a: memoryview, b: memoryview, is_equal: bool) -> None:
        """Encode the next bytes of a pair, not beyond its end."""
        if pair.one.dtype != pair.other.dtype:
            return
        state = self._open.get(id(pair))
        if state is None:
            state = _Encoded(self.spools[self._spool], pair.one.nbytes, hasher(self._checksum), self._kinds)
            self._open[id(pair)] = state
        state.add(a, b, is_equal)
        if self._encoding == AUTO and state.is_dense:
            self._kinds[OVERWRITE] = False
        if state.at == pair.one.nbytes:
            del self._open[id(pair)]
            if state.changed:
                self._made[id(pair)] = {kind: Places(self._spool, *result) for kind, result in state.finish().items()}

    def made(self, pairs: Iterable[Pair]) -> tuple[str, list[Places]]:
        """Return the encoding, and the places of the changes of each of `pairs`."""
        by_encoding = [self._made[id(pair)] for pair in pairs]
        able = [kind for kind, is_able in self._kinds.items() if is_able]
        encoding = min(able, key=lambda kind: sum(places[kind].nbytes for places in by_encoding))
        return encoding, [places[encoding] for places in by_encoding]


class _Encoded:
    """Encoder state of one tensor of `size` bytes: bytes seen (`at`), bytes that differ (`changed`)."""

    def __init__(self, spool: Spool, size: int, hashing: Any, kinds: Mapping[str, bool]) -> None:
        self._spool, self._size, self._hashing, self._kinds = spool, size, hashing, kinds
        self._xor: _Compressed | None = None
        self._positions, self._values = _Kept(spool), _Kept(spool)
        self.at = self.changed = 0

    @property
    def is_dense(self) -> bool:
        """Whether so many bytes change that a list of new bytes takes more space than xor."""
        return self.changed > self.at // _SPARSE + _FEW

    def add(self, a: memoryview, b: memoryview, is_equal: bool) -> None:
        """Encode the next bytes."""
        self._hashing.update(b)
        if not is_equal:
            self._add(a, b)
        elif self._xor is not None:
            self._xor.add_zeros(len(a))
        self.at += len(a)

    def _add(self, a: memoryview, b: memoryview) -> None:
        np = numpy_module()
        before, after = np.frombuffer(a, "u1"), np.frombuffer(b, "u1")
        if self._kinds[XOR]:
            if self._xor is None:
                self._xor = _Compressed(self._spool, self._size)
                self._xor.add_zeros(self.at)
            self._xor.add(np.bitwise_xor(before, after).data)
        if self._kinds[OVERWRITE]:
            (places,) = np.nonzero(before != after)
            self.changed += len(places)
            self._positions.add((places + self.at).astype("<u4").tobytes())
            self._values.add(after[places].tobytes())
        else:
            self.changed += 1  # at least one; their number does not matter

    def finish(self) -> dict[str, tuple[list[tuple[int, int]], str]]:
        """Return the place in the spool, and the checksum of the new tensor, by encoding."""
        results = {}
        checksum = self._hashing.hexdigest()
        if self._xor is not None:
            results[XOR] = self._xor.finish(), checksum
        if self._kinds[OVERWRITE]:
            # Positions come before values, and their number before both, so they are kept until all are known.
            frame = _Compressed(self._spool, NUMBER + CHANGE * self._values.nbytes)
            frame.add(self._values.nbytes.to_bytes(NUMBER, "little"))
            for kept in (self._positions, self._values):
                for data in kept.taken():
                    frame.add(data)
            results[OVERWRITE] = frame.finish(), checksum
        return results


class _Kept:
    """Bytes that are put into a spool and taken from it once."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._runs: list[tuple[int, int]] = []
        self.nbytes = 0

    def add(self, data: bytes) -> None:
        if data:
            start = self._spool.room(len(data))
            self._spool.write_at(start, data)
            self._runs.append((start, len(data)))
            self.nbytes += len(data)

    def taken(self) -> Iterator[bytes]:
        reader = DescriptorReader(File("a temporary file", 0), self._spool.descriptor)
        for start, size in self._runs:
            data = bytearray(size)
            reader.fill(start, [memoryview(data)])
            yield bytes(data)
            self._spool.give_back(start, size)


class _Compressed:
    """One frame of zstandard of `size` bytes. The frame states its size: readers allocate as much."""

    def __init__(self, spool: Spool, size: int) -> None:
        zstandard = _zstandard()
        chosen = zstandard.ZstdCompressionParameters.from_level(_LEVEL, window_log=_WINDOW)
        self._frame = zstandard.ZstdCompressor(compression_params=chosen).compressobj(size=size)
        self._spool = spool
        self._collected = bytearray()
        self._runs: list[tuple[int, int]] = []

    def add_zeros(self, count: int) -> None:
        for start in range(0, count, len(_ZEROS)):
            self.add(_ZEROS[: count - start])

    def add(self, data: bytes | memoryview) -> None:
        self._collected += self._frame.compress(data)
        if len(self._collected) >= COLLECTED:
            self._write()

    def finish(self) -> list[tuple[int, int]]:
        """End the frame. Return its place: offsets and lengths, in order."""
        self._collected += self._frame.flush()
        self._write()
        return self._runs

    def _write(self) -> None:
        start, size = self._spool.room(len(self._collected)), len(self._collected)
        self._spool.write_at(start, bytes(self._collected))
        self._collected.clear()
        if self._runs and sum(self._runs[-1]) == start:
            start, size = self._runs[-1][0], self._runs.pop()[1] + size
        self._runs.append((start, size))


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        raise UnsupportedError(
            "Deltas are compressed with zstandard, but no package for it is installed.", install("zstd")
        ) from None
    return zstandard


def check_installed(checksum: str) -> None:
    """Raise UsageError if the package for `checksum` is not installed, UnsupportedError if zstandard is not."""
    hasher(checksum)
    _zstandard()
