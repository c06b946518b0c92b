"""What a conversion gives back: its report."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class OutputFile:
    """A file of the output: its path, its size, and how many tensors it holds."""

    path: str
    bytes: int
    tensors: int


@dataclass
class LikeRow:
    """A tensor of an output that is like a reference: its name, dtype and file; the name that it has in the source,
    None if it is taken from the reference; and the dtype that it has there."""

    tensor: str
    dtype: str
    file: str
    source: str | None
    source_dtype: str


@dataclass
class LikeReport:
    """What an output takes over from its reference, whose path is `reference`.

    `matched` counts the tensors of the reference that the source gives; `missing` are those that the output leaves out,
    `filled` those that are taken from the reference. `casts` counts the tensors that are cast: {"float32 to bfloat16":
    count}. `tensors` has a row for each tensor, with `dry_run` only.
    """

    reference: str
    matched: int
    missing: list[str]
    filled: list[str]
    casts: dict[str, int]
    tensors: list[LikeRow] = field(default_factory=list)


@dataclass
class Report:
    """What a conversion did, or would do with `dry_run`. Sizes are in bytes.

    `checksums` counts the storages whose checksum was checked; `extra_bytes`, part of `bytes_read`, were read for that.
    `bytes_verified` counts the bytes of tensors that were compared with the source afterwards; 0 where there is no
    tensor beside objects of classes that are known by name only.
    `reused` counts the files that an earlier run had finished: they are no part of `bytes_written`.
    `part` names the part that was staged, and `finish` the outputs that are to be finished when all parts are.
    `dequantized` counts the weights that were made of quantized ones, by format.
    `dropped` names entries that were left out as their class is known by name only: {entry: class}.
    `recorded` are the keys at the top of the state under which the structure record holds values that are no tensors;
    then `weights_key` is the key that takes the weights alone, if there is one.
    `like` says what was taken over from a reference; None without one. `made_of` names, in a dry run with a map, the
    tensors of which each is made.
    """

    input: str
    outputs: list[OutputFile]
    format: str
    tensors: int
    aliases: dict[str, str]
    counts: dict[str, int]
    opaque: list[str]
    warnings: list[str]
    notes: list[str] = field(default_factory=list)
    input_bytes: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    bytes_verified: int = 0
    reused: int = 0
    checksums: int = 0
    extra_bytes: int = 0
    seconds: float = 0.0
    peak_rss_bytes: int = 0
    dry_run: bool = False
    finished: bool = False
    part: str = ""
    finish: list[str] = field(default_factory=list)
    dequantized: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    recorded: list[str] = field(default_factory=list)
    weights_key: str = ""
    like: LikeReport | None = None
    made_of: dict[str, list[str]] = field(default_factory=dict)
