"""`ckptconv serve`: the files of a conversion over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptconv.cli import signals
from ckptconv.cli.options import SHOWING, named, output_of, taking
from ckptconv.errors import StoppedError
from ckptconv.features.serve.options import SERVING
from ckptconv.options.table import TENSORS

if TYPE_CHECKING:
    from ckptconv.features.serve.printed import Serving

OTHER_OPTIONS = {"-p": "Use --port N.", "--address --bind --listen": "Use --host ADDRESS."}
Checkpoint = Annotated[
    str, typer.Argument(metavar="SOURCE", show_default=False, help="A checkpoint in any format: a path or a URL.")
]


@taking(
    *SERVING.values(),
    *named("tag exclude_frozen_parameters master unstack raw alone"),
    *TENSORS,
    *named("spool_dir"),
    *SHOWING,
)
def serve(source: Checkpoint, *, host: str = "127.0.0.1", port: int = 0, **options: Any) -> None:
    """Serve the safetensors files of a conversion over HTTP, without writing them.

    SOURCE may be a virtual checkpoint. The files are at http://HOST:PORT/NAME: other commands take the first address
    printed. huggingface_hub finds them with HF_ENDPOINT, in a repository of any name. Ctrl-C stops the server.

    \b
    Examples:
      ckptconv serve runs/7b/checkpoints --port 8000
      HF_ENDPOINT=http://127.0.0.1:8000 python -c '... from_pretrained("any/name")'
    """
    from ckptconv.cli.console import say
    from ckptconv.features.serve.server import Server
    from ckptconv.features.virtual_files.files import VirtualFiles
    from ckptconv.formats.model_files import INDEX_SUFFIX, SUFFIX
    from ckptconv.formats.source import CONFIG
    from ckptconv.process import settled

    shown = output_of("serve", options)
    request = say if shown.verbose else (lambda line: None)
    with VirtualFiles(source, **options) as files, Server(files, host, port, request) as server, settled():
        files.lost.warn = server.warn = shown.warn
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
            weights = [name for name in files if name.endswith((SUFFIX, INDEX_SUFFIX))]
            whole = next((name for name in weights if name.endswith(INDEX_SUFFIX)), weights[0])
            shown.tell([f"for ckptconv and curl: {server.url}/{whole}", f"for transformers: HF_ENDPOINT={server.url}"])
            if not server.is_local:
                elsewhere = (
                    f" On another machine, replace {host} with a name or address of this machine."
                    * server.is_everywhere
                )
                shown.note(f"Every machine that reaches {host} can read the files: there is no password.{elsewhere}")
            for note in files.notes:
                shown.note(note)
            if CONFIG not in files:
                shown.note(
                    f"{CONFIG}, which from_pretrained requires, is not next to SOURCE. To take it from a model, use "
                    "--like REF."
                )
        try:
            server.serve_forever()
        except StoppedError:
            signals.ignore()  # this is how it ends
