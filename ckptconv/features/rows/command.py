"""The commands for embedding tables of whole rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptconv.cli import signals
from ckptconv.cli.options import SHOWING, divided, named, run, taking
from ckptconv.cli.typer_compat import Command, Group
from ckptconv.features.rows.options import LAYOUT, PACKING, ROWS
from ckptconv.text import format_memory, format_size

if TYPE_CHECKING:
    from ckptconv.features.rows.check import CheckReport

# The layout of a row, and the options of commands that write rows.
_LAYOUT = list(LAYOUT.values())
_MAKING = [*_LAYOUT, *named("jobs memory fsync clobber overwrite spool_dir dry_run verify"), *SHOWING]
Tables = Annotated[
    list[str], typer.Argument(metavar="TABLE...", show_default=False, help="Where the table is, or its shards.")
]
OTHER_WORDS = {"rows split": ("split", "unpack"), "rows pack": ("pack",)}

rows = typer.Typer(
    name="rows",
    cls=Group,
    help="""Split, pack and check embedding tables of whole rows.

In these, header, weight and optimizer state of a row lie together.

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
            help="Where the table is, or its shards; then one .safetensors file, or a directory.",
        ),
    ],
    **options: Any,
) -> None:
    """Split a table of whole rows into its parts.

    They are weight_id, metadata, weight and the optimizer's states. TABLE is a .pt file, or safetensors; several are
    joined. Padding that is not zero is kept as pad, so that rows pack
    gives back the very same table.

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
            help="Where the parts are; then a file or a directory.",
        ),
    ],
    **options: Any,
) -> None:
    """Pack such parts into a table of whole rows.

    What rows split made needs no options. Other tensors need --method, and --column where they are called otherwise
    than weight_id, metadata, weight, momentum1, momentum2, prev_iter and pad. OUTPUT is safetensors, or a file for
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

    Its ids are unique; and what is saved beside the table agrees with it, as far as it is there: weight_id, bucket,
    metadata, momentum. Says whether headers have global or local ids, as files before August 2025 have. Exit code 1:
    something is wrong, and the first rows where it is are named.

    \b
    Examples:
      ckptconv rows check --embedding-dim 64 --method adagrad kv.pt
      ckptconv rows check parts/
    """
    from ckptconv.features.rows.check import check

    output, report = run("rows check", options, check, table)
    output.report(report, _lines(report))


def _make_rows(command: str, make: Callable[..., Any], words: list[str], what: str, options: dict[str, Any]) -> None:
    paths, target = divided(words, options, f"{command} needs {what} and an OUTPUT.")
    output, report = run(command, options, make, paths, target, before_commit=signals.ignore)
    output.done(report)


def _lines(report: CheckReport) -> list[str]:
    from ckptconv.text import count_of

    lines = [f"{report.input}: {report.table}: {count_of(report.rows, 'row')}, and no id twice"]
    ids = "global ids" if report.ids == "global" else f"local ids, less than weight_id by {report.offset}"
    if "weight_id" in report.checked:
        lines.append(f"  headers have {ids}")
    compared = ", ".join(report.checked) or "nothing: there is nothing of it beside the table"
    lines.append(f"  compared with the rows: {compared}")
    if report.bucket_size:
        least, most = report.bucket_size
        span = f"{least:,}" if least == most else f"{least:,} to {most:,}" if most else f"{least:,} or more"
        lines.append(f"  a bucket spans {span} ids")
    if report.padding:
        lines.append(f"  {count_of(report.padding, 'row')} with something in the padding")
    lines.append(
        f"read {format_size(report.bytes_read)} in {max(report.seconds, 0.01):.2f} s, "
        f"peak memory {format_memory(report.peak_rss_bytes)}"
    )
    return lines
