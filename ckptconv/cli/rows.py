"""The commands for embedding tables of whole rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from ckptconv.cli import signals
from ckptconv.cli.options import LAYOUT, MAKING, SHOWING, Tables, divided, named, output_of, taking
from ckptconv.cli.typer_compat import Command, Group
from ckptconv.options.table import PACKING, ROWS

rows = typer.Typer(
    name="rows",
    cls=Group,
    help="""Split, pack and check embedding tables of whole rows.

In these, header, weight and optimizer state of a row lie together.

\b
Examples:
  ckptconv rows split --embedding-dim 64 --optimizer adagrad kv.pt parts
  ckptconv rows pack parts kv.pt
""",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@rows.command("split", cls=Command)
@taking(*named("into"), ROWS["names"], ROWS["decode"], *MAKING)
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
      ckptconv rows split --embedding-dim 64 --optimizer adagrad kv.pt parts/
      ckptconv rows split --embedding-dim 8 --optimizer adam kv.pt t.safetensors
    """
    from ckptconv.rows.split import split

    _make_rows("rows split", split, words, "a TABLE", options)


@rows.command("pack", cls=Command)
@taking(*named("into"), PACKING["names"], PACKING["name"], *MAKING)
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

    What rows split made needs no options. Other tensors need --optimizer, and --part where they are called otherwise
    than weight_id, metadata, weight, momentum1, momentum2, prev_iter and pad. OUTPUT is safetensors, or a file for
    torch.load if it ends in .pt, .pth, .bin or .ckpt.

    \b
    Examples:
      ckptconv rows pack parts/ kv.pt
      ckptconv rows pack --optimizer adam --part weight=t1.weight model.pt kv.pt
    """
    from ckptconv.rows.pack import pack

    _make_rows("rows pack", pack, words, "a SOURCE", options)


@rows.command("check", cls=Command)
@taking(
    *(ROWS[name] for name in ("names", "global_id_offset", "bucket_size")),
    *LAYOUT,
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
      ckptconv rows check --embedding-dim 64 --optimizer adagrad kv.pt
      ckptconv rows check parts/
    """
    from ckptconv.rows.check import check

    shown = output_of("rows check", options)
    with shown.progress() as progress:
        report = check(table, progress=progress, on_total=progress.begin, **options)
    signals.ignore()
    shown.rows_checked(report)


def _make_rows(command: str, make: Callable[..., Any], words: list[str], what: str, options: dict[str, Any]) -> None:
    paths, target = divided(words, options, f"{command} needs {what} and an OUTPUT.")
    output = output_of(command, options)
    with output.progress() as progress:
        report = make(
            paths, target, progress=progress, on_total=progress.begin, before_commit=signals.ignore, **options
        )
    signals.ignore()
    output.done(report)
