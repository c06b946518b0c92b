"""The options of the commands, as typer takes them, and what their values mean."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args

import typer

from ckptconv.errors import UsageError
from ckptconv.options import full_dtype

MOST_JOBS = 256


MOST_ITEMS = 100_000_000


MOST_IDS = (1 << 63) - 1


DtypeName = Literal["float32", "bfloat16", "float16", "keep", "fp32", "bf16", "fp16"]


TiedChoice = Literal["alias", "duplicate"]


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


def taking(options: dict[str, tuple[Any, Any]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
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


def _named(text: str) -> tuple[str, str]:
    part, equals, name = text.partition("=")
    if not (part and equals and name):
        raise UsageError(f"--part {text!r} does not say which tensor is what.", "It is written as weight=NAME.")
    return part, name


def parse_dimensions(options: dict[str, Any]) -> None:
    """Make numbers of the words of those `options` that say how wide a row is."""
    from ckptconv.text import parse_count

    for name in ("embedding_dim", "max_dim"):
        if options[name] is not None:
            options[name] = parse_count(options[name], f"--{name.replace('_', '-')}", MOST_ITEMS)


def _dtype(text: str) -> str:
    """The dtype that `text` names, in full or as people say it."""
    name = full_dtype(text)
    if name is None or name not in get_args(DtypeName):
        raise UsageError(f"--as {text!r} is no dtype to convert to.", "Give fp32, bf16, fp16 or keep.")
    return name


def parse_common(options: dict[str, Any]) -> None:
    """Make values of the words of those `options` that every command which writes takes."""
    from ckptconv.text import parse_count, parse_size

    jobs = options["jobs"]
    options["jobs"] = None if jobs is None else parse_count(jobs, "--jobs", MOST_JOBS)
    options["memory"] = parse_size(options["memory"], "--memory")
    options["fsync"] = not options.pop("no_fsync")
    options["clobber"] = not options.pop("no_clobber")
    options["storage_options"] = storage_options(options["storage_options"])


def storage_options(text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--storage-options is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise UsageError("--storage-options is not a JSON object.")
    return value
