"""Checks for `--verify` that a table and its parts hold the same bits, by reversing the conversion.

Verification's evaluator computes their elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ckptconv.errors import DifferenceError
from ckptconv.features.rows.columns import padding, part
from ckptconv.features.rows.layout import PAD
from ckptconv.features.rows.options import RowOptions
from ckptconv.features.rows.parts import RowParts
from ckptconv.features.rows.tables import RowTable, contents
from ckptconv.features.verify.evaluate import Evaluator
from ckptconv.formats.detect import open_source
from ckptconv.formats.source import Source
from ckptconv.options.table import Options
from ckptconv.outputs.planning import Output
from ckptconv.publish.publish import Verifier
from ckptconv.storage.files import Readers
from ckptconv.storage.progress import Progress
from ckptconv.tensors.lazy import Equal
from ckptconv.tensors.moves import BLOCK


def verifier_of_split(table: RowTable, output: Output, options: Options) -> Verifier:
    """Return a verifier that packs the parts of `table` again, and compares the result with the table."""

    def pairs(source: Source) -> Iterator[Equal]:
        yield table.name, table.tensor, RowParts.choose(contents(source), {}, RowOptions()).table()

    return lambda places, progress: _compare(pairs(_made(output, places, options)), output, options, progress)


def verifier_of_pack(parts: RowParts, name: str, output: Output, options: Options) -> Verifier:
    """Return a verifier that splits the table `name` again, and compares each part with its source."""

    def pairs(source: Source) -> Iterator[Equal]:
        table = contents(source).tensors[name]
        for field in parts.layout.fields(decode="metadata" not in parts.tensors):
            yield field.name, parts.tensors[field.name], part(table, field)
        pad = padding(table, parts.layout)
        if pad is not None:
            yield PAD, parts.pad, pad

    return lambda places, progress: _compare(pairs(_made(output, places, options)), output, options, progress)


def _made(output: Output, places: Sequence[Mapping[str, str] | None], options: Options) -> Source:
    """Open the output, in staging or in its final place."""
    (file,) = output.plan.files
    at = places[0][file.name] if places[0] is not None else output.target.final(file.name)
    return open_source(at, spool_dir=options.spool_dir, storage_options=options.storage_options)


def _compare(pairs: Iterator[Equal], output: Output, options: Options, progress: Progress) -> int:
    """Return the number of bytes compared. Raise DifferenceError for the first block in which two tensors differ."""
    compared = 0
    with Readers(dict(options.storage_options), options.spool_dir) as readers:
        evaluator = Evaluator(readers)
        for name, before, after in pairs:
            for start in range(0, max(before.nbytes, after.nbytes), BLOCK):
                stop = min(start + BLOCK, before.nbytes)
                # Lazily: if the sizes differ, there may be nothing to read.
                read = (
                    evaluator.raw(side, start // side.dtype.itemsize, stop // side.dtype.itemsize)
                    for side in (before, after)
                )
                if before.nbytes != after.nbytes or next(read) != next(read):
                    raise DifferenceError(
                        f"{output.target.path} differs from the table: {name!r} differs in bytes {start} to {stop}. "
                        "The output was not published.",
                        "Run the command again; if it differs again, the disk or the memory is damaged.",
                        what="value",
                        tensor=name,
                    )
                progress(stop - start)
            compared += before.nbytes
    return compared
