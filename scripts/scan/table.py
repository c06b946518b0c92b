"""Compares the verdicts of `ckptconv scan` with those of other scanners: the table in docs/internals/scan.md.

    python scripts/scan/table.py --tools VENV [--last DIRECTORY …] [--foreign DIRECTORY …] [--peers DIRECTORY]

VENV has picklescan, fickling, modelscan, and typing_extensions, which fickling imports without asking for it.
`--last` and `--foreign` are files that `corpus.py` made, and `--peers` is a checkout of picklescan's repository. Rows
whose files are not named stay as they are.

The other files are the corpus of tests/attacks, made in a temporary directory, and the files of tests/data, which real
programs wrote. Nothing is loaded: each tool, in one process, reads each file once, for ten seconds at most.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "internals" / "scan.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
OTHER = ("picklescan", "fickling", "modelscan")
# Run by the Python of the tools, with the name of one: its release, and a verdict for each file, flagged, clean or not
# read, each on a line of its own.
OTHERS = """
import io, resource, signal, sys, zipfile
from contextlib import redirect_stdout, redirect_stderr
from importlib.metadata import version
def picklescan(path):
    from picklescan.scanner import scan_file_path, SafetyLevel
    found = scan_file_path(path)
    if found.infected_files or any(each.safety == SafetyLevel.Dangerous for each in found.globals):
        return "flagged"
    if found.scan_err or not found.scanned_files:
        return "not read"
    # What it does not know it calls suspicious: nearly every checkpoint.
    return "clean"
def fickling(path):
    from fickling.fickle import Pickled, StackedPickle
    from fickling.analysis import check_safety, Severity
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith(".pkl")]
            pickles = [Pickled.load(archive.read(name)) for name in names]
    else:
        with open(path, "rb") as file:
            pickles = list(StackedPickle.load(file))
    worst = max(check_safety(each).severity for each in pickles)
    # Below this it is of nearly every checkpoint.
    return "flagged" if worst >= Severity.LIKELY_OVERTLY_MALICIOUS else "clean"
def modelscan(path):
    from modelscan.modelscan import ModelScan
    from modelscan.settings import DEFAULT_SETTINGS
    scanner = ModelScan(settings=DEFAULT_SETTINGS)
    told = scanner.scan(path)
    if told["summary"]["total_issues"]:
        return "flagged"
    return "clean" if told["summary"]["scanned"]["total_scanned"] and not told["errors"] else "not read"
def late(*_):
    raise TimeoutError
signal.signal(signal.SIGALRM, late)
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
tool = globals()[sys.argv[1]]
__import__(sys.argv[1])
print(version(sys.argv[1]))
for line in sys.stdin:
    path = line.rstrip("\\n")
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        signal.alarm(10)
        try:
            verdict = tool(path)
        except BaseException:
            verdict = "not read"
        signal.alarm(0)
    print(verdict, flush=True)
"""
# Our columns, by the level on which a scan fails.
COLUMNS = {"ckptconv": "call", "ckptconv --fail-on unknown": "unknown"}
# What each row of the table counts.
KINDS = {
    "attack": "files that run something when torch.load or pickle reads them",
    "unknown": "functions that pass an argument to exec, eval, open and the like, and hidden calls",
    "known": "known names that are given what their own pickling never gives them, and what hides such calls",
    "two": "files that two readers read differently",
    "lies": "files that describe what cannot be, or ask for too much",
    "odd": "odd but sound files",
    "real": "files that real programs wrote",
    "held": "live payloads that were written after the tables of scan",
    "peers": "hostile files of picklescan's own repository",
    "last": "harmless files that were set aside until the grammar was done",
    "foreign": "harmless files of libraries that the grammar does not have",
}


# The kinds whose files are named on the command line.
EXTRA = ("peers", "last", "foreign")
# Of picklescan's files.
HARMLESS = ("bad_pytorch", "benign", "broken", "int_array", "new_pytorch", "not_a", "object_array", "pytorch_model")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", required=True, help="a virtual environment with picklescan, fickling and modelscan")
    for kind in EXTRA:
        parser.add_argument(f"--{kind}", type=Path, action="append", default=[], help=KINDS[kind])
    asked_for = parser.parse_args()
    tools = Path(asked_for.tools)
    with tempfile.TemporaryDirectory() as directory:
        files = made(Path(directory)) | {
            path: kind for kind in EXTRA for root in getattr(asked_for, kind) for path in files_of(kind, root)
        }
        with ThreadPoolExecutor() as threads:
            others = {tool: threads.submit(asked, tools, tool, list(files)) for tool in OTHER}
            found = {path: ours(path) for path in files}
            told = {tool: other.result() for tool, other in others.items()}
        for tool, (_, verdicts) in told.items():
            for path in files:
                found[path][tool] = verdicts[path]
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    lines = table(files, found, {tool: release for tool, (release, _) in told.items()})
    kept = {title: line for line in rest.partition(END)[0].splitlines() for title in KINDS.values() if title in line}
    lines += [kept[title] for kind, title in KINDS.items() if kind not in files.values() and title in kept]
    text = "\n".join(lines)
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}")


def asked(tools: Path, tool: str, files: list[Path]) -> tuple[str, dict[Path, str]]:
    """Return the release of a tool, and its verdicts. Where a file ends its process, it goes on after that file."""
    command = [str(tools / "bin" / "python"), "-c", OTHERS, tool]
    verdicts: dict[Path, str] = {}
    while True:
        left = files[len(verdicts) :]
        text = "\n".join(map(str, left))
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        release, *told = done.stdout.splitlines() or [""]
        if not release:
            sys.exit(f"{tool} ended with an error:\n{done.stderr}")
        verdicts |= dict(zip(left, told, strict=False))
        if len(told) >= len(left):
            return release, verdicts
        verdicts[left[len(told)]] = "not read"


def files_of(kind: str, root: Path) -> list[Path]:
    """The files below a directory; of picklescan's, those that are not meant to be harmless."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return [path for path in files if kind != "peers" or not path.name.startswith(HARMLESS)]


def made(directory: Path) -> dict[Path, str]:
    """Make the corpus; return its files, the real ones, and the kind of each."""
    sys.path.insert(0, str(ROOT / "tests"))
    modules = (
        "attacks.corpus",
        "attacks.readers",
        "features.scan.unknown",
        "attacks.assemble",
        "features.scan.traps",
        "features.scan.held_back",
    )
    corpus, readers, unknown, assemble, traps, held_back = map(importlib.import_module, modules)
    kinds: dict[Path, str] = {}
    for case in (*corpus.CASES.values(), *readers.READERS.values()):
        path = directory / case.file
        path.write_bytes(case.make(str(directory / "canary")))
        if case.exit == 4:
            kind = "two" if case.family in ("zip", "readers", "stream", "tar") else "lies"
        else:
            kind = "attack" if case.live else "odd" if case.exit == 0 else ""
        if kind:
            kinds[path] = kind
    canary = str(directory / "canary")
    payloads = [assemble.called(assemble.name(*each), assemble.text("x")) for each in unknown.RUNNERS]
    payloads += [make(canary) for make in unknown.HIDDEN.values()]
    written = [("x.pkl", b"\x80\x04" + payload + b".") for payload in payloads]
    evil = assemble.pickled(unknown.evaluated(canary))
    written += [(file, make(evil)) for file, make in unknown.FILES.values()]
    for count, (file, data) in enumerate(written):
        path = directory / str(count) / file
        path.parent.mkdir()
        path.write_bytes(data)
        kinds[path] = "unknown"
    # Of the ways to give a known name what it never gets, each name has its own part.
    payloads = traps.payloads()
    given = [*list(payloads.values())[::97], *(b"\x80\x04" + chain + b"." for chain in traps.CHAINS.values())]
    hidden = [(file, make(traps.evil(canary))) for file, make in traps.FILES.values()]
    for count, (file, data) in enumerate([*(("x.pkl", each) for each in given), *hidden]):
        path = directory / f"known{count}" / file
        path.parent.mkdir()
        path.write_bytes(data)
        kinds[path] = "known"
    for count, (file, data) in enumerate(held_back.payloads(canary).values()):
        path = directory / f"held{count}" / file
        path.parent.mkdir()
        path.write_bytes(data)
        kinds[path] = "held"
    real = sorted(path for path in (ROOT / "tests" / "data").rglob("*.pt") if path.is_file())
    return {**kinds, **dict.fromkeys(real, "real")}


def ours(path: Path) -> dict[str, str]:
    import ckptconv
    from ckptconv.features.scan.report import counts

    found = ckptconv.scan(path)
    verdicts = {}
    for column, level in COLUMNS.items():
        flagged = any(counts(each.rule, level) for file in found.files for each in file.findings)
        verdicts[column] = "flagged" if flagged else "not read" if found.verdict == "unreadable" else "clean"
    return verdicts


def table(files: Mapping[Path, str], found: Mapping[Path, Mapping[str, str]], versions: Mapping[str, str]) -> list[str]:
    """Return the lines of the table: for each kind of files, what each tool flagged, passed and did not read."""
    tools = (*COLUMNS, *OTHER)
    titles = [f"{tool} {versions[tool]}" if tool in versions else tool for tool in tools]
    lines = [f"| | files | {' | '.join(titles)} |", f"|---|--:|{'--:|' * len(tools)}"]
    for kind, title in KINDS.items():
        counted = [path for path in files if files[path] == kind]
        if not counted:
            continue
        cells = []
        for tool in tools:
            verdicts = Counter(found[path][tool] for path in counted)
            cells.append(f"{verdicts['flagged']} / {verdicts['clean']} / {verdicts['not read']}")
        lines.append(f"| {title} | {len(counted)} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
