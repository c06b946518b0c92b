"""The command `scan`: a verdict for each file, and an exit code for CI."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptconv.cli import signals
from ckptconv.cli.options import named, output_of, taking
from ckptconv.errors import CkptconvError, CorruptError, UnsafeError, UsageError
from ckptconv.features.scan.options import COMMAND
from ckptconv.text import count_of, format_size, some

if TYPE_CHECKING:
    from ckptconv.features.scan.report import ScanReport

# The most classes that are named.
_NAMED = 5
_NOTHING = "No file was scanned, so nothing was judged."

OTHER_OPTIONS = {
    "scan -o --out --output --output-file --outfile --report": "Use --sarif FILE, or --json > FILE.",
    "scan -r -R --recursive": "A directory is searched to any depth.",
    "--format --output-format --output-type": "Use --sarif FILE for SARIF, and --json for JSON.",
    "--weights-only": "scan loads no file, and judges what any loader would run. To choose the verdicts that fail, use "
    "--fail-on.",
}
OTHER_WORDS = {"scan": ("audit", "safe", "security", "picklescan", "fickling", "modelscan")}


@taking(COMMAND["sarif"], *named("overwrite"), COMMAND["fail_on"], *named("json quiet verbose storage_options"))
def scan(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATH...", show_default=False, help="Files, directories and URLs, in any format."),
    ],
    allow_suspicious: Annotated[bool, typer.Option("--allow-suspicious", hidden=True)] = False,
    *,
    sarif: str = "",
    fail_on: str = "",
    overwrite: bool = False,
    **options: Any,
) -> None:
    """Check whether loading files would run code.

    scan judges each checkpoint as safe, unknown, suspicious, an attack, or unreadable, and gives the reasons. It runs
    no code from files, and reads no tensor data. Directories are searched to any depth; other files are skipped. Exit
    code 3: a file has the verdict of --fail-on or a worse one; 4: a file is unreadable, and none is worse.

    \b
    Examples:
      ckptconv scan model.pt
      ckptconv scan --sarif scan.sarif .
      ckptconv scan --fail-on unknown hf://org/model
    """
    from ckptconv.features.scan.report import ATTACK
    from ckptconv.features.scan.scanning import scan as scanned

    # Before --fail-on existed, the option was --allow-suspicious.
    if allow_suspicious and fail_on not in ("", ATTACK):
        raise UsageError(f"--allow-suspicious means --fail-on attack, which contradicts --fail-on {fail_on}.")
    level = fail_on or (ATTACK if allow_suspicious else COMMAND["fail_on"].default)
    output = output_of("scan", options)
    if sarif:
        from ckptconv.features.reporting.report_file import check_whole
        from ckptconv.features.scan.sarif import SARIF

        check_whole(sarif, SARIF, overwrite)
    report = scanned(*paths, **options)
    signals.ignore()
    if sarif:
        from ckptconv.features.reporting.report_file import write_whole
        from ckptconv.features.scan.sarif import SARIF, document

        write_whole(sarif, document(report).encode(), SARIF, overwrite, [file.path for file in report.files])
    from ckptconv.cli.console import say
    from ckptconv.cli.failures import described

    error = _error(report, level)
    if output.json:
        failure = {"error": described(error)} if error else {}
        output.print_json(error is None, {**dataclasses.asdict(report), **failure})
    else:
        output.tell(_lines(report, output.verbose))
    if report.links:
        links = count_of(report.links, "symbolic link")
        output.warn(
            f"{links} to directories or missing targets, not followed. To scan their targets, specify the target paths."
        )
    if not report.files and not error:
        output.warn(_NOTHING)
    if error:
        say(str(error))
        raise typer.Exit(error.exit_code)


def _lines(report: ScanReport, verbose: bool) -> Iterator[str]:
    """Yield a paragraph for each file that is not safe, with `verbose` for all, then the totals."""
    from ckptconv.features.scan.report import SAFE, UNREADABLE

    for file in report.files:
        if file.findings or verbose:
            # A file that cannot be read has no known format.
            known = "" if file.verdict == UNREADABLE else f"{file.format}, "
            yield f"{file.verdict}: {file.path} ({known}{format_size(file.bytes)})"
            yield from (f"  {finding.rule}: {finding.message}" for finding in file.findings)
            if file.classes and verbose:
                yield f"  needs {some(file.classes, len(file.classes), str)}"
    for is_safe in (False, True):
        files = (file for file in report.files if (file.verdict == SAFE) is is_safe)
        if classes := list(dict.fromkeys(name for file in files for name in file.classes)):
            which = "would import and call, in files that are safe:" if is_safe else "would import and call"
            names = some(classes, len(classes) if verbose else _NAMED, str)
            yield f"torch.load with weights_only=False {which} {names}"
    words = {"unknown": "unknown (not reviewed)"}
    verdicts = ", ".join(
        f"{count:,} {words.get(verdict, verdict)}" for verdict, count in report.counts.items() if count
    )
    yield f"scanned {count_of(len(report.files), 'file')} in {report.seconds:.2f} s: {verdicts or 'no checkpoint'}"
    if report.skipped:
        which = "it is not a checkpoint" if report.skipped == 1 else "they are not checkpoints"
        yield f"{count_of(report.skipped, 'file')} skipped: {which}"
        yield from (f"  {path}" for path in report.others if verbose)


def _error(report: ScanReport, fail_on: str) -> CkptconvError | None:
    """Return the error for the worst verdict that counts."""
    from ckptconv.features.scan.report import ATTACK, SUSPICIOUS, UNKNOWN, UNREADABLE, counts

    # The worst verdict first: the words for one file and for several.
    verdicts = {
        ATTACK: ("is an attack", "are attacks"),
        SUSPICIOUS: ("is suspicious", "are suspicious"),
        UNREADABLE: ("cannot be judged", "cannot be judged"),
        UNKNOWN: ("is unknown", "are unknown"),
    }
    failing = {id(file) for file in report.files if any(counts(finding.rule, fail_on) for finding in file.findings)}
    counted = Counter(file.verdict for file in report.files if file.verdict == UNREADABLE or id(file) in failing)
    if not report.files and fail_on == "unknown":
        return CorruptError(_NOTHING)
    if not counted:
        return None
    summary = some(
        [
            f"{counted[verdict]:,} {words[counted[verdict] > 1]}"
            for verdict, words in verdicts.items()
            if counted[verdict]
        ],
        form=str,
    )
    # A file that cannot be judged may also have a finding that counts.
    return (UnsafeError if failing else CorruptError)(
        f"Of {count_of(len(report.files), 'file')}, {summary}.",
        "Do not load the files that are attacks." if counted[ATTACK] else "",
    )
