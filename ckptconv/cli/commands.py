"""The command line: options in, library calls out. No logic of its own."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptconv.cli import signals
from ckptconv.cli.console import _output
from ckptconv.cli.options import (
    CARRYING_OUT,
    CONVERTING,
    NAMING,
    SHOWING,
    Destination,
    DropOpaque,
    ExcludeFrozen,
    Input,
    PerRank,
    Tag,
    _dtype,
    _option,
    parse_common,
    storage_options,
    taking,
)
from ckptconv.cli.rows import rows
from ckptconv.cli.typer_compat import Command, Group
from ckptconv.errors import UsageError
from ckptconv.version import __version__

if TYPE_CHECKING:
    pass


ABOUT = """
Convert checkpoints of any size to safetensors: nothing in them runs, and memory stays small.

\b
Examples:
  ckptconv inspect model.pt                  what is it, and what is in it?
  ckptconv pt2safetensors model.pt           makes model.safetensors
  ckptconv zero-to-fp32 checkpoints/ model/  of a DeepSpeed run

ckptconv COMMAND --help has the options of each, and more examples.
"""
app = typer.Typer(
    name="ckptconv",
    cls=Group,
    help=ABOUT,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    # Long options are taken in DeepSpeed's spelling too: --max_shard_size.
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda token: token.replace("_", "-"),
    },
)


Opaque = Annotated[
    str,
    typer.Option(
        "--opaque",
        metavar="keep|drop",
        show_default=False,
        help="Objects of classes that are not known to be data: write them, or leave them out. Default: refuse.",
    ),
]


def _version(wanted: bool) -> None:
    if wanted:
        from ckptconv.cli.commands import versions

        typer.echo("\n".join(versions()))
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command("pt2safetensors", cls=Command)
@taking(CONVERTING)
def pt2safetensors(source: Input, output: Destination = None, **options: Any) -> None:
    """Convert a .pt, .pth, .bin or .ckpt file to safetensors.

    Nested state keeps its structure in a record beside the tensors. Without OUTPUT, x.pt becomes x.safetensors.

    \b
    Examples:
      ckptconv pt2safetensors model.pt
      ckptconv pt2safetensors --key state_dict epoch=3.ckpt model.safetensors
    """
    _convert("pt2safetensors", "torch", source, output, options)


@app.command("safetensors2pt", cls=Command)
@taking({name: option for name, option in CONVERTING.items() if name not in NAMING})
def safetensors2pt(
    source: Annotated[
        str, typer.Argument(metavar="INPUT", show_default=False, help="A .safetensors file, an index or a directory.")
    ],
    output: Annotated[
        str,
        typer.Argument(metavar="OUTPUT", show_default=False, help="A name that ends in .pt, .pth, .bin or .ckpt."),
    ],
    opaque: Opaque = "",
    drop_opaque: DropOpaque = False,
    **options: Any,
) -> None:
    """Write a .pt file of a safetensors file or directory.

    With the structure record that pt2safetensors keeps, torch.load gives back the very state that was saved once:
    containers, order, parameters, shared tensors. INPUT is a file, an index or a directory; OUTPUT ends in .pt, .pth,
    .bin or .ckpt. Whoever loads a .pt file runs what its objects name: those of classes that are not known to be data
    are written only with --opaque keep.

    \b
    Examples:
      ckptconv safetensors2pt model.safetensors model.pt
      ckptconv safetensors2pt --opaque drop model.safetensors model.pt
    """
    options |= {"opaque": opaque, "drop_opaque": drop_opaque}
    _convert("safetensors2pt", "safetensors", source, output, options)


@app.command("zero-to-fp32", cls=Command)
@taking(CONVERTING)
def zero_to_fp32(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", show_default=False, help="The directory with `latest`, or a tag's.")
    ],
    output: Destination = None,
    tag: Tag = "",
    exclude_frozen_parameters: ExcludeFrozen = False,
    optimizer: Annotated[
        str, typer.Option("--optimizer", metavar="PATH", help="Write the optimizer states there, by parameter.")
    ] = "",
    universal: Annotated[
        str, typer.Option("--universal", metavar="DIR", help="Write a universal checkpoint there, to resume from.")
    ] = "",
    per_rank: PerRank = False,
    safe_serialization: Annotated[
        bool, typer.Option("--safe-serialization", help="Accepted and ignored: the output is always safe.")
    ] = False,
    **options: Any,
) -> None:
    """Join the fp32 weights of a DeepSpeed checkpoint.

    They are the master weights of ZeRO 1, 2 or 3; what is stored in 16 bits only is widened, unless --dtype says keep.
    CHECKPOINT is the directory that holds `latest`, or one tag's. OUTPUT is a directory, or one file if it ends in
    .safetensors. Optimizer states are not read, unless --optimizer asks for them; OUTPUT may then be left out.

    \b
    Examples:
      ckptconv zero-to-fp32 runs/7b/checkpoints model/
      ckptconv zero-to-fp32 -t global_step1000 checkpoints model.safetensors
    """
    if output is None and not (optimizer or universal):
        raise UsageError("zero-to-fp32 needs an OUTPUT: a directory, or a name that ends in .safetensors.")
    options.update(
        tag=tag,
        exclude_frozen_parameters=exclude_frozen_parameters,
        optimizer=optimizer,
        universal=universal,
        per_rank=per_rank,
    )
    _convert("zero-to-fp32", "deepspeed", checkpoint, output, options)


@app.command("dcp2safetensors", cls=Command)
@taking(CONVERTING)
def dcp2safetensors(
    directory: Annotated[
        str, typer.Argument(metavar="DIR", show_default=False, help="The directory with .metadata, or the run's.")
    ],
    output: Destination = None,
    optimizer: Annotated[
        str, typer.Option("--optimizer", metavar="PATH", help="Write the optimizer states there, by parameter.")
    ] = "",
    **options: Any,
) -> None:
    """Join the files of a torch.distributed.checkpoint (FSDP).

    DIR holds .metadata and .distcp files, or is what FSDP, torchtitan, OLMo-core, accelerate or Lightning put such a
    directory in. The model is converted, under its own names: what is below `model`, `state_dict` or `module`, else
    all but the optimizer. --key takes another part, and --key . everything. OUTPUT is a directory, or one file if it
    ends in .safetensors; it may be left out with --optimizer.

    \b
    Examples:
      ckptconv dcp2safetensors checkpoints/step-1000 model/
      ckptconv dcp2safetensors step-1000 model/ --optimizer optimizer/
    """
    if output is None and not optimizer:
        raise UsageError("dcp2safetensors needs an OUTPUT: a directory, or a name that ends in .safetensors.")
    _convert("dcp2safetensors", "dcp", directory, output, {**options, "optimizer": optimizer})


@app.command("verify", cls=Command)
@taking({name: option for name, option in CONVERTING.items() if name not in CARRYING_OUT})
def verify_(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", show_default=False, help="What was converted, of any format.")
    ],
    output: Annotated[
        str | None, typer.Argument(metavar="OUTPUT", show_default=False, help="What the conversion wrote.")
    ] = None,
    tag: Tag = "",
    exclude_frozen_parameters: ExcludeFrozen = False,
    optimizer: Annotated[
        str, typer.Option("--optimizer", metavar="PATH", help="Verify the optimizer states there.")
    ] = "",
    universal: Annotated[
        str, typer.Option("--universal", metavar="DIR", help="Verify the universal checkpoint there.")
    ] = "",
    per_rank: PerRank = False,
    opaque: Opaque = "",
    drop_opaque: DropOpaque = False,
    manifest: Annotated[
        str, typer.Option("--manifest", metavar="FILE", help="What the conversion wrote with that; default: in OUTPUT.")
    ] = "",
    **options: Any,
) -> None:
    """Is this output exactly that source?

    Reads both again, by other means than a conversion, and compares every name, dtype, shape, tied name and structure
    record, and every element bit for bit. The options of the conversion are read from its manifest, in OUTPUT or
    --manifest FILE; those given here come first. Exit code 1: it is not, and the first difference is named.

    \b
    Examples:
      ckptconv verify model.pt model.safetensors
      ckptconv verify --dtype bfloat16 runs/7b/checkpoints model/
      ckptconv verify model.safetensors model.pt
    """
    from ckptconv.text import parse_size
    from ckptconv.verification.verify import verify

    shown = _output("verify", options)
    limit = options["max_shard_size"]
    options["max_shard_size"] = None if limit is None else parse_size(limit, "--max-shard-size")
    options["storage_options"] = storage_options(options["storage_options"])
    options["structure"] = not options.pop("no_structure")
    for name in ("include", "exclude", "rename"):
        options[name] = tuple(options[name] or ())
    with shown.progress() as progress:
        done = verify(
            source,
            output,
            progress=progress,
            announce=progress.begin,
            tag=tag,
            exclude_frozen_parameters=exclude_frozen_parameters,
            optimizer=optimizer,
            universal=universal,
            per_rank=per_rank,
            opaque=opaque,
            drop_opaque=drop_opaque,
            manifest=manifest,
            **options,
        )
    signals.ignore()
    shown.verified(done)


app.add_typer(rows)


@app.command("finish", cls=Command)
@taking(
    {
        "checksum": _option(bool, False, "--checksum", help="Read all again, and compare it with its checksums."),
        "no_fsync": CONVERTING["no_fsync"],
        "manifest": CONVERTING["manifest"],
        **{name: SHOWING[name] for name in ("storage_options", "json", "quiet", "verbose", "no_progress")},
    }
)
def finish_(
    outputs: Annotated[
        list[str], typer.Argument(metavar="OUTPUT...", show_default=False, help="What was made in parts.")
    ],
    **options: Any,
) -> None:
    """Publish outputs that were made in parts.

    OUTPUT is what the conversions with --part were given. All parts have to be there, or nothing is published, and the
    missing ones are named.

    \b
    Examples:
      ckptconv zero-to-fp32 --part 0/2 checkpoints model/
      ckptconv zero-to-fp32 --part 1/2 checkpoints model/
      ckptconv finish model/
    """
    from ckptconv.publish.finish import finish

    shown = _output("finish", options)
    options["fsync"] = not options.pop("no_fsync")
    options["storage_options"] = storage_options(options["storage_options"])
    with shown.progress() as progress:
        report = finish(outputs, publishing=signals.ignore, progress=progress, announce=progress.begin, **options)
    signals.ignore()
    shown.done(report)


@app.command("inspect", cls=Command)
@taking(SHOWING)
def inspect_(
    path: Annotated[
        str, typer.Argument(metavar="PATH", show_default=False, help="A file, a directory or a URL, of any format.")
    ],
    tag: Tag = "",
    depth: Annotated[
        str, typer.Option("--depth", metavar="N", help="Levels of modules; default: as many as fit a page.")
    ] = "",
    as_: Annotated[
        str,
        typer.Option("--as", metavar="DTYPE", help="What a conversion to DTYPE (fp32, bf16, fp16, keep) would give."),
    ] = "",
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", metavar="SIZE", help="And that in files of at most SIZE.")
    ] = "",
    html: Annotated[
        str, typer.Option("--html", metavar="FILE", help="Write a page that shows it: one file, without links.")
    ] = "",
    **options: Any,
) -> None:
    """Show what is inside a checkpoint. No tensor data is read.

    Modules that are alike, such as layers, are shown once. The page of --html has a map of where the bytes are, and a
    table of all tensors to search.

    \b
    Examples:
      ckptconv inspect model.pt
      ckptconv inspect --depth 2 --as bf16 checkpoints/
      ckptconv inspect --html model.html model.safetensors
    """
    from ckptconv.formats.detect import open_source
    from ckptconv.inspection.summary import summarize
    from ckptconv.process import no_garbage
    from ckptconv.rows import tables
    from ckptconv.storage.paths import normalize
    from ckptconv.text import format_size, parse_count, parse_size

    output = _output("inspect", options)
    levels = parse_count(depth, "--depth", 1000) if depth else None
    limit = parse_size(max_shard_size, "--max-shard-size") if max_shard_size else None
    dtype = _dtype(as_) if as_ else None
    # A million tensors are as many small objects, and all are shown.
    with no_garbage():
        source = open_source(
            normalize(path),
            tag=tag,
            inert=options["inert"],
            storage_options=storage_options(options["storage_options"]),
        )
        summary = summarize(source, list(tables.notes(tables.contents(source))))
        if as_ or limit:
            from ckptconv.inspection.summary import forecast

            summary["conversion"] = forecast(source, dtype, limit)
    if html:
        from ckptconv.inspection.page import write_page
        from ckptconv.outputs.targets import files_behind

        size = write_page(html, path, summary, files_behind(source))
        output.note(f"wrote {html} ({format_size(size)})")
    output.inspected(path, summary, levels)


def _convert(command: str, family: str, source: str, target: str | None, options: dict[str, Any]) -> None:
    from ckptconv.conversion import convert
    from ckptconv.text import parse_size

    output = _output(command, options)
    limit = options.get("max_shard_size")
    options["max_shard_size"] = None if limit is None else parse_size(limit, "--max-shard-size")
    parse_common(options)
    options["structure"] = not options.pop("no_structure")
    for name in ("include", "exclude", "rename"):
        options[name] = tuple(options.get(name) or ())
    part, address = options.pop("part"), options.pop("dask")
    if part:
        from ckptconv.publish.parts import parse_part

        options["part"] = parse_part(part, os.environ)
    if part and address:
        raise UsageError("--part and --dask are two ways to spread the work: give one of them.")
    with output.progress() as progress, contextlib.ExitStack() as stack:
        executor = None
        if address:
            from ckptconv.cli.dask import dask_executor

            executor = stack.enter_context(dask_executor(address))
        report = convert(
            source,
            target,
            family=family,
            progress=progress,
            announce=progress.begin,
            publishing=signals.ignore,
            executor=executor,
            **options,
        )
    signals.ignore()
    output.done(report)


# What converts, what reads back, and what reaches stores and other machines.
PARTS = ("torch", "safetensors", "numpy", "fsspec", "s3fs", "gcsfs", "adlfs", "huggingface_hub", "distributed")


def versions() -> list[str]:
    """The version of this program, and of all that has a part in what it does."""
    found: dict[str, str] = {}
    # The names of directories tell; importlib.metadata takes as long to import as all else.
    for directory in sys.path:
        with contextlib.suppress(OSError):
            for entry in os.listdir(directory or "."):
                name, _, rest = entry.partition("-")
                if rest.endswith(".dist-info"):
                    found.setdefault(name.lower(), rest.removesuffix(".dist-info"))
    python = ".".join(map(str, sys.version_info[:3]))
    return [
        f"ckptconv {__version__}",
        f"Python {python}",
        *(f"{name} {found[name]}" for name in PARTS if name in found),
    ]
