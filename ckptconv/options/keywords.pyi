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
    "torch-checkpointing",
]
CheckpointName: TypeAlias = Literal[
    "dcp",
    "dcp-hf",
    "accelerate",
    "torch-checkpointing",
]


class _Sharding(TypedDict, total=False):
    """Convert, Verify, Average, Inspect, Merge, Patch, Rows."""

    max_shard_size: int | str | None
    """Split the output into files of at most SIZE, such as 5GB or 2GiB. Default: 5GB for what many processes wrote,
    else files as the input has them."""


class _Casting(TypedDict, total=False):
    """Convert, Verify, Load, Distributed, Average, Merge, Patch, Rows."""

    dtype: DTypeName | TorchDType | None
    """Cast floating tensors to float32, bfloat16 or float16 (or fp32, bf16, fp16); keep leaves them as they are.
    Default: float32 for a DeepSpeed checkpoint, else keep."""


class _Choosing(TypedDict, total=False):
    """Convert, Verify, Open, Load, Distributed, Average, Diff, Inspect, Merge, Patch, Rows."""

    key: str | None
    """Only this subtree, such as state_dict or optimizer.state; . is all."""

    tag: str | None
    """The tag of a DeepSpeed run. Default: what `latest` says."""


class _Selecting(TypedDict, total=False):
    """Convert, Verify, Distributed, Average, Diff, Inspect, Merge, Rows."""

    include: str | list[str] | tuple[str, ...] | None
    """Only names that match, such as 'model.*'; repeatable."""

    exclude: str | list[str] | tuple[str, ...] | None
    """No names that match, such as '*.bias'; repeatable."""


class _Renaming(TypedDict, total=False):
    """Convert, Verify, Distributed, Average, Diff, Merge, Patch, Rows."""

    strip_prefix: str | None
    """Take PREFIX, such as model., off the beginning of names."""

    rename: str | list[str] | tuple[str, ...] | None
    """Rename, as re.sub does: '^module=model'; repeatable."""

    exclude_frozen_parameters: bool
    """Leave frozen parameters out."""


class _Tied(TypedDict, total=False):
    """Convert, Verify, Average, Merge, Rows."""

    tied: Literal["alias", "duplicate"] | None
    """Store tied tensors once (alias), or under each of their names (duplicate). Default: alias."""

    chunks: int | str | None
    """Cut every tensor into N along its first dimension, as N ranks save it, each into files of its own."""

    verify: bool
    """Compare the output with the input before it gets its name."""

    part: tuple[int, int] | list[int] | str | None
    """Do part I, from 0, of N, and leave it staged for `finish`; auto: as the job's environment says (Slurm, torchrun,
    Kubernetes)."""

    digest: Literal["sha256", "blake3"] | None
    """Compute a digest of every file and tensor, kept in the manifest."""

    depfile: str | os.PathLike[str] | None
    """Write a rule for make there: which files the output is made of."""

    for_hub: bool
    """Write a model to publish: its weights alone, found without --key, with config.json, tokenizer and the like,
    without structure record and manifest."""

    opaque: Literal["keep", "drop"] | None
    """Objects of classes that are not known to be data: write them, or leave them out. Default: refuse."""

    drop_opaque: bool
    """The same as --opaque drop."""

    quantize: Literal["fp8-block", "fp8-block-ue8m0", "mxfp8", "int4-g32"] | None
    """Quantize the matrices of layers: to FP8 with a scale for 128 by 128 (fp8-block; of powers of two: fp8-block-
    ue8m0) or for 32 (mxfp8), or to 4 bits with a scale for 32 (int4-g32). Embeddings, heads, norms and routers stay
    as they are."""

    requantize: Literal["fp8-block", "fp8-block-ue8m0", "mxfp8", "nvfp4"] | None
    """Give quantized weights another format that gives the same numbers, bit for bit; where it does not, that is an
    error."""

    keep: str | list[str] | tuple[str, ...] | None
    """Quantize no names that match, such as '*.down_proj.*'; repeatable."""


class _Imitating(TypedDict, total=False):
    """Convert, Verify, Open, Average, Merge, Rows."""

    like: str | os.PathLike[str] | None
    """Give the output the names, files and dtypes of REF, a checkpoint, and its config.json and tokenizer; of
    torch.distributed.checkpoint, the cuts of REF. What is missing, too much, or of another shape is an error before
    anything is written."""

    partial: bool
    """Leave out tensors of REF that the input does not have, and say which."""

    fill: bool
    """Take from REF the tensors that the input does not have."""

    structure: bool
    """False: Write tensors alone: no structure record, so none of the values that a checkpoint has beside them."""


class _Naming(TypedDict, total=False):
    """Convert, Verify, Rows."""

    to: OutputName | None
    """The kind of output, where the name of OUTPUT does not say it: safetensors, pt, universal, dcp, dcp-hf,
    accelerate or torch-checkpointing. pt is a file for torch.load, and universal a checkpoint from which DeepSpeed
    resumes. Those of torch.distributed.checkpoint are .distcp files (dcp), the safetensors shards of its
    HuggingFaceStorageWriter (dcp-hf), the two that accelerate and the Trainer of transformers load with FSDP2
    (accelerate), or a step of torch_checkpointing (torch-checkpointing). Default: what OUTPUT is called."""

    universal: str | os.PathLike[str] | None
    """Write a universal checkpoint there, to resume from."""

    zero_stage: int | str | None
    """The ZeRO stage that the universal checkpoint is for. Default: any; of a ZeRO checkpoint, its own."""

    fresh_optimizer: bool
    """Begin the universal checkpoint with zero moments and step 0, whatever INPUT holds."""

    per_rank: bool
    """Tensor parallel: OUTPUT/mp_rank_NN/ for each rank."""


class _ReadingStates(TypedDict, total=False):
    """Convert, Distributed, Rows."""

    states: str | os.PathLike[str] | None
    """The optimizer states too, from PATH: what --optimizer of another conversion wrote, or a checkpoint that has
    them, INPUT itself for one."""


class _FindingTheModel(TypedDict, total=False):
    """Convert, Verify, Distributed, Average, Merge, Rows."""

    model_key: str | None
    """Put the weights under KEY, such as model; . is the top of the state dict; none leaves them out, beside --states."""


class _FindingStates(TypedDict, total=False):
    """Convert, Verify, Distributed, Rows."""

    optimizer_key: str | None
    """Put the optimizer states under KEY."""

    flat_optimizer: bool
    """One key for each state and setting of a parameter, as flatten_optimizer_state_dict and torchtitan have it."""

    fill_states: bool
    """Give parameters that have no optimizer states yet those of the beginning, zeros: torch's strict load asks for
    them."""


class _Ordering(TypedDict, total=False):
    """Convert, Verify, Open, Distributed, Diff, Rows."""

    order: str | os.PathLike[str] | None
    """The order in which the optimizer numbers its parameters: a file of their names, one a line, or a JSON list of
    them, or of a list for each of its groups; a checkpoint that keeps their order, such as a state dict of
    torch.save; or a directory with the config.json of a model of transformers. Default: what the checkpoint itself
    tells, or its config.json."""


class _Working(TypedDict, total=False):
    """Convert, Verify, Average, Diff, Merge, Patch, Rows."""

    jobs: int | str | None
    """Work in N threads; an output that is mostly computed, in N processes. Default: what suits the machine."""

    memory: int | str | None
    """Most memory for all buffers together. Default: 8MiB; 16MiB where tensors are transposed, 24MiB where something
    is remote."""


class _Publishing(TypedDict, total=False):
    """Convert, Verify, Finish, Average, Merge, Patch, Rows."""

    fsync: bool
    """False: Do not wait for the disk: a power cut may lose the output."""

    manifest: str | os.PathLike[str] | None
    """Write there what was made of what, with checksums."""


class _Planning(TypedDict, total=False):
    """Convert, Verify, Average, Merge, Patch, Rows."""

    clobber: bool
    """False: Refuse to replace an output."""

    dry_run: bool
    """Show the plan, write nothing."""

    copy_config: bool | None
    """Copy config.json, the tokenizer and the like to OUTPUT, a directory, for from_pretrained; --no-extras is the
    same as --no-copy-config. Default: from the hub, of a pipeline of diffusers, and from REF of --like."""


class _Overwriting(TypedDict, total=False):
    """Convert, Verify, Finish, Average, Diff, Inspect, Merge, Patch, Rows."""

    overwrite: bool
    """Replace files of other programs too, where they have the names of what is written."""


class _Attesting(TypedDict, total=False):
    """Convert, Verify, Finish, Average, Merge, Rows."""

    checksum: bool
    """Check the checksums of all that is read, as far as the input has any."""

    attest: str | os.PathLike[str] | None
    """Write there, to be signed, the digests as OpenSSF Model Signing has them, and the provenance; needs --digest."""


class _Spooling(TypedDict, total=False):
    """Convert, Verify, Open, Distributed, Average, Diff, Inspect, Merge, Patch, Rows."""

    spool_dir: str | os.PathLike[str] | None
    """For temporary files: of pipes, compressed tensors, remote files. Default: beside OUTPUT, or TMPDIR."""

    inert: bool
    """Take even files that carry an attack; nothing in them runs."""


class _Connecting(TypedDict, total=False):
    """Convert, Verify, Finish, Open, Load, Distributed, Average, Diff, Inspect, Merge, Patch, Rows, Scan."""

    storage_options: Mapping[str, Any] | str | None
    """Settings of a store, for fsspec, such as '{"anon": true}'."""


class _Undecoded(TypedDict, total=False):
    """Convert, Verify, Open, Load, Average, Diff, Inspect, Merge, Patch, Rows."""

    raw: bool
    """Take whole modules as the objects they are, not as their state dicts."""


class _SingleFile(TypedDict, total=False):
    """Convert, Verify, Open, Load, Diff, Patch, Rows."""

    alone: bool
    """Take INPUT by itself even if it is one file of many, such as a rank's or a shard."""


class _Detecting(TypedDict, total=False):
    """Convert, Verify, Open, Inspect, Rows."""

    family: str | None
    """The family that the input must be of: torch, deepspeed, dcp, safetensors, or a plug-in's."""


class _Precision(TypedDict, total=False):
    """Convert, Verify, Open, Load, Distributed, Average, Diff, Merge, Patch, Rows."""

    master: bool
    """The optimizer's fp32 masters in the place of the weights, of a Megatron-core checkpoint."""

    unstack: bool
    """A tensor for each layer, as in decoder.layers.0.…, where Megatron-core stores all layers in one."""


class _Dequantizing(TypedDict, total=False):
    """Convert, Verify, Open, Load, Average, Diff, Inspect, Merge, Rows."""

    dequantize: bool
    """Make weights of quantized ones: of their codes, scales and zero points, as bfloat16 or --dtype."""


class _Mapping(TypedDict, total=False):
    """Convert, Verify, Open, Distributed, Average, Inspect, Merge, Rows."""

    map: str | os.PathLike[str] | None
    """Give tensors the names and layouts of another program, by a map that comes with ckptconv (`ckptconv maps`) or a
    file of rules."""


class _Measuring(TypedDict, total=False):
    """Convert, Verify, Open, Distributed, Average, Diff, Inspect, Merge, Rows."""

    size: Mapping[str, int] | str | list[str] | tuple[str, ...] | None
    """The size of an axis of the map that shapes and config.json do not tell, such as n=32; repeatable."""


class _NamingCheckpoints(TypedDict, total=False):
    """Average, Merge."""

    to: CheckpointName | None
    """Write a checkpoint of torch.distributed.checkpoint: .distcp files (dcp), or the safetensors shards of its
    HuggingFaceStorageWriter (dcp-hf); the two that accelerate and the Trainer of transformers load with FSDP2
    (accelerate); or a step of torch_checkpointing (torch-checkpointing)."""


class _Showing(TypedDict, total=False):
    """Diff, Inspect."""

    html: str | os.PathLike[str] | None
    """Write a page that shows it: one file, without links."""


class ConvertOptions(
    _Sharding,
    _Casting,
    _Choosing,
    _Selecting,
    _Renaming,
    _Tied,
    _Imitating,
    _Naming,
    _ReadingStates,
    _FindingTheModel,
    _FindingStates,
    _Ordering,
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
    _Dequantizing,
    _Mapping,
    _Measuring,
    total=False,
):
    """Options of `convert`, `save_state_dict` and `VirtualFiles`."""

    optimizer: str | os.PathLike[str] | None
    """Write the optimizer states there, by parameter."""


class VerifyOptions(
    _Sharding,
    _Casting,
    _Choosing,
    _Selecting,
    _Renaming,
    _Tied,
    _Imitating,
    _Naming,
    _FindingTheModel,
    _FindingStates,
    _Ordering,
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
    _Dequantizing,
    _Mapping,
    _Measuring,
    total=False,
):
    """Options of `verify`."""

    states: str | os.PathLike[str] | None
    """The optimizer states: those that the conversion wrote there, or of a checkpoint of torch.distributed.checkpoint
    those that went into it."""


class FinishOptions(_Publishing, _Overwriting, _Attesting, _Connecting, total=False):
    """Options of `finish`."""


class OpenOptions(
    _Choosing,
    _Imitating,
    _Ordering,
    _Spooling,
    _Connecting,
    _Undecoded,
    _SingleFile,
    _Detecting,
    _Precision,
    _Dequantizing,
    _Mapping,
    _Measuring,
    total=False,
):
    """Options of `open`."""

    exclude_frozen: bool
    """Leave frozen parameters out."""

    model_rank: int | str | None
    """Only this tensor-parallel rank of DeepSpeed's, from 0."""

    with_states: bool
    """The optimizer's states too: read what describes them now, not when they are asked for."""


class LoadOptions(_Casting, _Choosing, _Connecting, _Undecoded, _SingleFile, _Precision, _Dequantizing, total=False):
    """Options of `load_state_dict`."""


class DistributedOptions(
    _Casting,
    _Choosing,
    _Selecting,
    _Renaming,
    _ReadingStates,
    _FindingTheModel,
    _FindingStates,
    _Ordering,
    _Spooling,
    _Connecting,
    _Precision,
    _Mapping,
    _Measuring,
    total=False,
):
    """Options of `DistributedReader`."""


class AverageOptions(
    _Sharding,
    _Casting,
    _Choosing,
    _Selecting,
    _Renaming,
    _Tied,
    _Imitating,
    _FindingTheModel,
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
    _NamingCheckpoints,
    total=False,
):
    """Options of `average`."""

    weights: str | list[float] | tuple[float, ...] | None
    """How much each STEP counts, in order, such as 1,1,2; they may be negative, and the sum is divided by theirs.
    Default: 1 for each."""

    ema: float | str | None
    """Exponential moving average: each STEP counts by 1 - DECAY, and what was before it by DECAY."""

    minus: str | os.PathLike[str] | None
    """Do not divide: the first STEP, and by their weights what the others have more than BASE; of one STEP, what it
    has more itself."""


class DiffOptions(
    _Choosing,
    _Selecting,
    _Renaming,
    _Ordering,
    _Working,
    _Overwriting,
    _Spooling,
    _Connecting,
    _Undecoded,
    _SingleFile,
    _Precision,
    _Dequantizing,
    _Measuring,
    _Showing,
    total=False,
):
    """Options of `diff`."""

    with_states: bool
    """Compare the optimizer states too, by parameter."""

    map: str | os.PathLike[str] | None
    """Give the tensors of A the names and layouts that B has, by a map that comes with ckptconv (`ckptconv maps`) or a
    file of rules."""

    dtype: DTypeName | TorchDType | None
    """Cast the floating tensors of both to DTYPE before they are compared. Default: float32 for a DeepSpeed
    checkpoint, else keep."""

    rtol: float | str | None
    """Compare values, not bits; equal is what differs by at most R times the larger of both. Default: bits are
    compared; 0 with --atol."""

    atol: float | str | None
    """Compare values, not bits; equal is what differs by at most A. Default: bits are compared; 0 with --rtol."""

    tolerance: Literal["symmetric", "numpy"] | None
    """How far apart equal values may be: as math.isclose has it, the larger of A and R times the larger of both; or as
    numpy's isclose, A and R times that of B, together. Default: symmetric."""

    delta: str | os.PathLike[str] | None
    """Write what changes A into B to the directory DIR, as `ckptconv patch`, slime and sglang read it."""

    delta_encoding: Literal["auto", "xor", "overwrite"] | None
    """Store the exclusive or of old and new bytes, or the new bytes and where they go; auto: what is smaller. Default:
    auto."""

    delta_checksum: Literal["adler32", "xxh3-128", "blake3"] | None
    """Store these checksums of the new tensors; all but adler32 need a package. Default: adler32."""

    delta_version: int | str | None
    """B is version N of the model, and A the one before. Default: 1."""


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
    """Read all data, and show min, max, mean, std, zeros, NaN and infinities of each tensor."""

    as_: DTypeName | TorchDType | None
    """What a conversion to DTYPE (fp32, bf16, fp16, keep) would give."""


class MergeOptions(
    _Sharding,
    _Casting,
    _Choosing,
    _Selecting,
    _Renaming,
    _Tied,
    _Imitating,
    _FindingTheModel,
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
    _NamingCheckpoints,
    total=False,
):
    """Options of `merge`."""

    adapter: str | None
    """Of an ADAPTER that holds several, as TRL's checkpoints hold a reference, merge the one of this name. Default:
    the only one."""


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
    _Imitating,
    _Naming,
    _ReadingStates,
    _FindingTheModel,
    _FindingStates,
    _Ordering,
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
    _Dequantizing,
    _Mapping,
    _Measuring,
    total=False,
):
    """Options of `split_rows`, `pack_rows` and `check_rows`."""

    embedding_dim: int | str | None
    """Items of weight in a row."""

    method: str | None
    """exact_row_wise_adagrad, partial_row_wise_adam, adam, row_wise_rmsprop_ar, or none."""

    weight_dtype: str | TorchDType | None
    """float32 or float16. Default: the table's."""

    momentum1_dtype: str | TorchDType | None
    """float32, float16 or bfloat16. Default: float32."""

    momentum2_dtype: str | TorchDType | None
    """As --momentum1-dtype. Default: float32."""

    max_dim: int | str | None
    """D of the widest table of the same operator. Default: this table's."""


class ScanOptions(_Connecting, total=False):
    """Options of `scan`."""
