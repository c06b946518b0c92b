"""The verdicts and rules of a scan, and its report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ckptconv.features.reporting.notebook import html_table
from ckptconv.result import Shown

# The verdicts, the worst last.
VERDICTS = (SAFE, UNKNOWN, UNREADABLE, SUSPICIOUS, ATTACK) = ("safe", "unknown", "unreadable", "suspicious", "attack")
# The most files that a notebook lists.
_ROWS = 100


class ScanRule(NamedTuple):
    """A kind of reason for a verdict: a title, the verdict, and an explanation for readers of a report."""

    title: str
    verdict: str
    help: str


RULES: dict[str, ScanRule] = {
    "dangerous-call": ScanRule(
        "Loading the file runs programs or code",
        ATTACK,
        "A pickle in the file calls a function that no checkpoint needs: one that starts programs, runs code, or "
        "accesses files, the network or the interpreter. torch.load with weights_only=False, or pickle.load, runs "
        "it. Delete the file, and inform its sender. If you need its tensors, `ckptconv convert --inert` extracts "
        "them without running anything.",
    ),
    "path-outside": ScanRule(
        "The file refers to files outside its directory",
        ATTACK,
        "An index, a description or a pointer of the checkpoint refers to a file that is not below its own "
        "directory. Programs that follow the reference read or overwrite other files. Delete the checkpoint, and "
        "inform its sender.",
    ),
    "carries-code": ScanRule(
        "The file contains code",
        SUSPICIOUS,
        "The file contains code that runs when the file is loaded or used: functions that were pickled by value, "
        "modules of torch.fx, packages of torch.package, machine code, or TorchScript that reads or writes files. "
        "Only its author knows the effect of the code. Load the file only if you trust its source, or ask the "
        "source for the weights alone.",
    ),
    "unusual-call": ScanRule(
        "The file calls functions that checkpoints do not call",
        SUSPICIOUS,
        "A pickle in the file calls a function of Python's standard library that is not known to be dangerous, but "
        "that no known checkpoint calls. The call may be a step of an attack that decodes, imports or hides "
        "something.",
    ),
    "dangerous-name": ScanRule(
        "The file refers to a dangerous function",
        SUSPICIOUS,
        "A pickle in the file refers to a function that no checkpoint needs, but does not call it. Loading the file "
        "imports the function's module, and code that uses the loaded object may call the function.",
    ),
    "hidden": ScanRule(
        "The file's data contains something that is dangerous to load",
        SUSPICIOUS,
        "A value in the file is bytes that form a pickle or an archive with dangerous contents. Loading the file "
        "keeps them as bytes, but a program that then loads these bytes runs the contents.",
    ),
    "two-readings": ScanRule(
        "The file contradicts itself",
        SUSPICIOUS,
        "Two programs would read the file differently, or its description is impossible: members of the same name, "
        "data before or after an archive, tensors beyond their storage. No program writes such files. Attacks use "
        "them to show a scanner other data than torch.load reads.",
    ),
    "excessive": ScanRule(
        "The file asks for too much memory or time",
        SUSPICIOUS,
        "The file describes far more data than a file of its size can contain, so reading it exhausts memory or time.",
    ),
    "unknown-call": ScanRule(
        "The file calls a function that is not on the reviewed list",
        UNKNOWN,
        "A pickle in the file calls a function that is not on the reviewed list, a known function with unusual "
        "arguments, or the result of another call. Loading the file runs that code with arguments from the file. "
        "Review the function before you load the file, or load only the tensors: torch.load with weights_only=True, "
        "or `ckptconv convert`.",
    ),
    "unknown-name": ScanRule(
        "The file refers to classes that are not on the reviewed list",
        UNKNOWN,
        "A pickle in the file refers to classes or functions that are not on the reviewed list, or sets an unusual "
        "state. Most often these belong to the program that wrote the file. Loading the file imports their modules "
        "and creates their objects. Load it only if you know these classes, or load only the tensors.",
    ),
    "not-opened": ScanRule(
        "scan cannot open the file",
        UNKNOWN,
        "The file is a model or an archive that scan does not open, such as HDF5, 7z or zstandard, exceeds a limit, "
        "or is not listed in any description. Unpack an archive, and scan its contents.",
    ),
    "reads-elsewhere": ScanRule(
        "The file reads from other places",
        UNKNOWN,
        "A virtual checkpoint refers to directories or servers, and reading the checkpoint reads tensors from "
        "there. scan did not contact them. Read the file only if you know these places.",
    ),
    "repository-code": ScanRule(
        "The file refers to code in a repository",
        UNKNOWN,
        "A configuration next to the weights lists Python files in auto_map. Loading the model with "
        "trust_remote_code=True runs these files, and scan does not judge Python files. Review them before you load "
        "the model.",
    ),
    "unreadable": ScanRule(
        "The file cannot be judged",
        UNREADABLE,
        "The file is encrypted, cut short, damaged, compressed with an unsupported method, or not readable, so its "
        "contents are not known. Download it again, unpack it, or treat it as unsafe.",
    ),
}


@dataclass(frozen=True)
class Finding:
    """A reason for the verdict."""

    rule: str
    """The kind of reason."""

    message: str
    """The reason in words, with the position in the file."""


@dataclass
class ScannedFile:
    """A file that is a checkpoint, or should be."""

    path: str
    """Its path or URL."""

    verdict: str
    """The verdict on loading the file: safe (it would run nothing), unknown, suspicious (it names something that no
    checkpoint needs), or attack (it would run programs or code); unreadable if that cannot be judged."""

    format: str
    """The format of the file, in words."""

    bytes: int
    """Its size."""

    findings: list[Finding] = field(default_factory=list)
    """The reasons for the verdict; empty if it is safe."""

    classes: list[str] = field(default_factory=list)
    """Classes and functions that torch.load with weights_only=False imports and calls; they are inert data for
    ckptconv."""


@dataclass
class ScanReport(Shown):
    """The verdicts on files, by what loading them would run."""

    verdict: str
    """The worst verdict on a file; safe if there is no checkpoint."""

    files: list[ScannedFile]
    """The files that were scanned, without those that are no checkpoints."""

    counts: dict[str, int]
    """The number of files of each verdict."""

    skipped: int = 0
    """Files that are no checkpoints."""

    others: list[str] = field(default_factory=list)
    """The paths of files that are no checkpoints: the first 10,000."""

    links: int = 0
    """Symbolic links that were not followed: to directories, and to nothing."""

    seconds: float = 0.0
    """Duration in seconds."""

    def _repr_html_(self) -> str:
        """Return a table for notebooks: each file with its verdict and the reasons, the worst first."""
        files = sorted(self.files, key=lambda file: -VERDICTS.index(file.verdict))
        reasons = (" ".join(finding.message for finding in file.findings) for file in files[:_ROWS])
        rows: list[tuple[str, ...]] = [
            (file.path, file.verdict, reason) for file, reason in zip(files, reasons, strict=False)
        ]
        if len(files) > _ROWS:
            rows.append((f"{len(files) - _ROWS:,} more files",))
        return html_table(f"ScanReport: {self.verdict}", rows)


# The levels of `--fail-on`, from the lowest: each counts its own rules besides those of the levels after it.
LEVELS = ("unknown", "call", "suspicious", "attack")


def counts(rule: str, level: str) -> bool:
    """Return whether a finding of `rule` fails a scan with `--fail-on level`, one of `LEVELS`."""
    verdict = RULES[rule].verdict
    level_of_rule = "call" if rule == "unknown-call" else verdict
    return level_of_rule in LEVELS and LEVELS.index(level_of_rule) >= LEVELS.index(level)


def worst(verdicts: list[str]) -> str:
    """Return the worst of some verdicts; "safe" if there is none."""
    return max(verdicts, key=VERDICTS.index, default=SAFE)
