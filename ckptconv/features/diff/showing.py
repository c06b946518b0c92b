"""Shows the differences of two checkpoints, as lines of styled text and as the data of a page. Pure; prints nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from ckptconv.cells import cells, cut_column, padded
from ckptconv.cli.lines import Line, Words, format_memory, table_row
from ckptconv.features.diff.changes import Change
from ckptconv.features.diff.difference import CHANGED, DTYPE, EQUAL, ONLY_A, ONLY_B, SHAPE, Difference, TensorDifference
from ckptconv.features.reporting.quantized import Quantization, Steps
from ckptconv.features.reporting.tensor_info import TensorInfo
from ckptconv.text import count_of, format_size, printable, some

# The most tensors that are listed by default, and the most cells of a name if there is no screen to fit into.
LISTED = 40
_WIDE, _NARROW = 60, 16
_HEADS = ("name", "differ", "relative", "largest", "first at", "")
_COUNTED = {
    ONLY_A: "only in A",
    ONLY_B: "only in B",
    SHAPE: "with different shapes",
    DTYPE: "with different dtypes",
    CHANGED: "changed",
    EQUAL: "equal",
}


# --------------------------------------------------------------------------------------------------------------- text


def overview(
    report: Difference, *, width: int | None = None, top: int | None = None, verbose: bool = False
) -> Iterator[Line]:
    """Yield the lines that show `report`, each at most `width` cells wide (None: as wide as needed).

    The `top` tensors that differ most are listed, also within a tolerance; by default those that differ by more than
    it, as many as fit a page, and all if `verbose`.
    """
    for side, path, called in (("A", report.input, report.format), ("B", report.other, report.other_format)):
        yield [Words(f"{side}  "), Words(printable(path), "name"), Words(": "), Words(printable(called), "title")]
    differing = [tensor for tensor in report.tensors if tensor.status != EQUAL or (top and _is_near(tensor))]
    most = top or (None if verbose else LISTED)
    if differing:
        yield []
        yield from _table(differing[:most], width)
        if most is not None and len(differing) > most:
            how = "--top N shows more" if top else "--verbose shows all"
            yield [Words(f"  … and {len(differing) - most:,} more ({how})", "dim")]
        yield []
    elif top:
        yield [Words("no tensors to list: all are equal, even without a tolerance", "dim")]
    for hint in report.hints:
        yield [Words(printable(hint), "warning")]
    for sentence in _not_compared(report):
        yield [Words(sentence, "warning")]
    yield from _totals(report)


def _not_compared(report: Difference) -> Iterator[str]:
    """Yield a sentence on values that were not compared, if there are any."""
    if report.not_compared:
        what = "not compared, and not in the delta" if report.delta else "not compared"
        yield f"{what}: the values under {some(report.not_compared, form=printable)}, which are not tensors"


def _is_near(tensor: TensorDifference) -> bool:
    """Return whether a tensor differs, but not by more than the tolerance."""
    return tensor.status == EQUAL and tensor.change is not None and bool(tensor.change.max_abs)


def _totals(report: Difference) -> Iterator[Line]:
    if report.equal:
        by = " by numpy's rule" if report.tolerance == "numpy" else ""
        close = "" if report.rtol is None else f" within rtol {report.rtol:g} and atol {report.atol:g}{by}"
        yield from _through(report)
        yield [
            Words("equal", "good"),
            Words(f"{close}: {count_of(len(report.tensors), 'tensor')}, {_compared(report)}"),
        ]
        return
    counts = ", ".join(
        f"{report.counts[status]:,} {word}" for status, word in _COUNTED.items() if report.counts[status]
    )
    yield [Words("different", "warning"), Words(f": of {count_of(len(report.tensors), 'tensor')}, {counts}")]
    if report.elements_differ:
        share = _share(report.elements_differ, report.elements)
        yield [
            Words(
                f"{report.elements_differ:,} of {count_of(report.elements, 'element')} differ ({share}), by at most "
                f"{_number(report.max_abs)}, and by at most {_number(report.max_rel)} of the larger element"
            )
        ]
    yield from _through(report)
    yield [Words(_compared(report))]


def _through(report: Difference) -> Iterator[Line]:
    """Yield the results for weights that are quantized on either side."""
    summary = report.quantization
    if summary is None:
        return
    counts = {
        "equal": summary.equal,
        "reproduced": summary.reproduced,
        "within half a step": summary.within_half_step,
        "further apart": summary.beyond,
        "without steps": summary.unmeasured,
    }
    yield [
        Words(f"of {count_of(summary.tensors, 'quantized weight')} with {count_of(summary.scales, 'scale')}, "),
        Words(", ".join(f"{count:,} {word}" for word, count in counts.items() if count)),
        Words(f"; the sides differ by at most {_number(summary.largest)} steps of the codes, on average by "),
        Words(_number(summary.mean)),
    ]


def _compared(report: Difference) -> str:
    seconds = f"{max(report.seconds, 0.01):.2f} s" if report.seconds < 10 else f"{report.seconds:.0f} s"
    peak = format_memory(report.peak_rss_bytes)
    return f"{format_size(report.bytes_compared)} compared in {seconds}, peak memory {peak}"


def _table(tensors: Sequence[TensorDifference], width: int | None) -> Iterator[Line]:
    rows = [_HEADS, *(_cells(tensor) for tensor in tensors)]
    widths = [max(cells(row[column]) for row in rows) for column in range(len(_HEADS) - 1)]
    others = 2 + sum(size + 2 for size in widths[1:])
    widths[0] = min(widths[0], _WIDE if width is None else max(width - others, _NARROW))
    names = cut_column([row[0] for row in rows], widths[0])
    if width is not None and max(map(cells, names)) > widths[0]:
        # Names have lines of their own.
        widths[0] = max(min(widths[0], width - others), cells(_HEADS[0]))
    for number, (name, row) in enumerate(zip(names, rows, strict=True)):
        values = "".join(
            "  " + padded(text, size, right=True) for text, size in zip(row[1:-1], widths[1:], strict=True)
        )
        style = "" if number else "dim"
        line = [Words(f"{values}  {row[-1]}".rstrip(), style)]
        yield from table_row(Words("  "), Words(name, style or "name"), widths[0], line, width)


def _cells(tensor: TensorDifference) -> tuple[str, ...]:
    change = tensor.change
    remark = described(tensor)
    if change is None:
        return printable(tensor.name), "", "", "", "", remark
    elements = 1
    for extent in tensor.shape:
        elements *= extent
    return (
        printable(tensor.name),
        f"{change.elements:,} ({_share(change.elements, elements)})",
        _number(change.relative),
        _largest(change),
        "" if change.first is None else str(change.first),
        f"{change.first_a} → {change.first_b}{f'; {remark}' if remark else ''}" if change.elements else remark,
    )


def described(tensor: TensorDifference) -> str:
    """Return the result for a tensor besides its numbers, in words."""
    kinds = [
        (dtype, " × ".join(map(str, shape)) or "scalar")
        for dtype, shape in ((tensor.dtype_a, tensor.shape_a), (tensor.dtype_b, tensor.shape_b))
        if dtype is not None and shape is not None
    ]
    tied = f", tied to {printable(tensor.tied)}" if tensor.tied else ""
    if tensor.status in (ONLY_A, ONLY_B):
        return f"{_COUNTED[tensor.status]}: {' '.join(kinds[0])}{tied}"
    if tensor.status == SHAPE:
        return " → ".join(" ".join(kind) for kind in kinds)
    if tensor.status == DTYPE:
        return ", ".join(filter(None, [" → ".join(dtype for dtype, _ in kinds), _apart(tensor.steps)]))
    return ", ".join(filter(None, [_remark(tensor.change), _apart(tensor.steps)]))


def _apart(steps: Steps | None) -> str:
    """Return the distance of the sides of a quantized weight, in words."""
    if steps is None:
        return ""
    if steps.reproduced:
        return "reproduced"
    far = f"{_number(steps.largest)} steps apart at {steps.worst}" if steps.worst else "no steps apart"
    if steps.beyond:
        far += f", {steps.beyond:,} by more than half, first {steps.first}"
    return far + (f", {steps.scales_differ:,} of {steps.scales:,} scales differ" if steps.scales_differ else "")


def _remark(change: Change | None) -> str:
    if change is None:
        return ""
    remarks = []
    if change.not_finite:
        remarks.append(f"{change.not_finite:,} NaN or infinite")
    if change.same_value:
        remarks.append(f"{change.same_value:,} with the same value in other bits")
    return ", ".join(remarks)


def _share(part: int, whole: int) -> str:
    """Return a share in percent. Less than all is never shown as 100 %, and more than none never as 0."""
    if not part or part == whole:
        return "100 %" if part else "0 %"
    percent = 100 * part / whole
    return "<0.01 %" if percent < 0.01 else f"{min(percent, 99.99):.4g} %"


def _largest(change: Change) -> str:
    """Return the largest change; "" if all differing elements are NaN or infinite."""
    return "–" if change.not_finite and not change.max_abs else _number(change.max_abs)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


# --------------------------------------------------------------------------------------------------------------- page

# The colours of a page, from equal tensors to those on one side only.
_LEVELS = (
    ("equal", "#8b919b"),
    ("other bits, same values", "#76b7b2"),
    ("changed by less than 0.0001%", "#4b3f9e"),
    ("by less than 0.001%", "#4e79a7"),
    ("by less than 0.01%", "#2f9bb3"),
    ("by less than 0.1%", "#59a14f"),
    ("by less than 1%", "#d9b13b"),
    ("by less than 10%", "#f28e2b"),
    ("by 10% or more", "#e15759"),
    ("NaN or infinite", "#d1242f"),
    ("changed, not numeric", "#b07aa1"),
    ("other dtype or shape", "#9c755f"),
    ("only in A", "#5f8fd0"),
    ("only in B", "#8cb25c"),
)
_BOUNDS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
_COLUMNS = ("differ", "relative", "largest", "norm of change", "norm of A", "norm of B", "same value")


def page_of(report: Difference) -> str:
    """Return the page that shows `report`: a map coloured by change, and a table of all tensors."""
    name = f"{printable(report.input)} → {printable(report.other)}"
    rows = [TensorInfo(tensor.name, _dtype(tensor), tensor.shape, tensor.bytes) for tensor in report.tensors]
    totals: dict[str, list[int]] = {}
    tied = {tensor.name: tensor.tied for tensor in report.tensors if tensor.tied}
    for row in rows:
        if row.name in tied:
            continue
        total = totals.setdefault(row.dtype, [0, 0, 0])
        elements = 1
        for extent in row.shape:
            elements *= extent
        for place, more in enumerate((1, elements, row.bytes)):
            total[place] += more
    from ckptconv.features.reporting.page import page_with, tensors_of  # it imports much

    return page_with(
        name,
        {
            **tensors_of(rows, tied),
            "path": name,
            "format": f"{printable(report.format)} → {printable(report.other_format)}",
            "facts": [["A", printable(report.input)], ["B", printable(report.other)]],
            "counts": [
                *([word, f"{report.counts[status]:,}"] for status, word in _COUNTED.items() if report.counts[status]),
                ["elements compared", f"{report.elements:,}"],
                ["elements that differ", f"{report.elements_differ:,}"],
                ["largest change", _number(report.max_abs)],
                *_counted(report.quantization),
            ],
            "totals": [[dtype, *counts] for dtype, counts in totals.items()],
            "levels": _LEVELS,
            "level": [_level(tensor) for tensor in report.tensors],
            "columns": _COLUMNS,
            "stats": [tensor.change and _numbers(tensor.change) for tensor in report.tensors],
            "values": [],
            "opaque": [],
            "classes": [],
            "notes": list(
                map(printable, chain(report.hints, _not_compared(report), filter(None, map(_note, report.tensors))))
            ),
            "warnings": list(map(printable, report.warnings)),
            "conversion": None,
        },
    )


def _counted(quantization: Quantization | None) -> list[list[str]]:
    """Return the counts of quantized weights for a page."""
    if quantization is None:
        return []
    return [
        ["quantized weights", f"{quantization.tensors:,}"],
        ["scales", f"{quantization.scales:,}"],
        ["equal weights", f"{quantization.equal:,}"],
        ["reproduced", f"{quantization.reproduced:,}"],
        ["within half a step", f"{quantization.within_half_step:,}"],
        ["further apart", f"{quantization.beyond:,}"],
        ["most steps apart", _number(quantization.largest)],
    ]


def _note(tensor: TensorDifference) -> str:
    """Return the note of a page on a tensor, besides its colour and its numbers."""
    is_told = tensor.status not in (EQUAL, CHANGED) or tensor.steps is not None
    return f"{tensor.name}: {described(tensor)}" if is_told else ""


def _dtype(tensor: TensorDifference) -> str:
    return " → ".join(dict.fromkeys(filter(None, (tensor.dtype_a, tensor.dtype_b))))


def _numbers(change: Change) -> list[Any]:
    sizes = change.relative, change.max_abs, change.norm, change.norm_a, change.norm_b
    from ckptconv.features.reporting.page import numbers

    return numbers((change.elements, *sizes, change.same_value))


def _level(tensor: TensorDifference) -> int:
    """Return the number of the tensor's colour in `_LEVELS`."""
    places = {name: place for place, (name, _) in enumerate(_LEVELS)}
    change = tensor.change
    if tensor.status in (ONLY_A, ONLY_B):
        return places[_COUNTED[tensor.status]]
    if tensor.status in (SHAPE, DTYPE):
        return places["other dtype or shape"]
    if tensor.status == EQUAL or change is None:
        return 0
    if change.not_finite:
        return places["NaN or infinite"]
    if change.relative is None:
        return places["changed, not numeric"]
    if change.elements == change.same_value:
        return places["other bits, same values"]
    first = places["changed by less than 0.0001%"]
    return first + sum(change.relative >= bound for bound in _BOUNDS)
