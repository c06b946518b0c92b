"""Checks a table of whole rows: its ids, and its rows against the tensors saved next to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from ckptconv.engine.reader import TensorReader
from ckptconv.errors import DifferenceError, LimitError, UnsupportedError
from ckptconv.features.rows.buckets import Buckets
from ckptconv.features.rows.columns import part
from ckptconv.features.rows.ids import Ids
from ckptconv.features.rows.layout import METADATA_KEY, RowLayout
from ckptconv.features.rows.options import CONVERTING, LAYOUT, ROWS, RowOptions
from ckptconv.features.rows.parts import RowParts
from ckptconv.features.rows.tables import RowTable, choose, contents, join, layout_of, open_all
from ckptconv.options.option import checked
from ckptconv.options.table import Options
from ckptconv.plan import MAX_GROWTH, ROOM_TO_GROW
from ckptconv.process import peak_rss
from ckptconv.storage.files import Readers
from ckptconv.storage.paths import Paths, listed
from ckptconv.storage.progress import Progress, counter, shown
from ckptconv.tensors.float_formats import numpy_module
from ckptconv.tensors.lazy import LazyTensor
from ckptconv.tensors.moves import BLOCK

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from ckptconv.options.keywords import RowsOptions
    from ckptconv.storage.progress import AnyProgress

    Array: TypeAlias = NDArray[Any]

# The most differences of a kind that are shown.
_SHOWN = 5
# The most buckets: memory holds three numbers for each.
MOST_BUCKETS = 1 << 18
# Tensors next to a table whose bits are in every row too, with the message for a difference.
_COMPARED = {
    "weight_id": "weight_id differs from the header",
    "metadata": "metadata differs from the header",
    "momentum1": "momentum1 differs from the row",
    "momentum2": "momentum2 differs from the row",
}


@dataclass
class RowFinding:
    """A problem in the rows."""

    check: str
    """The check that failed."""

    message: str
    """The problem, in words."""

    count: int = 1
    """Number of rows, ids or buckets with the problem."""

    examples: list[dict[str, Any]] = field(default_factory=list)
    """The first of these."""


@dataclass
class CheckReport:
    """The result of a check of rows. Sizes are in bytes."""

    input: str
    """The table's first file."""

    table: str
    """The name of the table."""

    layout: dict[str, Any]
    """The layout of a row."""

    rows: int
    """Number of rows."""

    checked: list[str] = field(default_factory=list)
    """The tensors and rules that the rows were compared with."""

    ids: str = "global"
    """The kind of ids in the headers."""

    offset: int = 0
    """The number to add to local ids to get global ones."""

    unused: int = 0
    """Rows marked as not used."""

    padding: int = 0
    """Rows with padding that is not zero."""

    bucket_size: tuple[int, int | None] | None = None
    """The least and the greatest number of ids that a bucket may span; null for no upper bound. Null: there are no
    buckets."""

    findings: list[RowFinding] = field(default_factory=list)
    """The problems; empty if there are none."""

    warnings: list[str] = field(default_factory=list)
    """Warnings, one sentence each."""

    bytes_read: int = 0
    """Bytes read."""

    seconds: float = 0.0
    """Duration in seconds."""

    peak_rss_bytes: int = 0
    """The most memory that the process had."""


@shown
@checked(
    {**CONVERTING, **LAYOUT, **{name: ROWS[name] for name in ("names", "global_id_offset", "bucket_size")}},
    called="check_rows",
)
def check(
    table: Paths,
    *,
    names: Sequence[str] = (),
    global_id_offset: int | None = None,
    bucket_size: int | None = None,
    progress: AnyProgress | None = None,
    on_total: Callable[[int], object] | None = None,
    **options: Unpack[RowsOptions],
) -> CheckReport:
    """Check a table of whole rows, or the tensors into which it was split, in one pass.

    Ids must be unique. The header's ids must equal those of weight_id, or differ from them by `global_id_offset`; if
    that is not given, by any one number in most rows. Metadata and momentum saved next to the table must be the bits of
    its rows. Buckets, which span `bucket_size` ids, must hold the stated numbers of ids. Missing tensors are not
    checked. `table`, `names` and `options` are as for `split`. Raises DifferenceError with the whole report if
    something is wrong.

    Examples:
        >>> ckptconv.check_rows("kv.pt", embedding_dim=64, method="adagrad").checked
        ['weight_id']
    """
    started = time.monotonic()
    paths, row_options = listed(table), RowOptions.take(further := dict(options))
    chosen = Options(**further)
    sources = open_all(paths, chosen)
    checkpoints = [contents(source) for source in sources]
    if not names and METADATA_KEY in checkpoints[0].metadata:
        parts = RowParts.choose(checkpoints[0], {}, row_options)
        bucket = {name: tensor for name, tensor in checkpoints[0].tensors.items() if name == "bucket"}
        rows, layout, keys = RowTable(parts.name, parts.table(), bucket), parts.layout, parts.tensors["weight_id"]
    else:
        rows = join([choose(content, names) for content in checkpoints], paths[0])
        layout = layout_of(rows, row_options, paths[0])
        keys = part(rows.tensor, layout.fields()[0])
    report = CheckReport(paths[0], rows.name, asdict(layout), rows.tensor.shape[0])
    report.warnings.extend(warning for source in sources for warning in source.warnings)
    _check_size(rows)
    if on_total:
        on_total(rows.tensor.nbytes)
    with Readers(dict(chosen.storage_options), chosen.spool_dir) as readers:
        _Checking(rows, keys, layout, report, readers, global_id_offset, bucket_size).run(counter(progress))
        report.bytes_read += readers.bytes_unpacked
    if report.unused:
        report.warnings.append(f"{report.unused:,} of {report.rows:,} rows are marked as unused.")
    report.seconds, report.peak_rss_bytes = time.monotonic() - started, peak_rss()
    if report.findings:
        sentences = "; ".join(_told(finding) for finding in report.findings)
        raise DifferenceError(f"{report.input}: {report.table!r}: {sentences}.", what="rows", **asdict(report))
    return report


def _check_size(table: RowTable) -> None:
    """Raise LimitError for a table that repeats a few rows very often: reading each would never end."""
    stored = sum(file.size for file in dict.fromkeys(table.tensor.inputs()))
    if table.tensor.nbytes > MAX_GROWTH * stored + ROOM_TO_GROW:
        raise LimitError(
            f"{table.name!r} has {table.tensor.shape[0]} rows in only {stored} bytes, because it repeats the same "
            "bytes.",
            "Save a contiguous copy of the table.",
        )


def _told(finding: RowFinding) -> str:
    shown = (", ".join(f"{key} {value}" for key, value in example.items()) for example in finding.examples[:2])
    examples = "; ".join(shown)
    return f"{finding.message} ({examples}{', …' if finding.count > 2 else ''})" if examples else finding.message


class _Beside:
    """A tensor next to the table, with one index per row: where a row has its bits, and the rows that differ."""

    def __init__(self, name: str, tensor: LazyTensor, offset: int, rows: int) -> None:
        self.name, self.tensor, self.offset = name, tensor, offset
        self.width = tensor.nbytes // rows
        self.finding = RowFinding(name, _COMPARED[name], 0)

    def differs(self, first: int, wrong: Array, show: Callable[[int], dict[str, Any]]) -> None:
        """Note that the rows `wrong`, counted from `first`, differ. `show` describes the difference of a row."""
        self.finding.count += len(wrong)
        for row in wrong[: _SHOWN - len(self.finding.examples)].tolist():
            self.finding.examples.append({"row": first + row, **show(row)})


class _Checking:
    """One pass over a table and the tensors next to it."""

    def __init__(
        self,
        table: RowTable,
        keys: LazyTensor,
        layout: RowLayout,
        report: CheckReport,
        readers: Readers,
        asked_offset: int | None,
        bucket_size: int | None,
    ) -> None:
        self._np = numpy_module()
        self._table, self._keys, self._layout = table, keys, layout
        self._report, self._readers = report, readers
        self._asked_offset, self._bucket_size = asked_offset, bucket_size
        self._offset: int | None = None
        self._beside = list(self._comparable()) if report.rows else []
        self._buckets = self._bucket_counts()
        self._ids = Ids(readers.spool)
        report.checked = [*(companion.name for companion in self._beside), *(["bucket"] if self._buckets else [])]

    def run(self, progress: Progress | None) -> None:
        """Read everything, and add the findings to the report."""
        report, width = self._report, self._layout.row_bytes
        step = max(BLOCK // (width + sum(companion.width for companion in self._beside)), 1)
        table = TensorReader(self._table.tensor, self._readers, step * width)
        readings = [
            TensorReader(companion.tensor, self._readers, max(step * companion.width, 64)) for companion in self._beside
        ]
        for first in range(0, report.rows, step):
            last = min(first + step, report.rows)
            rows = self._bytes(table, first, last, width)
            ids = keys = _column(rows, 0, 8).view("<i8")[:, 0]
            self._ids.add(keys)
            self._look_at(rows)
            for companion, reading in zip(self._beside, readings, strict=True):
                saved = self._bytes(reading, first, last, companion.width)
                if companion.name == "weight_id":
                    ids = saved.view("<i8")[:, 0]
                    self._compare_ids(companion, first, keys, ids)
                else:
                    self._compare(companion, first, rows, saved)
            if self._buckets:
                self._buckets.look(first, ids)
            if progress:
                progress((last - first) * width)
        report.bytes_read += sum(reading.bytes_read for reading in (table, *readings))
        report.findings.extend(companion.finding for companion in self._beside if companion.finding.count)
        self._look_for_repeats()
        self._judge_buckets()

    def _bytes(self, reading: TensorReader, first: int, last: int, width: int) -> Array:
        """Read rows `first` to `last`, each of `width` bytes."""
        data: Array = self._np.frombuffer(reading.read(first * width, last * width), "u1")
        return data.reshape(last - first, width)

    def _comparable(self) -> Iterator[_Beside]:
        """Yield the tensors next to the table whose bits are also in its rows, with one element or row per row."""
        rows, layout = self._report.rows, self._layout
        places = {"weight_id": (0, 8), "metadata": (8, 8)}
        places.update({state.name: (state.offset, state.nbytes) for state in layout.states})
        for name, tensor in self._table.beside.items():
            if name not in _COMPARED:
                continue
            if name not in places:
                self._report.warnings.append(f"{name} was not checked: {layout.optimizer} has no such state.")
                continue
            offset, size = places[name]
            # Momentum may have been saved together with the padding after it.
            most = size if offset < layout.weight.offset else layout.row_bytes - offset
            if tensor.shape[:1] != (rows,):
                message = f"{name} has the shape {list(tensor.shape)}, but the table has {rows} rows"
            elif not size <= tensor.nbytes // rows <= most:
                message = f"{name} has {tensor.nbytes // rows} bytes per row, but a row of the table has {size}"
            else:
                yield _Beside(name, tensor, offset, rows)
                continue
            self._report.findings.append(RowFinding(name, message))

    def _bucket_counts(self) -> Buckets | None:
        tensor = self._table.beside.get("bucket")
        if tensor is None:
            return None
        if tensor.dtype.kind not in "iu":
            self._report.findings.append(
                RowFinding("bucket", f"bucket has the dtype {tensor.dtype}, but must contain counts of ids")
            )
            return None
        if tensor.numel > MOST_BUCKETS:
            raise UnsupportedError(f"The table has {tensor.numel} buckets; at most {MOST_BUCKETS} can be checked.")
        reading = TensorReader(tensor, self._readers, max(tensor.nbytes, 64))
        kind = f"<{tensor.dtype.kind}{tensor.dtype.itemsize}"
        return Buckets(self._np.frombuffer(reading.read(0, tensor.nbytes), kind).astype("i8"))

    # ---- piece by piece

    def _look_at(self, rows: Array) -> None:
        """Count the unused rows, and the rows whose padding is not zero."""
        self._report.unused += int(self._np.count_nonzero(rows[:, 15] < 0x80))
        gaps = [rows[:, gap.offset : gap.stop].any(axis=1) for gap in self._layout.gaps()]
        if gaps:
            self._report.padding += int(self._np.count_nonzero(self._np.logical_or.reduce(gaps)))

    def _compare_ids(self, beside: _Beside, first: int, keys: Array, ids: Array) -> None:
        apart = ids - keys
        if self._offset is None:
            self._offset = self._usual(apart)
            if self._offset:
                self._report.ids, self._report.offset = "local", self._offset
                beside.finding.message += f", which has local ids, lower by {self._offset}"
        (wrong,) = self._np.nonzero(apart != self._offset)
        beside.differs(first, wrong, lambda row: {"weight_id": int(ids[row]), "header": int(keys[row])})

    def _usual(self, apart: Array) -> int:
        """Return the difference of weight_id and the header's ids in most rows; 0 if there is no permitted one."""
        values, counts = self._np.unique(apart, return_counts=True)
        usual = dict(zip(values.tolist(), counts.tolist(), strict=True))
        if self._asked_offset is not None:
            return max((0, self._asked_offset, -self._asked_offset), key=lambda value: usual.get(value, 0))
        most = max(usual, key=lambda value: usual[value])
        return int(most) if 2 * usual[most] > len(apart) else 0

    def _compare(self, beside: _Beside, first: int, rows: Array, saved: Array) -> None:
        mine = rows[:, beside.offset : beside.offset + beside.width]
        (wrong,) = self._np.nonzero((mine != saved).any(axis=1))

        def show(row: int) -> dict[str, Any]:
            byte = int(self._np.nonzero(mine[row] != saved[row])[0][0]) // 4 * 4
            return {
                "byte": beside.offset + byte,
                "row_has": mine[row, byte : byte + 8].tobytes().hex(),
                beside.name: saved[row, byte : byte + 8].tobytes().hex(),
            }

        beside.differs(first, wrong, show)

    # ---- at the end

    def _look_for_repeats(self) -> None:
        count, values = self._ids.repeated(_SHOWN)
        if count:
            rows = self._rows_of(values)
            ids = "id occurs" if count == 1 else "ids occur"
            examples = [{"id": value, "rows": rows[value]} for value in values]
            finding = RowFinding("unique", f"{count:,} {ids} more than once in the table", count, examples)
            self._report.findings.append(finding)

    def _rows_of(self, values: list[int]) -> dict[int, list[int]]:
        """Return the first rows with each id."""
        reading = TensorReader(self._keys, self._readers)
        rows_of_id: dict[int, list[int]] = {value: [] for value in values}
        step = BLOCK // 8
        for first in range(0, self._report.rows, step):
            ids = self._np.frombuffer(reading.read(8 * first, 8 * min(first + step, self._report.rows)), "<i8")
            for value, rows in rows_of_id.items():
                if len(rows) < _SHOWN:
                    matching = self._np.nonzero(ids == value)[0][: _SHOWN - len(rows)]
                    rows.extend((matching + first).tolist())
            if all(len(rows) == _SHOWN for rows in rows_of_id.values()):
                break
        self._report.bytes_read += reading.bytes_read
        return rows_of_id

    def _judge_buckets(self) -> None:
        if self._buckets is None:
            return
        offset = self._asked_offset or self._offset or 0
        verdict = self._buckets.judge(self._report.rows, self._bucket_size, offset)
        self._report.bucket_size = verdict.sizes
        if verdict.message:
            finding = RowFinding("bucket", verdict.message, verdict.wrong, list(verdict.examples))
            self._report.findings.append(finding)


def _column(rows: Array, offset: int, size: int) -> Array:
    """Return `size` bytes from byte `offset` of each row, as a contiguous array."""
    contiguous: Array = numpy_module().ascontiguousarray(rows[:, offset : offset + size])
    return contiguous
