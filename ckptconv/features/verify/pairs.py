"""Compare pairs of tensors, as expected and as found, element by element, and report all that differ.

All differences are found before they are reported. The CRC-32 of compared tensors is computed along with them.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ckptconv.errors import DifferenceError
from ckptconv.features.pairs.elements import differing, place_of, shown
from ckptconv.features.pairs.runs import ExpectedPair, Run, in_order, is_scattered, runs
from ckptconv.features.verify import OTHER_SOURCE
from ckptconv.features.verify.arithmetic import value
from ckptconv.features.verify.evaluate import Evaluator, footprint
from ckptconv.features.verify.output import Written
from ckptconv.features.verify.provenance import Manifest
from ckptconv.options.table import Options
from ckptconv.process import settled
from ckptconv.storage.files import Readers, is_far, is_read_far
from ckptconv.storage.packed import packed
from ckptconv.storage.paths import basename
from ckptconv.storage.progress import Progress
from ckptconv.storage.reading import Range
from ckptconv.storage.stores import reached
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.text import quoted, some

_SHOWN = 5
# Bytes compared at a time, of local and of remote files.
BLOCK, _FAR_BLOCK = 1 << 19, 1 << 22
# Bytes that are prefetched from remote files before they are compared.
PREFETCH_MEMORY = 24 << 20


class _Piece(NamedTuple):
    """Elements of a pair that are fetched together. `far`: some are in remote files. `scattered`: C order is slow."""

    pair: ExpectedPair
    start: int
    stop: int
    far: bool
    scattered: bool

    @property
    def runs(self) -> Iterable[Run]:
        """The runs of elements, each of which is compared in one step."""
        want, got, _, _ = self.pair
        return runs(want, got, 2 * BLOCK) if self.scattered else (Run(self.start, self.stop),)


def compare_pairs(
    pairs: Sequence[ExpectedPair], options: Options, progress: Progress, attested: Attested, wrong: Differences
) -> tuple[int, int]:
    """Compare the elements of `pairs`, and add those that differ to `wrong`. Return the bytes compared and read."""

    def compare(evaluator: Evaluator, pieces: Iterable[_Piece]) -> int:
        return sum(_compare_elements(evaluator, piece, progress, attested, wrong) for piece in pieces)

    with settled(), Readers(dict(options.storage_options), options.spool_dir) as readers:
        readers.expect(packed(tensor for pair in pairs for tensor in (pair.want, pair.got)))
        paths = {file.stored.path for pair in pairs for side in (pair.want, pair.got) for file in side.inputs()}
        far = next(filter(is_far, paths), "")
        if not far:
            evaluator = Evaluator(readers, ahead=BLOCK)
            return compare(evaluator, _pieces(pairs)), evaluator.bytes_read
        settings = {"memory": PREFETCH_MEMORY, "request": _FAR_BLOCK}
        with reached(far).prefetching(readers, _needs, **settings) as prefetch:
            evaluator = Evaluator(prefetch)
            compared = compare(evaluator, prefetch.over(_pieces(pairs)))
        # The prefetch also reads small gaps between the wanted ranges.
        return compared, evaluator.bytes_read + prefetch.bytes_fetched - prefetch.bytes_used


class Attested:
    """Checks of manifests, made once everything they describe is known to be right, and the running CRC-32 of each of
    the output's tensors for which a manifest has one."""

    def __init__(self) -> None:
        # A check raises DifferenceError, or returns warnings.
        self.checks: list[Callable[[], list[str]]] = []
        self._crcs: dict[str, dict[str, int]] = {}

    def later(self, check: Callable[..., list[str]], *arguments: Any) -> None:
        """Call `check` with `arguments` once everything else is known to be right."""
        self.checks.append(functools.partial(check, *arguments))

    def expect(self, manifest: Manifest, written: Written) -> None:
        """Compute the CRC of the tensors of `written` for which `manifest` has one, for `known`."""
        entries = manifest.members["files"]
        for name, home in written.homes.items():
            if entries.get(basename(home), {"tensors": {}})["tensors"].get(name) is not None:
                self.count(home, name)

    def count(self, path: str, name: str) -> None:
        """Compute the CRC of a tensor, for `known`."""
        self._crcs.setdefault(path, {})[name] = 0

    def known(self, path: str) -> dict[str, int]:
        """Return the CRC-32 of each tensor of a file that were computed."""
        return dict(self._crcs.get(path, {}))

    def add(self, pair: ExpectedPair, data: bytes) -> None:
        """Add a tensor's next bytes to its CRC."""
        crcs = self._crcs.get(pair.path, {})
        if pair.name in crcs:
            crcs[pair.name] = zlib.crc32(data, crcs[pair.name])

    def read(self, evaluator: Evaluator, pair: ExpectedPair) -> None:
        """Compute the CRC of a tensor that was not compared in C order, by reading it again."""
        if pair.name in self._crcs.get(pair.path, {}):
            step = max(BLOCK // pair.got.dtype.itemsize, 1)
            for start in range(0, pair.got.numel, step):
                self.add(pair, evaluator.raw(pair.got, start, min(start + step, pair.got.numel)))

    def check(self) -> list[str]:
        """Return warnings. Raise DifferenceError if a manifest or a checksum is wrong."""
        return [warning for check in self.checks for warning in check()]


class Differences:
    """The tensors that differ: all are found before they are reported together."""

    def __init__(self) -> None:
        self._errors: list[DifferenceError] = []
        self._values: dict[int, _Values] = {}

    def __bool__(self) -> bool:
        return bool(self._errors or self._values)

    def add(self, error: DifferenceError) -> None:
        """Add a difference of names, dtypes or shapes."""
        self._errors.append(error)

    def add_values(
        self, pair: ExpectedPair, first: int, count: int, raw: Callable[[LazyTensor, int, int], bytes]
    ) -> None:
        """Add `count` elements of a tensor that differ, the first of them number `first`; `raw` reads elements."""
        known = self._values.get(id(pair))
        if known is None or first < known.first:
            want, got = (raw(tensor, first, first + 1) for tensor in (pair.want, pair.got))
            known = _Values(pair, first, known.elements if known else 0, want, got)
        self._values[id(pair)] = known._replace(elements=known.elements + count)

    def check(self) -> None:
        """Raise DifferenceError with all differences, if there is any."""
        errors = [*self._errors, *(values.error() for values in self._values.values())]
        if not errors:
            return
        rows = [row for error in errors for row in error.difference.pop("tensors", None) or [error.difference]]
        first = errors[0]
        message = first.message
        if len(errors) > 1:
            message += f" In total, {len(rows):,} tensors differ: {some(rows, _SHOWN, _shown)}."
        raise DifferenceError(message, first.hint, **first.difference, differences=rows)


def _shown(difference: Mapping[str, Any]) -> str:
    """Return a tensor that differs as a message names it: 'w' (12 elements), or 'w' (dtype)."""
    count = difference.get("elements")
    detail = difference["what"] if count is None else "an element" if count == 1 else f"{count:,} elements"
    return f"{quoted(difference['tensor'])} ({detail})"


class _Values(NamedTuple):
    """Elements of a pair that differ: the number of the first, how many there are, and the bits of the first."""

    pair: ExpectedPair
    first: int
    elements: int
    want: bytes
    got: bytes

    def error(self) -> DifferenceError:
        pair = self.pair
        place = place_of(self.first, pair.got.shape)
        expected = shown(pair.want.dtype, self.want, value)
        actual = shown(pair.got.dtype, self.got, value)
        more = f" {self.elements:,} of its {pair.got.numel:,} elements differ." if self.elements > 1 else ""
        return DifferenceError(
            f"{pair.path}: {pair.name!r} differs at index {place}: expected {expected}, found {actual}.{more}",
            f"{OTHER_SOURCE}convert it again. For a single file that average, merge or patch wrote, specify the "
            "--manifest of that command, or use --verify with that command.",
            what="value",
            tensor=pair.name,
            file=pair.path,
            index=place,
            expected=expected,
            found=actual,
            elements=self.elements,
        )


def _pieces(pairs: Iterable[ExpectedPair]) -> Iterator[_Piece]:
    is_known_far = functools.cache(is_far)  # there are many tensors, but few files
    for pair in pairs:
        want, got, _, _ = pair
        far = any(is_known_far(file.stored.path) for file in (*want.inputs(), *got.inputs()))
        if is_scattered(want, got):
            yield _Piece(pair, 0, got.numel, far, True)
        else:
            for start, stop, _ in in_order(want, got, 2 * (_FAR_BLOCK if far else BLOCK)):
                yield _Piece(pair, start, stop, far, False)


def _needs(piece: _Piece) -> Iterator[Range]:
    """Yield the ranges of remote files, those not compressed, that a piece needs."""
    if piece.far:
        for tensor in (piece.pair.want, piece.pair.got):
            yield from (needed for needed in footprint(tensor, piece.start, piece.stop) if is_read_far(needed.file))


def _compare_elements(
    evaluator: Evaluator, piece: _Piece, progress: Progress, attested: Attested, wrong: Differences
) -> int:
    """Compare the bits of the elements of a piece, and add those that differ to `wrong`. Return the bytes compared."""
    pair, equal = piece.pair, True
    want, got, _, _ = pair
    for run in piece.runs:
        expected, actual = (evaluator.bits(tensor, run) for tensor in (want, got))
        size = (run.stop - run.start) * got.dtype.itemsize
        if len(expected) != len(actual) or len(expected) != size:
            raise AssertionError(f"an evaluator gave {len(expected)} and {len(actual)} bytes of {run}")
        progress(size)
        if expected != actual:
            equal = False
            _add_differing(evaluator, pair, run, expected, actual, wrong)
        elif run.box is None:
            attested.add(pair, actual)
    if equal and piece.scattered:
        attested.read(evaluator, pair)
    return (piece.stop - piece.start) * got.dtype.itemsize


def _add_differing(
    evaluator: Evaluator, pair: ExpectedPair, run: Run, expected: bytes, actual: bytes, wrong: Differences
) -> None:
    """Add the elements of `run` that differ. Its bytes are `expected` and `actual`."""
    unequal = differing(expected, actual, pair.got.dtype.itemsize)
    first = run.number(int(unequal.argmax()), pair.got.shape)
    wrong.add_values(pair, first, int(unequal.sum()), evaluator.raw)
