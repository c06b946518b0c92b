"""All that is printed: reports on stdout; progress, warnings and errors on stderr; one JSON object with --json."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import sys
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from ckptconv.cli import likeness
from ckptconv.cli.failures import described
from ckptconv.cli.terminal import can_rewrite, coloured, has_colours
from ckptconv.errors import CkptconvError, CorruptError, DifferenceError, FailedError, UnsafeError
from ckptconv.inspection.overview import count_of, cut, overview, printable
from ckptconv.inspection.scan.report import ATTACK, SUSPICIOUS, UNKNOWN, UNREADABLE, counts
from ckptconv.storage import remote
from ckptconv.storage.writing import reason
from ckptconv.text import format_memory, format_size, format_time, some

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tqdm import tqdm
    from typing_extensions import Self

    from ckptconv.cli.printed import Failed, Maps, Serving
    from ckptconv.comparison.diff import Difference
    from ckptconv.inspection.mapping import MapCheck, MapSummary
    from ckptconv.inspection.overview import Line
    from ckptconv.inspection.scan.report import ScanReport
    from ckptconv.inspection.summary import Summary
    from ckptconv.result import OutputFile, Report
    from ckptconv.rows.check import CheckReport
    from ckptconv.verification.verify import Verification

# The version of all schemas in `schemas`: it changes when a field changes its meaning, or goes.
VERSION = 1
# Seconds between two lines of progress if there is no terminal.
INTERVAL = 5.0
# Cells of a file's name that stand before a bar, and the narrowest terminal on which they do.
SHORT, WIDE_ENOUGH = 24, 72
# Up to so many output files get a line each.
FEW = 3
# Most keys of recorded values that are named, and most cells of each.
KEYS, KEY = 5, 60
# Classes that every checkpoint of DeepSpeed or torch.distributed.checkpoint may name: they tell a user nothing.
_USUAL = ("deepspeed.", "_io.BytesIO")
# The verdicts of a scan that may be errors, the worst first: what is said of one file and of more.
_VERDICTS = {
    ATTACK: ("is an attack", "are attacks"),
    SUSPICIOUS: ("is suspicious", "are suspicious"),
    UNREADABLE: ("cannot be judged", "cannot be judged"),
    UNKNOWN: ("is unknown", "are unknown"),
}
# The styles of an overview on a terminal.
_STYLES = {"title": "bold", "name": "cyan", "dim": "dim", "good": "green", "warning": "yellow"}


@dataclasses.dataclass
class Output:
    """Where and how a command prints what it does."""

    command: str = ""
    json: bool = False
    quiet: bool = False
    verbose: bool = False
    progress_shown: bool = True

    def __post_init__(self) -> None:
        remote.on_wait = self.note

    def note(self, text: str) -> None:
        """Print something worth knowing, unless quiet."""
        if not self.quiet:
            say(text)

    def warn(self, text: str) -> None:
        say(f"warning: {text}")

    def progress(self) -> Progress:
        """Return a bar on a terminal, plain lines elsewhere, and nothing if quiet."""
        if self.quiet or not self.progress_shown:
            return Progress()
        return Bar() if can_rewrite(sys.stderr) else Lines()

    def done(self, report: Report) -> None:
        """Report the end of a conversion. If that fails it only warns, because the outputs are complete."""
        for warning in report.warnings:
            self.warn(warning)
        try:
            if self.json:
                self.print_json(True, dataclasses.asdict(report))
            elif not self.quiet:
                self._print(_report_lines(report, self.verbose))
        except FailedError as error:
            self.warn(str(error))

    def verified(self, done: Verification) -> None:
        """Report a verification that found no difference."""
        for warning in done.warnings:
            self.warn(warning)
        if self.json:
            self.print_json(True, dataclasses.asdict(done))
        elif not self.quiet:
            self._print(_verified_lines(done, self.verbose))

    def rows_checked(self, report: CheckReport) -> None:
        """Report a check of rows that found nothing wrong."""
        for warning in report.warnings:
            self.warn(warning)
        if self.json:
            self.print_json(True, dataclasses.asdict(report))
        elif not self.quiet:
            self._print(_rows_lines(report))

    def inspected(self, summary: Summary, depth: int | None = None) -> None:
        """Print what is inside a checkpoint, with its modules to `depth` levels."""
        if self.json:
            self.print_json(True, summary.to_dict())
        else:
            for warning in summary.warnings:
                self.warn(warning)
            if not self.quiet:
                self._show(overview(summary, width=width(), depth=depth, verbose=self.verbose))

    def tell(self, lines: list[str]) -> None:
        """Print lines, unless quiet."""
        if not self.quiet:
            self._print(lines)

    def maps(self, found: Sequence[MapSummary], text: str = "") -> None:
        """List maps; with `text`, print the one that this is of."""
        if self.json:
            fields: Maps = {"maps": found}
            if text:
                fields["text"] = text
            self.print_json(True, fields)
            return
        width = max((len(each.name) for each in found), default=0)
        table = [f"{each.name:{width}}  {' ⇄ '.join(each.sides)}  {each.about}".rstrip() for each in found]
        self.tell(text.splitlines() if text else table)

    def mapped(self, check: MapCheck) -> None:
        """Report a map that is sound, and what it makes of a checkpoint."""
        for warning in check.warnings:
            self.warn(warning)
        if self.json:
            fields: Maps = {
                "maps": [check.map],
                "precedence": check.precedence,
                "source": check.source or None,
            }
            if check.direction:
                fields["direction"], fields["made_of"] = check.direction, check.made_of
                fields["warnings"] = check.warnings
            self.print_json(True, fields)
            return
        told = check.map
        sizes = f"; sizes: {', '.join(told.sizes)}" if told.sizes else ""
        lines = [f"{told.name}: {count_of(told.rules, 'rule')}, {' ⇄ '.join(told.sides)}{sizes}"]
        lines.extend(f"{first} goes before {second}" for first, second in check.precedence)
        if check.direction:
            made = count_of(len(check.made_of), "tensor")
            lines.append(f"{check.source}: {' → '.join(check.direction)} makes {made}")
            if self.verbose:
                lines.extend(f"{name} ← {', '.join(of)}" for name, of in check.made_of.items())
        self.tell(lines)

    def differed(self, found: Difference, top: int | None = None) -> None:
        """Print what differs between two checkpoints: the `top` tensors that differ most."""
        if self.json:
            fields = found.to_dict(top)
            is_done = found.equal or found.delta is not None
            self.print_json(is_done, fields if is_done else {**fields, "error": described(different(found))})
            return
        for warning in found.warnings:
            self.warn(warning)
        if not self.quiet:
            from ckptconv.inspection import differences

            self._show(differences.overview(found, width=width(), top=top, verbose=self.verbose))

    def scanned(self, report: ScanReport, fail_on: str) -> int:
        """Report the verdicts of a scan, and return the exit code that stands for them."""
        error = _scan_error(report, fail_on)
        if self.json:
            failure = {"error": described(error)} if error else {}
            self.print_json(error is None, {**dataclasses.asdict(report), **failure})
        elif not self.quiet:
            self._print(list(_scan_lines(report, self.verbose)))
        if error:
            say(str(error))
        return error.exit_code if error else 0

    def serving(self, source: str, url: str, files: Mapping[str, int]) -> None:
        """Report that `files`, {name: bytes}, made from `source`, are served at `url`."""
        if self.json:
            served: Serving = {"input": source, "url": url, "files": files}
            self.print_json(True, served)
        elif not self.quiet:
            self._print([url])

    def request(self, line: str) -> None:
        """Print a line for a request that was served, if verbose."""
        if self.verbose:
            say(line)

    def _show(self, lines: Iterable[Line]) -> None:
        """Print styled lines: in colours on a terminal that has them, else as plain text."""
        if not has_colours(sys.stdout):
            self._print(["".join(span.text for span in line) for line in lines])
            return
        from rich.text import Text

        console = coloured(sys.stdout)
        with console.capture() as captured:  # rich would end the program when the reader closes the pipe
            for line in lines:
                console.print(Text.assemble(*((printable(span.text), _STYLES.get(span.style, "")) for span in line)))
        self._write(captured.get())

    def failed(self, error: CkptconvError, asked: str | None = None) -> None:
        """Report the error that ended a command. `asked` is its input, as far as it is known."""
        if self.json:
            with contextlib.suppress(FailedError):
                failed: Failed = {"input": asked, "error": described(error)}
                self.print_json(False, failed)
        say(str(error))
        difference = getattr(error, "difference", {})
        if difference.get("what") == "reference" and not self.json:
            with contextlib.suppress(OSError):
                print("\n".join(map(printable, likeness.differences(difference))), file=sys.stderr, flush=True)

    def print_json(self, ok: bool, fields: Mapping[str, Any]) -> None:
        """Print one object with what all have in common. Raises FailedError if that fails."""
        value = {"version": VERSION, "ok": ok, "command": self.command or None, **fields}
        # A lone surrogate in a name must not keep the report from being printed.
        self._print([json.dumps(value, ensure_ascii=True, allow_nan=False, default=_plain)])

    def _print(self, lines: list[str]) -> None:
        self._write("".join(f"{printable(line)}\n" for line in lines))

    def _write(self, text: str) -> None:
        """Write to stdout. Raises FailedError if that fails, but not if the reader has closed the pipe."""
        try:
            print(text, end="", flush=True)
        except OSError as error:
            # Python would try again when it exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if not isinstance(error, BrokenPipeError):
                raise FailedError(f"The report cannot be written: {reason(error)}.") from error


def _plain(value: Any) -> Any:
    """Return what is no JSON as what is."""
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else str(value)


def width() -> int | None:
    """Return the width of the terminal in cells; None if there is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def say(text: str) -> None:
    """Print a line to stderr. The work goes on if stderr is closed."""
    with contextlib.suppress(OSError):
        print(f"ckptconv: {printable(text)}", file=sys.stderr, flush=True)


class Progress:
    """Counts bytes written, from any thread. Shows nothing itself."""

    def __init__(self) -> None:
        self.total = self.done = 0
        self.current = ""
        self.started = time.monotonic()
        self._lock = threading.Lock()

    def begin(self, total: int) -> None:
        """Start, or start again, with `total` bytes to be written."""
        self.total, self.done = total, 0
        self.started = time.monotonic()

    def resize(self, total: int) -> None:
        """Say that `total` bytes are to be written after all."""
        self.total = total

    def __call__(self, count: int) -> None:
        with self._lock:
            self.done += count
            self.show(count)

    def on_file(self, name: str) -> None:
        """Note that the output file `name` is begun."""
        self.current = printable(name.removesuffix(".safetensors"))

    def show(self, count: int) -> None:
        """Show that `count` more bytes are done."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the terminal as it was."""


class Lines(Progress):
    """Prints a plain line every few seconds, for logs."""

    def begin(self, total: int) -> None:
        super().begin(total)
        self._next = self.started + INTERVAL

    def show(self, count: int) -> None:
        now = time.monotonic()
        if now < self._next or not self.done:
            return
        self._next = now + INTERVAL
        rate = self.done / (now - self.started)
        left = (self.total - self.done) / rate
        say(
            f"{self.done / self.total:.0%}, {format_size(self.done)} of {format_size(self.total)} "
            f"at {format_size(rate)}/s, {format_time(left)} left, {self.current}".removesuffix(", ")
        )


class Bar(Progress):
    """One bar with bytes, rate and the time left."""

    _bar: tqdm[Any] | None = None

    def begin(self, total: int) -> None:
        from tqdm import tqdm

        super().begin(total)
        if self._bar is not None:
            self._bar.close()
        tqdm.monitor_interval = 0  # no thread that watches over it
        self._bar = tqdm(total=self.total, unit="B", unit_scale=True, leave=False, file=sys.stderr, dynamic_ncols=True)

    def resize(self, total: int) -> None:
        super().resize(total)
        if self._bar is not None:
            self._bar.total = total

    def on_file(self, name: str) -> None:
        super().on_file(name)
        if self._bar is not None:
            with contextlib.suppress(OSError):
                is_wide = os.get_terminal_size(sys.stderr.fileno()).columns >= WIDE_ENOUGH
                self._bar.set_description_str(cut(self.current, SHORT) if is_wide else "")

    def show(self, count: int) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.update(count)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.close()


def _report_lines(report: Report, verbose: bool) -> list[str]:
    lines: list[str] = []
    verb = "would write" if report.dry_run else "staged" if report.part else "finished" if report.finished else "wrote"
    if report.part and not report.outputs:
        lines.append(f"there is nothing to do for part {report.part}")
    by_directory: dict[str, list[OutputFile]] = {}
    for output in report.outputs:
        by_directory.setdefault(_gathered(output.path), []).append(output)
    for directory, outputs in by_directory.items():
        if len(outputs) <= FEW or verbose:
            lines.extend(f"{verb} {output.path} ({_contents(output.bytes, output.tensors)})" for output in outputs)
        else:
            contents = _contents(sum(output.bytes for output in outputs), sum(output.tensors for output in outputs))
            lines.append(f"{verb} {len(outputs)} files in {directory} ({contents})")
    lines.extend(f"{name} ← {some(of, len(of) if verbose else FEW, str)}" for name, of in report.made_of.items())
    lines.extend(report.notes)
    if report.like:
        lines.extend(likeness.summary(report.like, verbose))
    lines.extend(recorded([report]))
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in report.counts.items())
    lines.append(f"{report.format}: {kinds or count_of(report.tensors, 'tensor')}")
    if report.aliases and verbose:
        lines.extend(f"  {alias} is stored as {kept}" for alias, kept in report.aliases.items())
    elif report.aliases and "aliases" not in report.counts:
        lines.append(f"{count_of(len(report.aliases), 'tied name')} stored once (--verbose names them)")
    opaque = report.opaque if verbose else [name for name in report.opaque if not name.startswith(_USUAL)]
    if opaque:
        most = len(opaque) if verbose else KEYS
        lines.append(f"kept as inert data, never run: {some(opaque, most, str)}")
        named = _unlisted(opaque) if report.recorded else []
        if named:
            lines.append(f"safetensors2pt writes back only with --opaque keep: {some(named, most, str)}")
    if report.checksums:
        extra = f", for which {format_size(report.extra_bytes)} more were read" if report.extra_bytes else ""
        lines.append(f"the checksums of {count_of(report.checksums, 'storage')} are right{extra}")
    if report.bytes_verified:
        lines.append(f"verified: {format_size(report.bytes_verified)} are exactly what the source gives")
    if report.reused:
        what = "1 file was" if report.reused == 1 else f"{report.reused:,} files were"
        lines.append(f"{what} taken over from an interrupted run")
    if report.part and not report.dry_run:
        asked = " ".join(map(shlex.quote, report.finish))
        lines.append(f"this was part {report.part}; when all are done: ckptconv finish {asked}")
    if not report.dry_run and not report.finished:
        # Descriptions may be read twice, and are most of a small file: more may be read than there is.
        read = f"{format_size(report.bytes_read)} of" if report.bytes_read < report.input_bytes else "all"
        lines.append(
            f"read {read} {format_size(report.input_bytes)}, wrote {format_size(report.bytes_written)} "
            f"in {_duration(report.seconds, report.bytes_written)}, peak memory {format_memory(report.peak_rss_bytes)}"
        )
    return lines


def different(found: Difference) -> DifferenceError:
    """Return what stands for all differences where a program looks for an error."""
    differing = [tensor for tensor in found.tensors if tensor.status != "equal"]
    return DifferenceError(
        f"{found.input} and {found.other} differ in {len(differing):,} of {count_of(len(found.tensors), 'tensor')}: "
        f"{some([tensor.name for tensor in differing])}.",
        what="tensors",
        tensor=differing[0].name,
    )


def _gathered(path: str) -> str:
    """Return the directory to report a file under. A universal checkpoint has a directory for each parameter: for
    these it is the one that contains `zero`."""
    directory = os.path.dirname(path) or "."
    above, slash, _ = f"{directory}/".rpartition("/zero/")
    return above if slash and path.endswith(".pt") else directory


def _verified_lines(done: Verification, verbose: bool) -> list[str]:
    lines: list[str] = []
    verb = "compared" if done.inert else "verified"
    if verbose or len(done.outputs) <= FEW:
        lines.extend(f"{verb} {file.path} ({_contents(file.bytes, file.tensors)})" for file in done.outputs)
    else:
        contents = _contents(sum(file.bytes for file in done.outputs), sum(file.tensors for file in done.outputs))
        lines.append(f"{verb} {len(done.outputs)} files ({contents})")
    if done.manifest:
        told = ", ".join(f"{name}={value}" for name, value in done.options.items())
        lines.append(f"converted with {told}, says {done.manifest}")
    tied = f", {count_of(len(done.aliases), 'tied name')} among them" if done.aliases else ""
    averaged = f" averaged with {count_of(len(done.averaged), 'other')}" if done.averaged else ""
    merged = f" with {count_of(len(done.adapters), 'adapter')} merged" if done.adapters else ""
    patched = f" with {count_of(len(done.deltas), 'delta')} applied" if done.deltas else ""
    lines.append(
        f"equal to {done.input}{averaged}{merged}{patched}: {count_of(done.tensors, 'tensor')}{tied}, "
        f"{format_size(done.bytes_compared)} compared in {_duration(done.seconds, done.bytes_compared)}, "
        f"peak memory {format_memory(done.peak_rss_bytes)}"
    )
    return lines


def _unlisted(classes: list[str]) -> list[str]:
    """Return those that the way back does not write unless it is told to."""
    from ckptconv.outputs import writable
    from ckptconv.pickles.nodes import Global

    return [name for name in classes if writable.unlisted(Global(*name.rpartition(".")[::2]))]


def _scan_lines(report: ScanReport, verbose: bool) -> Iterator[str]:
    """Yield a paragraph for each file that is not safe, with `verbose` for all, then the totals."""
    for file in report.files:
        if file.findings or verbose:
            yield f"{file.verdict}: {file.path} ({file.format}, {format_size(file.bytes)})"
            yield from (f"  {finding.rule}: {finding.message}" for finding in file.findings)
            if file.classes and verbose:
                yield f"  needs {some(file.classes, len(file.classes), str)}"
    classes = list(dict.fromkeys(name for file in report.files for name in file.classes))
    if classes:
        most = len(classes) if verbose else KEYS
        yield f"torch.load with weights_only=False would import and call {some(classes, most, str)}"
    verdicts = ", ".join(f"{count:,} {verdict}" for verdict, count in report.counts.items() if count)
    yield f"scanned {count_of(len(report.files), 'file')} in {report.seconds:.2f} s: {verdicts or 'no checkpoint'}"
    if report.skipped:
        which = "it is no checkpoint" if report.skipped == 1 else "they are no checkpoints"
        yield f"{count_of(report.skipped, 'file')} skipped: {which}"
    if report.links:
        yield f"{count_of(report.links, 'symbolic link')} not followed; name what they lead to, to scan that"


def _scan_error(report: ScanReport, fail_on: str) -> CkptconvError | None:
    """Return the error that stands for the worst verdict that counts."""
    failing = {id(file) for file in report.files if any(counts(each.rule, fail_on) for each in file.findings)}
    counted = Counter(file.verdict for file in report.files if file.verdict == UNREADABLE or id(file) in failing)
    if not counted:
        return None
    told = some(
        [
            f"{counted[verdict]:,} {words[counted[verdict] > 1]}"
            for verdict, words in _VERDICTS.items()
            if counted[verdict]
        ],
        form=str,
    )
    # A file that cannot be judged may have what counts, too.
    return (UnsafeError if failing else CorruptError)(
        f"Of {count_of(len(report.files), 'file')}, {told}.", "Do not load an attack." if counted[ATTACK] else ""
    )


def recorded(reports: Sequence[Report]) -> Iterator[str]:
    """Yield under which keys values were recorded, once for all outputs that have them under the same."""
    found: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for report in reports:
        if report.recorded:
            found.setdefault((tuple(report.recorded), report.weights_key), []).append(report.input)
    for (under, key), inputs in found.items():
        keys = some(under, KEYS, lambda each: cut(each, KEY))
        alone = f"--key {key} takes the weights alone, " if key else ""
        whose = f" of {some(inputs, FEW, str)}" if len(reports) > 1 else ""
        yield f"values are recorded beside the tensors{whose}, under {keys}; {alone}--no-structure leaves them out"


def _contents(size: int, tensors: int) -> str:
    return f"{format_size(size)}, {count_of(tensors, 'tensor')}" if tensors else format_size(size)


def _duration(seconds: float, size: int) -> str:
    """Return how long it took, and the rate if it took a second or more."""
    if seconds < 1:
        return f"{max(seconds, 0.01):.2f} s"
    shown = f"{seconds:.1f} s" if seconds < 10 else format_time(seconds)
    return f"{shown} ({format_size(size / seconds)}/s)"


def _rows_lines(report: CheckReport) -> list[str]:
    lines = [f"{report.input}: {report.table}: {count_of(report.rows, 'row')}, and no id twice"]
    ids = "global ids" if report.ids == "global" else f"local ids, less than weight_id by {report.offset}"
    if "weight_id" in report.checked:
        lines.append(f"  headers have {ids}")
    compared = ", ".join(report.checked) or "nothing: there is nothing of it beside the table"
    lines.append(f"  compared with the rows: {compared}")
    if report.bucket_size:
        least, most = report.bucket_size
        span = f"{least:,}" if least == most else f"{least:,} to {most:,}" if most else f"{least:,} or more"
        lines.append(f"  a bucket spans {span} ids")
    if report.padding:
        lines.append(f"  {count_of(report.padding, 'row')} with something in the padding")
    lines.append(
        f"read {format_size(report.bytes_read)} in {max(report.seconds, 0.01):.2f} s, "
        f"peak memory {format_memory(report.peak_rss_bytes)}"
    )
    return lines
