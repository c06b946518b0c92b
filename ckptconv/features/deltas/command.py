"""`ckptconv patch`: apply deltas to a checkpoint."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ckptconv.cli import signals
from ckptconv.cli.options import SHOWING, divided, named, run, taking
from ckptconv.features.deltas.options import PATCHING_TOO

OTHER_WORDS = {"patch": ("apply",)}


@taking(
    PATCHING_TOO["squash"],
    *named(
        "into max_shard_size dtype key strip_prefix rename copy_config tag exclude_frozen_parameters master unstack"
    ),
    *named("raw alone"),
    *named("jobs memory fsync clobber overwrite spool_dir manifest dry_run"),
    *SHOWING,
)
def patch(
    base: Annotated[
        str, typer.Argument(metavar="BASE", show_default=False, help="What the first delta changes, of any format.")
    ],
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="DELTA... OUTPUT",
            show_default=False,
            help="Directories of deltas, in order; then a directory, or a name that ends in .safetensors, or in "
            ".virtual.json.",
        ),
    ],
    **options: Any,
) -> None:
    """Apply deltas to a checkpoint.

    A delta is what `ckptconv diff --delta` writes, or slime. Several are applied one after the other, and each has to
    change the version that the one before makes. OUTPUT is what a conversion of BASE would be, with the changes. The
    checksum of every tensor that was changed is compared before OUTPUT gets its name. If OUTPUT ends in .virtual.json,
    it describes BASE and the deltas, and every command reads it as one checkpoint.

    \b
    Examples:
      ckptconv patch base/ deltas/weight_v000001 model/
      ckptconv patch base/ deltas/weight_v* model.safetensors
      ckptconv patch --squash base/ deltas/weight_v* deltas/all
    """
    from ckptconv.features.deltas.patching import patch as apply

    if options.pop("squash", False):
        from ckptconv.features.deltas.squashing import squash as apply

    deltas, target = divided(words, options, "patch needs a BASE, at least one DELTA, and an OUTPUT.")
    output, report = run("patch", options, apply, base, deltas, target, before_commit=signals.ignore)
    output.done(report)
