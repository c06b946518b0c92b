"""The reports that conversions print."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from ckptconv.cells import cut
from ckptconv.cli.lines import format_memory, format_time
from ckptconv.cli.registered import OF_CLASSES, SUMMARIES
from ckptconv.storage.paths import is_remote
from ckptconv.text import count_of, format_size, some

if TYPE_CHECKING:
    from ckptconv.result import OutputFile, Report

# Up to so many output files get a line each.
FEW = 3
# Most keys of recorded values that are named, and most cells of each.
KEYS, KEY = 5, 60
# Classes that every checkpoint of DeepSpeed or torch.distributed.checkpoint may name: they tell a user nothing.
_USUAL = ("deepspeed.", "_io.BytesIO")


def of_conversion(report: Report, verbose: bool) -> list[str]:
    """Return the lines of the report of a conversion."""
    lines: list[str] = []
    staged = "uploaded" if any(map(is_remote, report.finish)) else "staged"
    verb = "would write" if report.dry_run else staged if report.part else "finished" if report.finished else "wrote"
    if report.part and not report.outputs:
        lines.append(f"part {report.part} has no files: there are fewer files than parts (see --max-shard-size)")
    by_directory: dict[str, list[OutputFile]] = {}
    for output in report.outputs:
        by_directory.setdefault(_gathered(output.path), []).append(output)
    for directory, outputs in by_directory.items():
        if len(outputs) <= FEW or verbose:
            lines.extend(f"{verb} {output.path} ({contents(output.bytes, output.tensors)})" for output in outputs)
        else:
            tensors = min(sum(output.tensors for output in outputs), report.tensors)  # files may hold parts of tensors
            together = contents(sum(output.bytes for output in outputs), tensors)
            lines.append(f"{verb} {len(outputs)} files in {directory} ({together})")
    if shown := [path for path, option in report.beside.items() if verbose or option.startswith("-")]:
        lines.append(f"{'would write' if report.dry_run else 'wrote'} {', '.join(shown)}")
    lines.extend(f"{name} ← {some(of, len(of) if verbose else FEW, str)}" for name, of in report.made_of.items())
    lines.extend(report.notes)
    for field, module in SUMMARIES.items():
        if value := getattr(report, field):
            lines.extend(import_module(module).summary(value, verbose))
    lines.extend(recorded([report]))
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in report.counts.items())
    lines.append(f"{report.format}: {kinds or count_of(report.tensors, 'tensor')}")
    if report.aliases and verbose:
        lines.extend(f"  {alias} is stored as {kept}" for alias, kept in report.aliases.items())
    elif report.aliases and "aliases" not in report.counts:
        tied = count_of(len(report.aliases), "tied name")
        lines.append(f"{tied} stored once (--verbose lists them; convert --tied duplicate writes each)")
    opaque = report.opaque if verbose else [name for name in report.opaque if not name.startswith(_USUAL)]
    if opaque:
        most = len(opaque) if verbose else KEYS
        lines.append(f"kept as inert data, never run: {some(opaque, most, str)}")
        for module in OF_CLASSES if report.recorded else ():
            lines.extend(import_module(module).of_classes(opaque, most, verbose))
    if report.checksums:
        extra = f"; checking read another {format_size(report.extra_bytes)}" if report.extra_bytes else ""
        lines.append(f"the checksums of {count_of(report.checksums, 'storage')} are correct{extra}")
    if report.bytes_verified:
        lines.append(f"verified: {format_size(report.bytes_verified)} match the source bit for bit")
    if report.reused:
        lines.append(f"{count_of(report.reused, 'file')} reused from an interrupted run")
    if report.part and not report.dry_run:
        paths = " ".join(map(shlex.quote, report.finish))
        lines.append(f"this was part {report.part}; when all parts are done, run: ckptconv finish {paths}")
    if report.dry_run:
        size = format_size(report.bytes_written)
        lines.append(f"would write {size} in all, from input files of {format_size(report.input_bytes)}")
    elif not report.finished:
        # Descriptions may be read twice, and are most of a small file: more may be read than there is.
        read = f"{format_size(report.bytes_read)} of" if report.bytes_read < report.input_bytes else "all"
        whole = format_size(report.input_bytes or report.bytes_read)  # small arrays may lie in descriptions alone
        lines.append(
            f"read {read} {whole}, wrote {format_size(report.bytes_written)} "
            f"in {duration(report.seconds, report.bytes_written)}, peak memory {format_memory(report.peak_rss_bytes)}"
        )
    return lines


def _gathered(path: str) -> str:
    """Return the directory to report a file under. A universal checkpoint has a directory for each parameter: for
    these it is the one that contains `zero`."""
    directory = os.path.dirname(path) or "."
    above, slash, _ = f"{directory}/".rpartition("/zero/")
    return above if slash and path.endswith(".pt") else directory


def recorded(reports: Sequence[Report]) -> Iterator[str]:
    """Yield the keys under which values were recorded, once for all outputs with the same keys."""
    inputs_of: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for report in reports:
        if report.recorded:
            inputs_of.setdefault((tuple(report.recorded), report.weights_key), []).append(report.input)
    for (under, key), inputs in inputs_of.items():
        keys = some(under, KEYS, lambda name: cut(name, KEY))
        alone = f"--key {key} converts only the weights, " if key else ""
        whose = f" of {some(inputs, FEW, str)}" if len(reports) > 1 else ""
        yield f"the structure record{whose} also contains values under {keys}; {alone}--no-structure omits these"


def contents(size: int, tensors: int) -> str:
    """Return the size of files, and the number of tensors in them, in words."""
    return f"{format_size(size)}, {count_of(tensors, 'tensor')}" if tensors else format_size(size)


def duration(seconds: float, size: int) -> str:
    """Return the duration in words, with the rate if it is a second or more."""
    if seconds < 1:
        return f"{max(seconds, 0.01):.2f} s"
    shown = f"{seconds:.1f} s" if seconds < 10 else format_time(seconds)
    return f"{shown} ({format_size(size / seconds)}/s)"
