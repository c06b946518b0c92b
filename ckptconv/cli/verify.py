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
    OPTIONS["universal"].explained("Verify the universal checkpoint there."),
    OPTIONS["for_hub"].explained("OUTPUT was made with --for-hub."),
    OPTIONS["to"].explained("OUTPUT is of this kind.", "what its name and the manifest say"),
    *named("zero_stage fresh_optimizer per_rank opaque drop_opaque"),
    *named("chunks model_key optimizer_key flat_optimizer fill_states order"),
    OPTIONS["manifest"].explained("What the conversion wrote with that; default: in OUTPUT."),
    *TENSORS,
    *named("spool_dir"),
    *SHOWING,
)
def verify_(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", show_default=False, help="What was converted, of any format.")
    ],
    output: Annotated[
        str | None, typer.Argument(metavar="OUTPUT", show_default=False, help="What the conversion wrote.")
    ] = None,
    **options: Any,
) -> None:
    """Is this output exactly that source?

    Reads both again, by other means than a conversion, and compares every name, dtype, shape, tied name and structure
    record, and every element bit for bit. The options of the conversion are read from its manifest, in OUTPUT or
    --manifest FILE; those given here come first. Exit code 1: it is not, and what differs is named.

    \b
    Examples:
      ckptconv verify model.pt model.safetensors
      ckptconv verify --dtype bfloat16 runs/7b/checkpoints model/
      ckptconv verify model.safetensors model.pt
    """
    from ckptconv.cli.reports import of_verification
    from ckptconv.verification.verify import verify

    shown, done = run("verify", options, verify, source, output)
    shown.report(done, of_verification(done, shown.verbose))
