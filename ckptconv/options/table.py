"""The table of options: the name, values, default and effect of each.

`Options` are built from it, and so are the command line, the options in a manifest, and the checks of a caller's
values. A feature whose options no conversion has keeps its own table (`options/option.py` has the base of both).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from ckptconv.errors import UsageError
from ckptconv.options import NAMING, OUTPUT, RUNNING, TAKE
from ckptconv.options.kinds import (
    CHECKPOINT,
    DIGEST,
    DTYPE,
    FAR_MEMORY,
    FLAG,
    MAPPING,
    OPAQUE,
    OUTPUT_KIND,
    PATH,
    RULES,
    SCATTERED_MEMORY,
    SIZE,
    TEXT,
    TEXTS,
    TIED,
    USUAL_MEMORY,
    counted,
)
from ckptconv.options.option import FeatureOption, Given, Option, deciding, option, options_in
from ckptconv.options.registered import CARRIED_OUT, EXECUTORS, FEATURES, FITTED, OPENED, missing, names_of

# Options with this group are for Python only.
LIBRARY = "library"
# The value of an option for a recorded change to the input that is not to be repeated or undone.
NONE = "none"

# The commands that take one checkpoint, whose short help shows the options for the part of it to take.
_OF_ONE = (
    "convert pt2safetensors safetensors2pt zero-to-fp32 dcp2safetensors safetensors2dcp verify diff inspect virtual "
    "serve patch"
)

_running = functools.partial(option, group=RUNNING)


class Options(Given):
    """The options of a conversion; the contract of the command line explains each. None: the source's default.

    Each takes what the command line takes, as text, or the Python value: dtype="bf16", dtype=torch.bfloat16;
    max_shard_size="5GB", max_shard_size=5_000_000_000. Raise UsageError for an unknown name or an invalid value.
    """

    # The choice of tensors, and their conversion.
    max_shard_size: int | None = deciding(
        SIZE,
        "Split the output into files of at most SIZE bytes of tensors, such as 5GB or 2GiB.",
        metavar="SIZE",
        group=OUTPUT,
        common=True,
        fallback={
            "zero-to-fp32": "5GB",
            "dcp2safetensors": "5GB",
            "convert": "5GB for distributed checkpoints, else the files of the input",
            "verify": "from the manifest",
            "": "the files of the input",
        },
    )
    dtype: str | None = deciding(
        DTYPE,
        "Cast floating-point tensors to float32, bfloat16 or float16 (or fp32, bf16, fp16); keep does not cast.",
        metavar="DTYPE",
        group=NAMING,
        common=True,
        fallback={
            "zero-to-fp32": "float32",
            "convert": "float32 for a DeepSpeed checkpoint, else keep",
            "verify": "from the manifest",
            "": "keep",
        },
    )
    key: str = deciding(
        TEXT,
        "Take only this subtree, such as state_dict or optimizer.state; . takes everything.",
        metavar="PATH",
        group=TAKE,
        common=_OF_ONE,
        fallback={"dcp2safetensors": "the model"},
    )
    include: tuple[str, ...] = deciding(
        TEXTS, "Take only tensors whose names match, such as 'model.*'; repeatable.", metavar="GLOB", group=TAKE
    )
    exclude: tuple[str, ...] = deciding(
        TEXTS,
        "Leave out tensors whose names match, such as '*.bias'; repeatable.",
        metavar="GLOB",
        group=TAKE,
        common=_OF_ONE,
    )
    strip_prefix: str = deciding(
        TEXT,
        "Remove PREFIX, such as model., from the beginning of names.",
        metavar="PREFIX",
        group=NAMING,
        common="convert pt2safetensors safetensors2pt dcp2safetensors verify virtual serve patch",
    )
    rename: tuple[str, ...] = deciding(
        RULES, "Rename tensors as re.sub does, such as '^module=model'; repeatable.", metavar="REGEX=REPL", group=NAMING
    )
    tied: str = deciding(
        TIED,
        "Store tied tensors once (alias), or under each of their names (duplicate).",
        default="alias",
        metavar="alias|duplicate",
        group=NAMING,
    )
    structure: bool = deciding(
        FLAG,
        "Write only tensors, without the structure record and the other values in it.",
        default=True,
        group=OUTPUT,
    )

    # A checkpoint of torch.distributed.checkpoint as the output.
    to: str = deciding(
        OUTPUT_KIND,
        "The kind of output, if the name of OUTPUT does not specify it: safetensors, pt, universal, dcp, dcp-hf, "
        "accelerate, torch-checkpointing, megatron, megatron-te or megatron-fsdp. pt is a file for torch.load; "
        "DeepSpeed resumes from universal. For torch.distributed.checkpoint: .distcp files (dcp), the safetensors "
        "shards of its HuggingFaceStorageWriter (dcp-hf), the two checkpoints that accelerate and the Trainer load "
        "with FSDP2 (accelerate), a torch_checkpointing step, or a step of Megatron-core (megatron).",
        metavar="KIND",
        group=OUTPUT,
        common=True,
        fallback={"convert": "from the name of OUTPUT"},
    )
    states: str = option(
        PATH,
        "Also write the optimizer states from PATH, in a checkpoint of torch.distributed.checkpoint (such as --to "
        "dcp). PATH is the --optimizer output of another conversion, or a checkpoint with states, which may be INPUT.",
        metavar="PATH",
        group=TAKE,
        common="safetensors2dcp verify",
    )

    # Ways to work, and further files to write.
    jobs: int | None = _running(
        counted(1, 256),
        "Use N threads, or N processes if most of the output is computed.",
        metavar="N",
        fallback="chosen for the machine",
        env="CKPTCONV_JOBS",
    )
    memory: int | None = _running(
        SIZE,
        "The total size of all buffers.",
        fallback="8MiB; 16MiB if tensors are transposed, 24MiB if a file is remote",
        metavar="SIZE",
        env="CKPTCONV_MEMORY",
    )
    fsync: bool = _running(FLAG, "Do not wait for the disk: a power failure may lose the output.", default=True)
    clobber: bool = option(FLAG, "Refuse to replace an output.", default=True, group=OUTPUT)
    overwrite: bool = option(
        FLAG,
        "Also replace files of other programs that have the same names as output files. A file specified with -o is "
        "replaced without this option.",
        group=OUTPUT,
    )
    checksum: bool = _running(FLAG, "Verify all data that is read against the checksums in the input.")
    spool_dir: str = _running(
        PATH,
        "Store temporary files in DIR: for pipes, compressed tensors and remote files.",
        metavar="DIR",
        fallback="next to a local OUTPUT, else TMPDIR or /var/tmp",
        env="CKPTCONV_SPOOL_DIR",
    )
    manifest: str = option(
        PATH, "Write a manifest of inputs and outputs, with checksums, to FILE.", metavar="FILE", group=OUTPUT
    )
    digest: str = option(
        DIGEST, "Compute a digest of every file and tensor, for the manifest.", metavar="sha256|blake3", group=OUTPUT
    )
    dry_run: bool = _running(FLAG, "Show the plan without writing anything.", common="convert merge")

    # The place of the input, and the part of it to take.
    storage_options: Mapping[str, Any] = _running(
        MAPPING,
        "Settings that fsspec passes to a store, such as '{\"anon\": true}'.",
        metavar="JSON",
        env="CKPTCONV_STORAGE_OPTIONS",
    )
    raw: bool = deciding(FLAG, "Convert whole modules as objects, not as their state dicts.", group=TAKE)
    alone: bool = deciding(
        FLAG, "Convert only INPUT, even if it is one file of a set, such as a rank's file or a shard.", group=TAKE
    )
    family: str = option(
        TEXT,
        "The required family of the input: torch, deepspeed, dcp, safetensors, or a plug-in's family.",
        group=LIBRARY,
    )
    tag: str = deciding(
        TEXT,
        "The tag (step) of a DeepSpeed run.",
        flags=("--tag", "-t"),
        metavar="TAG",
        group=TAKE,
        fallback="the one in `latest`",
        common="zero-to-fp32",
    )
    exclude_frozen_parameters: bool = deciding(FLAG, "Leave frozen parameters out.", group=TAKE)
    master: bool = deciding(
        FLAG, "For Megatron-core: write the optimizer's fp32 master weights instead of the weights.", group=TAKE
    )
    unstack: bool = deciding(
        FLAG,
        "For Megatron-core: split a tensor that stores all layers into one tensor per layer, such as "
        "decoder.layers.0.….",
        group=NAMING,
    )

    # Further outputs.
    optimizer: str = option(
        PATH,
        "Write the optimizer states to PATH, by parameter.",
        metavar="PATH",
        group=OUTPUT,
        common="convert zero-to-fp32 dcp2safetensors pt2safetensors",
    )
    for_hub: bool = deciding(
        FLAG,
        "Write a model to publish: only the weights (found without --key), config.json, tokenizer and similar files; "
        "no structure record and no manifest.",
        group=OUTPUT,
        common=True,
    )
    per_rank: bool = option(FLAG, "Write one output per tensor-parallel rank: OUTPUT/mp_rank_NN/.", group=OUTPUT)
    opaque: str = deciding(
        OPAQUE,
        "Write (keep) or leave out (drop) objects of classes that are not known to be plain data.",
        metavar="keep|drop",
        fallback="keep for safetensors; an error for .pt",
        group=TAKE,
        common="safetensors2pt",
    )
    drop_opaque: bool = deciding(FLAG, "The same as --opaque drop.", group=TAKE)

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        if self.drop_opaque:  # the first name of --opaque drop
            if self.opaque == "keep":
                raise UsageError("--drop-opaque and --opaque keep contradict each other.")
            vars(self)["opaque"] = "drop"
            del vars(self)["drop_opaque"]
        if self.for_hub:
            vars(self)["structure"] = False
            if "copy_config" in self.table:
                vars(self).setdefault("copy_config", True)

    def buffers(self, far: bool, scattered: bool = False) -> int:
        """Return the bound in bytes on all buffers. `far`: something is remote; `scattered`: most is transposed."""
        if self.memory is not None:
            return self.memory
        return FAR_MEMORY if far else SCATTERED_MEMORY if scattered else USUAL_MEMORY

    def opening(self) -> dict[str, Any]:
        """Return the options that `open_source` takes for the whole of a checkpoint."""
        return {
            "family": self.family,
            "tag": self.tag,
            "exclude_frozen": self.exclude_frozen_parameters,
            "structure": self.structure,
            "raw": self.raw,
            "alone": self.alone,
            "master": self.master,
            "unstack": self.unstack,
            **self.changing(),
            **self.reaching(),
        }

    def changing(self) -> dict[str, Any]:
        """Return the options that `open_source` takes for the features that change a source."""
        return {name: value for name, value in vars(self).items() if name in CHANGING}

    def fitting(self) -> dict[str, Any]:
        """Return those of the options that `open_source` takes to fit an output of weights to a reference."""
        return {name: value for name, value in vars(self).items() if name in FITTING}

    def files(self) -> list[str]:
        """Return the paths of files that specify changes to a source."""
        return [value for name, value in self.changing().items() if CHANGING[name].kind.accepts == PATH.accepts]

    def reaching(self) -> dict[str, Any]:
        """Return the options that `open_source` takes for any checkpoint: how to access it, and whether to trust it."""
        trust = {"inert": True} if self.asked("inert") else {}
        return {**trust, "spool_dir": self.spool_dir, "storage_options": self.storage_options}

    def recorded(self) -> dict[str, Any]:
        """Return the options that decide the output and are not the default: {name: value as in JSON}."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in sorted(vars(self).items())
            if OPTIONS[name].decides
        }


class _Opening:
    """Options for opening a checkpoint that a conversion lacks, or names differently."""

    exclude_frozen = Option(FLAG, "Leave frozen parameters out.", group=LIBRARY)
    model_rank = Option(counted(0, 1 << 20), "Read only this DeepSpeed tensor-parallel rank, from 0.", group=LIBRARY)
    states = Option(FLAG, group=LIBRARY)
    with_states = Option(
        FLAG,
        "Also read the description of the optimizer states now, not when they are first used.",
        group=TAKE,
        common=True,
        former="--states",
    )


class _Command:
    """Options that only the command line has."""

    into = Option(PATH, "The same as the argument OUTPUT.", flags=("--output", "-o"), metavar="OUTPUT", group=OUTPUT)
    json = Option(FLAG, "Print one JSON object, also on failure.", common=True)
    quiet = Option(FLAG, "Print warnings and errors only.", flags=("--quiet", "-q"))
    verbose = Option(FLAG, "Print all names, not only the first few.", flags=("--verbose", "-v"))
    progress = Option(FLAG, "Do not show progress.", default=True, env="CKPTCONV_PROGRESS")
    safe_serialization = Option(FLAG, "Accepted and ignored: the name of OUTPUT selects the format.", group=OUTPUT)
    as_ = Option(
        DTYPE,
        "Also show the result of a conversion to DTYPE (fp32, bf16, fp16, keep).",
        flags=("--as",),
        metavar="DTYPE",
        group=NAMING,
        common=True,
    )
    html = Option(PATH, "Write a self-contained HTML page to FILE.", metavar="FILE", group=OUTPUT, common=True)
    stats = Option(
        FLAG,
        "Read all data, and show the minimum, maximum, mean, standard deviation, zeros, NaN and infinities of "
        "each tensor. NaN and infinities do not change the exit code; --json lists their tensors in not_finite.",
        common=True,
    )


def named_in(names: str, every: Mapping[str, Option] = Options.table) -> dict[str, Option]:
    """Return the options with these names, without those of features that are not installed."""
    return {name: every[name] for name in names.split() if not missing(name)}


# The table, in parts: one name may be different options in different parts.
OPTIONS = Options.table
for _name, _feature in names_of(*(each for each in FEATURES if each not in (*CARRIED_OUT, *EXECUTORS))).items():
    OPTIONS[_name] = FeatureOption(_name, _feature)
    setattr(Options, _name, OPTIONS[_name])
# The options on which sources depend that features change for outputs of weights; and for any use, with the dtype.
FITTING = named_in(" ".join(names_of(*FITTED)))
CHANGING = {"dtype": OPTIONS["dtype"]} | {
    name: OPTIONS[name] for name in names_of(*(each for each in OPENED if each in FEATURES)) if name not in FITTING
}
_OF_COMMANDS = {name: FeatureOption(name, feature) for name, feature in names_of(*CARRIED_OUT, *EXECUTORS).items()}
COMMAND = {**options_in(_Command), **_OF_COMMANDS}

# Groups of names that several tables take: options about the parts of a trainer's checkpoint to read, and about reading
# and reaching a checkpoint; options that choose, name and cast tensors.
_READ = "tag exclude_frozen_parameters master unstack"
_AS_IT_IS = "raw alone"
_REACHED = "inert spool_dir storage_options"
_TAKEN = "key include exclude"
_NAMED = "strip_prefix rename map size"
_WORKING = "jobs memory fsync clobber overwrite"
_OF_TENSORS = (
    f"max_shard_size dtype dequantize quantize requantize keep {_TAKEN} {_NAMED} tied like partial fill structure"
)

_PART = "layers experts component vocab graft config"

# The options of what opens a checkpoint.
OF_OPENING = options_in(_Opening)
OPENING = named_in(
    f"key tag exclude_frozen model_rank states structure {_AS_IT_IS} master unstack dequantize map size like order "
    f"{_PART} family {_REACHED}",
    {**OPTIONS, **OF_OPENING},
)
# The same `to`, for outputs that are checkpoints of torch.distributed.checkpoint if it is given.
TO_CHECKPOINT = OPTIONS["to"].explained(
    "Write a checkpoint of torch.distributed.checkpoint: .distcp files (dcp), or the safetensors shards of its "
    "HuggingFaceStorageWriter (dcp-hf); the two checkpoints that accelerate and the Trainer load with FSDP2 "
    "(accelerate); a torch_checkpointing step (torch-checkpointing); or a step of Megatron-core (megatron).",
    {"safetensors2dcp": "dcp"},
    CHECKPOINT,
)
# The options of commands that compute one output from several checkpoints.
COMBINING = named_in(
    f"{_OF_TENSORS} to chunks model_key copy_config for_hub {_READ} raw opaque drop_opaque {_WORKING} verify checksum "
    f"part manifest digest attest depfile dry_run {_REACHED}",
    {**OPTIONS, "to": TO_CHECKPOINT},
)
# The choice of tensors, and their conversion.
TENSORS = tuple(named_in(f"{_OF_TENSORS} {_PART}").values())
