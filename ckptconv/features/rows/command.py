"""The commands for embedding tables of whole rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptconv.cli import signals
from ckptconv.cli.lines import format_memory
from ckptconv.cli.options import SHOWING, divided, named, run, taking
from ckptconv.cli.typer_compat import Command, Group
from ckptconv.features.rows.options import LAYOUT, PACKING, ROWS
from ckptconv.text import format_size

if TYPE_CHECKING:
    from ckptconv.features.rows.check import CheckReport

# The layout of a row, and the options of commands that write rows.
_LAYOUT = list(LAYOUT.values())
_MAKING = [*_LAYOUT, *named("jobs memory fsync clobber overwrite spool_dir dry_run verify"), *SHOWING]
Tables = Annotated[
    list[str],
    typer.Argument(
        metavar="TABLE...", show_default=False, help=("The file or directory of the table, or of its shards.")
    ),
]
OTHER_WORDS = {"rows split": ("unpack", "split-rows"), "rows pack": ("pack",)}
OTHER_OPTIONS = {
    "--rows --row-range": (
        "In Python, ckptconv.open(PATH).get_slice(NAME)[5:10] reads rows of any tensor; --vocab N keeps the first rows "
        "of a vocabulary. ckptconv rows is for embedding tables of FBGEMM."
    ),
}

rows = typer.Typer(
    name="rows",
    cls=Group,
    help="""Split, pack and check FBGEMM's embedding tables of whole rows.

In such tables, the header, weight and optimizer state of a row are stored together.

\b
Examples:
  ckptconv rows split --embedding-dim 64 --method adagrad kv.pt parts
  ckptconv rows pack parts kv.pt
""",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@rows.command("split", cls=Command)
@taking(*named("into"), ROWS["names"], ROWS["decode"], *_MAKING)
def rows_split(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="TABLE... OUTPUT",
            show_default=False,
            help=(
                "The file or directory of the table, or of its shards; then the output: one .safetensors file, or "
                "a directory."
            ),
        ),
    ],
    **options: Any,
) -> None:
    """Split a table of whole rows into its parts.

    The parts are weight_id, metadata, weight and the optimizer states. TABLE is a .pt file or safetensors; several are
    joined. Nonzero padding is kept as pad, so that rows pack restores the identical table.

    \b
    Examples:
      ckptconv rows split --embedding-dim 64 --method adagrad kv.pt parts/
      ckptconv rows split --embedding-dim 8 --method adam kv.pt t.safetensors
    """
    from ckptconv.features.rows.split import split

    _make_rows("rows split", split, words, "a TABLE", options)


@rows.command("pack", cls=Command)
@taking(*named("into"), PACKING["names"], PACKING["name"], *_MAKING)
def rows_pack(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE... OUTPUT",
            show_default=False,
            help="The files or directories of the parts; then the output: one file, or a directory.",
        ),
    ],
    **options: Any,
) -> None:
    """Pack the parts of rows into a table of whole rows.

    The output of rows split needs no options. Other tensors need --method, and --column if their names are not
    weight_id, metadata, weight, momentum1, momentum2, prev_iter and pad. OUTPUT is safetensors, or a file for
    torch.load if it ends in .pt, .pth, .bin or .ckpt.

    \b
    Examples:
      ckptconv rows pack parts/ kv.pt
      ckptconv rows pack --method adam --column weight=t1.weight model.pt kv.pt
    """
    from ckptconv.features.rows.pack import pack

    _make_rows("rows pack", pack, words, "a SOURCE", options)


@rows.command("check", cls=Command)
@taking(
    *(ROWS[name] for name in ("names", "global_id_offset", "bucket_size")),
    *_LAYOUT,
    *named("spool_dir"),
    *SHOWING,
)
def rows_check(
    table: Tables,
    **options: Any,
) -> None:
    """Check a table of whole rows, or its parts.

    The ids must be unique, and the tensors saved with the table (weight_id, bucket, metadata, momentum) must agree with
    it. The report says whether headers have global ids, or local ids as in files from before August 2025. Exit code 1:
    the check failed; the first wrong rows are named.

    \b
    Examples:
      ckptconv rows check --embedding-dim 64 --method adagrad kv.pt
      ckptconv rows check parts/
    """
    from ckptconv.features.rows.check import check

    output, report = run("rows check", options, check, table)
    output.report(report, _lines(report))


def _make_rows(command: str, make: Callable[..., Any], words: list[str], inputs: str, options: dict[str, Any]) -> None:
    paths, target = divided(words, options, f"{command} needs {inputs} and an OUTPUT.")
    output, report = run(command, options, make, paths, target, before_commit=signals.ignore)
    output.done(report)


def _lines(report: CheckReport) -> list[str]:
    from ckptconv.text import count_of

    lines = [f"{report.input}: {report.table}: {count_of(report.rows, 'row')}, all ids unique"]
    ids = "global ids" if report.ids == "global" else f"local ids, lower than weight_id by {report.offset}"
    if "weight_id" in report.checked:
        lines.append(f"  headers have {ids}")
    compared = ", ".join(report.checked) or "nothing, because the table is stored without its parts"
    lines.append(f"  compared with the rows: {compared}")
    if report.bucket_size:
        least, most = report.bucket_size
        span = f"{least:,}" if least == most else f"{least:,} to {most:,}" if most else f"{least:,} or more"
        lines.append(f"  a bucket spans {span} ids")
    if report.padding:
        lines.append(f"  {count_of(report.padding, 'row')} with nonzero padding")
    lines.append(
        f"read {format_size(report.bytes_read)} in {max(report.seconds, 0.01):.2f} s, "
        f"peak memory {format_memory(report.peak_rss_bytes)}"
    )
    return lines
