"""`ckptconv patch`: apply deltas to a checkpoint."""

from __future__ import annotations

import shlex
from typing import Annotated, Any

import typer

from ckptconv.cli import signals
from ckptconv.cli.options import SHOWING, divided, named, run, taking
from ckptconv.errors import UNWRITTEN, UsageError
from ckptconv.features.deltas.options import PATCHING_TOO
from ckptconv.storage.location import Location
from ckptconv.storage.paths import normalize

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
        str,
        typer.Argument(
            metavar="BASE", show_default=False, help=("The checkpoint that the first delta changes, in any format.")
        ),
    ],
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="DELTA... OUTPUT",
            show_default=False,
            help="Directories of deltas, in order; then the output: a directory, or a name that ends in .safetensors "
            "or .virtual.json.",
        ),
    ],
    **options: Any,
) -> None:
    """Apply deltas to a checkpoint.

    `ckptconv diff --delta` or slime write deltas. patch applies several of them in order; each must change the version
    that the previous one produces. OUTPUT is like a conversion of BASE, with the changes. Before OUTPUT is published,
    patch compares the checksum of every changed tensor. If OUTPUT ends in .virtual.json, it describes BASE and the
    deltas, and every command reads it as one checkpoint.

    \b
    Examples:
      ckptconv patch base/ deltas/weight_v000001 model/
      ckptconv patch base/ deltas/weight_v* model.safetensors
      ckptconv patch --squash base/ deltas/weight_v* deltas/all
    """
    from ckptconv.features.deltas.patching import patch as apply
    from ckptconv.features.deltas.reading import is_delta

    squash = ["--squash"] if options.pop("squash", False) else []
    if squash:
        from ckptconv.features.deltas.squashing import squash as apply

    if len(words) == 1 and "into" not in options and is_delta(Location(normalize(words[0]))):
        whole = shlex.join(["ckptconv", "patch", *squash, base, words[0], "OUTPUT"])
        raise UsageError(f"OUTPUT is missing: {words[0]} is a delta. {UNWRITTEN}", f"Add it: {whole}")
    deltas, target = divided(words, options, "patch needs a BASE, at least one DELTA, and an OUTPUT.")
    output, report = run("patch", options, apply, base, deltas, target, before_commit=signals.ignore)
    output.done(report)
