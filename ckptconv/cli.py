"""The command line: options in, library calls out. No logic of its own."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import io
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, get_args

import typer

from ckptconv import signals
from ckptconv.errors import CkptconvError, FailedError, StoppedError, UsageError
from ckptconv.options import full_dtype

if TYPE_CHECKING:
    from ckptconv.report import Output

MOST_JOBS = 256
MOST_ITEMS = 100_000_000
MOST_IDS = (1 << 63) - 1
DtypeName = Literal["float32", "bfloat16", "float16", "keep", "fp32", "bf16", "fp16"]
TiedChoice = Literal["alias", "duplicate"]


# What typer raises about a command line, and does not name publicly.
_WRONG_USAGE: type[Any] = typer.BadParameter.__bases__[0]


class _Words:
    """Takes words of the command line, and defaults, as they are.

    typer has each value checked by pydantic, whose import takes as long as all else before a conversion begins. Here,
    words that are no choice are left to it, to say so.
    """

    def __init__(self, parameter: Any) -> None:
        self._checked = parameter.get_runtime_param

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        kind = param.type_descriptor.annotation
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        if kind in (str, list[str]) or value in get_args(kind):
            return value
        return self._checked().coerce(value, param=param, ctx=ctx)


class _Quick:
    """A command that is ready sooner where typer does as it did when this was written (0.29), and else like any."""

    def get_help(self, ctx: Any) -> str:
        """The help, in which arguments are called by their names alone, without braces and types."""
        for parameter in self.get_params(ctx):  # type: ignore[attr-defined]
            if hasattr(parameter, "_usage_display_name") and parameter.metavar:
                name = parameter.metavar if parameter.required else f"[{parameter.metavar}]"
                parameter._usage_display_name = lambda name=name: name
                parameter.display_type_rich = lambda ctx: ""
        return super().get_help(ctx)  # type: ignore[misc, no-any-return]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for parameter in self.get_params(ctx):  # type: ignore[attr-defined]
            if hasattr(parameter, "get_runtime_param") and hasattr(parameter, "type_descriptor"):
                words = _Words(parameter)
                parameter.get_runtime_param = lambda words=words: words
        try:
            return super().parse_args(ctx, args)  # type: ignore[misc, no-any-return]
        except _WRONG_USAGE as error:
            # Of an option that lacks its value, the parser does not say to which command it belongs.
            error.ctx = error.ctx or ctx
            raise


class _Command(_Quick, typer.core.TyperCommand):
    pass


class _Group(_Quick, typer.core.TyperGroup):
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
    cls=_Group,
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

Input = Annotated[
    str, typer.Argument(metavar="INPUT", show_default=False, help="The file, sharded set or its index; - is a pipe.")
]
Destination = Annotated[
    str | None,
    typer.Argument(metavar="OUTPUT", show_default=False, help="A name that ends in .safetensors, or a directory."),
]
Tag = Annotated[
    str, typer.Option("--tag", "-t", metavar="TAG", help="The tag to convert; default: what `latest` says.")
]

ExcludeFrozen = Annotated[bool, typer.Option("--exclude-frozen-parameters", help="Leave frozen parameters out.")]
PerRank = Annotated[bool, typer.Option("--per-rank", help="Tensor parallel: OUTPUT/mp_rank_NN/ for each rank.")]
Opaque = Annotated[
    str,
    typer.Option(
        "--opaque",
        metavar="keep|drop",
        show_default=False,
        help="Objects of classes that are not known to be data: write them, or leave them out. Default: refuse.",
    ),
]
DropOpaque = Annotated[bool, typer.Option("--drop-opaque", help="The same as --opaque drop.")]


def _option(kind: Any, default: Any, *names: str, **settings: Any) -> tuple[Any, Any]:
    return Annotated[kind, typer.Option(*names, **settings)], default


# Options that every command takes, by parameter name: annotation and default.
SHOWING = {
    "json": _option(bool, False, "--json", help="Print one JSON object, also of a failure."),
    "quiet": _option(bool, False, "--quiet", "-q", help="Print warnings and errors only."),
    "verbose": _option(bool, False, "--verbose", "-v", help="Print all names, where a few are shown."),
    "storage_options": _option(
        str,
        "",
        "--storage-options",
        metavar="JSON",
        help="Settings of a store, for fsspec, such as '{\"anon\": true}'.",
    ),
    "inert": _option(bool, False, "--inert", help="Take even files that carry an attack; nothing in them runs."),
    "no_progress": _option(bool, False, "--no-progress", help="Show no progress."),
}
# Options that every conversion takes.
CONVERTING = {
    "max_shard_size": _option(
        str | None,
        None,
        "--max-shard-size",
        metavar="SIZE",
        help="Split the output into files of at most SIZE: 5GB, 2GiB. Default: files as the input has them; 5GB for "
        "zero-to-fp32 and dcp2safetensors.",
    ),
    "dtype": _option(
        DtypeName | None,
        None,
        "--dtype",
        metavar="DTYPE",
        help="Cast floating tensors to float32, bfloat16, float16 (or fp32, bf16, fp16); keep: leave them. Default: "
        "float32 for zero-to-fp32, else keep.",
    ),
    "key": _option(
        str, "", "--key", metavar="PATH", help="Only this subtree, as in state_dict or optimizer.state; . is all."
    ),
    "include": _option(
        list[str] | None,
        None,
        "--include",
        metavar="GLOB",
        help="Only names that match, such as 'model.*'; repeatable.",
    ),
    "exclude": _option(
        list[str] | None, None, "--exclude", metavar="GLOB", help="No names that match, such as '*.bias'; repeatable."
    ),
    "strip_prefix": _option(
        str, "", "--strip-prefix", metavar="PREFIX", help="Take PREFIX, such as model., off the beginning of names."
    ),
    "rename": _option(
        list[str] | None,
        None,
        "--rename",
        metavar="REGEX=REPL",
        help="Rename, as re.sub does: '^module=model'; repeatable.",
    ),
    "tied": _option(
        TiedChoice, "alias", "--tied", help="Store tied tensors once (alias), or under each of their names (duplicate)."
    ),
    "no_structure": _option(
        bool,
        False,
        "--no-structure",
        help="Write tensors alone: no structure record, so none of the values that a checkpoint has beside them.",
    ),
    "jobs": _option(
        str | None, None, "--jobs", metavar="N", help="Work in N threads; default: what suits the machine."
    ),
    "memory": _option(
        str,
        "8MiB",
        "--memory",
        metavar="SIZE",
        help="Most memory for all buffers together; 24MiB by default where something is far away.",
    ),
    "no_fsync": _option(bool, False, "--no-fsync", help="Do not wait for the disk: a power cut may lose the output."),
    "no_clobber": _option(bool, False, "--no-clobber", help="Refuse to replace an output."),
    "verify": _option(bool, False, "--verify", help="Compare the output with the input before it gets its name."),
    "checksum": _option(
        bool, False, "--checksum", help="Check the checksums of all that is read, as far as the input has any."
    ),
    "spool_dir": _option(
        str,
        "",
        "--spool-dir",
        metavar="DIR",
        help="For temporary files: of pipes, compressed tensors, what is far away. Default: beside OUTPUT, or TMPDIR.",
    ),
    "part": _option(
        str,
        "",
        "--part",
        metavar="I/N",
        help="Do part I, from 0, of N, and leave it staged for `finish`; auto: ask the system.",
    ),
    "dask": _option(
        str,
        "",
        "--dask",
        metavar="ADDRESS",
        help="Spread the work over the dask.distributed cluster with the scheduler there: tcp://10.0.0.1:8786.",
    ),
    "manifest": _option(
        str, "", "--manifest", metavar="FILE", help="Write there what was made of what, with checksums."
    ),
    "depfile": _option(
        str, "", "--depfile", metavar="FILE", help="Write a rule for make there: which files the output is made of."
    ),
    "dry_run": _option(bool, False, "--dry-run", help="Show the plan, write nothing."),
    **SHOWING,
}

# Of these, what chooses names and files of safetensors.
NAMING = {"max_shard_size", "strip_prefix", "rename", "tied", "checksum"}
# And what does not decide what an output holds.
CARRYING_OUT = {
    "part", "dask", "manifest", "depfile", "jobs", "memory", "no_fsync", "no_clobber", "checksum", "verify", "dry_run",
}  # fmt: skip


def _taking(options: dict[str, tuple[Any, Any]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command `options` beside the parameters it names itself; they arrive in its `**options`."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, (annotation, default) in options.items()
        ]

        # A function without defaults: before Python 3.11, `get_type_hints`, which typer calls, changes the annotation
        # of what is None by default.
        def command(**given: Any) -> None:
            function(**given)

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__signature__ = signature.replace(parameters=own + added)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in own + added}
        return command

    return decorate


def _version(wanted: bool) -> None:
    if wanted:
        from ckptconv.versions import versions

        typer.echo("\n".join(versions()))
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command("pt2safetensors", cls=_Command)
@_taking(CONVERTING)
def pt2safetensors(source: Input, output: Destination = None, **options: Any) -> None:
    """Convert a .pt, .pth, .bin or .ckpt file to safetensors.

    Nested state keeps its structure in a record beside the tensors. Without OUTPUT, x.pt becomes x.safetensors.

    \b
    Examples:
      ckptconv pt2safetensors model.pt
      ckptconv pt2safetensors --key state_dict epoch=3.ckpt model.safetensors
    """
    _convert("pt2safetensors", "torch", source, output, options)


@app.command("safetensors2pt", cls=_Command)
@_taking({name: option for name, option in CONVERTING.items() if name not in NAMING})
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


@app.command("zero-to-fp32", cls=_Command)
@_taking(CONVERTING)
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


@app.command("dcp2safetensors", cls=_Command)
@_taking(CONVERTING)
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


@app.command("verify", cls=_Command)
@_taking({name: option for name, option in CONVERTING.items() if name not in CARRYING_OUT})
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
    from ckptconv.verification import verify

    shown = _output("verify", options)
    limit = options["max_shard_size"]
    options["max_shard_size"] = None if limit is None else parse_size(limit, "--max-shard-size")
    options["storage_options"] = _storage_options(options["storage_options"])
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


rows = typer.Typer(
    name="rows",
    cls=_Group,
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
app.add_typer(rows)

# What is in a row.
LAYOUT = {
    "embedding_dim": _option(str | None, None, "--embedding-dim", metavar="D", help="Items of weight in a row."),
    "optimizer": _option(
        str | None,
        None,
        "--optimizer",
        metavar="NAME",
        help="exact_row_wise_adagrad, partial_row_wise_adam, adam, row_wise_rmsprop_ar, or none.",
    ),
    "weight_dtype": _option(
        str | None, None, "--weight-dtype", metavar="DTYPE", help="float32 or float16; default: the table's."
    ),
    "momentum1_dtype": _option(
        str | None, None, "--momentum1-dtype", metavar="DTYPE", help="float32, float16 or bfloat16; default: float32."
    ),
    "momentum2_dtype": _option(str | None, None, "--momentum2-dtype", metavar="DTYPE", help="As --momentum1-dtype."),
    "max_dim": _option(
        str | None,
        None,
        "--max-dim",
        metavar="D",
        help="D of the widest table of the same operator; default: this one's.",
    ),
}
# Options of a conversion that make sense for rows.
MAKING = {
    name: CONVERTING[name]
    for name in ("jobs", "memory", "no_fsync", "no_clobber", "spool_dir", "dry_run", "verify", *SHOWING)
}
Tables = Annotated[
    list[str], typer.Argument(metavar="TABLE...", show_default=False, help="Where the table is, or its shards.")
]
Tensors = Annotated[
    list[str] | None,
    typer.Option(
        "--tensor", metavar="NAME", help="The table; repeated, the shards of it in order. Default: the only one."
    ),
]


@rows.command("split", cls=_Command)
@_taking({**LAYOUT, **MAKING})
def rows_split(
    table: Tables,
    output: Annotated[
        str, typer.Argument(metavar="OUTPUT", show_default=False, help="One .safetensors file, or a directory.")
    ],
    tensor: Tensors = None,
    decode: Annotated[
        bool, typer.Option("--decode", help="Write timestamp, count and used in the place of metadata.")
    ] = False,
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

    _make_rows("rows split", split, table, output, options, names=tuple(tensor or ()), decode=decode)


@rows.command("pack", cls=_Command)
@_taking({**LAYOUT, **MAKING})
def rows_pack(
    source: Annotated[list[str], typer.Argument(metavar="SOURCE...", show_default=False, help="Where the parts are.")],
    output: Annotated[
        str, typer.Argument(metavar="OUTPUT", show_default=False, help="A .safetensors or .pt file, or a directory.")
    ],
    part: Annotated[
        list[str] | None,
        typer.Option("--part", metavar="PART=NAME", help="The tensor that is PART of the rows; repeatable."),
    ] = None,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="What the table is called.")] = "",
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

    names = dict(_named(text) for text in part or ())
    _make_rows("rows pack", pack, source, output, options, names=names, name=name)


@rows.command("check", cls=_Command)
@_taking({**LAYOUT, "spool_dir": CONVERTING["spool_dir"], **SHOWING})
def rows_check(
    table: Tables,
    tensor: Tensors = None,
    global_id_offset: Annotated[
        str | None,
        typer.Option("--global-id-offset", metavar="N", help="How much less local ids are than global ones."),
    ] = None,
    bucket_size: Annotated[
        str | None, typer.Option("--bucket-size", metavar="N", help="Ids that a bucket spans; default: any one size.")
    ] = None,
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
    from ckptconv.text import parse_count

    shown = _output("rows check", options)
    _parse_dimensions(options)
    options["storage_options"] = _storage_options(options["storage_options"])
    offset, size = (
        None if text is None else parse_count(text, option, MOST_IDS)
        for text, option in ((global_id_offset, "--global-id-offset"), (bucket_size, "--bucket-size"))
    )
    with shown.progress() as progress:
        report = check(
            table,
            names=tuple(tensor or ()),
            global_id_offset=offset,
            bucket_size=size,
            progress=progress,
            announce=progress.begin,
            **options,
        )
    signals.ignore()
    shown.rows_checked(report)


def _named(text: str) -> tuple[str, str]:
    part, equals, name = text.partition("=")
    if not (part and equals and name):
        raise UsageError(f"--part {text!r} does not say which tensor is what.", "It is written as weight=NAME.")
    return part, name


def _parse_dimensions(options: dict[str, Any]) -> None:
    """Make numbers of the words of those `options` that say how wide a row is."""
    from ckptconv.text import parse_count

    for name in ("embedding_dim", "max_dim"):
        if options[name] is not None:
            options[name] = parse_count(options[name], f"--{name.replace('_', '-')}", MOST_ITEMS)


def _make_rows(
    command: str, make: Callable[..., Any], paths: list[str], target: str, options: dict[str, Any], **settings: Any
) -> None:
    output = _output(command, options)
    _parse_dimensions(options)
    _parse_common(options)
    with output.progress() as progress:
        report = make(
            paths,
            target,
            progress=progress,
            announce=progress.begin,
            publishing=signals.ignore,
            **settings,
            **options,
        )
    signals.ignore()
    output.done(report)


@app.command("finish", cls=_Command)
@_taking(
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
    from ckptconv.finishing import finish

    shown = _output("finish", options)
    options["fsync"] = not options.pop("no_fsync")
    options["storage_options"] = _storage_options(options["storage_options"])
    with shown.progress() as progress:
        report = finish(outputs, publishing=signals.ignore, progress=progress, announce=progress.begin, **options)
    signals.ignore()
    shown.done(report)


@app.command("inspect", cls=_Command)
@_taking(SHOWING)
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
    from ckptconv.formats import open_source
    from ckptconv.process import no_garbage
    from ckptconv.storage import normalize
    from ckptconv.summary import summarize
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
            storage_options=_storage_options(options["storage_options"]),
        )
        summary = summarize(source)
        if as_ or limit:
            from ckptconv.forecast import forecast

            summary["conversion"] = forecast(source, dtype, limit)
    if html:
        from ckptconv.page import write_page
        from ckptconv.targets import files_behind

        size = write_page(html, path, summary, files_behind(source))
        output.note(f"wrote {html} ({format_size(size)})")
    output.inspected(path, summary, levels)


def _dtype(text: str) -> str:
    """The dtype that `text` names, in full or as people say it."""
    name = full_dtype(text)
    if name is None or name not in get_args(DtypeName):
        raise UsageError(f"--as {text!r} is no dtype to convert to.", "Give fp32, bf16, fp16 or keep.")
    return name


def _output(command: str, options: dict[str, Any]) -> Output:
    """How `command` shows what it does; takes what says so out of `options`."""
    from ckptconv.report import Output

    shown = {name: options.pop(name) for name in ("json", "quiet", "verbose", "no_progress") if name in options}
    return Output(command, **shown)


def _convert(command: str, family: str, source: str, target: str | None, options: dict[str, Any]) -> None:
    from ckptconv.conversion import convert
    from ckptconv.text import parse_size

    output = _output(command, options)
    limit = options.get("max_shard_size")
    options["max_shard_size"] = None if limit is None else parse_size(limit, "--max-shard-size")
    _parse_common(options)
    options["structure"] = not options.pop("no_structure")
    for name in ("include", "exclude", "rename"):
        options[name] = tuple(options.get(name) or ())
    part, address = options.pop("part"), options.pop("dask")
    if part:
        from ckptconv.parts import parse_part

        options["part"] = parse_part(part, os.environ)
    if part and address:
        raise UsageError("--part and --dask are two ways to spread the work: give one of them.")
    with output.progress() as progress, contextlib.ExitStack() as stack:
        executor = None
        if address:
            from ckptconv.cluster import dask_executor

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


def _parse_common(options: dict[str, Any]) -> None:
    """Make values of the words of those `options` that every command which writes takes."""
    from ckptconv.text import parse_count, parse_size

    jobs = options["jobs"]
    options["jobs"] = None if jobs is None else parse_count(jobs, "--jobs", MOST_JOBS)
    options["memory"] = parse_size(options["memory"], "--memory")
    options["fsync"] = not options.pop("no_fsync")
    options["clobber"] = not options.pop("no_clobber")
    options["storage_options"] = _storage_options(options["storage_options"])


def _storage_options(text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--storage-options is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise UsageError("--storage-options is not a JSON object.")
    return value


def _mend_streams() -> None:
    """Streams that take anything: what goes to a closed one is lost, what an encoding lacks is escaped."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number there is: this one
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        try:
            signals.raise_stopped()
            _mend_streams()
            code = _run(arguments)
        finally:
            signals.ignore()
    except StoppedError as error:  # it came beside the work: before, after, or while something else went wrong
        signals.ignore()
        _output("", {"json": "--json" in arguments}).failed(error)
        code = error.exit_code
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    """Run a command; its exit code. Whatever goes wrong becomes one paragraph."""
    if not arguments:
        app(["--help"], standalone_mode=False, prog_name="ckptconv")
        return UsageError.exit_code
    if any("://" in argument for argument in arguments):
        from ckptconv.process import spare_memory

        spare_memory()
    try:
        code = app(arguments, standalone_mode=False, prog_name="ckptconv")
        sys.stdout.flush()
    except BaseException as error:
        failure = _failure(error)
        if failure is None:
            raise
        signals.ignore()  # the code is known
        _output("", {"json": "--json" in arguments}).failed(failure)
        return failure.exit_code
    return code if isinstance(code, int) else 0


def _instead(option: str, close: Iterable[str], ctx: Any) -> str:
    """What to type in the place of an `option` that the command of `ctx` does not have."""
    # Dashes, which all of them begin with, make short ones look alike.
    close = difflib.get_close_matches(option.lstrip("-"), [each.lstrip("-") for each in close])
    if option in ("-o", "--out", "--output", "--output-dir", "--output-file"):
        meant = "OUTPUT is named without one, after what is read. "
    elif option in _options_below(ctx.command):
        meant = f"Commands have it, and it stands after them: {ctx.command_path} COMMAND {option}. "
    else:
        meant = f"Did you mean {' or '.join(f'--{each}' for each in sorted(close))}? " if close else ""
    return f"{meant}See {ctx.command_path} --help."


def _options_below(group: Any) -> set[str]:
    """The options of the commands in `group`, which may be in groups of it; none of a command."""
    commands = getattr(group, "commands", {}).values()
    own = {name for command in commands for parameter in command.params for name in parameter.opts}
    return own.union(*map(_options_below, commands))


def _failure(error: BaseException) -> CkptconvError | None:
    """`error` as one of ours; None for what is not an error at all."""
    if isinstance(error, CkptconvError):
        return error
    if isinstance(error, _WRONG_USAGE):
        asked = error.ctx.command_path if error.ctx else "ckptconv"
        unknown = getattr(error, "option_name", "")
        # An error about an option that there is has no such list.
        if unknown and hasattr(error, "possibilities"):
            owner = f" of {asked} itself" if getattr(error.ctx.command, "commands", None) else ""
            return UsageError(
                f"There is no option {unknown}{owner}.", _instead(unknown, error.possibilities or (), error.ctx)
            )
        message = " ".join(error.format_message().replace("Value error, ", "").split())
        more = re.fullmatch(r"Got unexpected extra argument(?:\(s\)|s)? \((.*)\)", message)
        if more:
            return UsageError(
                f"There are more arguments than {asked} takes: {more[1]}.",
                f"Give several inputs to a command each, and quote names with blanks in them. See {asked} --help.",
            )
        named = re.match(r"No such command '(.*?)'\.", message)
        if named and f"--{named[1]}" in ("--help", "--version"):
            return UsageError(f"No such command '{named[1]}'.", f"Did you mean ckptconv --{named[1]}?")
        if named and (os.path.exists(named[1]) or "://" in named[1]):
            return UsageError(
                f"{named[1]} stands where a command should.",
                f"ckptconv inspect {named[1]} shows what it is; ckptconv --help lists the commands.",
            )
        if named and error.ctx and "Did you mean" not in message:
            asked = f"There are: {', '.join(error.ctx.command.commands)}. See {asked}"
            return UsageError(message, f"{asked} --help.")
        return UsageError(message if message.endswith((".", "?")) else f"{message}.", f"See {asked} --help.")
    if isinstance(error, MemoryError):
        return FailedError(
            "There is not enough memory. Nothing was put under a final name.", "Lower --memory or --jobs."
        )
    if isinstance(error, Exception) and os.environ.get("CKPTCONV_DEBUG"):
        traceback.print_exception(error)
    if isinstance(error, OSError):
        return FailedError(f"The system reports: {error}. Nothing was put under a final name.")
    if isinstance(error, Exception):
        return FailedError(
            f"This is a mistake in ckptconv itself: {type(error).__name__}: {error}. Nothing was put under a final "
            "name.",
            "Please report it, with what CKPTCONV_DEBUG=1 prints.",
        )
    return None
