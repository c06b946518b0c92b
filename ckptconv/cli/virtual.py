"""The commands for virtual checkpoints: `virtual` writes one, `serve` offers the files of one over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptconv.cli import signals
from ckptconv.cli.options import SHOWING, named, output_of, required, run, taking
from ckptconv.errors import StoppedError, UsageError
from ckptconv.options.table import TENSORS

if TYPE_CHECKING:
    from ckptconv.cli.printed import Serving

Checkpoint = Annotated[
    str, typer.Argument(metavar="SOURCE", show_default=False, help="A checkpoint of any format: a path or a URL.")
]


@taking(
    *named("into tag exclude_frozen_parameters master unstack raw alone"),
    *TENSORS,
    *named("fsync clobber overwrite manifest depfile dry_run spool_dir"),
    *SHOWING,
)
def virtual(
    source: Checkpoint,
    output: Annotated[
        str | None, typer.Argument(metavar="OUTPUT", show_default=False, help="A name that ends in .virtual.json.")
    ] = None,
    **options: Any,
) -> None:
    """Describe the safetensors files of a conversion, without writing them.

    OUTPUT is a small file that says which bytes of SOURCE, cast how, make up each file. Every command reads it like the
    files themselves, as long as SOURCE stays as it is.

    \b
    Examples:
      ckptconv virtual runs/7b/checkpoints step.virtual.json
      ckptconv virtual --dtype bf16 --max-shard-size 5GB dcp/step-1000 step.virtual.json
    """
    from ckptconv.conversion import convert
    from ckptconv.formats.virtual import SUFFIX

    target = required(output, options)
    if not target.endswith(SUFFIX):
        raise UsageError(f"{target} is no name for a virtual checkpoint.", f"Give one that ends in {SUFFIX}.")
    shown, report = run("virtual", options, convert, source, target, before_commit=signals.ignore)
    shown.done(report)


@taking(
    *named("host port tag exclude_frozen_parameters master unstack raw alone"),
    *TENSORS,
    *named("spool_dir"),
    *SHOWING,
)
def serve(source: Checkpoint, *, host: str = "127.0.0.1", port: int = 0, **options: Any) -> None:
    """Offer the safetensors files of a conversion over HTTP, without writing them.

    SOURCE may be a virtual checkpoint. The files are at http://HOST:PORT/NAME, and where huggingface_hub looks for
    them, in a repository of any name. Ctrl-C ends it.

    \b
    Examples:
      ckptconv serve runs/7b/checkpoints --port 8000
      HF_ENDPOINT=http://127.0.0.1:8000 python -c '... from_pretrained("any/name")'
    """
    from ckptconv.formats.companions import CONFIG
    from ckptconv.library.server import Server
    from ckptconv.library.virtual import VirtualFiles
    from ckptconv.process import settled

    shown = output_of("serve", options)
    with VirtualFiles(source, **options) as files, Server(files, host, port, shown.request) as server, settled():
        files.overflows.warn = shown.warn
        for warning in files.warnings:
            shown.warn(warning)
        if shown.json:
            served: Serving = {
                "input": source,
                "url": server.url,
                "files": {name: files[name].size for name in files},
                "warnings": files.warnings,
                "notes": files.notes,
            }
            shown.print_json(True, served)
        else:
            shown.tell([server.url])
            for note in files.notes:
                shown.note(note)
            if CONFIG not in files:
                shown.note(
                    f"{CONFIG}, which from_pretrained needs, is not beside SOURCE. --like REF takes it from a model."
                )
        try:
            server.serve_forever()
        except StoppedError:
            signals.ignore()  # this is how it ends
