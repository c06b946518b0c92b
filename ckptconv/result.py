"""The report of a conversion."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ckptconv.process import of_feature

# The feature that has reports of notebooks: `shown` in its `notebook` returns a report as HTML.
REPORTING = "reporting"


class Shown:
    """A dataclass that a notebook shows as a table of its fields. Those that are empty are left out."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as its command prints it with --json, as plain values."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    def to_json(self, *arguments: Any, **named: Any) -> str:
        """Return the result of `to_dict` for the same arguments as text: one line of JSON in ASCII."""
        import json

        return json.dumps(self.to_dict(*arguments, **named), ensure_ascii=True, allow_nan=False, default=str)

    def _repr_html_(self) -> str | None:
        notebook = of_feature(REPORTING, "notebook")
        return notebook.shown(self) if notebook else None


@dataclass
class OutputFile:
    """A file of the output."""

    path: str
    """Its path or URL."""

    bytes: int
    """Its size."""

    tensors: int
    """Number of tensors in the file."""


@dataclass
class Report(Shown):
    """The report of a conversion, or of a dry run. Sizes are in bytes."""

    input: str
    """The path or URL of the input."""

    outputs: list[OutputFile]
    """The files of the output."""

    format: str
    """The format of the input, in words."""

    tensors: int
    """Number of tensors written."""

    aliases: dict[str, str]
    """Tied tensors that are stored once: {name left out: name that is stored}."""

    counts: dict[str, int]
    """Number of tensors of each kind, for formats that distinguish kinds."""

    opaque: list[str]
    """Classes of objects in the input that are kept as inert data; nothing of them runs."""

    warnings: list[str]
    """Warnings, one sentence each."""

    notes: list[str] = field(default_factory=list)
    """Notes, one sentence each."""

    beside: dict[str, str] = field(default_factory=dict)
    """Further files that were written: {path: the option that names it, or `manifest` for one in an output}."""

    left: dict[str, str] = field(default_factory=dict)
    """Files and folders of the input's directory that the output does not have: {path: reason}."""

    input_bytes: int = 0
    """Size of all input files that the output is converted from."""

    bytes_read: int = 0
    """Bytes read; with --dry-run, those of the planning alone."""

    bytes_written: int = 0
    """Bytes written, with --dry-run those to be; files taken over from an earlier run are not among them."""

    bytes_verified: int = 0
    """Bytes of tensors compared with the input after writing, with --verify."""

    reused: int = 0
    """Files that an interrupted run had finished, and that were taken over."""

    checksums: int = 0
    """Stored checksums that were compared, with --checksum."""

    extra_bytes: int = 0
    """Bytes read for checksums alone; part of bytes_read."""

    seconds: float = 0.0
    """Duration in seconds; with --dry-run, of the planning."""

    peak_rss_bytes: int = 0
    """The most memory that the process had."""

    dry_run: bool = False
    """Whether nothing was written, with --dry-run."""

    finished: bool = False
    """Whether these outputs were published by `finish`."""

    part: str = ""
    """The part that was staged, with --part, such as 0/2; else empty."""

    finish: list[str] = field(default_factory=list)
    """The arguments of the `finish` that publishes the outputs when all parts are staged."""

    dequantized: dict[str, int] = field(default_factory=dict)
    """Number of weights that were dequantized, by format; of an average, in all its inputs together."""

    quantized: dict[str, int] = field(default_factory=dict)
    """Number of weights that were quantized with --quantize or --requantize, by format."""

    dropped: dict[str, str] = field(default_factory=dict)
    """Entries left out because their class is known by name only: {entry: class}."""

    recorded: list[str] = field(default_factory=list)
    """Keys of the state under which the structure record holds values other than tensors."""

    weights_key: str = ""
    """The --key that takes the weights alone when `recorded` names keys; empty if there is none."""

    like: Any = None
    """The properties taken over from the reference of --like; null without --like."""

    averaged: list[str] = field(default_factory=list)
    """The checkpoints that were averaged, in order; with --minus, the checkpoint that was subtracted is the last."""

    weights: list[float] = field(default_factory=list)
    """The weight of each of these checkpoints in the result."""

    adapters: list[str] = field(default_factory=list)
    """The adapters that were merged, in order."""

    deltas: list[str] = field(default_factory=list)
    """The deltas that were applied, in order."""

    configuration: dict[str, list[str]] = field(default_factory=dict)
    """Keys of config.json that --layers and similar options changed: {key: [old value, new value]}, both as JSON."""

    made_of: dict[str, list[str]] = field(default_factory=dict)
    """In a dry run: the input tensors of each output tensor that a map makes; of a renamed one, the former name."""
