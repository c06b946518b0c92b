"""The program: its name, its description of itself, and the registry of its commands."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptconv.cli.registered import COMMANDS
from ckptconv.cli.typer_compat import App, Group

ABOUT = """
Convert checkpoints of any size to safetensors, with little memory and without running any code in them.

\b
Examples:
  ckptconv convert model.pt              writes model.safetensors
  ckptconv convert checkpoints/ model/   converts a DeepSpeed run, for example
  ckptconv inspect model.pt              shows its format, tensors and sizes

ckptconv help COMMAND shows a command's options and more examples; ckptconv help options shows the shared options.
Exit codes: 0 done; 1 failed, or different; 2 wrong usage; 3 unsafe; 4 damaged or incomplete; 5 not supported.
"""

app = App(
    commands=COMMANDS,
    name="ckptconv",
    cls=Group,
    help=ABOUT,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    # Accept long options in DeepSpeed's spelling too: --max_shard_size.
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda token: token.replace("_", "-"),
    },
)


def _version(wanted: bool) -> None:
    if wanted:
        from ckptconv.cli.versions import versions

        typer.echo("\n".join(versions()))
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass
