"""The commands: they parse options and call the library, and have no logic of their own."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from ckptconv.cli import signals
from ckptconv.cli.compare import diff
from ckptconv.cli.convert import ConvertCommand, convert_, convert_one
from ckptconv.cli.maps import maps
from ckptconv.cli.options import (
    CONVERTING,
    SHOWING,
    Destination,
    Input,
    destination,
    named,
    required,
    run,
    taking,
)
from ckptconv.cli.registered import COMMANDS
from ckptconv.cli.scan import scan
from ckptconv.cli.typer_compat import App, Command, Group
from ckptconv.cli.versions import versions
from ckptconv.cli.virtual import serve, virtual
from ckptconv.errors import UsageError
from ckptconv.options.table import OPTIONS, TENSORS

ABOUT = """
Convert checkpoints of any size to safetensors: nothing in them runs, and memory stays small.

\b
Examples:
  ckptconv convert model.pt                  makes model.safetensors
  ckptconv convert checkpoints/ model/       of a DeepSpeed run, for example
  ckptconv inspect model.pt                  what is it, and what is in it?

ckptconv help COMMAND has the options of each, and more examples.
"""

app = App(
    features=COMMANDS,
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
        typer.echo("\n".join(versions()))
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


# Options of conversions to safetensors that the way back has no use for.
_NOT_BACK = "max_shard_size tied like partial fill checksum copy_config"

app.command("convert", cls=ConvertCommand)(convert_)


@app.command("pt2safetensors", cls=Command)
@taking(*named("into optimizer order for_hub universal zero_stage fresh_optimizer raw alone"), *CONVERTING)
def pt2safetensors(source: Input, output: Destination = None, **options: Any) -> None:
    """Convert .pt, .pth, .bin and .ckpt files to safetensors.

    Nested state keeps its structure in a record beside the tensors. Without OUTPUT, x.pt becomes x.safetensors. INPUT
    may be a directory with a set of shards, or with a file for each rank, as FSDP's and verl's: these are joined.

    \b
    Examples:
      ckptconv pt2safetensors model.pt
      ckptconv pt2safetensors --key state_dict epoch=3.ckpt model.safetensors
      ckptconv pt2safetensors global_step_100/actor model/ --optimizer optimizer/
    """
    convert_one("pt2safetensors", "torch", source, destination(output, options), options)


@app.command("safetensors2pt", cls=Command)
@taking(
    *named("into alone opaque drop_opaque"),
    *(each for each in CONVERTING if each not in named(_NOT_BACK)),
)
def safetensors2pt(
    source: Annotated[
        str, typer.Argument(metavar="INPUT", show_default=False, help="A .safetensors file, an index or a directory.")
    ],
    output: Annotated[
        str | None,
        typer.Argument(metavar="OUTPUT", show_default=False, help="A name that ends in .pt, .pth, .bin or .ckpt."),
    ] = None,
    **options: Any,
) -> None:
    """Write a .pt file of a safetensors file or directory.

    With the structure record that pt2safetensors keeps, torch.load gives back the very state that was saved once:
    containers, order, parameters, shared tensors. INPUT is a file, an index or a directory; OUTPUT ends in .pt, .pth,
    .bin or .ckpt. Whoever loads a .pt file runs what its objects name: those of classes that are not known to be data
    are written only with --opaque keep, and only if scan would call them safe.

    \b
    Examples:
      ckptconv safetensors2pt model.safetensors model.pt
      ckptconv safetensors2pt --opaque drop model.safetensors model.pt
    """
    convert_one("safetensors2pt", "safetensors", source, required(output, options), options)


@app.command("zero-to-fp32", cls=Command)
@taking(
    *named("into tag exclude_frozen_parameters optimizer order for_hub universal zero_stage fresh_optimizer per_rank"),
    *named("safe_serialization"),
    *CONVERTING,
)
def zero_to_fp32(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", show_default=False, help="The directory with `latest`, or a tag's.")
    ],
    output: Destination = None,
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
    options.pop("safe_serialization", None)
    output = destination(output, options)
    if output is None and not (options.get("optimizer") or options.get("universal")):
        raise UsageError("zero-to-fp32 needs an OUTPUT: a directory, or a name that ends in .safetensors.")
    convert_one("zero-to-fp32", "deepspeed", checkpoint, output, options)


@app.command("dcp2safetensors", cls=Command)
@taking(*named("into optimizer order for_hub universal zero_stage fresh_optimizer master unstack"), *CONVERTING)
def dcp2safetensors(
    directory: Annotated[
        str, typer.Argument(metavar="DIR", show_default=False, help="The directory with .metadata, or the run's.")
    ],
    output: Destination = None,
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
    output = destination(output, options)
    if output is None and not (options.get("optimizer") or options.get("universal")):
        raise UsageError("dcp2safetensors needs an OUTPUT: a directory, or a name that ends in .safetensors.")
    convert_one("dcp2safetensors", "dcp", directory, output, options)


@app.command("safetensors2dcp", cls=Command)
@taking(
    *named("into to chunks model_key optimizer_key flat_optimizer fill_states"),
    OPTIONS["like"].explained("Cut the tensors as the checkpoint in REF is cut, with its keys, and its files."),
    OPTIONS["optimizer"].explained(
        "The optimizer states too, from PATH: what --optimizer of another conversion wrote, or a checkpoint that has "
        "them, INPUT itself for one."
    ),
    *named("order opaque drop_opaque raw alone tag exclude_frozen_parameters master unstack per_rank"),
    *(each for each in CONVERTING if each not in named("copy_config like partial fill")),
)
def safetensors2dcp(
    source: Annotated[
        str, typer.Argument(metavar="INPUT", show_default=False, help="Safetensors, or a checkpoint of any format.")
    ],
    output: Annotated[
        str | None, typer.Argument(metavar="OUTPUT", show_default=False, help="A directory that does not exist yet.")
    ] = None,
    **options: Any,
) -> None:
    """Write a checkpoint that torch.distributed.checkpoint loads.

    dcp.load reads OUTPUT into FSDP2, DDP and plain models, on any number of ranks. Names stay as they are; --model-key
    model puts them where {"model": model.state_dict()} looks for them. INPUT is safetensors, or a checkpoint of any
    other format: a .pt file, a DeepSpeed run, another checkpoint of torch. Values that are no tensors are written as
    torch writes them. A rank reads whole chunks: --chunks N keeps these small, --like DIR makes them those of DIR. With
    --to torch-checkpointing, OUTPUT is a step that CheckpointManager.load of torch_checkpointing reads.

    \b
    Examples:
      ckptconv safetensors2dcp model/ checkpoints/step-0 --chunks 8
      ckptconv safetensors2dcp model/ step-0 --optimizer optimizer/ --model-key model
      ckptconv safetensors2dcp runs/7b/checkpoints step-0 --optimizer runs/7b/checkpoints --flat-optimizer
      ckptconv safetensors2dcp model/ step-0 --like checkpoints/step-1000
      ckptconv safetensors2dcp model/ checkpoint-500 --to accelerate --optimizer optimizer/
    """
    convert_one("safetensors2dcp", "", source, required(output, options), {"to": "dcp", **options})


@app.command("verify", cls=Command)
@taking(
    *named("raw alone tag exclude_frozen_parameters master unstack"),
    OPTIONS["optimizer"].explained(
        "Verify the optimizer states there; of a checkpoint of torch.distributed.checkpoint, what they come from."
    ),
    OPTIONS["universal"].explained("Verify the universal checkpoint there."),
    OPTIONS["for_hub"].explained("OUTPUT was made with --for-hub."),
    OPTIONS["to"].explained("OUTPUT is a checkpoint of this kind.", "what the manifest says"),
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


for each in (diff, scan, virtual, serve):
    app.command(each.__name__, cls=Command)(each)
app.add_typer(maps, name="maps")


@app.command("finish", cls=Command)
@taking(
    OPTIONS["checksum"].explained("Read all again, and compare it with its checksums."),
    *named("overwrite fsync manifest attest storage_options json quiet verbose progress"),
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

    shown, report = run("finish", options, finish, outputs, before_commit=signals.ignore)
    shown.done(report)


@app.command("inspect", cls=Command)
@taking(
    *named("raw tag depth as_"),
    OPTIONS["max_shard_size"].explained("And that in files of at most SIZE."),
    *named("key include exclude dequantize map size stats html overwrite"),
    *SHOWING,
)
def inspect_(
    path: Annotated[
        str, typer.Argument(metavar="PATH", show_default=False, help="A file, a directory or a URL, of any format.")
    ],
    *,
    depth: int | None = None,
    html: str = "",
    **options: Any,
) -> None:
    """Show what is inside a checkpoint. No tensor data is read, unless --stats asks for it.

    Modules that are alike, such as layers, are shown once. The page of --html has a map of where the bytes are, and a
    table of all tensors to search.

    \b
    Examples:
      ckptconv inspect model.pt
      ckptconv inspect --depth 2 --as bf16 checkpoints/
      ckptconv inspect --html model.html model.safetensors
      ckptconv inspect --stats --include '*.mlp.*' model.pt
    """
    from ckptconv.cli.console import width
    from ckptconv.inspection.inspecting import inspect
    from ckptconv.inspection.overview import overview
    from ckptconv.storage.paths import normalize
    from ckptconv.text import format_size

    output, summary = run("inspect", options, inspect, path, html=html)
    if html:
        output.note(f"wrote {html} ({format_size(os.stat(normalize(html)).st_size)})")
    if output.json:
        output.print_json(True, summary.to_dict())
    else:
        for warning in summary.warnings:
            output.warn(warning)
        output.show(overview(summary, width=width(), depth=depth, verbose=output.verbose))
