"""Checks that the ids of a table are in buckets of one size, with the stated number of ids in each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ckptconv.tensors.float_formats import numpy_module
from ckptconv.text import count_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]

_SHOWN = 5


class Verdict(NamedTuple):
    """The mistake in the buckets ("" for none), the number of wrong buckets, and the first of them.

    `sizes` is the range of sizes, in ids, that buckets may have: from, to (None: no upper bound).
    """

    message: str = ""
    wrong: int = 0
    examples: tuple[dict[str, Any], ...] = ()
    sizes: tuple[int, int | None] | None = None


class Buckets:
    """The ids of a table in order, bucket after bucket. Bucket b has `counts[b]` ids.

    The ids from size·b to size·(b+1) belong to bucket b. Keeps the least and the greatest id of each bucket.
    """

    def __init__(self, counts: Array) -> None:
        np = numpy_module()
        # Python's integers, because counts in a hostile file may add up to more than 64 bits.
        self.total = sum(counts.tolist())
        self.valid = bool((counts >= 0).all()) and self.total < 1 << 62
        self._ends = np.cumsum(counts) if self.valid else counts[:0]
        self._least = np.full(len(self._ends), np.iinfo("i8").max)
        self._most = np.full(len(self._ends), np.iinfo("i8").min)

    def look(self, first: int, ids: Array) -> None:
        """Take the ids of the rows from `first` on."""
        np = numpy_module()
        ids = ids[: max(self.total - first, 0)] if self.valid else ids[:0]
        if not len(ids):
            return
        # An empty bucket ends where the bucket before it does, so no row is found in it.
        buckets = np.searchsorted(self._ends, np.arange(first, first + len(ids)), side="right")
        starts = np.concatenate(([0], np.nonzero(np.diff(buckets))[0] + 1))
        present = buckets[starts]
        self._least[present] = np.minimum(self._least[present], np.minimum.reduceat(ids, starts))
        self._most[present] = np.maximum(self._most[present], np.maximum.reduceat(ids, starts))

    def judge(self, rows: int, size: int | None, offset: int) -> Verdict:
        """Decide whether the ids of all `rows` rows are in their buckets.

        A bucket spans `size` ids. If that is None, accept any size with which bucket 0 begins at id 0, or at `offset`.
        """
        if not self.valid:
            return Verdict("the counts of ids in buckets include a negative or very large number", len(self._ends))
        if self.total != rows:
            return Verdict(f"the buckets contain {self.total} ids, but the table has {rows} rows", len(self._ends))
        (used,) = numpy_module().nonzero(self._least <= self._most)
        if not len(used):
            return Verdict()
        least, most = self._least[used], self._most[used]
        if size is not None:
            return self._of_size(size, used, least, most)
        base = offset if least.min() >= offset else 0
        return self._of_any_size(base, used, least, most)

    def _of_size(self, size: int, used: Array, least: Array, most: Array) -> Verdict:
        np = numpy_module()
        # The table may be a shard that begins with any bucket.
        firsts, counts = np.unique(least // size - used, return_counts=True)
        place = used + firsts[counts.argmax()]
        (wrong,) = np.nonzero((least // size != place) | (most // size != place))
        if not len(wrong):
            return Verdict(sizes=(size, size))
        examples = tuple(_example(used[at], least[at], most[at]) for at in wrong[:_SHOWN].tolist())
        return Verdict(
            f"{count_of(len(wrong), 'bucket')} of {size} ids with ids of other buckets", len(wrong), examples
        )

    def _of_any_size(self, base: int, used: Array, least: Array, most: Array) -> Verdict:
        np = numpy_module()
        smallest = (most - base) // (used + 1) + 1
        later = used > 0
        if not later.any():
            return Verdict(sizes=(max(int(smallest.max()), 1), None))
        largest = (least[later] - base) // used[later]
        low, high = max(int(smallest.max()), 1), int(largest.min())
        if low <= high:
            return Verdict(sizes=(low, high))
        pair = sorted({int(smallest.argmax()), int(np.nonzero(later)[0][largest.argmin()])})
        examples = tuple(_example(used[at], least[at], most[at]) for at in pair)
        return Verdict(
            f"no bucket size matches all buckets if the first begins at id {base}; if it does not, specify "
            "--bucket-size",
            len(pair),
            examples,
        )


def _example(bucket: Any, least: Any, most: Any) -> dict[str, Any]:
    return {"bucket": int(bucket), "least_id": int(least), "greatest_id": int(most)}
