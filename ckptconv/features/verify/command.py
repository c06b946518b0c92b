"""`ckptconv verify`: an output compared with its source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptconv.cli.lines import format_memory
from ckptconv.cli.options import SHOWING, named, run, taking
from ckptconv.cli.reports import FEW, contents, duration
from ckptconv.features.verify.keywords import VERIFYING
from ckptconv.options.table import OPTIONS, TENSORS
from ckptconv.storage.paths import dirname
from ckptconv.text import count_of, format_size, some

if TYPE_CHECKING:
    from ckptconv.features.verify.report import Verification

OTHER_OPTIONS = {
    "verify --digest --digests --sha256 --hash": (
        "ckptconv verify OUTPUT, without SOURCE, compares the files with the digests in its manifest."
    ),
    "verify --checksum --checksums": (
        "To compare the checksums in SOURCE, use: ckptconv convert SOURCE OUTPUT --checksum. To compare the digests in "
        "the manifest of OUTPUT, omit SOURCE."
    ),
}
OTHER_WORDS = {"verify": ("check", "validate", "test")}


@taking(
    *named("raw alone tag exclude_frozen_parameters master unstack"),
    VERIFYING["states"],
    *(each.explained("Verify the universal checkpoint in DIR.") for each in named("universal")),
    OPTIONS["for_hub"].explained("OUTPUT was written with --for-hub."),
    OPTIONS["to"].explained("The kind of OUTPUT.", "from its name and the manifest"),
    *named("zero_stage fresh_optimizer per_rank opaque drop_opaque"),
    *named("chunks model_key optimizer_key flat_optimizer fill_states order"),
    OPTIONS["manifest"].explained("The manifest of the conversion (default: the manifest in OUTPUT)."),
    *TENSORS,
    *named("spool_dir"),
    *SHOWING,
)
def verify_(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", show_default=False, help="The source, of any format; or only an output.")
    ],
    output: Annotated[
        str | None, typer.Argument(metavar="OUTPUT", show_default=False, help="The output of the conversion.")
    ] = None,
    **options: Any,
) -> None:
    """Check that an output matches its source bit for bit.

    verify reads SOURCE and OUTPUT with code that conversions do not use. It compares every name, dtype, shape, tied
    name and structure record, and every element bit for bit. It reads the options of the conversion from its manifest,
    in OUTPUT or --manifest FILE; options on the command line override them. Exit code 1: SOURCE and OUTPUT differ; the
    error names the difference. Without SOURCE, verify compares OUTPUT with the digests in its manifest, which a
    conversion with --digest writes.

    \b
    Examples:
      ckptconv verify model.pt model.safetensors
      ckptconv verify --dtype bfloat16 runs/7b/checkpoints model/
      ckptconv verify model.safetensors model.pt
      ckptconv verify model/
    """
    from ckptconv.features.verify.verifying import verify

    shown, done = run("verify", options, verify, source, output)
    shown.report(done, _report(done, shown.verbose))


def _report(done: Verification, verbose: bool) -> list[str]:
    """Return the lines of the report of a verification that found no difference."""
    lines: list[str] = []
    verb = "compared" if done.inert else "verified"
    if verbose or len(done.outputs) <= FEW:
        lines.extend(f"{verb} {file.path} ({contents(file.bytes, file.tensors)})" for file in done.outputs)
    else:
        tensors = min(sum(file.tensors for file in done.outputs), done.tensors)  # files may hold parts of tensors
        together = contents(sum(file.bytes for file in done.outputs), tensors)
        places = some([*dict.fromkeys(dirname(file.path) for file in done.outputs)], form=str)
        lines.append(f"{verb} {len(done.outputs)} files in {places} ({together})")
    if done.manifest:
        chosen = ", ".join(f"{name}={value}" for name, value in done.options.items())
        lines.append(f"converted with {chosen}, according to {done.manifest}")
    lines.extend(done.notes)
    tied = f", including {count_of(len(done.aliases), 'tied name')}" if done.aliases else ""
    averaged = f" averaged with {count_of(len(done.averaged), 'other')}" if done.averaged else ""
    merged = f" with {count_of(len(done.adapters), 'adapter')} merged" if done.adapters else ""
    patched = f" with {count_of(len(done.deltas), 'delta')} applied" if done.deltas else ""
    lines.append(
        f"equal to {done.input}{averaged}{merged}{patched}: {count_of(done.tensors, 'tensor')}{tied}, "
        f"{format_size(done.bytes_compared)} compared in {duration(done.seconds, done.bytes_compared)}, "
        f"peak memory {format_memory(done.peak_rss_bytes)}"
    )
    if done.unchecked:
        lines.append(f"{done.input} contains checksums, which were not compared: convert --checksum compares them.")
    return lines
