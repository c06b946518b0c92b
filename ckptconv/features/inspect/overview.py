"""Shows the contents of a checkpoint as lines of styled text, for a screen or a log. Pure; prints nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptconv.cells import cells, cut, cut_column, padded
from ckptconv.cli.lines import NARROW, Line, Words, fitted, table_row
from ckptconv.features.inspect.module_tree import Row, fitting_depth, rows, tree
from ckptconv.features.inspect.summary import NOT_READ, Summary, shown_fact, shown_value
from ckptconv.process import no_garbage
from ckptconv.text import count_of, format_size, printable, some

if TYPE_CHECKING:
    from ckptconv.features.reporting.statistics import Statistics

# The most lines of the tree by default, and the most children shown of one module.
LINES, CHILDREN = 40, 20
# The most cells to which labels are aligned if there is no screen to fit into.
WIDE = 60
# The widths, in cells, of a size, of a percentage with the blanks before it, and of a bar.
_SIZE, _PERCENT, _BAR = 9, 6, 10
_FEW = 5
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def overview(
    summary: Summary,
    *,
    width: int | None = None,
    depth: int | None = None,
    verbose: bool = False,
) -> Iterator[Line]:
    """Yield the lines that show `summary`, each at most `width` cells wide (None: as wide as needed)."""
    if not all(name.isprintable() for name in (*(row.name for row in summary.tensors), *summary.values)):
        summary = _printable(summary)
    yield [Words(summary.input, "name"), Words(": "), Words(summary.format, "title")]
    yield from _facts(summary, width)
    yield from _table_of_dtypes(summary, width)
    yield from _quantized(summary, width)
    yield from _roles(summary, width)
    yield from _tree(summary, width, depth, verbose)
    yield from _largest(summary, width)
    yield from _values(summary, width, verbose)
    yield from _others(summary, width, verbose)
    yield from _ties(summary, width, verbose)
    yield from _made_of(summary, width, verbose)
    yield from _notes(summary, width)
    yield from _classes(summary, width)
    yield from _conversion(summary, width)


def _printable(value: Any) -> Any:
    """Return `value` with control characters escaped in all of its text. Escaped later, it might not fit its line."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {_printable(key): _printable(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{name: _printable(item) for name, item in _fields(value)})
    return [_printable(item) for item in value] if isinstance(value, list) else value


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(value):
        yield field.name, getattr(value, field.name)


def _facts(summary: Summary, width: int | None) -> Iterator[Line]:
    parts = [f"{key}: {shown_fact(key, value)}" for key, value in summary.facts.items()]
    yield from _wrapped(parts, " · ", width, "dim")
    kinds = [f"{kind} {count:,}" for kind, count in summary.counts.items()]
    total = [count_of(len(summary.tensors), "tensor"), count_of(summary.elements, "element")]
    yield from _wrapped([*total, format_size(summary.bytes), *kinds], " · ", width, "")


def _table_of_dtypes(summary: Summary, width: int | None) -> Iterator[Line]:
    totals = sorted(summary.totals.items(), key=lambda item: -item[1].bytes)
    if not totals:
        return
    yield []
    table = [
        [
            name,
            count_of(total.tensors, "tensor"),
            count_of(total.elements, "element"),
            format_size(total.bytes),
        ]
        for name, total in totals
    ]
    widths = [max(cells(row[column]) for row in table) for column in range(4)]
    shown = _fitting({column: widths[column] for column in (2, 1, 3)}, widths[0], width)
    for row, (_, total) in zip(table, totals, strict=True):
        line = [Words("  "), Words(padded(row[0], widths[0]), "name")]
        line += [Words("  " + padded(row[column], widths[column], right=True)) for column in sorted(shown)]
        room = None if width is None else width - sum(widths) - 8
        yield fitted([*line, *_share(total.bytes, summary.bytes, room)], width)


def _quantized(summary: Summary, width: int | None) -> Iterator[Line]:
    quantized = summary.quantized
    if quantized:
        yield []
        for name, group in quantized.formats.items():
            weights, bits = count_of(group.weights, "weight"), f"{group.bits_per_weight:g} bits each"
            line = ["quantized: " + name, weights, count_of(group.parameters, "parameter"), bits]
            yield from _wrapped(line, " · ", width, "")
        yield from _wrapped([f"{count_of(quantized.parameters, 'parameter')} in all"], " · ", width, "")


def _roles(summary: Summary, width: int | None) -> Iterator[Line]:
    roles = summary.roles or {}
    yield from [[]] if roles else []
    for role, names in roles.items():
        label = padded(role, max(map(cells, roles)))
        yield fitted([Words(f"  {label}", "name"), Words(f"  {some(names, 5, str)}")], width)


def _fitting(columns: dict[int, int], name: int, width: int | None) -> list[int]:
    """Return the columns, of `columns` with widths, that fit next to a name. The first give way; the last stays."""
    shown = list(columns)
    while width is not None and len(shown) > 1 and 2 + name + sum(2 + columns[column] for column in shown) > width:
        del shown[0]
    return shown


def _share(part: int, whole: int, room: int | None) -> Line:
    """Return the share in percent, and a bar, as far as `room` cells suffice."""
    if not whole:
        return []
    eighths = round(part / whole * _BAR * 8)
    bar = "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
    percent = part / whole * 100
    shown = "<1%" if 0 < percent < 1 else f"{percent:.0f}%"
    line = [Words(f"  {shown:>4}"), Words(f" {bar}".rstrip(), "good")]
    return line if room is None or room > _PERCENT + _BAR else line[:1] if room >= _PERCENT else []


def _tree(summary: Summary, width: int | None, depth: int | None, verbose: bool) -> Iterator[Line]:
    with no_garbage():
        root = tree(summary.tensors, summary.aliases)
    if not root.children:
        return
    most = None if verbose else CHILDREN
    if depth is None and not verbose:
        depth = fitting_depth(root, LINES, most)
    lines = list(rows(root, depth, most, fold=not verbose))
    described = [_described(row, depth) for row in lines]
    label_width = max(cells(label) for label, _, _ in described)
    columns = {column: max(cells(row[column]) for row in described) for column in (1, 2)}
    shown = _fitting({**columns, 3: _SIZE}, NARROW, width)
    others = 4 + sum(2 + columns[column_shown] for column_shown in shown[:-1]) + _SIZE
    # Shares and bars get the room next to labels.
    label_width = min(label_width, WIDE if width is None else max(width - others, NARROW))
    room = None if width is None else width - others - label_width
    yield []
    for row, (label, dtype, shape) in zip(lines, described, strict=True):
        if row.module is None:
            hidden = sum(module.elements for module in row.hidden)
            more = sum(module.tensors for module in row.hidden)
            rest_of_it = f"… and {more:,} more of {count_of(hidden, 'element')} (--verbose lists them)"
            yield fitted([Words("  " * row.depth), Words(rest_of_it, "dim")], width)
            continue
        module = row.module
        leaf = module.shape is not None
        label = label if width is None else _label(label, row.alike, label_width)
        size = f"the same as {module.tied}" if module.tied else format_size(module.nbytes * row.alike)
        line = [Words("  "), Words(padded(label, label_width), "" if leaf else "name")]
        cells_of = {1: (dtype, "dim"), 2: (shape, "")}
        for column_shown in shown[:-1]:
            text, style = cells_of[column_shown]
            line += [Words("  "), Words(padded(text, columns[column_shown]), style)]
        line += [
            Words("  "),
            Words(size if module.tied else padded(size, _SIZE, right=True), "dim" if module.tied else ""),
        ]
        if not module.tied:
            line += _share(module.nbytes * row.alike, summary.bytes, room)
        yield fitted(line, width)


def _described(row: Row, depth: int | None) -> tuple[str, str, str]:
    """Return the label, dtypes and shape of a row."""
    if row.module is None:
        return "", "", ""
    module = row.module
    indent = "  " * (row.depth - 1)
    label = indent + (row.label or "(itself)") + ("" if module.shape is not None else ".")
    if row.alike > 1:
        label += _alike(row.alike)
    dtype = next(iter(module.dtypes), "") if len(module.dtypes) <= 1 else f"{len(module.dtypes)} dtypes"
    if module.shape is None:
        shown = count_of(module.tensors * row.alike, "tensor")
    else:
        shown = " × ".join(map(str, module.shape)) or "scalar"
    return label, dtype, shown


def _label(label: str, alike: int, width: int) -> str:
    """Shorten a label to `width` cells: first the number of its modules, then the name."""
    if cells(label) > width and alike > 1:
        count = f" ×{alike:,}"
        return cut(label.removesuffix(_alike(alike)), width - len(count)) + count
    return cut(label, width)


def _alike(count: int) -> str:
    return f" ({count:,} alike)"


def _largest(summary: Summary, width: int | None) -> Iterator[Line]:
    by_name = {row.name: row for row in summary.tensors}
    largest = summary.largest[:_FEW]
    if len(by_name) <= _FEW:
        return
    yield []
    yield [Words("  largest:", "title")]
    shapes = [" × ".join(map(str, by_name[name].shape)) or "scalar" for name in largest]
    widths = max(map(cells, largest)), max(map(cells, shapes))
    shown = _fitting({1: 9, 2: widths[1], 3: 9}, 2 + NARROW, width)
    others = 4 + sum(2 + {1: 9, 2: widths[1], 3: 9}[column] for column in shown)
    name_width = min(widths[0], WIDE if width is None else max(width - others, NARROW))
    names = largest if width is None else cut_column(largest, name_width)
    for name, label, shape in zip(largest, names, shapes, strict=True):
        row = by_name[name]
        line = [Words(f"  {row.dtype:<9}", "dim")] if 1 in shown else []
        line += [Words(f"  {padded(shape, widths[1])}")] if 2 in shown else []
        yield from table_row(
            Words("    "), Words(label), name_width, [*line, Words(f"  {format_size(row.bytes):>9}")], width
        )


_LONG = 10**12
_STATISTICS = ("min", "max", "mean", "std", "zeros", "nan", "inf")


def _values(summary: Summary, width: int | None, verbose: bool) -> Iterator[Line]:
    """Show the statistics of tensors. Tensors with a NaN or an infinity are marked, and come first."""
    if summary.not_finite is None:
        return
    broken = set(summary.not_finite)
    # In the order of the file, but tensors with a NaN or an infinity first.
    measured = sorted(
        (row for row in summary.tensors if row.name not in summary.aliases),
        key=lambda row: row.name not in broken,
    )
    most = len(measured) if verbose else max(LINES, min(len(broken), 2 * LINES))
    table = [["", *_STATISTICS], *(_cells_of(row.stats) for row in measured[:most])]
    widths = [max(cells(row[column]) for row in table) for column in range(len(_STATISTICS) + 1)]
    names = max((cells(row.name) for row in measured[:most]), default=0)
    room = WIDE if width is None else max(width - sum(widths[1:]) - 2 * len(widths) - 4, NARROW)
    names = min(names, room)
    verdict = (
        f"{len(broken):,} of {count_of(len(measured), 'tensor')} with NaN or infinities"
        if broken
        else f"all values are finite in the {count_of(len(measured), 'tensor')} read"
    )
    beside = [note for note in (*summary.notes, *summary.warnings) if note.startswith(NOT_READ)]
    verdict += "".join(f"; not read: {note.removeprefix(NOT_READ).partition('. ')[0]}" for note in beside)
    yield []
    yield from _wrapped([f"values: {verdict}"], " ", width, "warning" if broken else "good")
    called = ["", *(row.name for row in measured[:most])]
    labels = called if width is None else cut_column(called, names)
    for name, label, row in zip(called, labels, table, strict=True):
        style = "warning" if name in broken else "" if name else "dim"
        line = [Words("  " + padded(row[column], widths[column], right=True), style) for column in range(1, len(row))]
        mark = Words("  ! " if name in broken else "    ", style)
        yield from table_row(mark, Words(label, style), names, line, width)
    if len(measured) > most:
        left = len(measured) - most
        yield fitted([Words(f"    … and {count_of(left, 'more tensor')} (--verbose lists them)", "dim")], width)


def _others(summary: Summary, width: int | None, verbose: bool) -> Iterator[Line]:
    """Show the values that are not tensors: numbers and texts such as epochs, learning rates and settings."""
    values = summary.values
    if not values:
        return
    most = len(values) if verbose else CHILDREN
    yield []
    yield [Words("other values:")]
    for name, value in list(values.items())[:most]:
        yield fitted([Words("  "), Words(name, "name"), Words(f": {shown_value(value)}")], width)
    if len(values) > most:
        yield fitted(
            [Words(f"  … and {count_of(len(values) - most, 'more value')} (--verbose lists them)", "dim")], width
        )


def _cells_of(stats: Statistics | None) -> list[str]:
    """Return the cells of a tensor's statistics; dashes for missing ones."""
    return ["", *("–" if stats is None else _value(getattr(stats, name)) for name in _STATISTICS)]


def _value(value: Any) -> str:
    """Return a statistic as text: integers in full unless they are long, other numbers with five digits."""
    if value is None:
        return "–"
    if isinstance(value, list):
        return f"{value[0]:.4g}{value[1]:+.4g}i"
    return f"{value:,}" if isinstance(value, int) and abs(value) < _LONG else f"{value:.5g}"


def _ties(summary: Summary, width: int | None, verbose: bool) -> Iterator[Line]:
    ties = list(summary.aliases.items())
    shown = ties if verbose else ties[:_FEW]
    if shown:
        yield []
    for alias, kept in shown:
        yield fitted([Words("  tied: "), Words(alias, "name"), Words(" is "), Words(kept, "name")], width)
    if len(shown) < len(ties):
        yield [Words(f"  … and {len(ties) - len(shown):,} more tied names (--verbose lists them)", "dim")]


def _made_of(summary: Summary, width: int | None, verbose: bool) -> Iterator[Line]:
    """Yield the tensors that a map makes, with their sources."""
    pairs = list((summary.made_of or {}).items())
    if pairs:
        yield []
    for name, sources in pairs if verbose else pairs[:_FEW]:
        yield fitted([Words("  "), Words(name, "name"), Words(" ← "), Words(", ".join(sources), "name")], width)
    if not verbose and len(pairs) > _FEW:
        yield [Words(f"  … and {len(pairs) - _FEW:,} more (--verbose lists them)", "dim")]


def _notes(summary: Summary, width: int | None) -> Iterator[Line]:
    notes = [*summary.notes, *summary.tables]
    if notes:
        yield []
    for note in notes:
        yield from _wrapped(note.split(" ") if width is not None else [note], " ", width, "")


def _classes(summary: Summary, width: int | None) -> Iterator[Line]:
    known = [name for name in summary.classes if name not in summary.opaque]
    if summary.opaque or known:
        yield []
    if summary.opaque:
        start = "classes kept as inert data, never run: "
        yield from _wrapped(_after(start, summary.opaque), ", ", width, "warning")
    if known:
        yield from _wrapped(_after("classes and functions mentioned, read as data only: ", known), ", ", width, "dim")


def _conversion(summary: Summary, width: int | None) -> Iterator[Line]:
    forecast = summary.conversion
    if not forecast:
        return
    files = len(forecast.files)
    text = f"as {forecast.dtype}: {format_size(forecast.bytes)} in {count_of(files, 'file')}"
    text += f" ({count_of(forecast.shards, 'shard')})" if forecast.shards > 1 else ""
    # Descriptions may be read twice, and are most of a small file: a conversion may read more than the file's size.
    read = f"{format_size(forecast.bytes_to_read)} of" if forecast.bytes_to_read < forecast.input_bytes else "all"
    text += f"; reads {read} {format_size(forecast.input_bytes)}"
    yield []
    yield from _wrapped([text], " ", width, "title")
    # Not cut, so that users can copy it.
    yield [Words(f"    {forecast.command}", "name")]


def _after(start: str, words: Sequence[str]) -> list[str]:
    return [start + words[0], *words[1:]]


def _wrapped(words: Iterable[str], separator: str, width: int | None, style: str) -> Iterator[Line]:
    """Yield `words` in indented lines, as many in each as fit."""
    line = ""
    for word in words:
        joined = f"{line}{separator}{word}" if line else f"  {word}"
        # Leave room for the separator, in case another word follows on the next line.
        if width is not None and line and cells(joined) + cells(separator.rstrip()) > width:
            yield [Words(line.rstrip() + separator.rstrip(), style)]
            joined = f"    {word}"
        line = joined
    if line.strip():
        # The terminal breaks a word that is wider than the screen.
        yield [Words(line, style)]
