"""The options of the public calls as types, which editors complete and type checkers check.

Made by scripts/keywords.py from the tables of keywords.py. Values may be what they are in Python or as on the
command line; None stands for the default.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal, Protocol, TypeAlias, TypedDict

from ckptconv.options.option import Option

def tables() -> dict[str, tuple[Mapping[str, Option], str]]: ...


class TorchDType(Protocol):
    """A dtype of torch, which need not be installed."""

    @property
    def is_floating_point(self) -> bool: ...
    @property
    def is_complex(self) -> bool: ...
    def to_real(self) -> Any: ...



DTypeName: TypeAlias = Literal[
    "float32",
    "bfloat16",
    "float16",
    "keep",
    "fp32",
    "f32",
    "float",
    "fp16",
    "f16",
    "half",
    "bf16",
]
OutputName: TypeAlias = Literal[
    "safetensors",
    "pt",
    "universal",
    "dcp",
    "dcp-hf",
    "accelerate",
    "megatron",
    "megatron-te",
    "megatron-fsdp",
    "torch-checkpointing",
]
CheckpointName: TypeAlias = Literal[
    "dcp",
    "dcp-hf",
    "accelerate",
    "megatron",
    "megatron-te",
    "megatron-fsdp",
    "torch-checkpointing",
]


class _Sharding(TypedDict, total=False):
    """Convert, Average, Inspect, Merge, Patch, Rows, Verify."""

    max_shard_size: int | str | None
    """Split the output into files of at most SIZE bytes of tensors, such as 5GB or 2GiB. Default: 5GB for distributed
    checkpoints, else the files of the input."""


class _Casting(TypedDict, total=False):
    """Convert, Average, Distributed, Load, Merge, Patch, Rows, Verify."""

    dtype: DTypeName | TorchDType | None
    """Cast floating-point tensors to float32, bfloat16 or float16 (or fp32, bf16, fp16); keep does not cast. Default:
    float32 for a DeepSpeed checkpoint, else keep."""


class _Choosing(TypedDict, total=False):
    """Convert, Average, Diff, Distributed, Inspect, Load, Merge, Open, Patch, Rows, Verify."""

    key: str | None
    """Take only this subtree, such as state_dict or optimizer.state; . takes everything."""

    tag: str | None
    """The tag (step) of a DeepSpeed run. Default: the one in `latest`."""


class _Selecting(TypedDict, total=False):
    """Convert, Average, Diff, Distributed, Inspect, Merge, Rows, Verify."""

    include: str | list[str] | tuple[str, ...] | None
    """Take only tensors whose names match, such as 'model.*'; repeatable."""

    exclude: str | list[str] | tuple[str, ...] | None
    """Leave out tensors whose names match, such as '*.bias'; repeatable."""


class _Renaming(TypedDict, total=False):
    """Convert, Average, Diff, Distributed, Merge, Patch, Rows, Verify."""

    strip_prefix: str | None
    """Remove PREFIX, such as model., from the beginning of names."""

    rename: str | list[str] | tuple[str, ...] | None
    """Rename tensors as re.sub does, such as '^module=model'; repeatable."""

    exclude_frozen_parameters: bool
    """Leave frozen parameters out."""


class _Tied(TypedDict, total=False):
    """Convert, Average, Merge, Rows, Verify."""

    tied: Literal["alias", "duplicate"] | None
    """Store tied tensors once (alias), or under each of their names (duplicate). Default: alias."""

    digest: Literal["sha256", "blake3"] | None
    """Compute a digest of every file and tensor, for the manifest."""

    for_hub: bool
    """Write a model to publish: only the weights (found without --key), config.json, tokenizer and similar files; no
    structure record and no manifest."""

    opaque: Literal["keep", "drop"] | None
    """Write (keep) or leave out (drop) objects of classes that are not known to be plain data. Default: keep for
    safetensors; an error for .pt."""

    drop_opaque: bool
    """The same as --opaque drop."""

    quantize: Literal["fp8-block", "fp8-block-ue8m0", "fp8-dynamic", "mxfp8", "int4-g32", "mxfp4", "nvfp4", "nvfp4-modelopt"] | None
    """Quantize the weight matrices of layers. To FP8, with one scale per block of 128 by 128 (fp8-block; with powers
    of two as scales: fp8-block-ue8m0), per row (fp8-dynamic) or per 32 elements (mxfp8). To 4 bits, with one scale
    per 32 elements (int4-g32, mxfp4) or per 16 (nvfp4 of compressed-tensors, nvfp4-modelopt of Model Optimizer).
    Embeddings, heads, norms and routers stay unquantized. Loaders were tested with fp8-block, mxfp8 and int4-g32."""

    requantize: Literal["fp8-block", "fp8-block-ue8m0", "mxfp8", "nvfp4"] | None
    """Change the format of quantized weights without changing any number. It is an error if the format cannot
    represent the numbers exactly."""

    keep: str | list[str] | tuple[str, ...] | None
    """Do not quantize tensors whose names match, such as '*.down_proj.*'; repeatable."""

    chunks: int | str | None
    """Split every tensor into N parts along its first dimension, in separate files, as N ranks save it."""

    part: tuple[int, int] | list[int] | str | None
    """Convert part I (from 0) of N, and leave it staged for `finish`. With auto, I and N come from the environment of
    a Slurm array, srun, torchrun or Kubernetes."""

    depfile: str | os.PathLike[str] | None
    """Write a Makefile rule to FILE, listing the local files on which the output depends. Its target is the output
    file or, in a directory, the index or the only weights file."""

    verify: bool
    """Compare the output with the input before publishing it."""


class _Structure(TypedDict, total=False):
    """Convert, Average, Merge, Open, Rows, Verify."""

    structure: bool
    """False: Write only tensors, without the structure record and the other values in it."""

    like: str | os.PathLike[str] | None
    """Write the output with the names, files and dtypes of the checkpoint REF, and copy its config.json and tokenizer.
    Missing tensors, extra tensors and different shapes are errors before any file is written. An output of
    torch.distributed.checkpoint gets the chunks of REF, with warnings about these differences; an output of
    Megatron-core gets the form of the step REF."""

    partial: bool
    """Omit the tensors of REF that the input lacks, and list them."""

    fill: bool
    """Copy the tensors that the input lacks from REF."""


class _Naming(TypedDict, total=False):
    """Convert, Rows, Verify."""

    to: OutputName | None
    """The kind of output, if the name of OUTPUT does not specify it: safetensors, pt, universal, dcp, dcp-hf,
    accelerate, torch-checkpointing, megatron, megatron-te or megatron-fsdp. pt is a file for torch.load; DeepSpeed
    resumes from universal. For torch.distributed.checkpoint: .distcp files (dcp), the safetensors shards of its
    HuggingFaceStorageWriter (dcp-hf), the two checkpoints that accelerate and the Trainer load with FSDP2
    (accelerate), a torch_checkpointing step, or a step of Megatron-core (megatron). Default: from the name of
    OUTPUT."""

    per_rank: bool
    """Write one output per tensor-parallel rank: OUTPUT/mp_rank_NN/."""

    universal: str | os.PathLike[str] | None
    """Write a DeepSpeed universal checkpoint to DIR, to resume training from."""

    zero_stage: int | str | None
    """The ZeRO stage of the training run that will load the universal checkpoint. Default: any; for a ZeRO checkpoint,
    its own stage."""

    fresh_optimizer: bool
    """Start the universal checkpoint with zero moments at step 0, without the states of INPUT."""

    last_good: bool
    """INPUT is a run. Convert its last step that is whole and marked as complete."""


class _ReadingStates(TypedDict, total=False):
    """Convert, Distributed, Rows."""

    states: str | os.PathLike[str] | None
    """Also write the optimizer states from PATH, in a checkpoint of torch.distributed.checkpoint (such as --to dcp).
    PATH is the --optimizer output of another conversion, or a checkpoint with states, which may be INPUT."""


class _Working(TypedDict, total=False):
    """Convert, Average, Diff, Merge, Patch, Rows, Verify."""

    jobs: int | str | None
    """Use N threads, or N processes if most of the output is computed. Default: chosen for the machine."""

    memory: int | str | None
    """The total size of all buffers. Default: 8MiB; 16MiB if tensors are transposed, 24MiB if a file is remote."""


class _Publishing(TypedDict, total=False):
    """Convert, Average, Finish, Merge, Patch, Rows, Verify."""

    fsync: bool
    """False: Do not wait for the disk: a power failure may lose the output."""

    manifest: str | os.PathLike[str] | None
    """Write a manifest of inputs and outputs, with checksums, to FILE."""


class _Planning(TypedDict, total=False):
    """Convert, Average, Merge, Patch, Rows, Verify."""

    clobber: bool
    """False: Refuse to replace an output."""

    dry_run: bool
    """Show the plan without writing anything."""

    copy_config: bool | None
    """Copy config.json, the tokenizer and similar files to the directory OUTPUT, for from_pretrained. --no-extras is
    an alias of --no-copy-config. Default: on if INPUT is a directory whose config.json also describes OUTPUT."""


class _Overwriting(TypedDict, total=False):
    """Convert, Average, Diff, Finish, Inspect, Merge, Patch, Rows, Verify."""

    overwrite: bool
    """Also replace files of other programs that have the same names as output files. A file specified with -o is
    replaced without this option."""


class _Attesting(TypedDict, total=False):
    """Convert, Average, Finish, Merge, Rows, Verify."""

    checksum: bool
    """Verify all data that is read against the checksums in the input."""

    attest: str | os.PathLike[str] | None
    """Write digests and provenance to FILE as an unsigned OpenSSF Model Signing statement. Requires --digest."""


class _Spooling(TypedDict, total=False):
    """Convert, Average, Diff, Distributed, Inspect, Merge, Open, Patch, Rows, Verify."""

    spool_dir: str | os.PathLike[str] | None
    """Store temporary files in DIR: for pipes, compressed tensors and remote files. Default: next to a local OUTPUT,
    else TMPDIR or /var/tmp."""

    inert: bool
    """Convert the tensors of malicious files too; no code in them runs."""


class _Connecting(TypedDict, total=False):
    """Convert, Average, Diff, Distributed, Finish, Inspect, Load, Merge, Open, Patch, Rows, Scan, Verify."""

    storage_options: Mapping[str, Any] | str | None
    """Settings that fsspec passes to a store, such as '{"anon": true}'."""


class _Undecoded(TypedDict, total=False):
    """Convert, Average, Diff, Inspect, Load, Merge, Open, Patch, Rows, Verify."""

    raw: bool
    """Convert whole modules as objects, not as their state dicts."""


class _SingleFile(TypedDict, total=False):
    """Convert, Diff, Load, Open, Patch, Rows, Verify."""

    alone: bool
    """Convert only INPUT, even if it is one file of a set, such as a rank's file or a shard."""


class _Detecting(TypedDict, total=False):
    """Convert, Inspect, Open, Rows, Verify."""

    family: str | None
    """The required family of the input: torch, deepspeed, dcp, safetensors, or a plug-in's family."""


class _Precision(TypedDict, total=False):
    """Convert, Average, Diff, Distributed, Load, Merge, Open, Patch, Rows, Verify."""

    master: bool
    """For Megatron-core: write the optimizer's fp32 master weights instead of the weights."""

    unstack: bool
    """For Megatron-core: split a tensor that stores all layers into one tensor per layer, such as decoder.layers.0.…."""


class _Ordering(TypedDict, total=False):
    """Convert, Diff, Distributed, Open, Rows, Verify."""

    order: str | os.PathLike[str] | None
    """The order in which the optimizer numbers its parameters. FILE is a list of parameter names, one per line or in
    JSON (optionally one list per parameter group); a checkpoint that preserves their order, such as a state dict
    saved with torch.save; or a directory with the config.json of a transformers model. Default: from the checkpoint
    itself, or from its config.json."""


class _Dequantizing(TypedDict, total=False):
    """Convert, Average, Diff, Inspect, Load, Merge, Open, Rows, Verify."""

    dequantize: bool
    """Convert quantized weights (codes, scales, zero points) to plain weights, in bfloat16 or --dtype."""


class _Mapping(TypedDict, total=False):
    """Convert, Average, Distributed, Inspect, Merge, Open, Rows, Verify."""

    map: str | os.PathLike[str] | None
    """Give tensors the names and layouts of another program, with a built-in map (`ckptconv maps`) or a file of rules."""


class _Measuring(TypedDict, total=False):
    """Convert, Average, Diff, Distributed, Inspect, Merge, Open, Rows, Verify."""

    size: Mapping[str, int] | str | list[str] | tuple[str, ...] | None
    """The size of an axis of the map, such as n=32, if shapes and config.json do not determine it; repeatable."""


class _FindingTheModel(TypedDict, total=False):
    """Convert, Average, Distributed, Merge, Rows, Verify."""

    model_key: str | None
    """In a checkpoint of torch.distributed.checkpoint, store the weights under KEY, such as model; . is the top of the
    state dict; none leaves out the weights, for use with --states. Default: .; model in a torch_checkpointing step;
    or as in --like."""


class _FindingStates(TypedDict, total=False):
    """Convert, Distributed, Rows, Verify."""

    optimizer_key: str | None
    """In a checkpoint of torch.distributed.checkpoint, store the optimizer states under KEY. Default: optimizer, or as
    in --like."""

    flat_optimizer: bool
    """Store each state and setting of a parameter under a separate key, like torchtitan and
    flatten_optimizer_state_dict."""

    fill_states: bool
    """Write zeros for missing optimizer states, because torch's strict load requires states for every parameter."""


class _Layers(TypedDict, total=False):
    """Convert, Open, Rows, Verify."""

    layers: str | list[int] | tuple[int, ...] | range | None
    """Convert only these layers, such as 0-3,60, renumbered in this order, and change config.json accordingly."""

    experts: str | list[int] | list[list[int]] | list[str] | range | None
    """Convert only these experts of each layer, such as 0-7, renumbered, with their rows of the routers. FILE is JSON
    with a list of numbers for each layer that has experts."""

    component: Literal["text", "vision", "mtp"] | None
    """Convert only one component: the language model (text) or the vision model (vision), with its own config.json, or
    the layers that predict further tokens (mtp)."""

    config: str | os.PathLike[str] | None
    """The configuration of the model, or of the component alone, if no config.json next to the checkpoint has it. The
    output of a part contains it as config.json."""

    vocab: int | str | None
    """Convert only the first N rows of embeddings and head. Rows are not added: only --to megatron pads embeddings."""

    graft: str | list[str] | tuple[str, ...] | None
    """Add the tensors whose names match GLOB from the checkpoint REF, unchanged; repeatable. --fill adds missing
    tensors, cast to the dtypes of the output."""


class _NamingCheckpoints(TypedDict, total=False):
    """Average, Merge."""

    to: CheckpointName | None
    """Write a checkpoint of torch.distributed.checkpoint: .distcp files (dcp), or the safetensors shards of its
    HuggingFaceStorageWriter (dcp-hf); the two checkpoints that accelerate and the Trainer load with FSDP2
    (accelerate); a torch_checkpointing step (torch-checkpointing); or a step of Megatron-core (megatron)."""


class _Showing(TypedDict, total=False):
    """Diff, Inspect."""

    html: str | os.PathLike[str] | None
    """Write a self-contained HTML page to FILE."""


class ConvertOptions(
    _Sharding,
    _Casting,
    _Choosing,
    _Selecting,
    _Renaming,
    _Tied,
    _Structure,
    _Naming,
    _ReadingStates,
    _Working,
    _Publishing,
    _Planning,
    _Overwriting,
    _Attesting,
    _Spooling,
    _Connecting,
    _Undecoded,
    _SingleFile,
    _Detecting,
    _Precision,
    _Ordering,
    _Dequantizing,
    _Mapping,
    _Measuring,
    _FindingTheModel,
    _FindingStates,
    _Layers,
    total=False,
):
    """Options of `convert`, `save_state_dict` and `VirtualFiles`."""

    optimizer: str | os.PathLike[str] | None
    """Write the optimizer states to PATH, by parameter."""


class AverageOptions(
    _Sharding,
    _Casting,
    _Choosing,
    _Selecting,
    _Renaming,
    _Tied,
    _Structure,
    _Working,
    _Publishing,
    _Planning,
    _Overwriting,
    _Attesting,
    _Spooling,
    _Connecting,
    _Undecoded,
    _Precision,
    _Dequantizing,
    _Mapping,
    _Measuring,
    _FindingTheModel,
    _NamingCheckpoints,
    total=False,
):
    """Options of `average`."""

    weights: str | list[float] | tuple[float, ...] | None
    """The weights of the STEPs, in order, such as 1,1,2. Weights may be negative, but must not sum to zero. Default:
    equal weights."""

    ema: float | str | None
    """Exponential moving average: DECAY times the previous average, plus 1 - DECAY times each STEP."""

    minus: str | os.PathLike[str] | None
    """Task arithmetic: weight × first STEP + Σ weight × (STEP − BASE) over the others. With one STEP: weight × (STEP −
    BASE)."""


class DiffOptions(
    _Choosing,
    _Selecting,
    _Renaming,
    _Working,
    _Overwriting,
    _Spooling,
    _Connecting,
    _Undecoded,
    _SingleFile,
    _Precision,
    _Ordering,
    _Dequantizing,
    _Measuring,
    _Showing,
    total=False,
):
    """Options of `diff`."""

    with_states: bool
    """Also compare the optimizer states, by parameter."""

    map: str | os.PathLike[str] | None
    """Give the tensors of A the names and layouts of B, with a built-in map (`ckptconv maps`) or a file of rules."""

    dtype: DTypeName | TorchDType | None
    """Cast the floating-point tensors of both sides to DTYPE before the comparison. Default: float32 for a DeepSpeed
    checkpoint, else keep."""

    rtol: float | str | None
    """Compare values, not bits; two values are equal if they differ by at most R times the larger value. Default: bits
    are compared; 0 with --atol."""

    atol: float | str | None
    """Compare values, not bits; two values are equal if they differ by at most A. Default: bits are compared; 0 with
    --rtol."""

    tolerance: Literal["symmetric", "numpy"] | None
    """The rule for the tolerance. symmetric (as math.isclose): the larger of atol and rtol × the larger value. numpy
    (as numpy.isclose): atol + rtol × the value in B. Default: symmetric."""

    delta: str | os.PathLike[str] | None
    """Write the changes from A to B as a delta to the directory DIR, which `ckptconv patch`, slime and sglang read."""

    delta_encoding: Literal["auto", "xor", "overwrite"] | None
    """Store the XOR of old and new bytes (xor), or the new bytes with their positions (overwrite); auto selects the
    smaller. Default: auto."""

    delta_checksum: Literal["adler32", "xxh3-128", "blake3"] | None
    """The checksum to store for each new tensor; all except adler32 require a package. Default: adler32."""

    delta_version: int | str | None
    """The version number of B; A is version N - 1. Default: 1."""


class DistributedOptions(
    _Casting,
    _Choosing,
    _Selecting,
    _Renaming,
    _ReadingStates,
    _Spooling,
    _Connecting,
    _Precision,
    _Ordering,
    _Mapping,
    _Measuring,
    _FindingTheModel,
    _FindingStates,
    total=False,
):
    """Options of `DistributedReader`."""


class FinishOptions(_Publishing, _Overwriting, _Attesting, _Connecting, total=False):
    """Options of `finish`."""


class InspectOptions(
    _Sharding,
    _Choosing,
    _Selecting,
    _Overwriting,
    _Spooling,
    _Connecting,
    _Undecoded,
    _Detecting,
    _Dequantizing,
    _Mapping,
    _Measuring,
    _Showing,
    total=False,
):
    """Options of `inspect`."""

    stats: bool
    """Read all data, and show the minimum, maximum, mean, standard deviation, zeros, NaN and infinities of each
    tensor. NaN and infinities do not change the exit code; --json lists their tensors in not_finite."""

    as_: DTypeName | TorchDType | None
    """Also show the result of a conversion to DTYPE (fp32, bf16, fp16, keep)."""


class LoadOptions(_Casting, _Choosing, _Connecting, _Undecoded, _SingleFile, _Precision, _Dequantizing, total=False):
    """Options of `load_state_dict`."""


class MergeOptions(
    _Sharding,
    _Casting,
    _Choosing,
    _Selecting,
    _Renaming,
    _Tied,
    _Structure,
    _Working,
    _Publishing,
    _Planning,
    _Overwriting,
    _Attesting,
    _Spooling,
    _Connecting,
    _Undecoded,
    _Precision,
    _Dequantizing,
    _Mapping,
    _Measuring,
    _FindingTheModel,
    _NamingCheckpoints,
    total=False,
):
    """Options of `merge`."""

    adapter: str | None
    """If ADAPTER contains several adapters, as TRL's checkpoints do with the reference, merge the adapter NAME.
    Default: the only one."""


class OpenOptions(
    _Choosing,
    _Structure,
    _Spooling,
    _Connecting,
    _Undecoded,
    _SingleFile,
    _Detecting,
    _Precision,
    _Ordering,
    _Dequantizing,
    _Mapping,
    _Measuring,
    _Layers,
    total=False,
):
    """Options of `open`."""

    exclude_frozen: bool
    """Leave frozen parameters out."""

    model_rank: int | str | None
    """Read only this DeepSpeed tensor-parallel rank, from 0."""

    with_states: bool
    """Also read the description of the optimizer states now, not when they are first used."""


class PatchOptions(
    _Sharding,
    _Casting,
    _Choosing,
    _Renaming,
    _Working,
    _Publishing,
    _Planning,
    _Overwriting,
    _Spooling,
    _Connecting,
    _Undecoded,
    _SingleFile,
    _Precision,
    total=False,
):
    """Options of `patch`."""


class RowsOptions(
    _Sharding,
    _Casting,
    _Choosing,
    _Selecting,
    _Renaming,
    _Tied,
    _Structure,
    _Naming,
    _ReadingStates,
    _Working,
    _Publishing,
    _Planning,
    _Overwriting,
    _Attesting,
    _Spooling,
    _Connecting,
    _Undecoded,
    _SingleFile,
    _Detecting,
    _Precision,
    _Ordering,
    _Dequantizing,
    _Mapping,
    _Measuring,
    _FindingTheModel,
    _FindingStates,
    _Layers,
    total=False,
):
    """Options of `split_rows`, `pack_rows` and `check_rows`."""

    embedding_dim: int | str | None
    """The number of weight items in a row."""

    method: str | None
    """exact_row_wise_adagrad, partial_row_wise_adam, adam, row_wise_rmsprop_ar, or none."""

    weight_dtype: str | TorchDType | None
    """float32 or float16. Default: the table's."""

    momentum1_dtype: str | TorchDType | None
    """float32, float16 or bfloat16. Default: float32."""

    momentum2_dtype: str | TorchDType | None
    """As --momentum1-dtype. Default: float32."""

    max_dim: int | str | None
    """The embedding dimension D of the widest table of the same operator. Default: this table's."""


class ScanOptions(_Connecting, total=False):
    """Options of `scan`."""


class VerifyOptions(
    _Sharding,
    _Casting,
    _Choosing,
    _Selecting,
    _Renaming,
    _Tied,
    _Structure,
    _Naming,
    _Working,
    _Publishing,
    _Planning,
    _Overwriting,
    _Attesting,
    _Spooling,
    _Connecting,
    _Undecoded,
    _SingleFile,
    _Detecting,
    _Precision,
    _Ordering,
    _Dequantizing,
    _Mapping,
    _Measuring,
    _FindingTheModel,
    _FindingStates,
    _Layers,
    total=False,
):
    """Options of `verify`."""

    states: str | os.PathLike[str] | None
    """The optimizer states that the conversion wrote; for a checkpoint of torch.distributed.checkpoint, the states
    that the conversion read."""
