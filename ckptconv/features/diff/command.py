"""`ckptconv diff`: the differences between two checkpoints."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptconv.cli.options import SHOWING, named, run, taking
from ckptconv.errors import DifferenceError
from ckptconv.features.diff.options import COMPARING, COMPARING_TOO
from ckptconv.options.table import OPTIONS, named_in
from ckptconv.text import format_size, some

if TYPE_CHECKING:
    from ckptconv.features.diff.difference import Difference

OTHER_OPTIONS = {
    "--tol --eps --epsilon --threshold": "Use --rtol or --atol, such as --atol 1e-3.",
    "-o --out --output --output-file --outfile": "--delta DIR writes the difference.",
}
OTHER_WORDS = {"diff": ("compare", "cmp", "delta", "changes", "allclose", "equal")}


@taking(
    *named("key include exclude"),
    COMPARING["with_states"],
    *named("order tag exclude_frozen_parameters master raw alone"),
    *named("strip_prefix rename"),
    *named_in("map size dtype", {**OPTIONS, **COMPARING}).values(),
    *named("dequantize"),
    *named("unstack"),
    COMPARING["rtol"],
    COMPARING["atol"],
    COMPARING["tolerance"],
    *COMPARING_TOO.values(),
    *named("html overwrite"),
    COMPARING["top"],
    *named("jobs memory spool_dir"),
    *SHOWING,
)
def diff(
    a: Annotated[str, typer.Argument(metavar="A", show_default=False, help="A checkpoint of any format.")],
    b: Annotated[
        str, typer.Argument(metavar="B", show_default=False, help="Another checkpoint, of the same or another format.")
    ],
    *,
    html: str = "",
    top: int | None = None,
    **options: Any,
) -> None:
    """Compare two checkpoints, tensor by tensor.

    diff matches tensors by name. For each tensor, it reports how many elements differ, by how much, and the index of
    the first. Elements with the same dtype are equal if their bits are equal; elements with different dtypes, if their
    values are equal. With --rtol or --atol, diff compares values, not bits and dtypes. Options that select and rename
    tensors apply to both sides, --map only to A. Exit code 0: equal; 1: different. With --delta, the exit code is 0
    once the delta is written; the delta is empty if all tensors are equal.

    \b
    Examples:
      ckptconv diff checkpoints/global_step100 checkpoints/global_step200
      ckptconv diff model.pt model.safetensors
      ckptconv diff --rtol 1e-2 --top 10 fp32/ bf16/
      ckptconv diff --html changes.html base/ tuned/
      ckptconv diff step-1000/ ../Llama-3.1-8B --map torchtitan-llama3
      ckptconv diff step100/ step101/ --delta deltas/weight_v000001
    """
    from ckptconv.cli.failures import described
    from ckptconv.cli.terminal import width
    from ckptconv.features.diff import showing
    from ckptconv.features.diff.comparing import diff as compare
    from ckptconv.process import reuse_memory
    from ckptconv.storage.paths import is_remote, normalize
    from ckptconv.text import count_of

    if not (is_remote(a) or is_remote(b)):
        reuse_memory()  # the libraries of stores need the memory
    # Differences are not measured if nothing shows the measurement.
    measure = bool(html or options.get("json") or not options.get("quiet"))
    output, report = run("diff", options, compare, a, b, html=html, measure=measure)
    if html:
        output.note(f"wrote {html} ({format_size(os.stat(normalize(html)).st_size)})")
    if report.delta:
        size = format_size(report.delta.bytes)
        changed = count_of(report.delta.tensors, "changed tensor")
        versions = f"changes version {report.delta.base_version:06d} into {report.delta.version:06d}"
        output.note(f"wrote {report.delta.path} ({changed}, {size}; {versions})")
    if output.json:
        fields, is_done = report.to_dict(top), report.equal or report.delta is not None
        output.print_json(is_done, fields if is_done else {**fields, "error": described(_error(report))})
    else:
        for warning in report.warnings:
            output.warn(warning)
        output.show(showing.overview(report, width=width(), top=top, verbose=output.verbose))
    if not report.equal and not report.delta:
        raise typer.Exit(1)


def _error(report: Difference) -> DifferenceError:
    """Return one error for all differences, for programs that look for an error."""
    from ckptconv.text import count_of

    differing = [tensor for tensor in report.tensors if tensor.status != "equal"]
    return DifferenceError(
        f"{report.input} and {report.other} differ in {len(differing):,} of {count_of(len(report.tensors), 'tensor')}: "
        f"{some([tensor.name for tensor in differing])}.",
        what="tensors",
        tensor=differing[0].name,
    )
