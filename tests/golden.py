"""The golden set: what every command makes of every checkpoint of the tests, to be compared before and after a change.

    python tests/golden.py record FILE     runs every case, and writes down how each ended
    python tests/golden.py compare FILE    runs them again, and says what differs; exit code 1 if anything does

Of a case are kept: the exit code, the report without times and memory, the errors and warnings, and the sha256 of
every file that was written; manifests are among these, and name the plan id. The cases on S3 also keep what
the store of the tests was asked for; the cases of memory the peak of a whole process, compared within a few MiB.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from attacks.every import ALL, ALL_DIRECTORIES
from cells import of_features
from checkpoints import ckptconv, ckptconv_here
from remote import a_model

# A fixed time for all inputs: the plan id of a file without checksums depends on it.
THEN = 1_700_000_000
# What a run says of itself, and of the machine.
OF_THE_RUN = {"seconds", "peak_rss_bytes"}
TIMES = re.compile(r"\d+(?:\.\d+)? (?:s|ms|min|MB/s|GB/s|KB/s|MiB|KiB|GiB)\b")
# By how much a peak may differ between two runs of the same program.
SLACK = 4 << 20
CHILDREN = 2


@dataclass(frozen=True)
class Golden:
    """A case: `make` puts the input into an empty directory; `commands` are run there, one after the other."""

    name: str
    make: Callable[[Path], object]
    commands: tuple[tuple[str, ...], ...]


# ---------------------------------------------------------------------------------------------------------- the cases


def _copied(source: Path) -> Callable[[Path], object]:
    return lambda place: shutil.copytree(source, place / "in")


def _unpacked(file: Path) -> Callable[[Path], object]:
    def make(place: Path) -> None:
        with tarfile.open(file) as tar:
            tar.extractall(place, filter="data")

    return make


def of_fixtures() -> Iterator[Golden]:
    for name, path, commands in itertools.chain(*of_features("CHECKPOINTS")):
        yield Golden(name, _copied(path), commands)
    for name, path in sorted((name, path) for more in of_features("DIRECTORIES") for name, path in more.items()):
        convert = ("pt2safetensors", "in", "--json")
        yield Golden(
            name,
            _copied(path),
            (
                (*convert, "out"),
                (*convert, "all", "--key", ".", "--max-shard-size", "20KB"),
                (*convert, "model.safetensors", "--dtype", "bf16", "--optimizer", "states"),
                ("verify", "in", "out", "--json"),
                ("inspect", "in", "--json"),
            ),
        )
    for name, file, commands in (each for more in of_features("ARCHIVES") for each in more):
        yield Golden(name, _unpacked(file), commands)


def _tree() -> dict[str, Any]:
    """A training state with something of everything."""
    from collections import Counter, OrderedDict, defaultdict

    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 8))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    weights = model.state_dict()
    return {
        "state_dict": weights,
        "ema": OrderedDict((f"module.{name}", value.to(torch.bfloat16)) for name, value in weights.items()),
        "optimizer": optimizer.state_dict(),
        "tied": weights["0.weight"],
        "transposed": torch.arange(600.0).reshape(20, 30).t(),
        "complex": torch.view_as_complex(torch.arange(8.0).reshape(4, 2)),
        "odd": {
            1: (1, 2.5),
            (1, 2): [None, True],
            "set": {"a"},
            "count": Counter(a=2),
            "d": defaultdict(list, {"k": [1]}),
        },
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "empty": torch.empty(0, 4),
        "epoch": 3,
    }


def _saved(tree: Callable[[], Any]) -> Callable[[Path], object]:
    return lambda place: torch.save(tree(), place / "in.pt")


def of_files() -> Iterator[Golden]:
    convert = ("pt2safetensors", "in.pt", "--json")
    commands: tuple[tuple[str, ...], ...] = (
        (*convert, "out.safetensors"),
        (*convert, "weights.safetensors", "--key", "state_dict", "--dtype", "bf16", "--checksum", "--verify"),
        (*convert, "some.safetensors", "--include", "ema.*", "--strip-prefix", "ema.module."),
        (*convert, "shards", "--max-shard-size", "2KB"),
        ("verify", "in.pt", "out.safetensors", "--json"),
        ("verify", "in.pt", "weights.safetensors", "--json"),
        ("safetensors2pt", "out.safetensors", "back.pt", "--json"),
        ("safetensors2pt", "shards", "shards.pt", "--json"),
        ("inspect", "in.pt"),
        ("inspect", "in.pt", "--json", "--depth", "1"),
        ("inspect", "out.safetensors", "--json"),
        ("pt2safetensors", "in.pt", "plan.safetensors", "--dry-run", "--json"),
        ("convert", "in.pt", "converted.safetensors", "--json"),
        ("convert", "shards", "cast.safetensors", "--dtype", "fp16", "--rename", "^=net.", "--verify", "--json"),
        ("verify", "shards", "cast.safetensors", "--dtype", "fp16", "--rename", "^=net.", "--json"),
        ("convert", "in.pt", "out.safetensors", "none.pt", "--output-dir", "several", "--json"),
    )
    yield Golden("pt/zip", _saved(_tree), commands)
    for name, make, own in itertools.chain(*of_features("TORCH_FILES")):
        yield Golden(name, make, own or commands)
    yield Golden("pt/model", _saved(lambda: a_model(layers=10)), commands)


def _rows(place: Path) -> None:
    """A table of 12 rows of 64 bytes: an id, the state of an optimizer, padding, and 8 floats."""
    width = 64
    table = torch.arange(12 * width).to(torch.uint8).reshape(12, width)
    table[:, :8] = torch.arange(12).reshape(12, 1).view(torch.uint8)
    torch.save({"embeddings.t.weight": table.view(torch.float32)}, place / "in.pt")


def of_rows() -> Iterator[Golden]:
    layout = ("--embedding-dim", "8", "--optimizer", "exact_row_wise_adagrad")
    yield Golden(
        "rows",
        _rows,
        (
            ("rows", "split", *layout, "in.pt", "parts.safetensors", "--json"),
            ("rows", "check", *layout, "in.pt", "--json"),
            ("rows", "check", "parts.safetensors", "--json"),
            ("rows", "pack", "parts.safetensors", "again.pt", "--json"),
        ),
    )


def of_the_corpus() -> Iterator[Golden]:
    for case in [case for case in ALL if case.family != "readers"]:
        command = "safetensors2pt" if case.file.endswith(".safetensors") else "pt2safetensors"
        output = "out.pt" if command == "safetensors2pt" else "out.safetensors"
        yield Golden(
            f"corpus/{case.file}",
            lambda place, case=case: (place / case.file).write_bytes(case.make("canary")),  # type: ignore[misc]
            ((command, case.file, output, "--json"), ("inspect", case.file, "--json")),
        )
    for directory in ALL_DIRECTORIES:

        def make(place: Path, directory: Any = directory) -> str:
            (place / "in").mkdir()
            return str(directory.make(place / "in", "canary").relative_to(place))

        yield Golden(f"corpus/{directory.file}", make, (("@made", directory.command),))


def of_usage() -> Iterator[Golden]:
    commands = (
        "", "--help", "convert --help", "convert none.pt", "convert a b c", "convert a b --output-dir out",
        "convert a/x b/x --output-dir out --json",
        "pt2safetensors", "pt2safetensors --help", "zero-to-fp32 --help", "dcp2safetensors --help",
        "safetensors2pt --help", "inspect --help", "verify --help", "finish --help", "rows --help", "rows split --help",
        "rows pack --help", "rows check --help", "pt2safetensors none.pt", "pt2safetensors none.pt --json", "convert",
        "zero-to-fp32 .", "zero-to-fp32 . out", "dcp2safetensors . out --json", "inspect none", "verify none none",
        "finish none", "pt2safetensors none.pt --dtype int8", "pt2safetensors none.pt --jobs 0 --json",
        "pt2safetensors none.pt --memory 1", "pt2safetensors none.pt --part 3/2", "pt2safetensors none.pt out.bin",
    )  # fmt: skip
    yield Golden("usage", lambda place: None, tuple(tuple(each.split()) for each in commands))


# ----------------------------------------------------------------------------------------------------------- a run


def run(case: Golden) -> dict[str, Any]:
    """How the commands of a case ended, and what is there then."""
    with tempfile.TemporaryDirectory(prefix="golden") as where:
        place = Path(where)
        os.chdir(place)
        made = case.make(place)
        inputs = _backdated(place)
        ended = {}
        for command in case.commands:
            if command[:1] == ("@made",):
                output = "out.pt" if command[1] == "safetensors2pt" else "out"
                command = (command[1], str(made), output, "--json")
            ended[" ".join(command)] = _ended(command, where)
            _backdated(place)
        files = {
            str(path.relative_to(place)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(place.rglob("*"))
            if path.is_file() and not path.is_symlink() and path not in inputs
        }
        os.chdir("/")
    return {"commands": ended, "files": files}


def _backdated(place: Path) -> set[Path]:
    """The files below `place`, all given one time: an output may be the next command's input."""
    files = {path for path in place.rglob("*") if path.is_file() and not path.is_symlink()}
    for path in files:
        os.utime(path, (THEN, THEN))
    return files


def _ended(command: tuple[str, ...], where: str) -> dict[str, Any]:
    done = ckptconv_here(*command)
    try:
        out = _lasting(json.loads(done.out))
    except ValueError:
        out = TIMES.sub("…", done.out)
    text = json.dumps([out, TIMES.sub("…", done.err)]).replace(where, "")
    out, err = json.loads(text)
    return {"code": done.code, "out": out, "err": err}


def _lasting(value: Any) -> Any:
    """A report without what is of the run, also in the reports within it."""
    if isinstance(value, dict):
        return {key: _lasting(each) for key, each in value.items() if key not in OF_THE_RUN}
    return [_lasting(each) for each in value] if isinstance(value, list) else value


def of_memory() -> dict[str, int]:
    """The peak of whole processes, in bytes."""
    peaks = {}
    with tempfile.TemporaryDirectory() as where:
        place = Path(where)
        torch.save({f"w{n}": torch.full((1 << 20,), float(n)) for n in range(64)}, place / "plain.pt")
        torch.save({f"w{n}": torch.full((1 << 10, 1 << 10), float(n)).t() for n in range(64)}, place / "turned.pt")
        torch.save({f"w{n}": torch.full((4,), float(n)) for n in range(30_000)}, place / "many.pt")
        for name, *options in (("plain",), ("plain", "--dtype", "bf16"), ("turned",), ("many",)):
            done = ckptconv("pt2safetensors", place / f"{name}.pt", place / "out", "--json", *options)
            peaks[" ".join((name, *options))] = done.json["peak_rss_bytes"]
    return peaks


def _child(case: Golden) -> tuple[str, dict[str, Any]]:
    sys.stdout = io.StringIO()
    return case.name, run(case)


def cases() -> list[Golden]:
    return [*of_usage(), *of_files(), *of_rows(), *of_fixtures(), *of_the_corpus()]


_BY_NAME: dict[str, Golden] = {}


def _named(name: str) -> tuple[str, dict[str, Any]]:
    return _child(_BY_NAME[name])


def all_of_it(only: str) -> dict[str, Any]:
    _BY_NAME.update({case.name: case for case in cases() if only in case.name})
    with multiprocessing.get_context("fork").Pool(CHILDREN, maxtasksperchild=50) as pool:
        found: dict[str, Any] = dict(pool.imap_unordered(_named, _BY_NAME))
    beside = {name: record for more in of_features("GOLDEN") for name, record in more.items() if only in name}
    found.update({name: record() for name, record in beside.items()})
    if only in "memory":
        found["memory"] = of_memory()
    return dict(sorted(found.items()))


def differences(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """What is not the same in two records, by place."""
    if path.startswith("/memory/") and isinstance(before, int) and isinstance(after, int):
        if after > before + SLACK:
            yield f"{path}: {before >> 10} KiB, now {after >> 10} KiB"
    elif isinstance(before, dict) and isinstance(after, dict):
        for key in {**before, **after}:
            if key not in after:
                yield f"{path}/{key}: no longer there"
            elif key not in before:
                yield f"{path}/{key}: new: {str(after[key])[:200]}"
            else:
                yield from differences(before[key], after[key], f"{path}/{key}")
    elif before != after:
        yield f"{path}:\n    was {before}\n    is  {after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name has TEXT in it")
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["COLUMNS"] = "120"
    now = all_of_it(given.only)
    if given.what == "record":
        given.file.write_text(json.dumps(now, indent=1, ensure_ascii=True))
        print(f"{len(now)} cases recorded")
        return 0
    before = {name: each for name, each in json.loads(given.file.read_text()).items() if given.only in name}
    found = list(differences(before, json.loads(json.dumps(now))))
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    print("\n".join(found) or f"{len(now)} cases as before")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
