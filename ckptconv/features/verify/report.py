"""An output to verify, and the report of how it was verified."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckptconv.features.verify.provenance import Manifest
from ckptconv.options.table import Options
from ckptconv.outputs.kinds import entry_of
from ckptconv.outputs.targets import Target
from ckptconv.result import OutputFile, Shown
from ckptconv.storage.location import Location


@dataclass
class Verification(Shown):
    """The comparison of an output that equals its source. Sizes are in bytes."""

    input: str
    """The source."""

    outputs: list[OutputFile]
    """The files of the output."""

    format: str
    """The format of the source, in words."""

    tensors: int
    """Names of the source that were looked up."""

    aliases: dict[str, str]
    """Names that are stored under another name: {name: name that is stored}."""

    structure_records: int
    """Number of structure records that were compared."""

    bytes_compared: int
    """Bytes of the output's tensors; all are compared."""

    bytes_read: int
    """Bytes read."""

    warnings: list[str]
    """Warnings, one sentence each."""

    options: dict[str, Any] = field(default_factory=dict)
    """The conversion's options that are not the default, as given or as the manifest says."""

    manifest: str = ""
    """The manifest that says so; empty if none was read."""

    deltas: list[str] = field(default_factory=list)
    """The deltas that were applied to the source, if `ckptconv patch` made the output, as its manifest says."""

    averaged: list[str] = field(default_factory=list)
    """The checkpoints that `ckptconv average` averaged the source with, as its manifest says."""

    adapters: list[str] = field(default_factory=list)
    """The adapters that `ckptconv merge` merged into the source, as its manifest says."""

    notes: list[str] = field(default_factory=list)
    """Notes on the choice among the source's steps or checkpoints, and on its parts that the output lacks, one sentence
    each."""

    inert: bool = False
    """Whether the output has no tensor but in objects of classes known by name only: it is no model then."""

    unchecked: bool = False
    """Whether the source has checksums of its own, which were not compared."""

    seconds: float = 0.0
    """Duration in seconds."""

    peak_rss_bytes: int = 0
    """The most memory that the process had."""


class CheckedOutput(NamedTuple):
    """An output to verify, its `place`, and which of `KINDS` it is.
    `at` maps the names of files that are not yet in their place to where they are read. `manifest` is None if there is
    none, and so are its own `options` if they are those of the conversion. `others` are the paths of outputs that are
    verified together."""

    place: Location
    kind: str = "directory"
    at: Mapping[str, str] | None = None
    manifest: Manifest | None = None
    options: Options | None = None
    others: frozenset[str] = frozenset()

    @property
    def path(self) -> str:
        return self.place.path

    @property
    def planned(self) -> Target:
        """The place and kind of the output, as a conversion plans it."""
        return Target(self.path, self.kind)

    @property
    def holds(self) -> str:
        """The kind of its contents, as manifests call it."""
        return entry_of(self.kind).holds
