"""Reads each case with all readers and with ours, and judges: the same, or we refuse.

What others refuse we may read, and what others read we may refuse, unless it was made by honest means. A finding is

- another value: a reader has other types, keys, bits or sharing than we have;
- attack passes: a reader would have called what we call an attack, and we read the file as if nothing were wrong;
- unseen call: a reader would have called what we do not tell of;
- read alone: we read what the reader of the only specification refuses;
- refused honest, crash, slow, memory: what a file made by honest means, or any at all, must not meet.

    python -m differential.hunt KIND FILE …     (in tests/) judges files that are there already
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cells import of_features

from ckptconv.errors import CkptconvError
from ckptconv.formats.detect import open_source
from ckptconv.formats.safetensors import read_header
from ckptconv.formats.torch.objects import CONSTANTS
from ckptconv.pickles import machine
from ckptconv.pickles.nodes import Global
from ckptconv.pickles.refusing import refusing_attacks
from ckptconv.pickles.vocabulary import Vocabulary
from ckptconv.storage.files import open_reader
from differential import trees
from differential.cases import KINDS, Case, Kind
from differential.workers import Workers

SECONDS_EACH = 10
MEMORY = 1 << 30
# A case is made smaller with at most so many tries.
TRIES = 200


# --------------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Outcome:
    """What we make of a file: its tree and the names of what it calls, or why it was refused; or what went wrong."""

    tree: trees.Tree | None = None
    calls: frozenset[str] = frozenset()
    refused: str = ""
    wrong: tuple[str, str] = ("", "")  # kind of finding, detail


def read_pickle(path: Path) -> tuple[Any, Iterable[Any]]:
    loaded = machine.load(path.read_bytes(), Vocabulary(constants=CONSTANTS), where=path.name)
    return [loaded.value, trees.Text(f"ends at {loaded.end}")], loaded.opaque


def read_torch(path: Path) -> tuple[Any, Iterable[Any]]:
    source = open_source(path)
    return source.weights, source.files.opaque


def read_safetensors(path: Path) -> tuple[Any, Iterable[Any]]:
    """The header alone: names, dtypes, shapes, bytes and metadata; and the whole file must be readable or refused."""
    from compare import evaluate

    with contextlib.suppress(CkptconvError):
        open_source(path)
    reader = open_reader(str(path), None)
    try:
        header = read_header(reader)
    finally:
        reader.close()
    tensors = {
        name: f"{tensor.dtype.code} {list(tensor.shape)} {evaluate(tensor).hex()}"
        for name, tensor in sorted(header.tensors.items())
    }
    return {"tensors": tensors, "metadata": dict(sorted(header.metadata.items()))}, ()


READ: dict[str, Callable[[Path], tuple[Any, Iterable[Any]]]] = {
    "pickle": read_pickle,
    "torch": read_torch,
    "safetensors": read_safetensors,
}


class TooLongError(BaseException):
    """Not to be caught by what takes too long."""


def _stop(*_: Any) -> None:
    raise TooLongError


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Not much more memory than now, and not much more time."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGVTALRM, _stop)
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY + (1 << 28), hard))
    signal.setitimer(signal.ITIMER_VIRTUAL, 2 * SECONDS_EACH)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGVTALRM, before)


def _resident(name: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) << 10


def read_ours(reads: str, path: Path) -> Outcome:
    """What we make of the file at `path`, and whether it took too much."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
    before, started = _resident("VmRSS"), time.process_time()
    try:
        with limited(), refusing_attacks():
            value, calls = READ[reads](path)
            tree = trees.tree_of(value, trees.ours)
        outcome = Outcome(tree, frozenset(map(_called, calls)))
    except CkptconvError as error:
        outcome = Outcome(refused=f"{error.kind}: {error.message}" if error.message else "")
    except zlib.error as error:
        outcome = Outcome(refused=str(error))  # `evaluate` met what a conversion refuses
    except TooLongError:
        outcome = Outcome(wrong=("slow", f"more than {2 * SECONDS_EACH} s of processor time"))
    except MemoryError:
        outcome = Outcome(wrong=("memory", f"more than {MEMORY} bytes"))
    except Exception as error:
        outcome = Outcome(wrong=("crash", f"{type(error).__name__}: {error}"))
    took, grown = time.process_time() - started, _resident("VmHWM") - before
    if not outcome.wrong[0] and took > SECONDS_EACH:
        return Outcome(wrong=("slow", f"{took:.0f} s of processor time"))
    if not outcome.wrong[0] and grown > MEMORY:
        return Outcome(wrong=("memory", f"{grown} bytes"))
    return outcome


def _called(name: Any) -> str:
    module, _, attribute = (str(name.module), ".", str(name.name)) if isinstance(name, Global) else _split(str(name))
    return trees.named(module, attribute)


def _split(path: str) -> tuple[str, str, str]:
    return path.rpartition(".")


# --------------------------------------------------------------------------------------------------------- judging


@dataclass(frozen=True)
class Finding:
    """What is wrong with the reading of a case. `what` says it for all cases alike, `detail` for this one."""

    kind: str
    category: str
    reader: str = field(compare=False)
    what: str
    detail: str = field(compare=False)


_PECULIAR = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")


def generic(text: str) -> str:
    """A text without what is peculiar to a case."""
    return _PECULIAR.sub("…", text)[:80]


def sides(differs: str) -> str:
    """What kinds of values differ; of tensors, in which respect."""
    ours, _, others = differs.partition(": ")[2].partition(" | ")
    kinds = [side.split(maxsplit=1)[0] for side in (ours, others) if side]
    if kinds == ["tensor", "tensor"]:
        facts, other = ours.partition(": ")[0], others.partition(": ")[0]
        dtypes = {side.split()[1] for side in (facts, other)}
        kinds.append("dtype" if len(dtypes) > 1 else "facts" if facts != other else "content")
    return " | ".join(kinds)


@functools.cache
def suspecting() -> list[Callable[[Global], bool]]:
    """What features take for a name that no checkpoint has a reason to call."""
    return of_features("SUSPECTING")


def judge(kind: str, our: Outcome, answers: dict[str, dict[str, Any]], honest: bool) -> list[Finding]:
    """What is wrong, judged by what all others read; each fault once, whoever shows it."""
    if our.wrong[0]:
        return [Finding(kind, our.wrong[0], "ours", generic(our.wrong[1]), our.wrong[1])]
    if our.tree is None:
        if honest and any(answer["end"] == "value" for answer in answers.values()):
            return [Finding(kind, "refused honest", "ours", generic(our.refused.rpartition(": ")[2]), our.refused)]
        return []
    found: dict[tuple[str, str], Finding] = {}
    for reader, answer in answers.items():
        calls = [Global(*each) for each in answer["calls"]]
        attack = [str(call) for call in calls if any(is_suspect(call) for is_suspect in suspecting())]
        unseen = [str(call) for call in calls if trees.named(*call) not in our.calls]
        if not trees.CALLERS.isdisjoint(our.calls):
            unseen = []  # what is called by what we tell of
        if attack:
            new = Finding(kind, "attack passes", reader, "", ", ".join(attack))
        elif unseen:
            new = Finding(kind, "unseen call", reader, generic(answer.get("error", "")), ", ".join(unseen))
        elif answer["end"] == "value" and (differs := trees.difference(our.tree, answer["tree"])):
            new = Finding(kind, "another value", reader, sides(differs), differs)
        elif answer["end"] == "error" and KINDS[kind].strict:
            new = Finding(kind, "read alone", reader, generic(answer["error"]), answer["error"])
        else:
            continue
        found.setdefault((new.category, new.what), new)
    return list(found.values())


# --------------------------------------------------------------------------------------------------------- hunting


@dataclass
class Hunt:
    """Findings of many cases of a kind, each fault once, and how the cases ended."""

    findings: dict[Finding, tuple[int, bytes]] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)


class Hunter:
    """Reads cases with the readers of its kinds, which it starts."""

    def __init__(self, kinds: Iterable[str], place: Path) -> None:
        self.kinds: dict[str, Kind] = {name: KINDS[name] for name in kinds}
        self.place = place
        self.workers = Workers(dict.fromkeys(reader for kind in self.kinds.values() for reader in kind.readers))

    def __enter__(self) -> Hunter:
        return self

    def __exit__(self, *error: Any) -> None:
        self.workers.__exit__(*error)

    def read(self, name: str, data: bytes, honest: bool = False) -> tuple[list[Finding], str]:
        """What is wrong with the reading of `data`, and in a word how it ended."""
        kind = self.kinds[name]
        path = self.place / f"case{kind.suffix}"
        path.write_bytes(data)
        our = read_ours(kind.reads, path)
        answers = self.workers.ask(kind.readers, path)
        others = sum(answer["end"] == "value" for answer in answers.values())
        end = "read" if our.tree else "refused"
        return judge(name, our, answers, honest), f"{end}, {'others read it' if others else 'as by others'}"

    def hunt(
        self, name: str, seed: int, *, seconds: float = 0, cases: int = 0, until: str = "", keep: Path | None = None
    ) -> Hunt:
        """Judge so many cases of a kind, or those of so many seconds, or until there is a finding of the category
        `until`. The cases follow from the seed alone."""
        hunt, stop = Hunt(), time.monotonic() + seconds if seconds else float("inf")
        while time.monotonic() < stop and (not cases or hunt.ends.total() < cases):
            number = hunt.ends.total()
            case = self.kinds[name].make(random.Random(f"{name} {seed} {number}"))
            data = case.data()
            findings, end = self.read(name, data, case.honest)
            hunt.ends[end + (", honest" if case.honest else "")] += 1
            for finding in findings:
                if not any(finding == known for known in hunt.findings):
                    small, finding = self.smaller(name, case, finding) if keep else (case, finding)
                    hunt.findings[finding] = number, small.data()
                    if keep:
                        write(keep, finding, seed, number, data, small)
            if until and any(finding.category == until for finding in findings):
                break
        return hunt

    def smaller(self, name: str, case: Case, finding: Finding) -> tuple[Case, Finding]:
        """The case with as few of its steps as show the same fault, as far as a bounded search finds, and the fault."""
        steps, width, tries = case.steps, max(len(case.steps) // 2, 1), TRIES
        before = len(steps)
        while width and tries > 0:
            at = 0
            while at < len(steps) and tries > 0:
                fewer = [*steps[:at], *steps[at + width :]]
                tries -= 1
                shown = self._shown(name, case.with_steps(fewer), finding)
                if shown:
                    steps, finding = fewer, shown
                else:
                    at += width
            if width > 1 or len(steps) == before:
                width //= 2
            before = len(steps)
        return case.with_steps(steps), finding

    def _shown(self, name: str, case: Case, finding: Finding) -> Finding | None:
        """The same fault in a smaller case."""
        try:
            data = case.data()
        except Exception:
            return None  # what is left does not fit together
        same = (found for found in self.read(name, data, case.honest)[0] if found == finding)
        return next(same, None)


def write(directory: Path, finding: Finding, seed: int, number: int, data: bytes, small: Case) -> None:
    """Keep the smallest input of a finding, the one it was made from, and what both are."""
    directory.mkdir(parents=True, exist_ok=True)
    mark = hashlib.sha1(repr((finding.kind, finding.category, finding.what)).encode()).hexdigest()[:8]
    stem = f"{finding.kind}-{finding.category.replace(' ', '-')}-{mark}"
    suffix = KINDS[finding.kind].suffix
    (directory / f"{stem}{suffix}").write_bytes(small.data())
    (directory / f"{stem}.full{suffix}").write_bytes(data)
    (directory / f"{stem}.txt").write_text(
        f"{finding.kind}, seed {seed}, case {number}\n{finding.category}, by {finding.reader}\n{finding.detail}\n\n"
        + "\n".join(small.told())
        + "\n"
    )


def told(hunt: Hunt) -> Iterator[str]:
    """The findings of a hunt, for people."""
    for finding, (number, data) in hunt.findings.items():
        shown = data.hex() if len(data) <= 200 else f"{len(data)} bytes"
        yield f"{finding.kind}, case {number}: {finding.category}, by {finding.reader}: {finding.detail[:500]}"
        yield f"    {shown}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as here, Hunter([sys.argv[1]], Path(here)) as hunter:
        for name in sys.argv[2:]:
            print(os.path.basename(name), *hunter.read(sys.argv[1], Path(name).read_bytes()))
