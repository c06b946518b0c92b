"""`ckptconv inspect`: shows the contents of a checkpoint."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from ckptconv.cli.options import SHOWING, named, run, taking
from ckptconv.features.inspect.options import OF_INSPECT
from ckptconv.options.table import OPTIONS

OTHER_OPTIONS = {
    "--dtype": "In inspect, this option is --as DTYPE.",
    "--statistics --statistic --summary": "Use --stats.",
    "--tensor --tensors --name": "Use --include NAME.",
    "inspect diff verify --layer --module --block": "Use --include GLOB, such as --include '*layers.0.*'.",
    "--nan --nans --inf --check-nan --check-finite --finite": "Use --stats, which counts NaN and infinite values.",
    "--keys --names --all --list --full": (
        "Use --key PATH to show a part. ckptconv inspect -v shows all tensor names."
    ),
}
OTHER_WORDS = {
    "inspect": (
        *("show", "info", "ls", "list", "view", "describe", "tree", "head", "stat", "cat"),
        *("keys", "names", "print", "summary", "summarize", "dump", "analyze", "size", "stats", "metadata"),
    )
}


@taking(
    *named("raw tag"),
    OF_INSPECT["depth"],
    *named("as_"),
    OPTIONS["max_shard_size"].explained("With --as: the maximum size of each file."),
    *named("key include exclude dequantize map size"),
    *named("stats html overwrite"),
    *SHOWING,
)
def inspect_(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH", show_default=False, help="A file, a directory or a URL, in any supported format."
        ),
    ],
    *,
    depth: int | None = None,
    html: str = "",
    **options: Any,
) -> None:
    """Show the contents of a checkpoint. Tensor data is read only with --stats.

    Identical modules, such as layers, are shown once. The page of --html has a map of the bytes, and a searchable table
    of all tensors.

    \b
    Examples:
      ckptconv inspect model.pt
      ckptconv inspect --depth 2 --as bf16 checkpoints/
      ckptconv inspect --html model.html model.safetensors
      ckptconv inspect --stats --include '*.mlp.*' model.pt
    """
    from ckptconv.cli.terminal import width
    from ckptconv.features.inspect.inspecting import inspect
    from ckptconv.features.inspect.overview import overview
    from ckptconv.storage.paths import normalize
    from ckptconv.text import format_size

    output, summary = run("inspect", options, inspect, path, html=html)
    if html:
        output.note(f"wrote {html} ({format_size(os.stat(normalize(html)).st_size)})")
    if output.json:
        output.print_json(True, summary.to_dict())
    else:
        for warning in summary.warnings:
            output.warn(warning)
        output.show(overview(summary, width=width(), depth=depth, verbose=output.verbose))
