"""`ckptconv verify`: an output compared with its source."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ckptconv.cli.options import SHOWING, named, run, taking
from ckptconv.options.table import OPTIONS, TENSORS, VERIFYING

OTHER_WORDS = {"verify": ("check", "validate", "test")}


@taking(
    *named("raw alone tag exclude_frozen_parameters master unstack"),
    VERIFYING["states"],
    *(each.explained("Verify the universal checkpoint in DIR.") for each in named("universal")),
    OPTIONS["for_hub"].explained("OUTPUT was written with --for-hub."),
    OPTIONS["to"].explained("OUTPUT is of this kind.", "from its name and the manifest"),
    *named("zero_stage fresh_optimizer per_rank opaque drop_opaque"),
    *named("chunks model_key optimizer_key flat_optimizer fill_states order"),
    OPTIONS["manifest"].explained("The manifest that the conversion wrote; default: the one in OUTPUT."),
    *TENSORS,
    *named("spool_dir"),
    *SHOWING,
)
def verify_(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", show_default=False, help="The source of the conversion, of any format.")
    ],
    output: Annotated[
        str | None, typer.Argument(metavar="OUTPUT", show_default=False, help="The output of the conversion.")
    ] = None,
    **options: Any,
) -> None:
    """Check that an output matches its source bit for bit.

    verify reads both again, with code that conversions do not use, and compares every name, dtype, shape, tied name and
    structure record, and every element bit for bit. It takes the options of the conversion from its manifest, in OUTPUT
    or --manifest FILE; options given here override them. Exit code 1: they differ, and the error names the difference.
    An OUTPUT alone is compared with the digests in its manifest, which a conversion with --digest writes.

    \b
    Examples:
      ckptconv verify model.pt model.safetensors
      ckptconv verify --dtype bfloat16 runs/7b/checkpoints model/
      ckptconv verify model.safetensors model.pt
      ckptconv verify model/
    """
    from ckptconv.cli.reports import of_verification
    from ckptconv.verification.verify import verify

    shown, done = run("verify", options, verify, source, output)
    shown.report(done, of_verification(done, shown.verbose))
