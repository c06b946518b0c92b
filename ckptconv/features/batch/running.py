"""Convert several inputs, each to its own output: one failing does not stop the others, a signal stops all."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shlex
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ckptconv.cells import cut, cut_column, padded
from ckptconv.cli import failures, signals
from ckptconv.cli.console import Printer, say
from ckptconv.cli.lines import format_memory
from ckptconv.cli.progress import Counting
from ckptconv.cli.reports import recorded
from ckptconv.cli.terminal import width
from ckptconv.errors import UNPUBLISHED, UNWRITTEN, CkptconvError, FailedError, StoppedError, UsageError
from ckptconv.features.batch.naming import UNCONVERTED
from ckptconv.features.batch.worker import attempt
from ckptconv.process import peak_rss
from ckptconv.storage.handles import resolved
from ckptconv.storage.paths import basename, dirname, is_remote, join
from ckptconv.storage.writing import writing
from ckptconv.text import count_of, format_size, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from multiprocessing.connection import Connection

    from ckptconv.cli.printed import Failure
    from ckptconv.features.batch.printed import Converted, NotConverted, SeveralInputs
    from ckptconv.result import Report

# Exit codes from the worst to the best: unsafe, corrupt, unsupported, failed, usage, done.
SEVERITY = (3, 4, 5, 1, 2, 0)
# Seconds between two looks at whether a signal came.
_LOOK = 0.2
# Cells of an input and an output in the table, if no terminal has fewer.
_WIDE, _NARROW = 60, 12
# A worker's program. It imports nothing from the current directory, which may hold anybody's files.
START = (
    "import sys; sys.path = [{!r}, *filter(None, sys.path)]; from ckptconv.features.batch.worker import main; main({})"
)


class Conversion(NamedTuple):
    """An input, its output, and the approximate size of that in bytes; or the error for an input that can have no
    output."""

    source: str
    output: str
    size: int = 0
    error: CkptconvError | None = None


class Outcome(NamedTuple):
    """The outcome of an input. Without a report or an error, it was not begun."""

    source: str
    report: Report | None = None
    error: CkptconvError | None = None


def worst(codes: Iterable[int]) -> int:
    """Return the exit code of several inputs: the worst of theirs. An interruption is worse than any."""
    return min(codes, key=lambda code: SEVERITY.index(code) if code in SEVERITY else -1, default=0)


# ----------------------------------------------------------------------------------------------------------- progress


class _Whole:
    """One bar over all inputs. The bytes of an input are an estimate until it is planned."""

    def __init__(self, shown: Counting, tasks: Sequence[Conversion]) -> None:
        self._shown, self._count = shown, len(tasks)
        self._totals = [task.size for task in tasks]
        self._done = [0] * len(tasks)
        shown.begin(sum(self._totals))

    def of(self, number: int) -> _One:
        return _One(self, number)

    def total(self, number: int, total: int) -> None:
        self._totals[number] = total
        self._shown.resize(sum(self._totals))

    def add(self, number: int, count: int) -> None:
        self._done[number] += count
        self._shown(count)

    def file(self, number: int, name: str) -> None:
        self._shown.on_file(f"{number + 1}/{self._count} {name}")

    def end(self, number: int) -> None:
        self.total(number, self._done[number])


class _One:
    """The progress of one of the inputs."""

    def __init__(self, whole: _Whole, number: int) -> None:
        self._whole, self._number = whole, number

    def __call__(self, count: int) -> None:
        self._whole.add(self._number, count)

    def on_total(self, total: int) -> None:
        self._whole.total(self._number, total)

    def on_file(self, name: str) -> None:
        self._whole.file(self._number, name)


# ------------------------------------------------------------------------------------------------------------ running


def run(
    tasks: Sequence[Conversion], options: Mapping[str, Any], at_once: int, progress: Counting
) -> tuple[list[Outcome], StoppedError | None]:
    """Convert every task with `options`, `at_once` at a time. Return the outcome of each, and the signal that came."""
    whole = _Whole(progress, tasks)
    ended: dict[int, Report | CkptconvError] = {
        number: task.error for number, task in enumerate(tasks) if task.error is not None
    }
    stopped: StoppedError | None = None
    with _directories(dict.fromkeys(dirname(task.output) for task in tasks if task.error is None)):
        try:
            if at_once > 1:
                with _Workers(min(at_once, len(tasks)), tasks, options, whole, ended) as workers:
                    workers.run()
            else:
                _run_here(tasks, options, whole, ended)
        except StoppedError as error:
            stopped = error
        signals.ignore()  # all outcomes are known
    stopped = stopped or next((end for end in ended.values() if isinstance(end, StoppedError)), None)
    return [_result(task, ended.get(number)) for number, task in enumerate(tasks)], stopped


def _result(task: Conversion, end: Report | CkptconvError | None) -> Outcome:
    if isinstance(end, CkptconvError):
        for sentence in (UNWRITTEN, UNPUBLISHED):
            end.message = end.message.replace(sentence, UNCONVERTED[0])
        return Outcome(task.source, error=end)
    return Outcome(task.source, report=end)


def _run_here(
    tasks: Sequence[Conversion], options: Mapping[str, Any], whole: _Whole, ended: dict[int, Report | CkptconvError]
) -> None:
    """Convert in this process, one after the other. Raise StoppedError when a signal comes."""
    for number, task in enumerate(tasks):
        if task.error is not None:
            continue
        bar = whole.of(number)
        ended[number] = end = attempt(task.source, task.output, dict(options), bar, bar.on_total)
        whole.end(number)
        if isinstance(end, StoppedError):
            return
        signals.release()


@contextlib.contextmanager
def _directories(wanted: Iterable[str]) -> Iterator[None]:
    """Make directories for outputs; afterwards remove the empty ones among them."""
    created: list[str] = []
    try:
        for path in wanted:
            _make(path if is_remote(path) else resolved(path), created)
        yield
    finally:
        for path in reversed(created):
            with contextlib.suppress(OSError):
                os.rmdir(path)


def _make(path: str, created: list[str]) -> None:
    if is_remote(path) or os.path.isdir(path):
        return
    _make(os.path.dirname(path), created)
    with writing(path):
        try:
            os.mkdir(path)
        except FileExistsError as error:
            if os.path.isdir(path):  # another process made it meanwhile
                return
            raise UsageError(f"{path} is not a directory, so outputs cannot be written there.") from error
    created.append(path)


class _Workers:
    """Processes that convert, each one input at a time. A signal is only noted until all have ended."""

    def __init__(
        self,
        count: int,
        tasks: Sequence[Conversion],
        options: Mapping[str, Any],
        whole: _Whole,
        ended: dict[int, Report | CkptconvError],
    ) -> None:
        self._tasks, self._options, self._whole, self._ended = tasks, options, whole, ended
        self._count = count
        self._waiting = deque(number for number, task in enumerate(tasks) if task.error is None)
        # The number of each worker's task, by its connection.
        self._working: dict[Connection, int] = {}
        self._processes: dict[Connection, subprocess.Popen[bytes]] = {}
        self._stopping = False

    def __enter__(self) -> _Workers:
        signals.hold()
        return self

    def __exit__(self, *_: object) -> None:
        for connection in list(self._processes):
            self._close(connection)
        signals.release()

    def run(self) -> None:
        """Convert everything, or until a signal comes: then stop all workers, and wait until they have cleaned up."""
        from multiprocessing.connection import wait

        for _ in range(self._count):
            self._give(self._started())
        while self._working:
            for connection in wait(list(self._working), _LOOK):
                self._hear(connection)  # type: ignore[arg-type]
            if signals.held() and not self._stopping:
                self._stop()

    def _started(self) -> Connection:
        from multiprocessing import Pipe

        ours, theirs = Pipe()
        package = str(Path(__file__).absolute().parents[3])
        descriptor = theirs.fileno()
        self._processes[ours] = subprocess.Popen(
            [sys.executable, "-c", START.format(package, descriptor)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[descriptor],
            # A terminal's Ctrl-C goes to this process alone, which signals the others.
            start_new_session=True,
        )
        theirs.close()
        return ours

    def _give(self, connection: Connection) -> None:
        """Give a worker the next input, or end it."""
        if not self._waiting or self._stopping:
            self._close(connection)
            return
        number = self._working[connection] = self._waiting.popleft()
        task = self._tasks[number]
        with contextlib.suppress(OSError):  # it has died: reading from it will say so
            connection.send((task.source, task.output, dict(self._options)))

    def _hear(self, connection: Connection) -> None:
        """Take a worker's next message."""
        number = self._working[connection]
        bar = self._whole.of(number)
        try:
            kind, value = connection.recv()
        except (EOFError, OSError):
            self._died(connection, number)
            return
        if kind == "ended":
            del self._working[connection]
            self._end(number, value)
            self._give(connection)
        elif kind == "total":
            bar.on_total(value)
        elif kind == "done":
            bar(value)
        else:
            bar.on_file(value)

    def _end(self, number: int, value: Report | CkptconvError) -> None:
        self._ended[number] = value
        self._whole.end(number)
        if isinstance(value, StoppedError):
            self._stop()

    def _died(self, connection: Connection, number: int) -> None:
        """Note that a worker died without a message; start another one for the tasks that are left."""
        del self._working[connection]
        code = self._close(connection)
        if not self._stopping:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            self._end(
                number,
                FailedError(
                    f"{self._tasks[number].source}: its conversion process ended with {how}. {UNPUBLISHED}",
                    "If memory ran out, lower --memory or --jobs.",
                ),
            )
            if self._waiting:
                self._give(self._started())

    def _stop(self) -> None:
        self._stopping = True
        for connection in self._working:
            self._processes[connection].terminate()

    def _close(self, connection: Connection) -> int:
        connection.close()
        return self._processes.pop(connection).wait()


# ---------------------------------------------------------------------------------------------------------- reporting


def report(
    output: Printer, results: Sequence[Outcome], stopped: StoppedError | None, seconds: float, dry_run: bool
) -> None:
    """Report the outcomes of several inputs. If that fails it only warns: the outputs are complete."""
    for outcome in results:
        for warning in outcome.report.warnings if outcome.report else ():
            output.warn(warning if outcome.source in warning else f"{outcome.source}: {warning}")
    # Inputs whose outputs would have one name share an error.
    for error, source in {outcome.error: outcome.source for outcome in results if outcome.error}.items():
        say(str(error) if source in error.message else f"{source}: {error}")
    whole = described(results, stopped, seconds)
    try:
        if output.json:
            output.print_json("error" not in whole, whole)
        else:
            lines = recorded([outcome.report for outcome in results if outcome.report])
            output.tell([*table(results, width()), *_taken(results), *lines, last_line(results, whole, dry_run)])
    except FailedError as error:
        output.warn(str(error))
    if "error" in whole:
        say(str(summary_error(results, stopped)))


def _taken(results: Iterable[Outcome]) -> Iterator[str]:
    """Yield the notes on which checkpoint in an input was taken; for a step of a run, how to convert every step."""
    for outcome in results:
        for note in outcome.report.notes if outcome.report else ():
            if taken := re.match(r"Took ([^:, ]+)", note):
                step = basename(taken[1].rstrip("."))
                pattern = shlex.quote(join(outcome.source, "")) + re.sub(r"\d+", "*", step)
                every = f" To convert every step, use {pattern} as inputs." if "*" in pattern else ""
                yield printable(f"{outcome.source}: {note}{every}")


def described(results: Sequence[Outcome], stopped: StoppedError | None, seconds: float) -> SeveralInputs:
    """Return the JSON object of a whole run. It has an "error" if anything was not converted."""
    code = exit_code(results, stopped)
    reports = [outcome.report for outcome in results if outcome.report]
    failed = [outcome for outcome in results if outcome.error and not isinstance(outcome.error, StoppedError)]
    whole: SeveralInputs = {
        "results": [_described(outcome) for outcome in results],
        "inputs": len(results),
        "converted": len(reports),
        "failed": len(failed),
        "tensors": sum(report.tensors for report in reports),
        "input_bytes": sum(report.input_bytes for report in reports),
        "bytes_read": sum(report.bytes_read for report in reports),
        "bytes_written": sum(report.bytes_written for report in reports),
        "seconds": seconds,
        "peak_rss_bytes": max([peak_rss(), *(report.peak_rss_bytes for report in reports)]),
    }
    if code:
        whole["error"] = cast("Failure", {**failures.described(summary_error(results, stopped)), "exit_code": code})
    return whole


def _described(result: Outcome) -> Converted | NotConverted:
    if result.report:
        return cast("Converted", {"ok": True, **dataclasses.asdict(result.report), "input": result.source})
    return {"ok": False, "input": result.source, "error": failures.described(result.error or _not_begun(result.source))}


def _not_begun(source: str) -> StoppedError:
    return StoppedError(f"{source} was not converted: a signal stopped the run.")


def exit_code(results: Iterable[Outcome], stopped: StoppedError | None) -> int:
    """Return the exit code of a run."""
    return stopped.exit_code if stopped else worst(outcome.error.exit_code for outcome in results if outcome.error)


def summary_error(results: Sequence[Outcome], stopped: StoppedError | None) -> CkptconvError:
    """Return the error for a run in which not everything was converted."""
    errors = [outcome.error for outcome in results if outcome.error and not isinstance(outcome.error, StoppedError)]
    done = sum(outcome.report is not None for outcome in results)
    if stopped:
        first, _, _ = stopped.message.partition(". ")
        of = f"{done} of {count_of(len(results), 'input')} converted; no other output" if done else "No output"
        return StoppedError(f"{first}. {of} was published.", exit_code=stopped.exit_code)
    code = worst(error.exit_code for error in errors)
    worst_one = next(error for error in errors if error.exit_code == code)
    text = f"{len(errors)} of {count_of(len(results), 'input')} could not be converted."
    return type(worst_one)(text)


def table(results: Sequence[Outcome], width: int | None) -> Iterator[str]:
    """Yield the lines of a table: each input, its format, its output, size and time, or why it has none.

    The lines have at most `width` cells, unless that is None or different paths would look alike.
    """
    first_of: dict[CkptconvError | None, Outcome] = {}
    rows = [_row(outcome, first_of.setdefault(outcome.error, outcome) is outcome) for outcome in results]
    shown = [("input", "input format", "output", "size", "time"), *rows]
    # Output, size and time of a failed input are one text.
    widths = [max(len(row[column]) for row in shown if len(row) > 3 or column < 2) for column in range(5)]
    last = max(len("".join(f"  {cell}" for cell in row[5:])) for row in shown)
    room = (width or 10**6) - widths[1] - widths[3] - widths[4] - last - 8
    for column in (0, 2):
        widths[column] = max(_NARROW, min(widths[column], _WIDE, room // 2))
    inputs = cut_column([row[0] for row in shown], widths[0])
    outputs = iter(cut_column([row[2] for row in shown if len(row) > 3], widths[2]))
    for called, row in zip(inputs, shown, strict=True):
        cells = [padded(called, widths[0]), padded(row[1], widths[1])]
        if len(row) > 3:
            cells.append(padded(next(outputs), widths[2]))
            cells.extend(padded(row[column], widths[column], right=True) for column in (3, 4))
            cells.extend(row[5:])
        else:
            left = (width or 10**6) - sum(widths[:2]) - 4
            cells.append(cut(row[2], max(left, _NARROW)))
        yield "  ".join(cells).rstrip()


def _row(result: Outcome, is_first: bool) -> tuple[str, ...]:
    """Return the cells of an input; an error that several share is told with the first of them."""
    source = printable(result.source)
    if result.report:
        report = result.report
        outputs = [file.path for file in report.outputs]
        where = outputs[0] if len(outputs) == 1 else os.path.dirname(outputs[0]) + "/" if outputs else ""
        size = format_size(sum(file.bytes for file in report.outputs))
        notes = [note for note in report.notes if note.startswith("This replaces ")]
        verb = "replaces" if report.dry_run else "replaced"
        replaced = [f"{verb} {'an earlier output' if 'earlier output' in note else 'other files'}" for note in notes]
        return source, report.format, printable(where), size, f"{max(report.seconds, 0.01):.2f} s", *replaced
    if result.error is None or isinstance(result.error, StoppedError):
        return source, "not converted", "not begun" if result.error is None else "interrupted"
    said = printable(first_sentence(result.error.message)) if is_first else "(the same)"
    return source, f"error: {result.error.kind}", said


def first_sentence(message: str) -> str:
    """Return the first sentence of an error's message."""
    return message.partition(". ")[0].rstrip(".")


def last_line(results: Sequence[Outcome], whole: Mapping[str, Any], dry_run: bool) -> str:
    """Return the line below the table: how much was converted."""
    verb = "would be converted" if dry_run else "converted"
    line = f"{whole['converted']} of {count_of(len(results), 'input')} {verb}"
    if whole["failed"]:
        line += f", {whole['failed']} failed"
    if dry_run:
        return line
    return (
        f"{line}: wrote {format_size(whole['bytes_written'])} in {max(whole['seconds'], 0.01):.2f} s, peak memory "
        f"{format_memory(whole['peak_rss_bytes'])}{' of a process' if whole['inputs'] > 1 else ''}"
    )
