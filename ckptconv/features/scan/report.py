"""The verdicts and rules of a scan, and its report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

# The verdicts, the worst last.
VERDICTS = (SAFE, UNKNOWN, UNREADABLE, SUSPICIOUS, ATTACK) = ("safe", "unknown", "unreadable", "suspicious", "attack")


class ScanRule(NamedTuple):
    """A kind of reason for a verdict: a title, the verdict that it gives, and what a reader of a report should know."""

    title: str
    verdict: str
    help: str


RULES: dict[str, ScanRule] = {
    "dangerous-call": ScanRule(
        "Loading it runs programs or code",
        ATTACK,
        "A pickle in the file calls a function that starts programs, runs code, or accesses files, the network or the "
        "interpreter, and that no checkpoint has a reason to call. torch.load with weights_only=False, or "
        "pickle.load, runs it. Delete the file, and tell whoever it came from. If its tensors are needed, "
        "`ckptconv convert --inert` takes them out without running anything.",
    ),
    "path-outside": ScanRule(
        "It names files outside its directory",
        ATTACK,
        "An index, a description or a pointer of the checkpoint names a file that is not below its own directory. "
        "Readers that follow it read, or overwrite, what is none of theirs. Delete it, and tell whoever it came from.",
    ),
    "carries-code": ScanRule(
        "It carries code",
        SUSPICIOUS,
        "The file holds code that runs when it is loaded or used: functions that were pickled by value, modules of "
        "torch.fx, packages of torch.package, machine code, or TorchScript that reads or writes files. Nobody but its "
        "author knows what the code does. Load it only if you trust its source, or ask for the weights alone.",
    ),
    "unusual-call": ScanRule(
        "It calls what checkpoints do not call",
        SUSPICIOUS,
        "A pickle in the file calls a function of Python's standard library that is not known to be dangerous, and "
        "that no known checkpoint calls. It may be a step of an attack: to decode, to import, or to hide something.",
    ),
    "dangerous-name": ScanRule(
        "It names a dangerous function",
        SUSPICIOUS,
        "A pickle in the file names a function that no checkpoint has a reason to name, and does not call it. Loading "
        "the file imports its module, and whoever uses what was loaded may call it.",
    ),
    "hidden": ScanRule(
        "Its data holds something that is dangerous to load",
        SUSPICIOUS,
        "A value in the file is bytes that are themselves a pickle or an archive with something dangerous in it. "
        "Loading the file leaves them as they are; a program that loads these bytes in turn runs it.",
    ),
    "two-readings": ScanRule(
        "It contradicts itself",
        SUSPICIOUS,
        "Two readers of the file find different things in it, or it describes what cannot be: members of one name, "
        "data before or after an archive, tensors beyond their storage. No program writes that. Attacks do, so that a "
        "scanner sees something else than torch.load.",
    ),
    "excessive": ScanRule(
        "It asks for too much",
        SUSPICIOUS,
        "The file describes far more than a file of its size holds, so that reading it takes all memory or time.",
    ),
    "unknown-call": ScanRule(
        "It calls a function that nobody has reviewed",
        UNKNOWN,
        "A pickle in the file calls a function that nobody reviewed, or a known one with what ordinary checkpoints "
        "never give it, or what another call returned. Loading the file runs that code with arguments from the file. "
        "Look at the function before you load the file, or take the tensors alone: torch.load with "
        "weights_only=True, or `ckptconv convert`.",
    ),
    "unknown-name": ScanRule(
        "It names classes that nobody has reviewed",
        UNKNOWN,
        "A pickle in the file names classes or functions that nobody reviewed, or gives them another state, most "
        "often those of the program that wrote it. Loading the file imports their modules and makes their objects. "
        "Load it only where these are yours or known to you, or take the tensors alone.",
    ),
    "not-opened": ScanRule(
        "It cannot be opened here",
        UNKNOWN,
        "The file is a model or an archive that is not judged here, such as HDF5, 7z or zstandard, or it has more than "
        "is looked at. Unpack an archive, and scan what is in it. Or it is data that no description mentions.",
    ),
    "reads-elsewhere": ScanRule(
        "It reads from other places",
        UNKNOWN,
        "A virtual checkpoint names directories or servers from which reading it takes its tensors. They were not "
        "asked. Read it only if you know them.",
    ),
    "unreadable": ScanRule(
        "It cannot be judged",
        UNREADABLE,
        "The file is encrypted, cut short, damaged, compressed in a way that is not supported, or may not be read. "
        "What is in it is not known. Download it again, unpack it, or treat it as unsafe.",
    ),
}


@dataclass(frozen=True)
class Finding:
    """A reason for the verdict."""

    rule: str
    """The kind of reason."""

    message: str
    """What was found, and where in the file."""


@dataclass
class ScannedFile:
    """A file that is a checkpoint, or should be."""

    path: str
    """Its path or URL."""

    verdict: str
    """What loading it would do: run nothing; that is not known; what no checkpoint has a reason to do; run programs
    or code."""

    format: str
    """What it is, in words."""

    bytes: int
    """Its size."""

    findings: list[Finding] = field(default_factory=list)
    """The reasons for the verdict; empty if it is safe."""

    classes: list[str] = field(default_factory=list)
    """Classes and functions that torch.load with weights_only=False imports and calls; they are inert data for
    ckptconv."""


@dataclass
class ScanReport:
    """The verdicts on files, by what loading them would run."""

    verdict: str
    """The worst verdict on a file; safe if there is no checkpoint."""

    files: list[ScannedFile]
    """The files that were scanned, without those that are no checkpoints."""

    counts: dict[str, int]
    """The number of files of each verdict."""

    skipped: int = 0
    """Files that are no checkpoints."""

    links: int = 0
    """Symbolic links that were not followed."""

    seconds: float = 0.0
    """How long it took."""


# What `--fail-on` counts, from the least: by its word, the rules that count beside those of the words after it.
LEVELS = ("unknown", "call", "suspicious", "attack")


def counts(rule: str, level: str) -> bool:
    """Whether a finding of `rule` fails a scan that is to fail on `level`, one of `LEVELS`."""
    verdict = RULES[rule].verdict
    found = "call" if rule == "unknown-call" else verdict
    return found in LEVELS and LEVELS.index(found) >= LEVELS.index(level)


def worst(verdicts: list[str]) -> str:
    """Return the worst of some verdicts; "safe" if there is none."""
    return max(verdicts, key=VERDICTS.index, default=SAFE)
