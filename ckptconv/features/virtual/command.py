"""`ckptconv virtual`: `convert` to a virtual checkpoint only."""

from __future__ import annotations

import os
import shlex
from typing import Annotated, Any

import typer

from ckptconv.cli.making import convert_one
from ckptconv.cli.options import SHOWING, named, required, taking
from ckptconv.errors import UsageError
from ckptconv.options.table import TENSORS
from ckptconv.storage.paths import basename, is_remote

# Commands whose report is that of a conversion.
OF_CONVERSIONS = ("virtual",)


@taking(
    *named("into tag exclude_frozen_parameters master unstack raw alone"),
    *TENSORS,
    *named("fsync clobber overwrite manifest depfile dry_run spool_dir"),
    *SHOWING,
)
def virtual(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", show_default=False, help="A checkpoint in any format: a path or a URL.")
    ],
    output: Annotated[
        str | None, typer.Argument(metavar="OUTPUT", show_default=False, help="A name that ends in .virtual.json.")
    ] = None,
    **options: Any,
) -> None:
    """Describe the safetensors files of a conversion, without writing them.

    OUTPUT is a small file that records which bytes of SOURCE, with which casts, make up each file. Every command reads
    it like the files themselves, as long as SOURCE does not change. ckptconv convert SOURCE OUTPUT does the same, if
    OUTPUT ends in .virtual.json.

    \b
    Examples:
      ckptconv virtual runs/7b/checkpoints step.virtual.json
      ckptconv virtual --dtype bf16 --max-shard-size 5GB dcp/step-1000 step.virtual.json
    """
    from ckptconv.features.virtual.description import SUFFIX

    stem, _ = os.path.splitext(basename(source.rstrip("/")))
    target = required(output, options, f", such as {shlex.quote((stem.strip('.') or 'step') + SUFFIX)}")
    if not target.endswith(SUFFIX):
        if source.endswith(SUFFIX) and (is_remote(target) or os.path.exists(target)):
            raise UsageError(
                f"{source} is the name of a virtual checkpoint, but it comes first.",
                f"SOURCE comes before OUTPUT: ckptconv virtual {shlex.quote(target)} {shlex.quote(source)}",
            )
        raise UsageError(
            f"{target or 'An empty text'} is not a name for a virtual checkpoint.",
            f"Give a name that ends in {SUFFIX}.",
        )
    convert_one("virtual", "", source, target, options)
