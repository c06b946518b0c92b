"""`ckptconv diff`: what differs between two checkpoints."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptconv.cli.options import SHOWING, named, run, taking
from ckptconv.errors import DifferenceError
from ckptconv.features.diff.options import COMPARING, COMPARING_TOO
from ckptconv.text import format_size, some

if TYPE_CHECKING:
    from ckptconv.features.diff.difference import Difference

OTHER_WORDS = {"diff": ("compare", "cmp", "delta", "changes")}


@taking(
    *named("key include exclude"),
    COMPARING["with_states"],
    *named("order tag exclude_frozen_parameters master raw alone"),
    *named("strip_prefix rename"),
    COMPARING["map"],
    *named("size"),
    COMPARING["dtype"],
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
    a: Annotated[str, typer.Argument(metavar="A", show_default=False, help="A checkpoint, of any format.")],
    b: Annotated[
        str, typer.Argument(metavar="B", show_default=False, help="Another, of the same format or any other.")
    ],
    *,
    html: str = "",
    top: int | None = None,
    **options: Any,
) -> None:
    """What differs between two checkpoints?

    Tensors are matched by name, and compared element by element: in how many they differ, by how much, and where first.
    Elements of one dtype are equal if all their bits are; those of two dtypes if their values are. With --rtol or
    --atol, values count, not bits and dtypes. Options that choose and change names apply to both. Exit code 0: all is
    equal; 1: something differs. With --delta it is 0 once the delta is written, which is empty if all is equal.
    --map is for A alone.

    \b
    Examples:
      ckptconv diff checkpoints/global_step100 checkpoints/global_step200
      ckptconv diff model.pt model.safetensors
      ckptconv diff --rtol 1e-2 --top 10 fp32/ bf16/
      ckptconv diff --html changes.html base/ tuned/
      ckptconv diff step-1000/ ../Llama-3.1-8B --map torchtitan-llama3
      ckptconv diff step100/ step101/ --delta deltas/weight_v000001
    """
    from ckptconv.cli.console import width
    from ckptconv.cli.failures import described
    from ckptconv.features.diff import showing
    from ckptconv.features.diff.comparing import diff as compare
    from ckptconv.process import reuse_memory
    from ckptconv.storage.paths import is_remote, normalize
    from ckptconv.text import count_of

    if not (is_remote(a) or is_remote(b)):
        reuse_memory()  # the libraries of stores need what there is
    # What nobody sees is not measured.
    measure = bool(html or options.get("json") or not options.get("quiet"))
    output, found = run("diff", options, compare, a, b, html=html, measure=measure)
    if html:
        output.note(f"wrote {html} ({format_size(os.stat(normalize(html)).st_size)})")
    if found.delta:
        size = format_size(found.delta.bytes)
        output.note(f"wrote {found.delta.path} ({count_of(found.delta.tensors, 'changed tensor')}, {size})")
    if output.json:
        fields, is_done = found.to_dict(top), found.equal or found.delta is not None
        output.print_json(is_done, fields if is_done else {**fields, "error": described(_error(found))})
    else:
        for warning in found.warnings:
            output.warn(warning)
        output.show(showing.overview(found, width=width(), top=top, verbose=output.verbose))
    if not found.equal and not found.delta:
        raise typer.Exit(1)


def _error(found: Difference) -> DifferenceError:
    """Return what stands for all differences where a program looks for an error."""
    from ckptconv.text import count_of

    differing = [tensor for tensor in found.tensors if tensor.status != "equal"]
    return DifferenceError(
        f"{found.input} and {found.other} differ in {len(differing):,} of {count_of(len(found.tensors), 'tensor')}: "
        f"{some([tensor.name for tensor in differing])}.",
        what="tensors",
        tensor=differing[0].name,
    )
